"""The namespace `torch.ops.fp4deploy` that this package registers its operators in, and their dtypes in CUDA."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("fp4deploy", "FRAGMENT")
CUDA_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
THREADS = 256
SMALL = 2**31 - 2**10  # threads that 32-bit indices can count
