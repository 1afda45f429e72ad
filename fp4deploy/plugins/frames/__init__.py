"""Frames before a network and after it: resized and normalised; classes of pixels from logits."""
