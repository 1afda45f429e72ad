"""Changed graphs and numbers: refused in words, or run, and give finite numbers of the shape that was derived."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.tensors import leaves
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file
from fp4deploy.packed.check import check_graph, check_values
from fp4deploy.packed.graph import Graph, constants_of, tensors_of
from fp4deploy.packed.shapes import shapes_of
from tests.export.packable_networks import NETWORKS, deployed
from tests.samples import sample

INTERESTING = (0, 1, -1, 2, 3, 7, 16, 49, 255, 1 << 16, 1 << 20, 1 << 31, 0.0, -0.5, 1e38, None, True, "", "x", [], {})
CHEAP = 1 << 19  # elements of all activations that are still computed here


class Windows(nn.Module):
    """Windows as columns and back, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        n, c, h, w = x.shape
        columns = F.unfold(x, 3, padding=1).view(n, c, 9, h, w).amax(2)
        x = self.body(columns + F.fold(F.unfold(x, 2, stride=2).square(), (h, w), 2, stride=2))
        return self.head(x + x.argmax(1, keepdim=True) / 16)


class Slopes(nn.Sequential):
    """Layers with one slope, and with one a channel."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3), nn.PReLU(), nn.Conv2d(16, 16, 1), nn.PReLU(16), nn.Conv2d(16, 4, 1))


OWN = {"windows": Windows, "slopes": Slopes}


@cache
def network(name: str) -> PackedFile:
    torch.manual_seed(0)
    factory = OWN[name] if name in OWN else NETWORKS[name][0]
    x = torch.randn(1, 3, 16, 32)
    model = deployed(factory(), x)
    sizes = name != "MobileNet"  # whose nodes hold none
    return packed_file(Path("own.fp4"), None, *pack_model(model, x, dynamic_size=sizes))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    found = [path] if path else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in pairs:
        found += places(part, (*path, key))
    return found


def changed(graph: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """One to three values replaced by others of the graph, by numbers, or taken away."""
    graph = copy.deepcopy(graph)
    kept = {key: value for key, value in graph.items() if key != "tensors"}
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(places(kept))
        owner: Any = graph
        try:
            for key in path[:-1]:
                owner = owner[key]
            other: Any = graph
            for key in draw.choice(places(kept)):
                other = other[key]
            value = draw.choice([draw.choice(INTERESTING), copy.deepcopy(other)])
            if draw.random() < 0.15:
                del owner[path[-1]]
            else:
                owner[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue
    return graph


def outcome(file: PackedFile, graph: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """ "refused", "accepted", or "accepted, not run" where it would take long."""
    try:
        parsed = Graph.model_validate(graph)
        check_graph(parsed)
        check_values(tensors, parsed)
    except (InputError, ValidationError):
        return "refused"
    shapes = shapes_of(parsed)
    if sum(map(math.prod, shapes.values())) > CHEAP:
        return "accepted, not run"
    runner = PackedNetwork(dataclasses.replace(file, graph=parsed, tensors=tensors))
    outputs = leaves(runner(*(torch.randn(each.shape) for each in parsed.inputs)))
    assert [tuple(each.shape) for each in outputs] == [shapes[each.activation] for each in parsed.outputs]
    assert all(each.isfinite().all() for each in outputs)
    return "accepted"


@pytest.mark.parametrize("name", sample(["MobileNet", "SegFormer block", "ASPP", "windows"], every=2))
def test_changed_graphs(name: str) -> None:
    file = network(name)
    graph = file.graph.model_dump(exclude={"inputs": {"__all__": {"dtype"}}})  # as an older file has them
    draw = random.Random(0)
    found = [outcome(file, changed(graph, draw), file.tensors) for _ in range(60)]
    assert {"refused", "accepted"} <= set(found)


@pytest.mark.parametrize("name", ["slopes", "MobileNet"])
def test_tensors_of_another_shape_or_type(name: str) -> None:
    """Constants, which are any operator's operands, are left to torch."""
    graph = network(name).graph
    constants = constants_of(graph)
    read = {each for node in graph.nodes for each in tensors_of(node) if each not in constants}
    assert read
    for tensor in sorted(read):
        info = graph.tensors[tensor]
        shapes = [
            [*info.shape, 2],
            info.shape[1:],
            [size + 1 for size in info.shape],
            [size + 16 for size in info.shape],
        ]
        others = [{"shape": shape} for shape in shapes if shape != info.shape] + [{"dtype": "I8"}, {"dtype": "BF16"}]
        for other in others:
            changed = {**graph.tensors, tensor: info.model_copy(update=other)}
            with pytest.raises(InputError):
                check_graph(graph.model_copy(update={"tensors": changed}))
                pytest.fail(f"{tensor} {info.dtype} {info.shape} may be {other}")


def test_changed_numbers() -> None:
    file, draw = network("MobileNet"), random.Random(1)
    for _ in range(20):
        name = draw.choice(list(file.tensors))
        tensor = file.tensors[name].clone()
        flat = tensor.flatten().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
        for _ in range(4):
            flat[draw.randrange(len(flat))] = draw.randrange(256)
        replaced = flat.view(tensor.dtype).reshape(tensor.shape)
        outcome(file, file.graph.model_dump(), {**file.tensors, name: replaced})
