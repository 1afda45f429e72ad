"""Kernels compiled ahead of time (AOT), for any architecture on any machine, and launched without a compiler."""
