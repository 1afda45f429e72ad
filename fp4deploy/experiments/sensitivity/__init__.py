"""The sensitivity study: which tensors and layers NVFP4 harms."""
