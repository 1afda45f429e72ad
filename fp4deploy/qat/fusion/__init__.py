"""Fusion of training: quantisation in operators that torch.compile fuses with the layers around it."""
