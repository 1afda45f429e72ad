"""What a quantised layer computes with in training: quantisers, straight-through gradients, operands of GEMMs."""
