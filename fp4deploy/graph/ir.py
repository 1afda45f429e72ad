"""The graph of a network: nodes in the order in which they run, each with one output.

    node.op         what it computes             "conv", "group_norm", "relu", ... (`operators`), else ATen's own name
    node.inputs     role -> value                {"input": "relu"}; of a concatenation "tensors.0", "tensors.1", ...
    node.parameters role -> name in state_dict   {"weight": "encoder.0.conv1.weight", "bias": "encoder.0.conv1.bias"}
    node.attributes everything else              {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}

Roles and attributes have the names of the ATen schema; axes are counted from the front. A layer that is called twice is
two nodes of one layer, and shares its parameters. A value has the name of the node that writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fp4deploy.graph.sizes import Size, evaluate

COMPUTED = "computed."  # begins the names of constants that a module's code computes


@dataclass(frozen=True)
class Value:
    """A tensor between two nodes; `shape` in torch's order (NCHW)."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype

    def count(self, sizes: Mapping[str, int]) -> int:
        """Elements, for inputs of these sizes ("<input>.<axis>" -> size)."""
        return math.prod(evaluate(size, sizes) for size in self.shape)


@dataclass(frozen=True)
class Node:
    """One operation. layer: path of the module that owns its parameters, or that called it; where: file and line."""

    name: str
    op: str
    inputs: Mapping[str, str]
    parameters: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    layer: str = ""
    where: str = ""

    @property
    def described(self) -> str:
        """Name, operator and line, for messages."""
        place = f", {self.where}" if self.where else ""
        return f"{self.layer or self.name} ({self.op}{place})"


@dataclass(frozen=True)
class Graph:
    """A whole network.

    inputs: names of its tensors, as its forward names them. outputs: (name, value); the names are the keys of a dict,
    the positions of a tuple, or "" for a single tensor. values: by name, inputs included. example: the sizes that the
    network was captured with, "<input>.<axis>" -> size. constants: tensors that nodes read as parameters and that are
    none of the module's, by name: what its code makes of parameters and numbers alone, such as a standardised weight.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    values: Mapping[str, Value]
    example: Mapping[str, int]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def readers(self) -> dict[str, list[Node]]:
        """The nodes that read each value, in order; a network's outputs are not among them."""
        found: dict[str, list[Node]] = {name: [] for name in self.values}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs.values()):
                found[name].append(node)
        return found

    def sizes(self, *shapes: tuple[int, ...]) -> dict[str, int]:
        """ "<input>.<axis>" -> size, for inputs of these shapes; the example's where none are given."""
        if not shapes:
            return dict(self.example)
        pairs = zip(self.inputs, shapes, strict=True)
        return {f"{name}.{axis}": size for name, shape in pairs for axis, size in enumerate(shape)}

    def layers(self) -> Iterator[tuple[str, list[Node]]]:
        """(layer, its nodes) of every layer with parameters, in order of the first call."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.parameters:
                found.setdefault(node.layer, []).append(node)
        yield from found.items()
