"""Heatmaps: the hierarchy, numbers that are those that were tracked, pages without a network, awkward values."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fp4deploy.data import generate_shapes
from fp4deploy.errors import InputError
from fp4deploy.formats import E2M1_VALUES
from fp4deploy.qat import QuantSpec, Recipe, load_model, quantized_layers
from fp4deploy.qat.telemetry.collect import contracted_axis, window
from fp4deploy.report.figures.heatmap import COUNT, SIGNED, Heatmap
from fp4deploy.report.figures.heatmap_files import save_heatmap
from fp4deploy.report.figures.heatmap_page import save_script
from fp4deploy.report.figures.telemetry import (
    STATISTICS,
    heatmap_folder,
    model_heatmaps,
    read_snapshots,
    save_heatmaps,
    task_of_run,
    telemetry_pictures,
)
from fp4deploy.report.figures.weights import quantized_weight
from fp4deploy.report.telemetry_page import LONG, draw_trained, page_path
from fp4deploy.runs import Run, create_run
from fp4deploy.train import load_config, train_models
from fp4deploy.train.logging.jsonl_tracker import FILE, read_entries
from fp4deploy.train.logging.telemetry import read_gradients
from fp4deploy.train.logging.tracker import SAMPLE
from fp4deploy.train.sections import TelemetrySection
from tests.qat.layer_cases import quantized

SETTINGS = [
    "model.scale=0.125",
    "data.height=32",
    "data.width=32",
    "train.epochs=1",
    "train.finetune_epochs=1",
    "train.batch_size=4",
    "telemetry.every=1",
]


def draw_heatmaps(run: Run, model: str) -> list[Path]:
    return save_heatmaps(run, model, model_heatmaps(run, model))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("heatmaps")
    generate_shapes(folder / "data", train=8, val=4, size=32, seed=0)
    run = create_run(folder / "run")
    train_models(load_config(None, [f"data.root={folder / 'data'}", *SETTINGS]), run)
    return run


@pytest.fixture(scope="module")
def drawn(trained: Run) -> Path:
    draw_heatmaps(trained, "nvfp4")
    return heatmap_folder(trained, "nvfp4")


def numbers(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_the_hierarchy_of_the_contract(drawn: Path) -> None:
    stems = {path.with_suffix("").relative_to(drawn) for path in drawn.rglob("*.json")}
    for stem in stems:
        for suffix in ("png", "html"):
            assert (drawn / stem.parent / f"{stem.name}.{suffix}").stat().st_size > 1000
    names = {str(stem) for stem in stems}
    for tensor in ("weights", "activations"):
        for name, shown in STATISTICS.items():
            if not (tensor == "activations" and name == "flips"):
                assert f"{tensor}/{shown.phase}/semantic_{name}" in names
        assert f"{tensor}/quantized/semantic_occupancy" in names
    assert "gradients/semantic_std" in names
    for layer in ("encoder.0.conv1", "up.0", "head"):
        assert f"weights/prequantize/semantic_{layer}" in names
        assert f"gradients/semantic_{layer}" in names
    assert "weights/quantized/semantic_up.0" in names
    assert "weights/quantized/semantic_head" not in names
    assert "weights/dequantized/semantic_raw_against_dequantized" in names
    assert not list(drawn.rglob(".*"))


def test_the_numbers_are_those_that_were_tracked(trained: Run, drawn: Path) -> None:
    snapshots = [e for e in read_entries(trained.model_dir("nvfp4") / "telemetry.jsonl") if e.kind == SAMPLE]
    assert [entry.step for entry in snapshots] == [1, 2]
    checked = 0
    for path in drawn.rglob("semantic_*.json"):
        found = numbers(path)
        if "statistic" not in found:
            continue
        assert found["columns"] == [str(entry.step) for entry in snapshots]
        for layer, values in zip(found["rows"], found["values"], strict=True):
            for entry, value in zip(snapshots, values, strict=True):
                tracked = entry.layers[layer][found["tensor"]][found["statistic"]]
                assert value == (None if tracked is None else tracked * found["factor"])
                checked += 1
    assert checked > 500
    occupancy = numbers(drawn / "weights" / "quantized" / "semantic_occupancy.json")
    for layer, values in zip(occupancy["rows"], occupancy["values"], strict=True):
        assert occupancy["counts"][layer] == snapshots[-1].codes[layer]["weight"]
        assert sum(values) == pytest.approx(100)
        first = occupancy["columns"].index("-6")
        assert values[first] == 100 * occupancy["counts"][layer][15] / sum(occupancy["counts"][layer])


def test_windows_are_of_the_weights_before_during_and_after(trained: Run, drawn: Path) -> None:
    network, _ = load_model(trained.checkpoint("nvfp4"))
    for name in ("encoder.1.conv2", "up.0", "decoder.1.conv1"):
        layer = quantized_layers(network)[name]
        axis = contracted_axis(layer)
        before = torch.tensor(numbers(drawn / f"weights/prequantize/semantic_{name}.json")["values"])
        during = numbers(drawn / f"weights/quantized/semantic_{name}.json")
        after = torch.tensor(numbers(drawn / f"weights/dequantized/semantic_{name}.json")["values"])
        torch.testing.assert_close(before, window(layer.weight, axis), rtol=1e-5, atol=0)
        torch.testing.assert_close(after, window(layer.quantized_weight(), axis), rtol=1e-5, atol=0)
        codes = torch.tensor(during["codes"])
        assert torch.equal(codes % 8 == 0, after == 0)
        assert torch.equal((codes > 7) & (codes % 8 > 0), after < 0)
        assert during["values"][0][0] == (-1 if codes[0, 0] > 7 else 1) * E2M1_VALUES[int(codes[0, 0]) % 8]
    gradients = read_gradients(trained.model_dir("nvfp4"))
    shown = torch.tensor(numbers(drawn / "gradients/semantic_head.json")["values"])
    torch.testing.assert_close(shown, gradients["head"].float(), rtol=1e-5, atol=1e-12)


def test_raw_against_dequantised(trained: Run, drawn: Path) -> None:
    found = numbers(drawn / "weights/dequantized/semantic_raw_against_dequantized.json")
    network, _ = load_model(trained.checkpoint("nvfp4"))
    pairs = []
    for layer in quantized_layers(network).values():
        raw, value = layer.weight.detach().double().flatten(), layer.quantized_weight().detach().double().flatten()
        scaled = torch.stack((raw, value)) / raw.std(correction=0)
        pairs.append(scaled - scaled.mean(1, keepdim=True))
    assert found["correlation"] == pytest.approx(np.corrcoef(torch.cat(pairs, 1).numpy())[0, 1], rel=1e-6)
    assert found["weights"] == sum(layer.weight.numel() for layer in quantized_layers(network).values())
    counted = np.array([[cell or 0 for cell in row] for row in found["values"]])
    assert 0.99 * found["weights"] < counted.sum() <= found["weights"]
    rows, columns = np.nonzero(counted)
    raw = [float(found["columns"][column]) for column in columns]
    value = [float(found["rows"][row]) for row in rows]
    assert np.corrcoef(raw, value)[0, 1] > 0.95  # not upside down


def test_pages_share_one_script_and_need_no_network(drawn: Path) -> None:
    script = drawn.parent / "plotly.min.js"
    assert script.stat().st_size > 1 << 20
    assert len(list(drawn.parent.rglob("*.js"))) == 1
    for path in drawn.rglob("*.html"):
        text = path.read_text()
        sources = re.findall(r'src="([^"]+)"', text)
        assert len(sources) == 1
        assert (path.parent / sources[0]).resolve() == script.resolve()
        assert not re.search("https?:", text)
        assert path.stat().st_size < 1 << 20


HOSTILE = "</script><img src=x onerror=alert(1)><b>"


class Elements(HTMLParser):
    """The tags of a page, and the contents of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and data.strip():
            self.scripts.append(data)


