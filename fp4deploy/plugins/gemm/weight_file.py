"""One packed weight as one safetensors file.

| tensor | type | |
|---|---|---|
| `codes` | uint8 [N, ceil16(K)/2] or [O, KH, KW, ceil16(I)/2] | two E2M1 codes a byte, low nibble first |
| `scales` | E4M3 [..., ceil16(K)/16] | |
| `amax` | float32 [] | |
| `bias` | float32 [N] | where there is one |

The metadata is one entry, `fp4deploy.weight`: a JSON object of `format` (`weight/1`; another one is refused),
`version`, `shape`, `e4m3_max`, and the `sha256` over these and every tensor's name and bytes. The digest finds damage;
it is no signature. Whole networks have a file of their own (`fp4deploy.packed`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fp4deploy import __version__
from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.checkpoint import read_tensors, write_tensors
from fp4deploy.system.files import digest_of

KEY = "fp4deploy.weight"
FORMAT = "weight/1"
SIGNED = ("format", "version", "shape", "e4m3_max")
TYPES = {"codes": torch.uint8, "scales": torch.float8_e4m3fn, "amax": torch.float32, "bias": torch.float32}
E4M3_LARGEST = (256, 448)
AGAIN = "Write it with FP4WeightCache.save."


def write_weight(path: Path, weight: Nvfp4Tensor, bias: torch.Tensor | None) -> None:
    """Write a weight, whole or not at all.

    Raises:
        InputError: it cannot be written; an older file survives.
    """
    given = {"codes": weight.codes, "scales": weight.scales, "amax": weight.amax.reshape(()), "bias": bias}
    tensors = {name: value.detach().cpu() for name, value in given.items() if value is not None}
    metadata: dict[str, Any] = {"format": FORMAT, "version": __version__}
    metadata |= {"shape": list(weight.shape), "e4m3_max": weight.e4m3_max}
    metadata["sha256"] = _digest(metadata, tensors)
    write_tensors(path, tensors, {KEY: json.dumps(metadata)})


def read_weight(path: Path) -> tuple[Nvfp4Tensor, torch.Tensor | None]:
    """Read and check; tensors on the CPU.

    Raises:
        InputError: the file is missing, truncated, damaged or of another kind.
    """
    metadata, tensors = read_tensors(path, KEY, "packed weight", (FORMAT,), (*SIGNED, "sha256"), AGAIN)
    shape = metadata["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InputError(f"{path} is damaged: its shape is {str(shape)[:40]}. {AGAIN}")
    if metadata["e4m3_max"] not in E4M3_LARGEST:
        raise InputError(f"{path} is damaged: its e4m3_max is {str(metadata['e4m3_max'])[:40]}. {AGAIN}")
    problems = [f"lacks {name}" for name in ("codes", "scales", "amax") if name not in tensors]
    problems += [f"has {name[:40]!r}, which no weight has" for name in tensors if name not in TYPES]
    for name, value in tensors.items():
        if value.dtype != TYPES.get(name, value.dtype):
            problems.append(f"has {value.dtype} {name}")
    if not problems and metadata["sha256"] != _digest(metadata, tensors):
        problems = ["is not what was written (SHA-256)"]
    if problems:
        raise InputError(f"{path} is damaged: it {', '.join(problems)}. {AGAIN}")
    parts = tensors["codes"], tensors["scales"], tensors["amax"]
    weight = Nvfp4Tensor(*parts, torch.Size(shape), metadata["e4m3_max"])
    return weight, tensors.get("bias")


def _digest(metadata: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> str:
    parts = [json.dumps({key: metadata[key] for key in SIGNED}, sort_keys=True).encode()]
    for name in sorted(tensors):
        parts += [name.encode(), tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()]
    return digest_of(parts)
