"""Convolutions of packed networks that multiply in FP16: of decoded weights, and of layers that stay in FP16."""
