"""Train, export, build and measure convolutional networks in NVFP4 for Blackwell GPUs."""

__version__ = "0.1.0"
