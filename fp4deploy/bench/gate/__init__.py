"""The gate of `bench --baseline`: a paired bootstrap decides, and a baseline is bound to what it was measured on."""
