"""The canonical Q/DQ graph: tracing, constants, Q/DQ nodes, and the decomposed graph in standard operators."""
