"""Building with plugins up to the compiler, and what the ledger makes of an engine that lists them.

No TensorRT runs here: its answer is written by hand, in the form of the lines that its relatives print.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from fp4deploy.errors import InputError
from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.engine.compile import CompileAnswer, CompileJob
from fp4deploy.export.engine.plugin_nodes import plugin_nodes
from fp4deploy.export.ledger.ledger import Ledger, load_ledger
from fp4deploy.export.lowering.lower import LoweredModel
from tests.export.lowering.engine_graphs import CanonicalGraph

TENSOR = "{{ Name: {0}, Dimensions: [1,16,16,16], Format: Row-major linear, Datatype: {1} }}"


def line(name: str, kind: str, given: str, made: str) -> str:
    inputs, outputs = TENSOR.format("x", given), TENSOR.format("y", made)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [ {inputs}], Constants: [], Outputs: [ {outputs}], "
        f"Metadata: [ONNX Layer: {name}]"
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    graph = CanonicalGraph()
    x = graph.norm_relu("norm", graph.conv("first", graph.image(16, 16, channels=32), 32))
    path = tmp_path / "model.onnx"
    onnx.save(graph.model(graph.conv("second", x, 16, kernel=1)), path)
    return path


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[CompileJob]:
    """TensorRT is there, and lists what `engine` says; returns the jobs it was given."""
    found: list[CompileJob] = []

    def compile(lowered: LoweredModel, job: CompileJob, log: Path | None, progress: object) -> CompileAnswer:
        found.append(job)
        job.plan.write_bytes(b"ftrt" + bytes(60))
        nodes = plugin_nodes(lowered.model)
        return CompileAnswer("11.4", 1.0, "\n".join(engine(node.name) for node in nodes), "engine inspector")

    monkeypatch.setattr("fp4deploy.export.engine.build._compile", compile)
    monkeypatch.setattr("fp4deploy.export.engine.backend.Backend.require_installed", lambda _: None)
    return found


def engine(name: str) -> str:
    made = "Int8" if "quantize" in name else "Half"
    return line(name, "PluginV3", "Half" if "quantize" in name else "Int8", made)


def built(model: Path, arch: str) -> Ledger:
    result = build_engine(model, model.with_name("model.plan"), "tensorrt", arch, "plugin")
    assert load_ledger(result.ledger_path) == result.ledger
    return result.ledger


def test_plugins_realise_the_layers(model: Path, jobs: list[CompileJob]) -> None:
    ledger = built(model, "sm100")
    assert [(row.layer, row.form, row.planned, row.actual, row.weights) for row in ledger.layers] == [
        ("first", "plugin", "FP4", "FP4", "FP4"),
        ("second", "plugin", "FP4", "FP4", "FP4"),
    ]
    assert not ledger.fallbacks()
    assert ledger.layers[0].kernels == ("first.plugin.convolution", "first.plugin.quantize")
    assert ledger.totals().plugins == 2
    assert ledger.shares() == {"FP4": 1.0}
    assert ledger.precision == "nvfp4"
    assert [(job.arch, job.plugins) for job in jobs] == [("sm100", True)]


def test_before_blackwell_operands_are_packed_and_gemms_fp16(model: Path, jobs: list[CompileJob]) -> None:
    row = built(model, "sm90").layers[0]
    assert (row.planned, row.actual, row.weights, row.fell_back) == ("FP16", "FP16", "FP4", False)
    assert (
        row.reason
        == "Conv2d in FP4 as a plugin, because TensorRT has no FP4 convolution; sm90 decodes to FP16 in registers"
    )


@pytest.mark.parametrize(
    "replacement",
    [line("first.plugin.convolution", "gemm", "Half", "Half"), line("elsewhere", "PluginV3", "Int8", "Half")],
    ids=["another kernel", "no kernel"],
)
def test_a_layer_without_its_plugin_fell_back(
    model: Path, jobs: list[CompileJob], monkeypatch: pytest.MonkeyPatch, replacement: str
) -> None:
    right = engine
    name = "first.plugin.convolution"
    monkeypatch.setattr(f"{__name__}.engine", lambda node: replacement if node == name else right(node))
    (row,) = built(model, "sm100").fallbacks()
    assert row.layer == "first"
    assert row.actual != "FP4"


def test_architectures_without_kernels_are_refused(model: Path, jobs: list[CompileJob]) -> None:
    with pytest.raises(InputError, match="'sm75' is not a supported GPU architecture. Valid: sm80"):
        built(model, "sm75")
    with pytest.raises(InputError, match=r"holds FP4 layers, and sm90 has no FP4 tensor cores"):
        build_engine(model, model.with_name("model.plan"), "tensorrt", "sm90", "auto")
    assert jobs == []
