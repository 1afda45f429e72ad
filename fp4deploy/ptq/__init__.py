"""Post-training quantisation: NVFP4 by a few images, without labels and without training.

`quantize` is the one interface of all methods; their names and sources are in `methods`.
"""

from fp4deploy.ptq.checkpoint import quantize_checkpoint
from fp4deploy.ptq.methods import METHODS
from fp4deploy.ptq.quantize import Result, quantize

__all__ = ["METHODS", "Result", "quantize", "quantize_checkpoint"]
