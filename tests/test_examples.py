"""Examples run by their command lines, and what the documentation says of them is what the code and the runs say."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import pickle
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fp4deploy.formats import decode_e2m1, quantize_nvfp4, unpack_codes
from fp4deploy.qat import RECIPES, quantized_layers

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, DOCS, RESULTS = ROOT / "examples", ROOT / "docs", ROOT / "benchmarks" / "results"
HEADINGS = ["recipe", "format", "X", "W^T", "G", "W", "G^T", "X (dW)", "double quant"]

Command = Callable[..., str]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples import each other by name; what they change in torch is changed back."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads, loaded = torch.get_num_threads(), set(sys.modules)
    yield
    torch.set_num_threads(threads)
    for name in {path.stem for path in EXAMPLES.glob("*.py")} - loaded:
        sys.modules.pop(name, None)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a script by its command line and return what it printed."""

    def run(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(ROOT / script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "loop", [[], pytest.param(["--lightning"], marks=pytest.mark.variants)], ids=["plain", "lightning"]
)
def test_an_own_network_and_loop(command: Command, loop: list[str], tmp_path: Path) -> None:
    """From an own loss and loader to ONNX and a packed network, in a plain loop and in Lightning's."""
    if loop:
        pytest.importorskip("lightning", reason="Lightning is not installed: pip install -e '.[examples]'")
    printed = command("examples/own_network.py", "--out", str(tmp_path), "--images", "16", "--epochs", "2", *loop)
    first, before, after = map(float, re.findall(r"(\d\.\d{3})", printed.splitlines()[0]))
    assert before < first
    assert after < first
    assert "ONNX: 5 layers in FP4" in printed
    shares = re.findall(r"(model\S*): (\S+) % of the pixels", printed.replace("%", " %"))
    assert len(shares) == 2
    assert shares[0][1] == shares[1][1]


def needs_digits() -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install -e '.[examples]'")


def markdown_rows(text: str) -> list[list[str]]:
    """The cells of every line of a table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def doc(name: str) -> str:
    """A page with its tables, as the site shows it."""
    tables = load(DOCS / "macros.py")

    def render(call: re.Match[str]) -> str:
        rendered: str = tables.table(*re.findall(r'"([^"]+)"', call[1]))
        return rendered

    return re.sub(r"\{\{ table\(([^)]*)\) \}\}", render, (DOCS / name).read_text(encoding="utf-8"))


def assert_shown(table: str, page: str) -> None:
    """Every row that an example prints is on the page."""
    head, _, *rows = markdown_rows(table)
    assert rows
    assert [row for row in (head, *rows) if row not in markdown_rows(page)] == []


def result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    ("script", "jobs", "recipes"),
    [
        pytest.param("vit_digits", "1", ["mx_baseline", "nvfp4_train"], marks=pytest.mark.variants),
        ("conv_digits", "3", ["tetrajet", "nvfp4_qat"]),
    ],
)
def test_digits_trains_every_recipe_asked_for(
    command: Command, tmp_path: Path, script: str, jobs: str, recipes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_digits()
    import digits

    pools: list[int] = []

    class Pool(contextlib.AbstractContextManager["Pool"]):
        """What a process of another interpreter is given, run here."""

        def __init__(self, jobs: int, **_: Any) -> None:
            pools.append(jobs)

        def map(self, job: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
            return (pickle.loads(pickle.dumps(job))(item) for item in items)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(digits, "ProcessPoolExecutor", Pool)
    file, options = tmp_path / "runs.json", ["--seeds", "1", "--epochs", "1", "--jobs", jobs, "--recipes", *recipes]
    out = command(f"examples/{script}.py", *options, "--json", str(file))
    assert pools == [int(jobs)] * (jobs != "1")
    assert [row[0] for row in markdown_rows(out)[2:]] == ["fp32", *recipes]
    content = json.loads(file.read_text())
    assert content["command"] == " ".join(["python", f"examples/{script}.py", *options])
    runs = content["runs"]
    assert list(runs) == ["fp32", *recipes]
    for rows in runs.values():
        assert len(rows) == 1
        assert math.isfinite(rows[0]["loss"])
        assert rows[0]["loss"] < math.log(10) + 0.5
        assert 0 <= rows[0]["accuracy"] <= 100


def test_all_recipes_of_a_seed_start_alike_and_all_layers_means_all() -> None:
    from conv_digits import ConvNet
    from digits import quantized_names
    from vit_digits import VisionTransformer

    inner = ["block.attn.qkv", "block.attn.proj", "block.mlp.expand", "block.mlp.contract"]
    assert quantized_names(VisionTransformer, all_layers=False) == inner
    assert quantized_names(VisionTransformer, all_layers=True) == ["patch", *inner, "head"]
    assert quantized_names(ConvNet, all_layers=False) == ["conv", "down"]
    assert quantized_names(ConvNet, all_layers=True) == ["stem", "conv", "down", "head"]


def test_training_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_digits()
    import digits
    from conv_digits import SETTINGS, ConvNet

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = digits.train

    def train(model: torch.nn.Module, settings: Any, seed: int, steps: int | None = None) -> list[float]:
        model.stem.register_forward_pre_hook(
            lambda layer, inputs: seen.append((inputs[0].detach().clone(), layer.weight.detach().clone()))
        )
        return original(model, settings, seed, 2)

    monkeypatch.setattr(digits, "train", train)
    losses = [digits.run(ConvNet, recipe, SETTINGS, 3, False).loss for recipe in ("fp32", "fp32", "nvfp4_train")]
    assert losses[0] == losses[1] != losses[2]
    first, second = seen[:3], seen[-3:]  # two steps and the test set
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[0][1], second[0][1])


@pytest.mark.variants
def test_gradient_range_counts_what_vanishes(command: Command, tmp_path: Path) -> None:
    needs_digits()
    file = tmp_path / "range.json"
    out = command("examples/gradient_range.py", "--seeds", "1", "--epochs", "1", "--json", str(file))
    content = json.loads(file.read_text())
    assert len(content["gradients"]) == 16
    for row in content["gradients"]:
        assert row["zero_blocks_without"] == 100.0
        assert row["zero_blocks_with"] < 50
        assert row["relative_error_with"] < 0.15
    assert "fp4_all_the_way, no global scale" in out


def test_block_axis_shows_one_function_and_three_placements(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "axis.json"
    out = command(
        "examples/block_axis.py",
        "--epochs",
        "1",
        "--images",
        "8",
        "--size",
        "32",
        "--octaves",
        "3",
        "--json",
        str(file),
    )
    content = json.loads(file.read_text())
    assert content["fp32_logits_equal"]
    assert [row["placement"] for row in content["rows"]] == 2 * ["FP32", "channels", "flattened", "width"]
    assert len(markdown_rows(out)) == 10
    trained, spread = content["rows"][:4], content["rows"][4:]
    assert spread[1]["output_error"] > 1.5 * trained[1]["output_error"]
    assert spread[3]["output_error"] < 1.2 * trained[3]["output_error"]


def test_reference_speed_compares_bits_and_prints_the_ratio(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    out = command("benchmarks/reference_speed.py", "--size", "128", "--repeats", "1", "--json", str(file))
    assert "x naive" in out
    assert [row["name"] for row in json.loads(file.read_text())["rows"]][:2] == ["naive", "reference"]


def test_the_pictures_can_be_drawn_again(tmp_path: Path) -> None:
    module = load(DOCS / "images" / "make_grid.py")
    module.FOLDER = tmp_path
    module.draw_e2m1()
    module.draw_four_over_six()
    for name in ("e2m1.svg", "four_over_six.svg"):
        assert (tmp_path / name).stat().st_size > 5000
        assert (DOCS / "images" / name).is_file()
        assert f"images/{name}" in doc("numerics.md")


def test_the_table_of_recipes_is_what_print_says() -> None:
    rows = markdown_rows(doc("recipes.md"))
    assert rows[0] == HEADINGS
    assert rows[2 : 2 + len(RECIPES)] == [
        re.split(r" {2,}", str(recipe).splitlines()[2]) for recipe in RECIPES.values()
    ]


def test_the_code_in_the_recipes_page_runs() -> None:
    from vit_digits import VisionTransformer

    blocks = re.findall(r"```python\n(.*?)```", doc("recipes.md"), re.DOTALL)
    blocks = [
        code for code in blocks if "load_model(trained)" not in code
    ]  # of a checkpoint: in tests/qat/test_prepare.py
    space: dict[str, Any] = {"model": VisionTransformer(), "steps": 1000, "step": 0}
    expected = [0, 4, 4, 4, 4]
    assert len(blocks) == len(expected)
    for code, layers in zip(blocks, expected, strict=True):
        exec(code, space)
        assert len(quantized_layers(space["model"])) == layers
    printed = re.search(r">>> print\(nearest\)\n(.*?)\n```", doc("recipes.md"), re.DOTALL)
    assert printed
    assert printed[1] == str(space["nearest"])


def test_the_code_in_the_gemm_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.plugins.gemm import scaled_mm

    monkeypatch.chdir(tmp_path)
    page = doc("gemm.md")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    space: dict[str, Any] = {}
    for code in blocks:
        exec(code, space)
    assert space["again"].released
    assert (tmp_path / "layer.safetensors").is_file()
    assert ", ".join(f'`"{name}"`' for name in scaled_mm.BACKENDS) in page


@pytest.mark.parametrize("name", ["vit", "conv"])
def test_the_digits_tables_are_those_of_the_runs(name: str) -> None:
    from digits import Result, table

    content = result(f"digits_{name}_cpu.json")
    runs = {recipe: [Result(**row) for row in rows] for recipe, rows in content["runs"].items()}
    trained = {"conv": "The convolutional network was", "vit": "the transformer"}[name]
    said = re.search(rf"{trained}(?: trained)? with <!--= .*? -->every recipe(.*?)<!--/-->", doc("recipes.md"))
    assert said
    left_out = re.findall(r"`(\w+)`", said[1])
    assert set(runs) == {"fp32", *RECIPES} - set(left_out)
    assert {len(rows) for rows in runs.values()} == {5}
    assert_shown(table(runs), doc("recipes.md"))
    reference = [row.accuracy for row in runs["fp32"]]
    for recipe, rows in runs.items():
        gap = sum(row.accuracy for row in rows) / 5 - sum(reference) / 5
        assert abs(gap) < 1.5, recipe


def test_the_tables_of_gradients_and_block_axes_are_those_of_the_runs() -> None:
    from digits import Result, table

    content = result("gradient_range_cpu.json")
    recipes, numerics = doc("recipes.md"), doc("numerics.md")
    assert_shown(table({name: [Result(**row) for row in rows] for name, rows in content["runs"].items()}), recipes)
    for row in content["gradients"]:
        assert f"| {row['step']} | {row['layer']} | {row['median_block_amax']:.1e} | " in recipes
    for row in result("block_axis_cpu.json")["rows"]:
        shown = [cells for cells in markdown_rows(numerics) if cells[:2] == [row["network"], row["placement"]]]
        assert len(shown) == 1
        assert shown[0][-1] == f"{row['miou']:.2f}"
        if row["placement"] != "FP32":
            assert shown[0][4:6] == [f"{row['output_error']:.3f}", f"{row['pixels_changed']:.2f} %"]


def test_the_worked_example_of_the_numerics_page() -> None:
    cells = {row[0]: row[1:] for row in markdown_rows(doc("numerics.md"))}
    x = torch.tensor([float(cell.replace("−", "-")) for cell in cells["x"]])
    block = torch.cat([torch.nn.functional.pad(x, (0, 11)), torch.tensor([2.6]), torch.zeros(15)]).unsqueeze(0)
    q = quantize_nvfp4(block)
    codes = unpack_codes(q.codes)[0, :5]
    assert q.scales[0].tolist() == [224.0, 448.0]
    assert codes.tolist() == [int(cell) for cell in cells["code"]]
    shown = torch.tensor([float(cell.replace("−", "-")) for cell in cells["x'"]])
    torch.testing.assert_close(shown, q.dequantize()[0, :5], rtol=0, atol=5e-5)
    torch.testing.assert_close(decode_e2m1(codes) * 0.2166667, q.dequantize()[0, :5], rtol=1e-6, atol=0)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trainers_of_fp32_and_fp4_differ_by_two_lines(command: Command) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    texts = [(EXAMPLES / f"trainer_{name}.py").read_text(encoding="utf-8").splitlines() for name in ("fp32", "fp4")]
    assert [line for line in texts[1] if line and line not in texts[0]] == [
        "import fp4deploy as fd",
        "fd.prepare(model)",
    ]
    assert not [line for line in texts[0] if line not in texts[1]]
    printed = command("examples/trainer_fp4.py", "--steps", "4")
    assert 0 <= float(re.findall(r"accuracy (\d\.\d{3})", printed)[-1]) <= 1


def test_digits_are_folders_for_a_sweep_of_every_recipe(tmp_path: Path, command: Command) -> None:
    needs_digits()
    from fp4deploy.experiments.sweep.spec import load_sweep

    command("examples/digits_folders.py", str(tmp_path))
    assert [len([*tmp_path.glob(f"{part}/*/*.png")]) for part in ("train", "val")] == [1347, 450]
    sweep = load_sweep(ROOT / "configs" / "sweep_digits.yaml")
    assert {"fp16", *RECIPES} == {variant.name for variant in sweep.variants}
    assert all(sweep.config(each, 0).recipe == each.name for each in sweep.variants if each.name in RECIPES)
    assert len(sweep.seeds) == 5
