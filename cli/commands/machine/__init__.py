"""Commands about this machine and its data."""
