"""The ledger reads real build logs, claims nothing without evidence, and sees a silent fallback."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fp4deploy.errors import GateError, InputError
from fp4deploy.export.ledger.actual import match_kernels
from fp4deploy.export.ledger.build_log import EngineLayer, Tensor, parse_engine_layers
from fp4deploy.export.ledger.ledger import COLUMNS, Ledger, LedgerRow, PlannedLayer, ledger_path, load_ledger
from fp4deploy.export.lowering.lower import lower
from tests.export.lowering.engine_graphs import CanonicalGraph

# Layers of the graph below as TensorRT-RTX 1.7.1 listed them when it built for SM120, conv2 in FP16.
RECORDED = Path(__file__).with_name("engine_log_rtx_1.7.1.txt").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _convolutions_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the recorded build: `auto` chooses FP8 for conv2 otherwise."""
    monkeypatch.setattr("fp4deploy.export.lowering.lower.prefers_fp8", lambda layer: None)


def planned() -> tuple[object, ...]:
    graph = CanonicalGraph()
    x = graph.image(16, 16)
    x = graph.norm_relu("norm1", graph.conv("conv1", x, 32, fp4=False))
    x = graph.norm_relu("norm2", graph.conv("conv2", x, 32))
    x = graph.conv("head", graph.up("up", x, 16), 4, kernel=1, fp4=False)
    graph.layers["norm1"] = {"kind": "GroupNorm", "precision": "FP16", "reason": "normalisation"}
    return lower(graph.model(x)).layers


def ledger(log: str = RECORDED) -> Ledger:
    engine = parse_engine_layers(log)
    return Ledger(
        backend="tensorrt-rtx",
        backend_version="1.7.1.116",
        arch="sm120",
        conv="auto",
        evidence="build log",
        source="unet.onnx",
        source_sha256="0" * 64,
        plan="unet.plan",
        plan_sha256="1" * 64,
        plan_bytes=1_862_000,
        build_seconds=0.2,
        batch=(1, 1, 8),
        card=None,
        layers=match_kernels(planned(), engine),
        engine=engine,
    )


def row(found: Ledger, layer: str) -> LedgerRow:
    return {entry.layer: entry for entry in found.layers}[layer]


def edited(kernel: str, old: str, new: str) -> str:
    """The recorded log with one kernel's line changed."""
    lines = [line.replace(old, new) if f"Name: {kernel}" in line else line for line in RECORDED.splitlines()]
    changed = "\n".join(lines)
    assert changed != RECORDED.rstrip("\n")
    return changed


def test_a_normalisation_fused_with_the_next_quantiser_computes_in_what_it_reads() -> None:
    (fused,) = parse_engine_layers(
        "Name: gnor, LayerType: kgen, Inputs: [ { Name: n, Dimensions: [-1], Datatype: Int32 }, { Name: x, Dimensions: "
        "[-1,16,96,96], Datatype: Half }], Constants: [], Outputs: [ { Name: y, Dimensions: [-1,16,96,96], Datatype: "
        "FP8E4M3 }, { Name: scratch, Dimensions: [9024], Datatype: Float }], Metadata: [ONNX Layer: norm1]"
    )
    assert fused.precision == "FP16"
    norm = next(layer for layer in planned() if layer.name == "norm1")  # type: ignore[attr-defined]
    (matched,) = match_kernels([norm], [fused])  # type: ignore[list-item]
    assert matched.actual == "FP16"


def test_every_line_of_a_real_log_is_read() -> None:
    engine = parse_engine_layers(RECORDED)
    assert len(engine) == RECORDED.count("LayerType: ")
    (gemm,) = [layer for layer in engine if layer.type == "gemm"]
    assert gemm.precision == "FP4"
    assert gemm.inputs[0].shape == (-1, 32, 256)
    assert [tensor.precision for tensor in gemm.constants] == ["FP4", "FP32", "FP32", "FP8"]
    assert "up.gemm.matmul" in gemm.onnx_nodes
    quantize = next(layer for layer in engine if layer.onnx_nodes == ("conv2.input.quantize",))
    assert [tensor.precision for tensor in quantize.outputs] == ["FP4", "FP8"]


