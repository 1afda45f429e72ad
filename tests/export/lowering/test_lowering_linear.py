"""Linear layers in the form that an engine keeps in FP4: flat inputs, results in parts; the same numbers in ORT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F

from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.session import portable_session
from tests.export.exported_models import images, prepared
from tests.samples import sample

SHAPE = (3, 16, 16)
Result = torch.Tensor


class Projected(nn.Module):
    """Reads the result of one projection as `read` does; gives a map of 5 channels."""

    def __init__(self, wide: int, read: Callable[[Result], Result], out: int = 32, axes: int = 1) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 32, 4, 4), nn.LayerNorm(32)
        self.project, self.out, self.head = nn.Linear(32, wide), nn.Linear(out, 32), nn.Conv2d(32, 5, 1)
        self.read, self.axes = read, axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        tokens = self.norm(y.flatten(2).transpose(1, 2) if self.axes == 1 else y.permute(0, 2, 3, 1))
        z = self.out(self.read(self.project(tokens)))
        return self.head(y + z.movedim(-1, 1).reshape(y.shape))


class Twice(Projected):
    """One projection of two inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        tokens = self.norm(y.flatten(2).transpose(1, 2))
        z = self.out(self.read(self.project(tokens)) + self.read(self.project(tokens.flip(1))))
        return self.head(y + z.movedim(-1, 1).reshape(y.shape))


class Pointwise(Projected):
    """A 1x1 convolution as the projection."""

    def __init__(self) -> None:
        super().__init__(32, whole)
        self.project = nn.Conv2d(32, 96, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        q, k, v = self.project(y).chunk(3, 1)
        scores = torch.softmax(q.flatten(2) @ k.flatten(2).transpose(1, 2) * 0.2, -1)
        return self.head(y + (scores @ v.flatten(2)).reshape(y.shape))


def attention(q: Result, k: Result, v: Result) -> Result:
    n, _, t, _ = q.shape
    return (torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1) @ v).transpose(1, 2).reshape(n, t, -1)


def stacked(y: Result) -> Result:
    q, k, v = y.reshape(y.shape[0], -1, 3, 2, 16).permute(2, 0, 3, 1, 4)
    return attention(q, k, v)


def rotary(y: Result) -> Result:
    """Halves of each of eight heads: more parts than anyone wants."""
    q, k, v = y.reshape(y.shape[0], -1, 3, 8, 4).permute(2, 0, 3, 1, 4)
    q, k = (x + torch.cat([-x[..., 2:], x[..., :2]], -1) for x in (q, k))
    return attention(q, k, v)


def by_head(y: Result) -> Result:
    q, k, v = y.reshape(y.shape[0], -1, 2, 3, 16).permute(3, 0, 2, 1, 4)
    return attention(q, k, v)


def chunks(y: Result) -> Result:
    q, k, v = (each.reshape(y.shape[0], -1, 2, 16).transpose(1, 2) for each in y.chunk(3, -1))
    return attention(q, k, v)


def gated(y: Result) -> Result:
    value, gate = y.chunk(2, -1)
    return value * F.gelu(gate)


def unequal(y: Result) -> Result:
    return F.relu(y)[..., :64].reshape(*y.shape[:-1], 2, 32).sum(-2) * y[..., 64:]


def whole(y: Result) -> Result:
    return F.gelu(y)


def by_tokens(y: Result) -> Result:
    """Parts of the tokens, each with all features."""
    first, second = y.chunk(2, 1)
    return torch.cat([second, first], 1)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {  # network, parts of its projection
    "rotary": (lambda: Projected(96, rotary), 3),
    "queries, keys, values": (lambda: Projected(96, stacked), 3),
    "by head": (lambda: Projected(96, by_head), 6),
    "chunks": (lambda: Projected(96, chunks), 3),
    "gated": (lambda: Projected(64, gated), 2),
    "gated, four axes": (lambda: Projected(64, gated, axes=2), 2),
    "unequal": (lambda: Projected(96, unequal), 2),
    "whole": (lambda: Projected(64, whole, 64), 1),
    "whole, four axes": (lambda: Projected(64, whole, 64, axes=2), 1),
    "tokens": (lambda: Projected(32, by_tokens), 1),
    "called twice": (lambda: Twice(64, gated), 4),
    "1x1 convolution": (Pointwise, 3),
}


