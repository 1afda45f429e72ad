"""The first operand of a packed network that reads its image as FP4 terms, by one kernel.

    operand = encode_and_pack(images, amax)      [N, 3, H, W] -> codes and scales [N, H, W, 13]

`models.input_encoding` defines the terms, in a dozen operators of torch; packing them is one more, and a copy between
layouts. The bytes are those: every term is exact in whatever lies between.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.quantize.norm_pack import FeatureMap
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


def packed_image(x: torch.Tensor, amax: torch.Tensor) -> Nvfp4Tensor:
    """The operand of an image float [N, 3, H, W] by `encode_and_pack`, or in torch where that does not run.

    >>> packed_image(torch.ones(1, 3, 1, 1), torch.tensor(6.0)).dequantize()[0, 0, 0, ::3]
    tensor([ 2., -1.,  0.,  0.,  6.])
    """
    if supports(x):
        with fallback.guard(x.device):
            return encode_and_pack(x, amax)
    return replace(quantize_nvfp4(encode_input(x).movedim(1, -1), amax=amax), amax=amax)


def image_shape(x: FeatureMap) -> torch.Size:
    """[N, 3, H, W] of an image or of its operand.

    >>> image_shape(packed_image(torch.ones(1, 3, 2, 5), torch.tensor(6.0)))
    torch.Size([1, 3, 2, 5])
    """
    return torch.Size((x.shape[0], 3, *x.shape[1:3])) if isinstance(x, Nvfp4Tensor) else x.shape


def parts(x: FeatureMap) -> tuple[torch.Tensor, ...]:
    """The tensors that an image or its operand lies in.

    >>> [tuple(part.shape) for part in parts(packed_image(torch.ones(1, 3, 2, 5), torch.tensor(6.0)))]
    [(1, 2, 5, 8), (1, 2, 5, 1)]
    """
    return (x.codes, x.scales) if isinstance(x, Nvfp4Tensor) else (x,)


def joined(operands: list[Nvfp4Tensor]) -> Nvfp4Tensor:
    """The operand of the images of several operands of one size and one amax.

    >>> one = packed_image(torch.ones(1, 3, 2, 5), torch.tensor(6.0))
    >>> joined([one, one]).shape
    torch.Size([2, 2, 5, 13])
    """
    if len(operands) == 1:
        return operands[0]
    codes, scales = torch.cat([x.codes for x in operands]), torch.cat([x.scales.view(torch.uint8) for x in operands])
    shape = torch.Size((len(codes), *operands[0].shape[1:]))
    return Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), operands[0].amax, shape)


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
    operand, count = empty_operand((n, h, w), x.device, amax), n * h * w
    run = kernel(SOURCE, "encode_input", "PPPPqq", {"VALUE": CUDA_TYPES[x.dtype]}, x.device)
    launch_secondary(run, -(-count // THREADS), THREADS, x, amax, operand.codes, operand.scales, h * w, count)
    return operand


def empty_operand(pixels: tuple[int, int, int], device: torch.device, amax: torch.Tensor) -> Nvfp4Tensor:
    """Memory for the operand of images of [N, H, W] pixels, which a kernel writes.

    >>> empty_operand((1, 2, 3), torch.device("cpu"), torch.tensor(6.0))
    Nvfp4Tensor((1, 2, 3, 13), 54 bytes, cpu)
    """
    codes = torch.empty((*pixels, 8), dtype=torch.uint8, device=device)
    scales = torch.empty((*pixels, 1), dtype=torch.float8_e4m3fn, device=device)
    return Nvfp4Tensor(codes, scales, amax, torch.Size((*pixels, CHANNELS)))
