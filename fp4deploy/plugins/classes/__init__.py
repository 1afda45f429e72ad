"""Classes of pixels from logits."""
