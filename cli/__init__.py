"""The `fp4deploy` command: one small file a command; each parses, calls one function and prints."""
