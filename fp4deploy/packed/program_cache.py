"""Compiled programs of packed networks on disk: a later process loads one without tracing or generating code.

An entry is what Inductor saves of a compiled graph, and the tensors that were computed for it; those that a file has
are made of the file. It stands for the whole file, the inputs, the GPU, the versions and this package's source. A
program is code, so entries are in this package's cache, of mode 0700, with digests (`plugins.runtime.cache`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

import fp4deploy
from fp4deploy.errors import InputError
from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.writer import Key
from fp4deploy.plugins.aot.compile import versions
from fp4deploy.plugins.runtime.cache import cache_folder, keep_entry, key, read_entry, remove_unused
from fp4deploy.system.children import owned_folder
from fp4deploy.system.schema import parse_json

SOURCES = ("formats", "fusion", "graph", "models", "packed", "plugins")  # what a program is made by


def program_key(file: PackedFile, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> str:
    """What a program depends on."""
    device = inputs[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    places = [(tuple(x.shape), x.stride(), str(x.dtype)) for x in inputs]
    return key(["program 1", file.graph.to_json(), str(places), str(dtype), str(device), name, versions(), _source()])


def read_program(
    name: str, tensors: Mapping[Key, torch.Tensor], device: torch.device
) -> tuple[Callable[..., object], list[torch.Tensor]] | None:
    """A compiled graph and the tensors that it takes before the inputs; None where there is no whole entry."""
    code, held = read_entry(_path(name, "code")), read_entry(_path(name, "tensors"))
    if code is None or held is None:
        return None
    from torch._inductor.standalone_compile import CompiledArtifact

    try:
        computed = load(held)
        keys = parse_json(bytes(computed.pop("keys").tolist()).decode(), "a compiled program")
        taken = []
        for number, given in enumerate(keys):
            own = given is None
            taken.append(computed[str(number)].to(device) if own else tensors[_key(given)])
        with owned_folder() as folder:
            path = folder / "code"
            path.write_bytes(code)
            return CompiledArtifact.load(path=str(path), format="binary"), taken
    except (SafetensorError, KeyError, InputError, AssertionError, RuntimeError):
        return None  # of another version of torch, or incomplete: it is compiled again


def keep_program(name: str, compiled: Any, keys: Sequence[Key | None], tensors: Sequence[torch.Tensor]) -> None:
    """Keep a compiled graph for `read_program`, where it can be saved.

    keys: of `tensors`, by which `Writer.tensors` has them; None for one that was computed.
    """
    computed = {
        str(number): tensor.contiguous().cpu()
        for number, (each, tensor) in enumerate(zip(keys, tensors, strict=True))
        if each is None
    }
    computed["keys"] = torch.tensor(list(json.dumps(keys).encode()), dtype=torch.uint8)
    with owned_folder() as folder:
        path = folder / "code"
        try:
            compiled.save(path=str(path), format="binary")
        except (RuntimeError, AssertionError):  # part of it cannot be saved: later processes compile it again
            return
        keep_entry(_path(name, "code"), path.read_bytes())
    keep_entry(_path(name, "tensors"), save(computed))
    remove_unused("programs", "inductor")


def _key(given: Any) -> Key:
    return given if isinstance(given, str) else (given[0], given[1])


def _path(name: str, kind: str) -> Path:
    return cache_folder() / "programs" / f"{name}.{kind}"


@lru_cache
def _source() -> str:
    root = Path(fp4deploy.__file__).parent
    files = sorted(
        file for room in SOURCES for file in (root / room).rglob("*") if file.suffix in (".py", ".cu", ".cuh")
    )
    return key(file.read_bytes() for file in files)
