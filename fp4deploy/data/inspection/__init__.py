"""What a dataset holds: its defects, its classes, the digest of what is measured on it."""