def elements(path: Path) -> Elements:
    found = Elements()
    found.feed(path.read_text())
    return found


def snapshot(layer: str, **statistics: Any) -> str:
    tensors = {"weight": {"kurtosis": 3.0, **statistics}}
    return json.dumps({"kind": SAMPLE, "step": 1, "epoch": 1, "values": {}, "layers": {layer: tensors}}) + "\n"


def test_names_of_layers_never_become_markup(tmp_path: Path) -> None:
    """Neither for the browser nor for plotly.js, which reads some tags in labels."""
    run = create_run(tmp_path / "run")
    file = run.model_dir("nvfp4") / FILE
    file.parent.mkdir()
    plain = "decoder.conv1"
    file.write_text(snapshot(plain))
    draw_heatmaps(run, "nvfp4")
    page = heatmap_folder(run, "nvfp4") / "weights" / "prequantize" / "semantic_kurtosis.html"
    before = elements(page)
    file.write_text(snapshot(HOSTILE))
    draw_heatmaps(run, "nvfp4")
    after = elements(page)
    assert "img" not in after.tags
    assert after.tags == before.tags
    assert len(after.scripts) == len(before.scripts)
    label = json.dumps([html.escape(HOSTILE, quote=False)])[1:-1].replace("/", "\\u002f")
    assert label in after.scripts[-1], "the name as text: entities for plotly.js, no slash for the browser"
    assert numbers(page.with_suffix(".json"))["rows"] == [HOSTILE]


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    file = run.model_dir("nvfp4") / FILE
    file.parent.mkdir()
    file.write_text(snapshot("good") + snapshot("bad", std=HOSTILE) + snapshot("worse", std={}))
    assert [list(found.layers) for found in read_snapshots(run, "nvfp4")] == [["good"]]