def test_realised_precision_of_every_kind_of_layer() -> None:
    found = ledger()
    assert {entry.layer: (entry.requested, entry.actual, entry.weights) for entry in found.layers} == {
        "conv1": ("FP16", "FP16", "FP16"),
        "conv2": ("FP4", "FP16", "FP4"),
        "up": ("FP4", "FP4", "FP4"),
        "head": ("FP16", "FP16", "FP16"),
        "norm1": ("FP16", "FP16", "FP16"),
    }
    assert found.fallbacks() == ()
    found.require_no_fallback()
    assert any(kernel.startswith("up.gemm.matmul") for kernel in row(found, "up").kernels)
    assert "conv2.weight.dequantized" in row(found, "conv2").onnx_nodes


def test_totals_and_summary() -> None:
    found = ledger()
    totals = found.totals()
    assert (totals.fp4_gemms, totals.fp16_with_fp4_weights, totals.fp16, totals.fell_back) == (1, 1, 3, 0)
    pixels = 16 * 16
    macs = 27 * 32 * pixels + 9 * 32 * 32 * pixels + 4 * 32 * 16 * pixels + 16 * 4 * 4 * pixels
    assert totals.macs == macs
    assert totals.fp4_mac_share == pytest.approx(4 * 32 * 16 * pixels / macs)
    assert 9 * 32 * 32 // 2 < totals.constant_bytes < 16_000
    assert totals.actual == {"FP16": pytest.approx(1 - totals.fp4_mac_share), "FP4": totals.fp4_mac_share}
    assert totals.requested == {"FP4": pytest.approx(0.910, abs=1e-3), "FP16": pytest.approx(0.090, abs=1e-3)}
    assert found.summary() == (
        "multiply-accumulates in FP16 83.5 %, FP4 16.5 %, requested: FP4 91.0 %, FP16 9.0 %; "
        "1 layer requested FP4 and got another, 0 fallbacks among 5 layers; built and inspected, not run."
    )
    assert found.precision == "nvfp4"


def test_a_constant_counts_once_however_many_kernels_read_it() -> None:
    x = Tensor("x", (1, 32, 256), "FP16")
    kinds = {"FP4": 4, "FP8": 8, "INT8": 8, "FP16": 16, "BF16": 16, "FP32": 32, "Int64": 64}
    held = {precision: Tensor(f"w.{precision}", (32, 10), precision) for precision in kinds}
    alone = tuple(EngineLayer(name, "gemm", (x,), (each,), (x,), ()) for name, each in held.items())
    copies = (dataclasses.replace(each) for each in held.values())  # as each line of a log is read by itself
    again = EngineLayer("again", "kgen", (x,), tuple(copies), (x,), ())
    for layers in (alone, (*alone, again), (again, *alone, again)):
        totals = dataclasses.replace(ledger(), engine=layers).totals()
        assert totals.constant_bytes == 320 * sum(kinds.values()) // 8
        assert totals.engine_layers == len(layers)


def test_what_is_not_as_requested_is_counted_beside_fallbacks() -> None:
    """A convolution that the plan makes FP16 is no fallback, and not what was requested."""
    found = ledger()
    assert [entry.layer for entry in found.not_as_requested()] == ["conv2"]
    found.require_no_fallback()
    expected = r"1 of 5 layers are not as requested: conv2 \(requested FP4, actual FP16, weights FP4: .*--conv gemm"
    with pytest.raises(GateError, match=expected):
        found.require_requested()
    other = ledger("\n".join(line for line in RECORDED.splitlines() if "up." not in line))
    assert [entry.layer for entry in other.not_as_requested()] == ["conv2", "up"]
    assert "unknown 18.6 %" in other.summary()
    assert "2 layers requested FP4 and got another, 1 fallback among" in other.summary()
    with pytest.raises(GateError, match="2 of 5 layers are not as requested"):
        other.require_requested()


def test_a_share_of_fp4_products_can_be_required() -> None:
    """A plan that keeps its convolution in FP16 has no fallback, and still too little FP4."""
    found = ledger()
    found.require_fp4_share(0.16)
    expected = r"16\.5 % of .* are in FP4, and --require-fp4 asks for 50\.0 %.*conv2 \(74\.4 %, FP16\)"
    with pytest.raises(GateError, match=expected):
        found.require_fp4_share(0.5)


def test_decoded_gemm_is_a_fallback() -> None:
    found = ledger(edited("up.gemm.matmul", "Datatype: FP4E2M1", "Datatype: Half"))
    failed = row(found, "up")
    assert failed.actual == "FP16"
    assert failed.fell_back
    assert "the compiler chose FP16 where FP4 was planned" in failed.reason
    with pytest.raises(GateError, match=r"1 of 5 layers fell back: up \(planned FP4, actual FP16, weights FP16: fell"):
        found.require_no_fallback()


