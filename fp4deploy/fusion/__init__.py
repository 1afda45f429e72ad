"""What lies between two GEMMs, in elementary operators that a compiler fuses with their neighbours."""
