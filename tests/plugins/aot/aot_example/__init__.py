"""A package of kernels of their own, as another project could have them."""
