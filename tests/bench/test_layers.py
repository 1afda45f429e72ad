"""Time of each layer of a packed network: what is counted, and what the command writes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from fp4deploy.bench import layers
from fp4deploy.errors import InputError
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.packed.shapes import fitting
from fp4deploy.runs import Run
from tests.contract.invoke import fp4deploy


@pytest.fixture(scope="module")
def times(untrained: Run) -> layers.LayerTimes:
    return layers.layer_times(untrained.export_dir / "unet.fp4", batch=2, iterations=3)


def test_every_node_is_timed(untrained: Run, times: layers.LayerTimes) -> None:
    graph = read_packed(untrained.export_dir / "unet.fp4").graph
    assert [row.op for row in times.layers] == [node.op for node in graph.nodes]
    assert all(row.ms > 0 and row.bytes > 0 and row.share > 0 for row in times.layers)
    assert times.whole_ms > 0
    assert sum(row.operations > 0 for row in times.layers) == sum(node.op.startswith("conv") for node in graph.nodes)


def test_bytes_and_operations_by_hand(untrained: Run) -> None:
    """The second convolution reads packed and writes plain values; counted from the shapes alone."""
    network = PackedNetwork(read_packed(untrained.export_dir / "unet.fp4"))
    shapes = fitting(network.graph, {network.graph.inputs[0].name: (2, 3, 32, 32)})
    node = next(node for node in network.graph.nodes if getattr(node, "layer", "") == "encoder.0.conv2")
    outputs, channels = shapes[node.outputs[0].name][1], shapes[node.inputs[0]][1]
    assert layers.node_operations(network, node, shapes) == 2 * 2 * 32 * 32 * outputs * channels * 9
    codes = -(-channels // 16)  # blocks of 16: eight bytes of codes and one of scale
    read, written = 2 * 32 * 32 * codes * 9, 2 * 32 * 32 * outputs * 4
    assert layers.node_bytes(network, node, shapes) == read + written + outputs * 9 * codes * 9


def test_the_trace_has_the_nodes_one_after_the_other(times: layers.LayerTimes) -> None:
    events = json.loads(layers.chrome_trace(times))["traceEvents"]
    assert [event["name"] for event in events] == [row.layer for row in times.layers]
    for one, following in pairwise(events):
        assert one["ts"] + one["dur"] == pytest.approx(following["ts"])


def test_other_files_are_refused(untrained: Run) -> None:
    with pytest.raises(InputError, match="--layers times packed networks"):
        layers.layer_times(untrained.checkpoint("fp16"))


def test_the_command(untrained: Run, tmp_path: Path) -> None:
    path, trace, out = untrained.export_dir / "unet.fp4", tmp_path / "trace.json", tmp_path / "layers.json"
    options = ("--layers", "--iterations", 2, "--trace", trace, "--json", out)
    done = fp4deploy("bench", "--engine", path, *options, folder=tmp_path)
    assert done.code == 0, done.stderr
    found = json.loads(out.read_text())["layers"][0]
    assert len(found["layers"]) == len(json.loads(trace.read_text())["traceEvents"])
    assert {"bandwidth", "rate"} <= found["limits"].keys()
    assert "at the limits of" in done.stdout
