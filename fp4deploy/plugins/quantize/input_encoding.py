"""The first operand of a packed network that reads its image as FP4 terms, by one kernel.

    operand = encode_and_pack(images, amax)      [N, 3, H, W] -> codes and scales [N, H, W, 13]

`models.input_encoding` defines the terms, in a dozen operators of torch; packing them is one more, and a copy between
layouts. The bytes are those: every term is exact in whatever lies between.
"""

from __future__ import annotations

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS

SOURCE, CHANNELS = "encode_input.cu", 13

fallback = Fallback("Images as FP4 terms", "torch")


def supports(x: torch.Tensor) -> bool:
    """Whether the kernel runs for an image: float32 or float16 [N, 3, H, W] with pixels, whose blocks 31 bits count."""
    counted = 0 < x.numel() // 3 <= THREADS * (2**31 - 1)
    return x.dtype in (torch.float32, torch.float16) and counted and fallback.runs(x.device)


def encode_and_pack(x: torch.Tensor, amax: torch.Tensor) -> Nvfp4Tensor:
    """`quantize_nvfp4(encode_input(x) [N, H, W, 13], amax=amax)`, its channels padded to a block.

    Args:
        x: as `supports` says, on a GPU; copied where it is not contiguous.
        amax: float32 [], the global amax.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    x = x.contiguous()
    n, _, h, w = x.shape
    codes = torch.empty((n, h, w, 8), dtype=torch.uint8, device=x.device)
    scales = torch.empty((n, h, w, 1), dtype=torch.float8_e4m3fn, device=x.device)
    run = kernel(SOURCE, "encode_input", "PPPPqq", {"VALUE": CUDA_TYPES[x.dtype]}, x.device)
    launch_secondary(run, -(-scales.numel() // THREADS), THREADS, x, amax, codes, scales, h * w, scales.numel())
    return Nvfp4Tensor(codes, scales, amax, torch.Size((n, h, w, CHANNELS)))
