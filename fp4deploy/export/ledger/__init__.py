"""The precision ledger: which layer runs in which precision in an engine, and why.

`build_log` reads the compiler's list of kernels, `actual` matches it with the planned layers, `ledger` is the file.
"""