def test_activation_left_in_half_precision_is_a_fallback() -> None:
    line = next(line for line in RECORDED.splitlines() if "Name: up.gemm.matmul" in line)
    first = line.replace("Datatype: FP4E2M1", "Datatype: Half", 1)
    found = ledger(RECORDED.replace(line, first))
    assert row(found, "up").actual == "FP16 x FP4"
    assert row(found, "up").fell_back


def test_convolution_weights_unfolded_into_the_plan_are_a_fallback() -> None:
    decode = "__myl_CastMulReplCastMulCastReshTran"
    found = ledger(edited(decode, "Datatype: FP4E2M1", "Datatype: Half"))
    assert row(found, "conv2").weights == "FP16"
    assert row(found, "conv2").fell_back
    assert not row(found, "up").fell_back


def test_layer_without_a_kernel_is_not_claimed() -> None:
    found = ledger("\n".join(line for line in RECORDED.splitlines() if "up." not in line))
    missing = row(found, "up")
    assert (missing.actual, missing.fell_back) == ("unknown", True)
    assert "its precision is unknown" in missing.reason


def test_wanted_fp4_that_was_never_exported_as_fp4_is_a_fallback() -> None:
    graph = CanonicalGraph()
    x = graph.conv("conv2", graph.conv("conv1", graph.image(16, 16), 32, fp4=False), 32)
    graph.layers["conv1"] = {"kind": "Conv2d", "precision": "FP4", "reason": ""}
    first, second = match_kernels(lower(graph.model(x)).layers, parse_engine_layers(RECORDED))
    assert (first.fell_back, second.fell_back) == (True, False)
    assert first.reason == "the file holds no FP4 weights for this layer"


def test_rows_are_ready_for_a_table() -> None:
    rows = ledger().rows()
    assert all(tuple(entry) == COLUMNS for entry in rows)
    assert rows[1]["layer"] == "conv2"
    assert "no FP4 convolution" in rows[1]["reason"]


def test_json_gives_the_same_ledger_back(tmp_path: Path) -> None:
    found = ledger()
    path = ledger_path(tmp_path / "unet.plan")
    assert path.name == "unet.ledger.json"
    path.write_text(found.to_json(), encoding="utf-8")
    assert load_ledger(path) == found


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"format": 9}', '{"format": 1, "layers": 3}', '{"format": 1, "layers": [3]}', "\x00"],
    ids=["empty", "object", "list", "format", "layers", "layer", "null"],
)
def test_broken_ledger_is_an_input_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "unet.ledger.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"unet\.ledger\.json.*fp4deploy build"):
        load_ledger(path)


def test_missing_ledger_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fp4deploy build"):
        load_ledger(tmp_path / "unet.ledger.json")


def test_model_card_travels_with_the_ledger() -> None:
    assert ledger().model_card() is None
    card = {
        "precision": "nvfp4",
        "scale": 0.25,
        "class_names": ["background", "disc"],
        "height": 16,
        "width": 16,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.2, 0.2, 0.2],
        "background": True,
    }
    found = dataclasses.replace(ledger(), card=card).model_card()
    assert found is not None
    assert found.class_names == ("background", "disc")


def test_every_kernel_of_a_layer_is_listed() -> None:
    before = next(entry for entry in ledger().layers if entry.kernels)
    name = before.kernels[0]
    line = next(line for line in RECORDED.splitlines() if f"Name: {name}," in line)
    second = line.replace(f"Name: {name},", f"Name: {name}_second,", 1)
    after = row(ledger(f"{RECORDED.rstrip()}\n{second}\n"), before.layer)
    assert after.kernels == (*before.kernels, f"{name}_second")


FUSED = ("a.input.quantize", "b.input.quantize")


