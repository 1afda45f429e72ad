"""`fp4deploy build`: every option of an engine's range and interface, from the command line to the ledger."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper

from fp4deploy.data import generate_shapes, open_dataset
from fp4deploy.export.engine.build import PreparedEngine, open_plan, prepare_engine
from fp4deploy.export.engine.forms import smallest
from fp4deploy.models import ModelCard
from tests.cli.command_line import Invoke
from tests.export.lowering.engine_graphs import CanonicalGraph, with_open_size


def card_of(fp4: bool) -> dict[str, str]:
    """Metadata of a file for 16x16 and four classes."""
    precision = "nvfp4" if fp4 else "fp16"
    card = ModelCard(precision, 0.25, ("a", "b", "c", "d"), 16, 16, (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), True)
    return {"fp4deploy.card": card.to_json()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A graph of open image size with one FP4 layer, with a model card."""
    graph = CanonicalGraph()
    x = graph.conv("first", graph.image(16, 16), 32, fp4=False)
    x = graph.conv("point", x, 32, kernel=1)
    found = with_open_size(graph.model(graph.conv("head", x, 4, kernel=1, fp4=False)))
    layers = {entry.key: entry.value for entry in found.metadata_props}
    helper.set_model_props(found, {**layers, **card_of(True)})
    onnx.save(found, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.rtx
class TestBuilt:
    """Built with TensorRT-RTX for a GPU that is not there; the compiler's own profile is compared in `test_engine`."""

    @pytest.fixture(autouse=True)
    def _rtx(self) -> None:
        pytest.importorskip("tensorrt_rtx")

    @pytest.mark.usefixtures("model")
    def test_ranges_and_interface(self, invoke: Invoke, tmp_path: Path) -> None:
        ranges = ("--min-batch", 2, "--opt-batch", 3, "--max-batch", 4)
        sizes = ("--min-size", "8x16", "--opt-size", "16x16", "--max-size", "32x24")
        interface = ("--input", "uint8", "--input-layout", "nhwc", "--output", "argmax")
        result = invoke("build", "model.onnx", *ranges, *sizes, *interface, "--json")
        assert result.exit_code == 0, result.stderr
        ledger = open_plan(tmp_path / json.loads(result.stdout)["results"][0]["engine"])
        assert (ledger.batch, ledger.sizes) == ((2, 3, 4), ((8, 16), (16, 16), (32, 24)))
        assert ledger.interface is not None
        assert {"uint8", "nhwc", "argmax"} <= set(ledger.interface.values())
        shown = json.loads(invoke("inspect", "model.sm120.plan", "--json").stdout)
        assert (shown["batch"], shown["sizes"]) == ([2, 3, 4], [[8, 16], [16, 16], [32, 24]])
        assert shown["interface"] == ledger.interface

    @pytest.mark.variants
    def test_the_smallest_form_is_found_and_a_plan_larger_than_that_of_fp16_is_named(
        self, invoke: Invoke, tmp_path: Path
    ) -> None:
        for name, fp4 in (("half", False), ("four", True)):
            graph = CanonicalGraph()
            x = graph.conv("deep", graph.conv("first", graph.image(16, 16), 32, fp4=False), 32, fp4=fp4)
            found = graph.model(graph.conv("head", x, 4, kernel=1, fp4=False), function=fp4)
            helper.set_model_props(found, {**{each.key: each.value for each in found.metadata_props}, **card_of(fp4)})
            onnx.save(found, tmp_path / f"{name}.onnx")
        alone = invoke("build", "four.onnx").stderr
        assert re.search(r"Of four.sm120.plan [\d.]+ MB are constants .* FP16, with fewer, may be smaller", alone)
        said = invoke("build", "half.onnx").stderr
        assert "larger" not in said
        assert "smaller" not in said
        sizes = {}
        for form in ("auto", "gemm", "fp8", "qdq"):
            result = invoke("build", "four.onnx", "--conv", form, "--out", f"{form}.plan", "--json")
            (built,) = json.loads(result.stdout)["results"]
            sizes[form] = built["size_bytes"]
            (half,) = (path.stat().st_size for path in tmp_path.glob("half.sm120.plan"))
            assert sizes[form] > half
            assert (
                f"{form}.plan is larger than the FP16 plan half.sm120.plan, {sizes[form] / 1e6:.2f} MB" in result.stderr
            )
        assert len(set(sizes.values())) > 1
        result = invoke("build", "four.onnx", "--conv", "smallest", "--out", "least.plan", "--json")
        assert json.loads(result.stdout)["results"][0]["size_bytes"] == min(sizes.values())
        assert "No form is smaller." in result.stderr

    @pytest.mark.usefixtures("model")
    def test_the_usual_size_is_by_default_the_largest(self, invoke: Invoke, tmp_path: Path) -> None:
        sizes = ("--min-size", "8x16", "--max-size", "32x24")
        result = invoke("build", "model.onnx", *sizes, "--output", "fp32", "--output-layout", "nhwc")
        assert result.exit_code == 0, result.stderr
        ledger = open_plan(tmp_path / "model.sm120.plan")
        assert (ledger.batch, ledger.sizes) == ((1, 1, 8), ((8, 16), (32, 24), (32, 24)))
        assert ledger.interface is not None
        assert {"fp32", "nhwc"} <= set(ledger.interface.values())

    def test_a_form_that_keeps_the_accuracy_is_taken(self, invoke: Invoke, tmp_path: Path) -> None:
        """FP8 changes pixels of a network of random weights: where that may not be, its convolutions are FP16."""
        generate_shapes(tmp_path / "data", train=1, val=6, size=32, seed=1)  # on these FP8 loses
        classes = open_dataset(tmp_path / "data", "val").class_names
        graph = CanonicalGraph()
        x = graph.conv("deep", graph.conv("first", graph.image(32, 32), 32, fp4=False), 32)
        found = graph.model(graph.conv("head", x, len(classes), kernel=1, fp4=False))
        card = ModelCard("nvfp4", 0.25, tuple(classes), 32, 32, (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), True)
        layers = {each.key: each.value for each in found.metadata_props}
        helper.set_model_props(found, {**layers, "fp4deploy.card": card.to_json()})
        onnx.save(found, tmp_path / "four.onnx")
        forms = {}
        for allowed in ("0", "100"):
            result = invoke("build", "four.onnx", "--data", "data", "--max-drop", allowed)
            assert result.exit_code == 0, result.stderr
            forms[allowed] = open_plan(tmp_path / "four.sm120.plan").conv
            assert f"Emulated, not run; allowed are {allowed} points." in result.stderr
            assert ("Building four.onnx again, with --conv qdq" in result.stderr) == (allowed == "0")
        assert forms == {"0": "qdq", "100": "auto"}
        compiled = []  # though `auto` multiplies nothing in FP4

        def prepare(form: str) -> PreparedEngine:
            compiled.append(form)
            return prepare_engine(tmp_path / "four.onnx", conv=form)

        smallest(prepare)
        assert compiled == ["auto", "auto", "gemm", "fp8", "qdq"]
        before = (tmp_path / "four.sm120.plan").stat().st_mtime_ns
        assert invoke("build", "four.onnx", "--data", "away").exit_code == 2  # before anything is compiled
        assert (tmp_path / "four.sm120.plan").stat().st_mtime_ns == before
        refused = invoke("build", "four.onnx", "--data", "data", "--conv", "gemm")
        assert refused.exit_code == 2
        assert "--data is for --conv auto" in refused.stderr

    @pytest.mark.usefixtures("model")
    @pytest.mark.skipif(torch.cuda.is_available(), reason="builds where there is a GPU")
    @pytest.mark.parametrize(
        ("option", "code", "said"),
        [
            ("--strip-weights", 3, "cannot build with --strip-weights on this machine"),
            pytest.param(
                "--refittable", 3, "cannot build with --refittable on this machine", marks=pytest.mark.variants
            ),
            ("--version-compatible", 2, "does not offer --version-compatible"),
        ],
    )
    def test_what_this_target_does_not_offer(self, invoke: Invoke, option: str, code: int, said: str) -> None:
        result = invoke("build", "model.onnx", "--size", "16x16", option)
        assert (result.exit_code, result.stdout) == (code, ""), result.stderr
        assert said in " ".join(result.stderr.split())
        assert not list(Path().glob("*.plan"))


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--min-size", "8x16"), "give --max-size as well"),
        (("--opt-size", "8x16"), "give --max-size as well"),
        (("--max-size", "32x24", "--size", "16x16"), "--size"),
        (("--max-size", "8x16", "--min-size", "16x16"), "--min-size"),
        (("--size", "16x16", "--min-batch", 4, "--opt-batch", 2), "batch range"),
        (("--size", "16x16", "--output", "argmax", "--output-layout", "nhwc"), "--output-layout"),
        (("--max-size", "8by8"), "--max-size"),
        (("--size", "16x16", "--out", "model.onnx/x.plan"), "could not be written"),
        (("--size", "16x16", "--log", "model.onnx/log"), "could not be written"),
        (("--size", "16x16", "--max-drop", 1), "--data DIR"),
    ],
)
def test_what_does_not_go_together(invoke: Invoke, arguments: tuple[object, ...], said: str) -> None:
    result = invoke("build", "model.onnx", *arguments)
    assert result.exit_code == 2, result.stderr
    assert said in " ".join(result.stderr.split())
    assert not list(Path().glob("*.plan"))
