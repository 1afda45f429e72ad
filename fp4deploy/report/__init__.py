"""Reports of a run and comparisons of runs: collecting, rendering, writing."""