@pytest.mark.parametrize(
    ("name", "constant", "nodes", "weights"),
    [
        ("b", "b.weight", FUSED, "FP4"),
        ("b", "a.weight", FUSED, "FP16"),
        ("b", "constant7", FUSED, "FP16"),
        ("b", "constant7", ("b.input.quantize",), "FP4"),
        ("b", "b2.weight", FUSED, "FP16"),
        ("b", "ab.weight", FUSED, "FP16"),
    ],
    ids=["own name", "other's name", "no name", "serves it alone", "longer name", "name's end"],
)
def test_a_kernel_of_two_layers_lends_no_weights(
    name: str, constant: str, nodes: tuple[str, ...], weights: str
) -> None:
    layer = PlannedLayer(
        name, "Conv2d", "FP16", "plain", "FP16", "FP16", "", 100, (f"{name}.input.quantize", f"{name}.gemm"),
        (f"{name}.gemm",),
    )  # fmt: skip
    x = Tensor("x", (1, 32, 256), "FP16")
    fused = EngineLayer("fused", "kgen", (x,), (Tensor(constant, (32, 64), "FP4"),), (x,), nodes)
    own = EngineLayer("own", "gemm", (x,), (Tensor("w", (32, 32), "FP16"),), (x,), ("b.gemm",))
    (found,) = match_kernels((layer,), (fused, own))
    assert (found.actual, found.weights, found.kernels) == ("FP16", weights, ("fused", "own"))


def test_the_storage_of_weights_is_that_of_the_largest_matrix() -> None:
    layer = PlannedLayer("b", "Conv2d", "FP16", "plain", "FP16", "FP16", "", 100, ("b.gemm",), ("b.gemm",))
    x = Tensor("x", (1, 32, 256), "FP16")
    shapes = {"FP32": (2, 2), "FP16": (32, 32), "FP8": (3, 3), "Int32": (4096,)}
    constants = tuple(Tensor("c", shape, precision) for precision, shape in shapes.items())
    (found,) = match_kernels((layer,), (EngineLayer("own", "gemm", (x,), constants, (x,), ("b.gemm",)),))
    assert found.weights == "FP16"


def test_without_the_kernel_that_multiplies_no_weights_are_claimed() -> None:
    layer = PlannedLayer("b", "Conv2d", "FP4", "gemm", "FP4", "FP4", "", 100, (FUSED[1], "b.gemm"), ("b.gemm",))
    x = Tensor("x", (1, 32, 256), "FP4")
    fused = EngineLayer("fused", "kgen", (x,), (Tensor("a.weight", (32, 64), "FP4"),), (x,), FUSED)
    (found,) = match_kernels((layer,), (fused,))
    assert (found.actual, found.weights, found.fell_back) == ("unknown", "unknown", True)


def test_statistics_in_fp32_are_not_what_a_norm_computes_in() -> None:
    layer = PlannedLayer("norm", "GroupNorm", "FP16", "plain", "FP16", "", "", 0, ("norm",), ())
    x, moments = Tensor("x", (1, 32, 256), "FP16"), Tensor("moments", (1, 32), "FP32")
    kernels = [EngineLayer(each.name, "kgen", (each,), (), (each,), ("norm",)) for each in (moments, x)]
    assert [kernel.precision for kernel in kernels] == ["FP32", "FP16"]
    assert match_kernels((layer,), tuple(kernels))[0].actual == "FP16"


@pytest.mark.parametrize(("read", "counted"), [("INT8", 1), ("FP16", 0)])
def test_a_plugin_that_reads_codes_computes_as_planned(read: str, counted: int) -> None:
    node = "conv.plugin"
    layer = PlannedLayer("conv", "Conv2d", "FP4", "plugin", "FP4", "FP4", "", 100, (node,), (node,))
    kernel = EngineLayer("conv.plugin", "PluginV3", (Tensor("codes", (1, 32, 256), read),), (), (), (node,))
    found = dataclasses.replace(ledger(), layers=match_kernels((layer,), (kernel,)), engine=(kernel,))
    assert (found.totals().plugins, found.totals().fell_back) == (counted, 1 - counted)
    assert found.shares() == {"FP4" if counted else found.layers[0].actual: 1.0}


@pytest.mark.parametrize(
    "change",
    [
        ('"macs": ', '"macs": -'), ('"batch": [\n  1', '"batch": [\n  "1"'),
        ('"plan_bytes": 1', '"plan_bytes": 1.5e3, "x": 1'),
        ('"fell_back": false', '"fell_back": 3'), ('"build_seconds": 0.2', '"build_seconds": NaN'),
    ],
    ids=["macs", "batch", "bytes", "bool", "nan"],
)  # fmt: skip
def test_a_field_of_another_type_is_refused(change: tuple[str, str]) -> None:
    text = ledger().to_json()
    assert change[0] in text
    with pytest.raises(InputError, match="The ledger"):
        Ledger.from_json(text.replace(*change, 1))
