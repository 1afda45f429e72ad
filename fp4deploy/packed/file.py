"""A packed network as one file: safetensors for the tensors, JSON in its metadata for everything else.

The metadata is one entry, `fp4deploy.packed`: a JSON object of strings.

| key | what it is |
|---|---|
| `format` | `packed/11` to 3, the oldest that has all nodes |
| `version` | version of fp4deploy that wrote it |
| `card` | the model card, or "" |
| `graph` | JSON: inputs, nodes, outputs, and of each tensor type, shape and SHA-256 (`graph.Graph`) |
| `sha256` | SHA-256 over the four above |
| `about` | JSON: version, SHA-256 of the checkpoint, colours of the classes (`fp4deploy.about`); older files lack it |

Reading checks all of it before the first byte is used: the digests, that the tensors are those the graph lists, that
the graph fits together (`check`), that no number in it is NaN or Inf. Digests find damage, not a forger: who can change
a tensor can change its digest. `about` is kept as it is, and neither read nor digested: older versions read the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from fp4deploy import __version__
from fp4deploy.errors import InputError
from fp4deploy.models.card import ModelCard
from fp4deploy.models.checkpoint import digest, read_tensors, write_tensors
from fp4deploy.packed.check import TYPES, check_graph, check_values
from fp4deploy.packed.graph import Graph, TensorInfo, format_of
from fp4deploy.rest import rest_of
from fp4deploy.system.files import digest_of

SUFFIX = ".fp4"
FORMATS = tuple(f"packed/{number}" for number in range(11, 2, -1))  # the oldest that has all nodes is written
KEY = "fp4deploy.packed"
SIGNED = ("format", "version", "card", "graph")
AGAIN = "Write it again with: fp4deploy export --format packed"


@dataclass(frozen=True)
class PackedFile:
    """What a packed file holds, checked; tensors on the CPU."""

    path: Path
    card: ModelCard | None
    graph: Graph
    tensors: dict[str, torch.Tensor]
    version: str
    about: str = ""

    def __repr__(self) -> str:
        return f"PackedFile({str(self.path)!r}, {len(self.graph.nodes)} nodes, {self.weight_bytes} bytes)"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def packed_file(
    path: Path, card: ModelCard | None, graph: Graph, tensors: Mapping[str, torch.Tensor], about: str = ""
) -> PackedFile:
    """A network as it would be read from `path`: checked, not written; the card says which input it takes.

    Args:
        graph: its list of tensors is made from `tensors`.
        about: JSON of where the network comes from (`fp4deploy.about`).

    Raises:
        InputError: the graph does not fit together, or a tensor holds NaN or Inf.
    """
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    infos = {
        name: TensorInfo(dtype=TYPES[tensor.dtype], shape=list(tensor.shape), sha256=digest(tensor))
        for name, tensor in host.items()
    }
    graph = Graph.model_validate(graph.model_copy(update={"tensors": infos}).model_dump())
    check_graph(graph, card.channels if card else None, card.head if card else None)
    _check_values(path, graph, host)
    return PackedFile(Path(path), card, graph, host, __version__, about)


def write_packed(file: PackedFile) -> None:
    """Write a network to its path, under a temporary name and renamed.

    Raises:
        InputError: the target cannot be written; an older file there survives.
    """
    metadata = {
        "format": f"packed/{file.graph.format()}",
        "version": file.version,
        "card": file.card.to_json() if file.card else "",
        "graph": file.graph.to_json(),
    }
    metadata["sha256"] = _digest_of(metadata)
    if file.about:
        metadata["about"] = file.about
    write_tensors(file.path, file.tensors, {KEY: json.dumps(metadata)})


def read_packed(path: Path) -> PackedFile:
    """Read and check a packed network.

    Raises:
        InputError: the file is missing, truncated, damaged, of another kind or version, or does not fit together.
    """
    path = Path(path)
    required = (*SIGNED, "sha256")
    metadata, tensors = read_tensors(path, KEY, "packed network", FORMATS, required, AGAIN)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{path}: its metadata '{KEY}' cannot be read. {AGAIN}")
    if metadata["sha256"] != _digest_of(metadata):
        raise InputError(f"{path}: its graph or model card was changed after it was written. {AGAIN}")
    card = ModelCard.from_json(metadata["card"], f"{path}: model card") if metadata["card"] else None
    graph = _graph(path, metadata)
    _check_tensors(path, graph, tensors)
    try:
        check_graph(graph, card.channels if card else None, card.head if card else None)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    _check_values(path, graph, tensors)
    return PackedFile(path, card, graph, tensors, metadata["version"], metadata.get("about", ""))


def _graph(path: Path, metadata: Mapping[str, str]) -> Graph:
    try:
        graph = Graph.model_validate_json(metadata["graph"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: its graph cannot be read ({where}: {first['msg']}). {AGAIN}") from error
    known = int(metadata["format"].removeprefix("packed/"))
    if graph.format() > known:
        later = [node for node in graph.nodes if format_of(node) > known]
        said = f"node such as '{later[0].op}' of this graph" if later else f"rest in {rest_of(graph).described}"
        raise InputError(f"{path}: {metadata['format']} has no {said}. {AGAIN}")
    return graph


def _digest_of(metadata: Mapping[str, str]) -> str:
    return digest_of(metadata[key].encode() for key in SIGNED)


def _check_tensors(path: Path, graph: Graph, tensors: Mapping[str, torch.Tensor]) -> None:
    different = sorted(graph.tensors.keys() ^ tensors.keys())
    if different:
        raise InputError(
            f"{path}: {len(different)} tensors are not those the graph lists (first '{different[0]}'). {AGAIN}"
        )
    for name, info in graph.tensors.items():
        tensor = tensors[name]
        if TYPES.get(tensor.dtype) != info.dtype or list(tensor.shape) != info.shape or digest(tensor) != info.sha256:
            raise InputError(f"{path} is damaged: the tensor '{name}' is not the one that was written. {AGAIN}")


def _check_values(path: Path, graph: Graph, tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        check_values(tensors, graph)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
