"""The numerics contract in plain torch: the reference that every kernel, graph and engine constant is compared with."""

from fp4deploy.formats.e2m1 import E2M1_MAX, E2M1_VALUES, decode_e2m1, encode_e2m1, pack_codes, round_e2m1, unpack_codes
from fp4deploy.formats.nvfp4 import BLOCK, E4M3_MAX, Nvfp4Tensor, fake_quantize_nvfp4, pad_to_blocks, quantize_nvfp4

__all__ = [
    "BLOCK",
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "Nvfp4Tensor",
    "decode_e2m1",
    "encode_e2m1",
    "fake_quantize_nvfp4",
    "pack_codes",
    "pad_to_blocks",
    "quantize_nvfp4",
    "round_e2m1",
    "unpack_codes",
]