def canonical_of(name: str, open_size: bool = False) -> onnx.ModelProto:
    torch.manual_seed(0)
    return export_graph(prepared(CASES[name][0](), "nvfp4_qat", SHAPE), SHAPE, dynamic_size=open_size)


def run(model: onnx.ModelProto) -> np.ndarray:
    return portable_session(to_portable(model)).run(None, {"image": images(2, SHAPE).numpy()})[0]


@pytest.mark.parametrize("name", sample(CASES, every=4))
def test_parts_give_the_numbers_of_the_whole(name: str) -> None:
    canonical = canonical_of(name)
    found = lower(canonical, "auto", "tensorrt")
    layer = next(layer for layer in found.layers if layer.name == "project")
    assert layer.compute == "FP4"
    assert len(layer.compute_nodes) == CASES[name][1]
    assert ("parts" in layer.reason) == (CASES[name][1] > 1)
    lowered = found.model
    onnx.checker.check_model(lowered)
    lowered.functions.extend(canonical.functions)
    expected, got = run(canonical), run(lowered)
    assert np.linalg.norm(expected) > 0.1
    assert np.linalg.norm(got - expected) < 0.005 * np.linalg.norm(expected)


def test_axes_may_be_counted_from_the_end() -> None:
    """As tools that simplify a file write them."""
    model = canonical_of("unequal")
    graph = model.graph
    ranks = {each.name: len(each.type.tensor_type.shape.dim) for each in (*graph.input, *graph.value_info)}
    held = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    changed = 0
    for number, node in enumerate(graph.node):
        rank = ranks.get(node.input[0] if node.input else "")
        if rank and node.op_type == "Slice" and (held[node.input[3]] >= 0).all():
            axes = numpy_helper.from_array(held[node.input[3]] - rank, f"axes.{number}")
            graph.initializer.append(axes)
            node.input[3] = axes.name
            changed += 1
    assert changed > 0
    layer = next(layer for layer in lower(model, "auto", "tensorrt").layers if layer.name == "project")
    assert (layer.compute, len(layer.compute_nodes)) == ("FP4", CASES["unequal"][1])


def test_a_layer_of_four_axes_is_multiplied_as_it_is_quantised() -> None:
    model = lower(canonical_of("whole, four axes"), "auto", "tensorrt").model
    producers = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if node.op_type == "MatMul":
            assert producers[node.input[0]].op_type == "Cast"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["queries, keys, values", "by head", "gated, four axes", "unequal", "1x1 convolution"])
def test_an_engine_keeps_them_in_fp4(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    path = tmp_path / "model.onnx"
    onnx.save(canonical_of(name), path)
    built = build_engine(path, path.with_suffix(".plan"), arch="sm120")
    assert not built.ledger.fallbacks()
    assert next(row for row in built.ledger.layers if row.layer == "project").actual == "FP4"


def test_parts_are_found_in_a_graph_of_an_open_size() -> None:
    found = lower(canonical_of("queries, keys, values", open_size=True), "auto", usual=SHAPE[1:])
    assert len(next(layer for layer in found.layers if layer.name == "project").compute_nodes) == 3


class Shown(Projected):
    """An output that a quantised layer reads, as a decoder reads its encoder's; its file declares a shape."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        tokens = self.norm(self.embed(x).flatten(2).transpose(1, 2))
        return {"projected": self.out(self.read(self.project(tokens))), "tokens": tokens}


def test_an_output_is_also_the_input_of_a_layer() -> None:
    torch.manual_seed(0)
    canonical = export_graph(prepared(Shown(64, gated), "nvfp4_qat", SHAPE), SHAPE, dynamic_size=False)
    quantised = {node.input[0] for node in canonical.graph.node if node.op_type == "TRT_FP4DynamicQuantize"}
    assert "tokens" in quantised
    assert "project" in {layer.name for layer in lower(canonical, "auto", "tensorrt").layers if layer.compute == "FP4"}
