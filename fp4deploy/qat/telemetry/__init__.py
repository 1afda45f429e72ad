"""Statistics of weights, activations and gradients before and after quantisation."""
