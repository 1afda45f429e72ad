"""The numerics contract in plain torch: the reference that every kernel, graph and engine constant is compared with."""

from fp4deploy.formats.blocks import pad_to_blocks
from fp4deploy.formats.constants import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_MAX_FOUR_OVER_SIX,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    nvfp4_range,
)
from fp4deploy.formats.e2m1 import decode_e2m1, encode_e2m1, pack_codes, round_e2m1, unpack_codes
from fp4deploy.formats.eight_bits import EIGHT_BITS
from fp4deploy.formats.four_over_six import FourOverSix
from fp4deploy.formats.fp8 import EightBitTensor, fake_quantize_fp8, fp8_scale, quantize_fp8, scale_of
from fp4deploy.formats.hadamard import random_hadamard
from fp4deploy.formats.int8 import INT8_MAX, fake_quantize_int8, quantize_int8
from fp4deploy.formats.ms_eden import quantize_ms_eden, rotate
from fp4deploy.formats.mxfp4 import (
    Mxfp4Tensor,
    decode_e8m0,
    e8m0_scales,
    fake_quantize_mxfp4,
    quantize_mxfp4,
)
from fp4deploy.formats.mxfp8 import Mxfp8Tensor, fake_quantize_mxfp8, quantize_mxfp8
from fp4deploy.formats.nvfp4 import Nvfp4Tensor, fake_quantize_nvfp4, quantize_nvfp4
from fp4deploy.formats.philox import philox4x32, random_bytes
from fp4deploy.formats.scales import (
    ZEROS_AMAX,
    block_scales,
    block_step,
    deployed_amax,
    finite_amax,
    global_amax,
    global_scale,
    tracked_amax,
)
from fp4deploy.formats.swizzle import swizzle_scales, unswizzle_scales

BLOCK, MX_BLOCK = NVFP4_BLOCK, MXFP4_BLOCK  # their names in version 0.1

__all__ = [
    "BLOCK",
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_MAX_FOUR_OVER_SIX",
    "EIGHT_BITS",
    "INT8_MAX",
    "MXFP4_BLOCK",
    "MX_BLOCK",
    "NVFP4_BLOCK",
    "ZEROS_AMAX",
    "EightBitTensor",
    "FourOverSix",
    "Mxfp4Tensor",
    "Mxfp8Tensor",
    "Nvfp4Tensor",
    "block_scales",
    "block_step",
    "decode_e2m1",
    "decode_e8m0",
    "deployed_amax",
    "e8m0_scales",
    "encode_e2m1",
    "fake_quantize_fp8",
    "fake_quantize_int8",
    "fake_quantize_mxfp4",
    "fake_quantize_mxfp8",
    "fake_quantize_nvfp4",
    "finite_amax",
    "fp8_scale",
    "global_amax",
    "global_scale",
    "nvfp4_range",
    "pack_codes",
    "pad_to_blocks",
    "philox4x32",
    "quantize_fp8",
    "quantize_int8",
    "quantize_ms_eden",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "random_bytes",
    "random_hadamard",
    "rotate",
    "round_e2m1",
    "scale_of",
    "swizzle_scales",
    "tracked_amax",
    "unpack_codes",
    "unswizzle_scales",
]
