"""Golden vectors: NVFP4 bytes that this project did not compute.

`nvfp4_golden.json` was made on a CPU by an independent public implementation of the arithmetic in docs/numerics.md; it
shares no code with this project. Ten inputs, each quantised in nine configurations (standard, and 4/6 with both
metrics, both maxima, strict and fast). All bytes are hexadecimal: `x_f32_hex` holds little-endian float32, `data_hex`
two E2M1 codes a byte (low nibble first), `scale_hex` one E4M3 scale a block, `tile` the rows and columns of a block.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch


def golden_cases() -> dict[str, dict[str, Any]]:
    """Name -> input, block and expected bytes of each configuration."""
    text = Path(__file__).with_name("nvfp4_golden.json").read_text(encoding="utf-8")
    cases: dict[str, dict[str, Any]] = json.loads(text)["cases"]
    assert len(cases) == 10
    return cases


def golden_input(case: dict[str, Any]) -> torch.Tensor:
    """The input of a case, float32 [rows, K]."""
    raw = bytes.fromhex("".join(case["x_f32_hex"]))
    return torch.from_numpy(np.frombuffer(raw, "<f4").copy()).reshape(case["shape"])
