"""Block sizes and largest values of the formats with blocks: the one place where these numbers stand.

| format | element | block | block scale | global scale |
|---|---|---|---|---|
| NVFP4 | E2M1, at most 6 | 16 | E4M3, at most 448 | FP32, one a tensor or one a row |
| MXFP4 | E2M1, at most 6 | 32 | E8M0, a power of two | none |
| MXFP8 | E4M3, at most 448 | 32 | E8M0, a power of two | none |

Device code and ONNX function bodies cannot import Python and repeat these numbers; tests compare their bytes with the
reference.

Sources: Open Compute Project, "OCP Microscaling Formats (MX) Specification", v1.0; NVIDIA, "Pretraining Large Language
Models with NVFP4", 2025.
"""

from __future__ import annotations

NVFP4_BLOCK = 16  # elements of the contraction axis that share an E4M3 scale
MXFP4_BLOCK = 32  # elements of the contraction axis that share an E8M0 scale
MXFP8_BLOCK = MXFP4_BLOCK  # both operands of an instruction share the cut into blocks

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; code + 8 is the negative
E2M1_MAX = 6.0
E4M3_MAX = 448.0  # byte 0x7E
E4M3_MAX_FOUR_OVER_SIX = 256  # 1.5 * 256 = 384 is an E4M3 value, 1.5 * 448 is none


def nvfp4_range(e4m3_max: float = E4M3_MAX) -> float:
    """Largest magnitude of NVFP4 in units of the global scale: 6 * `e4m3_max`.

    A tensor with the global amax A has the global scale A / nvfp4_range().

    >>> nvfp4_range(), nvfp4_range(E4M3_MAX_FOUR_OVER_SIX)
    (2688.0, 1536.0)
    """
    return E2M1_MAX * e4m3_max