def test_a_run_without_weights_or_telemetry(trained: Run, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    with pytest.raises(InputError, match="no telemetry to draw"):
        draw_heatmaps(run, "nvfp4")
    source = trained.model_dir("nvfp4") / "telemetry.jsonl"
    target = run.model_dir("nvfp4") / "telemetry.jsonl"
    target.parent.mkdir()
    target.write_text(source.read_text().splitlines()[0] + "\n{torn")
    files = draw_heatmaps(run, "nvfp4")  # interrupted before its first checkpoint
    assert {path.name.split("_")[0] for path in files} == {"semantic"}
    assert not (heatmap_folder(run, "nvfp4") / "weights" / "prequantize" / "semantic_head.png").exists()
    assert telemetry_pictures(run, ["fp16", "nvfp4"])


def test_pictures_of_a_report(trained: Run, drawn: Path) -> None:
    pictures = telemetry_pictures(trained, ["fp16", "nvfp4"])
    assert [caption.split(":")[0] for caption, _ in pictures] == ["nvfp4"] * 6
    assert all(uri.startswith("data:image/svg+xml;base64,") for _, uri in pictures)
    assert telemetry_pictures(trained, ["fp16_control"]) == []


def test_a_picture_suits_a_light_and_a_dark_page(trained: Run) -> None:
    for _, uri in telemetry_pictures(trained, ["nvfp4"]):
        svg = base64.b64decode(uri.partition(",")[2]).decode()
        assert "@media(prefers-color-scheme:dark)" in svg
        inside = re.findall(r"data:image/png;base64,([^\"]+)", svg)
        shown = [np.array(Image.open(io.BytesIO(base64.b64decode(each)))) for each in inside]
        light, dark = (pixels[0, 0].mean() for pixels in shown)
        assert light > 200 > 60 > dark
        assert shown[0].shape == shown[1].shape


@pytest.mark.parametrize(
    "recipe",
    ["nvfp4_qat_2d", "mx_baseline", "nvfp4_4o6_qat", "tetrajet", Recipe("sr", weight=QuantSpec(rounding="stochastic"))],
)
def test_codes_and_values_of_a_weight_belong_together(recipe: str | Recipe) -> None:
    torch.manual_seed(0)
    model = quantized(torch.nn.Conv2d(20, 24, 3, groups=2), recipe)
    codes, values = quantized_weight(quantized_layers(model)["0"])
    assert codes.shape == values.shape
    assert torch.equal(codes % 8 == 0, values == 0)


AWKWARD = {
    "one cell": [[1.0]],
    "nothing known": [[None, None], [None, None]],
    "constant": [[0.0, 0.0], [0.0, 0.0]],
    "tiny": [[1e-30, 2e-12], [None, 1e-3]],
    "negative": [[-5.0, -1.0], [-3.0, None]],
    "integers": [[1, 1000], [50, None]],
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("colours", [SIGNED, COUNT])
def test_awkward_values_are_drawn(name: str, colours: str, tmp_path: Path) -> None:
    values = AWKWARD[name]
    rows, columns = [f"{HOSTILE}{at}$" for at in range(len(values))], [str(at) for at in range(len(values[0]))]
    heatmap = Heatmap("a & $b <c>", HOSTILE, rows, columns, "r", "c", values, "unit", colours, log=True)
    save_script(tmp_path / "plotly.min.js")
    paths = save_heatmap(heatmap, tmp_path / "deep" / "task_a.b", tmp_path / "plotly.min.js")
    assert sorted(path.name for path in paths) == ["task_a.b.html", "task_a.b.json", "task_a.b.png"]
    assert numbers(paths[0])["values"] == values
    assert {"img", "b", "c"}.isdisjoint(elements(paths[1]).tags)
    with Image.open(paths[2]) as picture:
        assert picture.width > 200
    low, high, _ = heatmap.limits()
    assert low < high


def test_a_full_disk_leaves_the_older_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heatmap = Heatmap("t", "n", ["a"], ["1"], "r", "c", [[1.0]], "u")
    (path, *_) = save_heatmap(heatmap, tmp_path / "t_a", tmp_path / "plotly.min.js")
    before = path.read_bytes()

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left"):
        save_heatmap(Heatmap("u", "n", ["a"], ["1"], "r", "c", [[2.0]], "u"), tmp_path / "t_a", tmp_path / "x.js")
    assert path.read_bytes() == before


def test_heatmaps_carry_the_name_of_the_task(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    assert task_of_run(run) == "semantic"
    for text, task in (("task: instance\n", "instance"), ("task: 3\n", "semantic"), ("[", "semantic")):
        run.config_path.write_text(text)
        assert task_of_run(run) == task
    run.config_path.write_text("task: instance\n")
    line = {"kind": SAMPLE, "step": 1, "epoch": 1, "layers": {"a": {"gradient": {"std": 0.5}}}, "codes": {}}
    (run.model_dir("fp16")).mkdir()
    (run.model_dir("fp16") / FILE).write_text(json.dumps(line) + "\n")
    assert {path.name.partition("_")[0] for path in draw_heatmaps(run, "fp16")} == {"instance"}


def test_a_training_leaves_its_heatmaps_on_one_page(tmp_path: Path) -> None:
    run, told = create_run(tmp_path / "run"), []
    (run.model_dir("fp16")).mkdir()
    (run.model_dir("fp16") / FILE).write_text(snapshot("conv"))
    off = TelemetrySection(every=200, trackers=["jsonl"], plots=False)
    assert draw_trained(run, ["fp16"], off) == {}
    assert not page_path(run).exists()
    on = off.model_copy(update={"plots": True})
    assert draw_trained(run, ["fp16", "nvfp4_ptq"], on) == {}, "of a short training the page alone; nvfp4_ptq has none"
    assert page_path(run).is_file()
    assert not heatmap_folder(run, "fp16").exists()
    (run.model_dir("fp16") / FILE).write_text(LONG * snapshot("conv"))
    drawn = draw_trained(run, ["fp16"], on, lambda *progress: told.append(progress))
    assert drawn["fp16"]
    assert all(path.is_file() for path in drawn["fp16"])
    assert told == [("heatmaps of fp16", 0, 1)]
