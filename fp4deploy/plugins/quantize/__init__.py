"""Quantising kernels: fake quantisation and packing to NVFP4 and MXFP4, alone and fused with GroupNorm or pooling."""
