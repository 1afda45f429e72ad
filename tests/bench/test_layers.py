"""Time of each layer of a packed network: what is counted, and what the command writes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fp4deploy.bench import layers
from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, read_packed, write_packed
from fp4deploy.packed.graph import Layer
from fp4deploy.packed.network import packed_form
from fp4deploy.packed.producers import Produce, label, plan
from fp4deploy.packed.shapes import fitting
from fp4deploy.runs import Run
from tests.contract.invoke import fp4deploy
from tests.export.packable_networks import NETWORKS, deployed


@pytest.fixture(scope="module")
def times(untrained: Run) -> layers.LayerTimes:
    return layers.layer_times(untrained.export_dir / "unet.nvfp4.fp4", batch=2, iterations=3)


def test_every_node_is_timed(untrained: Run, times: layers.LayerTimes) -> None:
    graph = read_packed(untrained.export_dir / "unet.nvfp4.fp4").graph
    assert [row.op for row in times.layers] == [node.op for node in graph.nodes]
    assert all(row.ms > 0 and row.bytes > 0 and row.share > 0 for row in times.layers)
    assert times.whole_ms > 0
    assert sum(row.operations > 0 for row in times.layers) == sum(node.op.startswith("conv") for node in graph.nodes)


def test_bytes_and_operations_by_hand(untrained: Run) -> None:
    """The second convolution reads packed and writes plain values; counted from the shapes alone."""
    network = PackedNetwork(read_packed(untrained.export_dir / "unet.nvfp4.fp4"))
    shapes = fitting(network.graph, {network.graph.inputs[0].name: (2, 3, 32, 32)})
    node = next(node for node in network.graph.nodes if getattr(node, "layer", "") == "encoder.0.conv2")
    outputs, channels = shapes[node.outputs[0].name][1], shapes[node.inputs[0]][1]
    assert layers.step_operations(network, node, shapes) == 2 * 2 * 32 * 32 * outputs * channels * 9
    codes = -(-channels // 16)  # blocks of 16: eight bytes of codes and one of scale
    read, written = 2 * 32 * 32 * codes * 9, 2 * 32 * 32 * outputs * 4
    assert layers.step_bytes(network, node, shapes) == read + written + outputs * 9 * codes * 9


class Planned(PackedNetwork):
    """On the CPU, the steps of a GPU, by the reference of its kernels."""

    def __init__(self, file: PackedFile, *_: object) -> None:
        super().__init__(file)
        self.schedule(*plan(self.graph))
        self.pack = packed_form


def test_the_steps_that_run_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the nodes: a step of several has one row, whose bytes are those of its inputs and forms alone."""
    torch.manual_seed(0)
    factory, size = NETWORKS["ResNet encoder"]
    x = torch.randn(1, 3, *size)
    file = packed_file(tmp_path / "own.fp4", None, *pack_model(deployed(factory(), x), x))
    write_packed(file)
    monkeypatch.setattr(layers, "PackedNetwork", Planned)
    found = layers.layer_times(file.path, iterations=1).layers
    network = Planned(file)
    assert len(found) == len(network.steps) < len(file.graph.nodes)
    assert [row.layer for row in found] == [label(step) for step in network.steps]
    ops = {row.op for row in found}
    assert {"conv2d", "affine+relu", "affine+add+relu"} <= ops
    assert "add" not in ops
    convolutions = {node.layer for node in file.graph.nodes if isinstance(node, Layer)}
    assert {row.layer for row in found if row.operations} == convolutions  # which a search reads by their names
    at, step = next((at, each) for at, each in enumerate(network.steps) if isinstance(each, Produce) and each.second)
    shapes = fitting(file.graph, {file.graph.inputs[0].name: tuple(x.shape)})
    _, channels, height, width = shapes[step.inputs[0]]
    written = {"plain": 4 * channels, "packed": channels // 16 * 9}
    pixels = sum(written[form] for form in found[at].writes) + 2 * 4 * channels
    vectors = 2 * 2 * channels + 1  # scale and shift of both branches, and the amax
    assert found[at].bytes == height * width * pixels + 4 * vectors


def test_the_trace_has_the_nodes_one_after_the_other(times: layers.LayerTimes) -> None:
    events = json.loads(layers.chrome_trace(times))["traceEvents"]
    assert [event["name"] for event in events] == [row.layer for row in times.layers]
    for one, following in pairwise(events):
        assert one["ts"] + one["dur"] == pytest.approx(following["ts"])


def test_other_files_are_refused(untrained: Run) -> None:
    with pytest.raises(InputError, match="profile times packed networks"):
        layers.layer_times(untrained.checkpoint("fp16"))


def test_the_command(untrained: Run, tmp_path: Path) -> None:
    path, trace, out = untrained.export_dir / "unet.nvfp4.fp4", tmp_path / "trace.json", tmp_path / "layers.json"
    done = fp4deploy(
        *("profile", "--engine", path, "--iterations", 2, "--trace", trace, "--json", out), folder=tmp_path
    )
    assert done.code == 0, done.stderr
    found = json.loads(out.read_text())["layers"][0]
    assert len(found["layers"]) == len(json.loads(trace.read_text())["traceEvents"])
    assert {"bandwidth", "rate"} <= found["limits"].keys()
    assert "at the limits of" in done.stdout


def test_options_of_bench_that_are_commands_now(untrained: Run, tmp_path: Path) -> None:
    engine = ("--engine", untrained.export_dir / "unet.nvfp4.fp4", "--iterations", 1)
    done = fp4deploy("bench", *engine, "--layers", "--trace", "trace.json", "--json", "-", folder=tmp_path)
    assert done.code == 0, done.stderr
    assert "fp4deploy profile" in done.stderr
    assert json.loads(done.stdout)["layers"]
    assert (tmp_path / "trace.json").is_file()
    refused = fp4deploy("bench", *engine, "--trace", "other.json", folder=tmp_path)
    assert (refused.code, (tmp_path / "other.json").exists()) == (2, False)
    assert "fp4deploy profile" in refused.stderr


def test_a_trace_is_of_one_network(untrained: Run, tmp_path: Path) -> None:
    path = untrained.export_dir / "unet.nvfp4.fp4"
    done = fp4deploy("profile", "--engine", path, "--engine", path, "--trace", "trace.json", folder=tmp_path)
    assert done.code == 2
    assert "--trace takes one network, and there are 2" in done.stderr
