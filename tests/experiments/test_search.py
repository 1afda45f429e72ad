"""The search: the solver against all placements, costs by hand, and one small search from checkpoint to recipe."""

from __future__ import annotations

import copy
import fcntl
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.experiments.search.choose import least_cost, least_error
from fp4deploy.experiments.search.costs import LayerCost, layer_costs, measured_layers, with_measured
from fp4deploy.experiments.search.files import pareto_front, recipe, save_search
from fp4deploy.experiments.search.run import Budget, Point, search
from fp4deploy.experiments.search.study import Measurements, Record
from fp4deploy.metrics import SegmentationScore
from fp4deploy.models import read_card
from fp4deploy.peaks import find_gpu
from fp4deploy.precisions import LAYER_FORMATS
from fp4deploy.ptq import quantize
from fp4deploy.ptq.forward import deployed_in
from fp4deploy.qat.load import deployed
from fp4deploy.rest import RESTS, Rest
from fp4deploy.runs import LOCK, Run, create_run
from fp4deploy.timing.library import library_time
from fp4deploy.train import load_config
from fp4deploy.train.config import save_config, with_settings

COSTS = {"FP4": 1, "W4A8": 1, "FP8": 2, "INT8": 2, "FP16": 4}


def test_the_solver_is_as_good_as_trying_everything() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        names = [(f"l{number}", precision) for number in range(5) for precision in ("FP4", "FP8")]
        errors = dict(zip(names, random.lognormal(-6, 2, 10), strict=True))
        saved = dict(zip(names, random.uniform(1e5, 1e7, 10), strict=True))
        every = [
            frozenset((f"l{number}", precision) for number, precision in enumerate(choice) if precision)
            for choice in itertools.product(("", "FP4", "FP8"), repeat=5)
        ]
        bound = 0.4 * sum(errors.values())
        fitting = [each for each in every if sum(errors[name] for name in each) <= bound]
        best = max(sum(saved[name] for name in each) for each in fitting)
        found = least_cost(errors, saved, bound)
        assert sum(errors[name] for name in found) <= bound * (1 + 1e-6)
        assert sum(saved[name] for name in found) == pytest.approx(best)
        wanted = 0.3 * sum(saved.values())
        enough = [each for each in every if sum(saved[name] for name in each) >= wanted]
        least = min(sum(errors[name] for name in each) for each in enough)
        chosen = least_error(errors, saved, wanted)
        assert chosen is not None
        assert sum(errors[name] for name in chosen) == pytest.approx(least, rel=1e-4)
    assert least_error(errors, saved, 2 * sum(saved.values())) is None


def test_costs_of_layers_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(20, 8, 3, padding=1), nn.Conv2d(8, 4, 1))
    names = {"0": model[0], "1": model[1]}
    gpu = find_gpu("sm120")
    found = layer_costs(model, names, torch.zeros(1, 20, 6, 6), gpu, "auto")
    assert found["0"].bytes["FP16"] == 2 * 8 * 20 * 9
    assert found["0"].bytes["FP4"] == 8 * 32 * 9 * 4.5 / 8 + 4  # 20 channels fill two blocks
    moved = 2 * (20 + 8) * 36
    product = (36, 8, 20 * 9)
    assert found["0"].ms["FP16"] == library_time("FP16", *product, 2 * 8 * 20 * 9 + moved, gpu).ms
    assert found["0"].bytes["W4A8"] == 8 * 32 * 9 * 4.25 / 8  # a block of 32; decoded, so that its time is FP16's
    assert found["0"].ms["W4A8"] == found["0"].ms["FP16"]
    moved = (20 + 2 * 8) * 36
    assert found["0"].bytes["FP8"] == 8 * 20 * 9 + 2 * 8
    assert found["0"].ms["FP8"] == library_time("FP8", *product, found["0"].bytes["FP8"] + moved, gpu).ms
    assert found["0"].ms["INT8"] == library_time("INT8", *product, found["0"].bytes["INT8"] + moved, gpu).ms
    in_fp8 = library_time("FP8", *product, found["0"].bytes["FP4"] + moved, gpu)
    assert found["0"].ms["FP4"] == in_fp8.ms  # multiplied in FP8
    packed = 4 * 16 * 4.5 / 8 + 4 + 8 * 36 * 4.5 / 8 + 2 * 4 * 36
    assert found["1"].ms["FP4"] == library_time("FP4", 36, 4, 8, packed, gpu).ms
    assert {find_gpu(text).name for text in ("sm_120", "sm_120a", "12.0", "SM120")} == {"RTX 5090"}
    for text in ("sm75", "blackwell"):
        with pytest.raises(InputError, match="no published peaks"):
            find_gpu(text)


@pytest.mark.parametrize("text", ["drop", "drop=", "drop=-1", "time=3", "ms=nan", "bytes=1e400"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--budget is"):
        Budget.parse(text)


def test_a_record_answers_of_every_placement_what_would_be_measured(tmp_path: Path) -> None:
    """Placements of the same layers in other precisions, and parts of them, each have a score of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)).eval()
    images = [torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    with torch.no_grad():
        labelled = [(each, model(each).argmax(1)) for each in images]  # of which each precision loses some

    def measured(record: Record) -> Measurements:
        return Measurements(model, images, labelled, lambda: SegmentationScore(4, "abcd"), "miou", "amax", record)

    common = measured(Record(tmp_path / "common.jsonl", {}))
    placements = [[], [("2", "FP4")], [("2", "FP8")], [("2", "FP4"), ("3", "FP8")], [("2", "FP8"), ("3", "FP4")]]
    scores = [common.score(placement) for placement in placements]
    assert len(set(scores)) == len(placements)
    for number, (placement, score) in enumerate(zip(placements, scores, strict=True)):
        assert common.score(reversed(placement)) == score
        assert measured(Record(tmp_path / f"{number}.jsonl", {})).score(placement) == score


@pytest.mark.parametrize("precision", ["FP4", *map(str.upper, LAYER_FORMATS)])
@pytest.mark.parametrize("rest", RESTS.values(), ids=RESTS)
def test_what_is_measured_is_what_would_be_deployed(precision: str, rest: Rest, tmp_path: Path) -> None:
    """Also of the layers that stay as they are, whose weights a file rounds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 4, 1)).eval()
    images = [torch.randn(2, 3, 12, 20) for _ in range(2)]
    with torch.no_grad():
        logits = [model(each) for each in images]
    labelled = [(each, found.argmax(1)) for each, found in zip(images, logits, strict=True)]
    record, scorer = Record(tmp_path / "a.jsonl", {}), lambda: SegmentationScore(4, "abcd")
    measured = Measurements(model, images, labelled, scorer, "miou", "amax", record, rest)
    quantized, form = copy.deepcopy(model), {} if precision == "FP4" else {precision.lower(): ("2",)}
    with deployed_in(rest):
        quantize(quantized, images, "amax", include=("2",), correction="none", progress=lambda *_: None, **form)
    quantized, score = deployed(quantized, rest), scorer()
    with torch.no_grad():
        given = [quantized(each) for each in images]
    for found, (_, labels) in zip(given, labelled, strict=True):
        score.update(found, labels)
    error = sum(float((a - b).double().square().sum()) for a, b in zip(given, logits, strict=True))
    power = sum(float(each.double().square().sum()) for each in logits)
    assert measured.error(("2", precision)) == pytest.approx(error / power, rel=1e-9)
    assert measured.score([("2", precision)]) == score.compute().miou


def test_a_search_writes_a_recipe_and_can_go_on(untrained: Run, shapes: Path, tmp_path: Path) -> None:
    checkpoint = untrained.checkpoint("fp16")
    options = {"images": 2, "batch": 2}
    out = tmp_path / "search"
    found = search(checkpoint, shapes, Budget("drop", 100.0), out, **options)  # type: ignore[arg-type]
    assert found.chosen.bytes == min(point.bytes for point in found.points)
    assert len(found.errors) == 13
    lines = (out / "measured.jsonl").read_text().splitlines()
    half = (found.fp16.bytes + found.chosen.bytes) / 2
    again = search(checkpoint, shapes, Budget("bytes", half), out, **options)  # type: ignore[arg-type]
    assert again.chosen.bytes <= half
    assert again.errors == found.errors
    assert len((out / "measured.jsonl").read_text().splitlines()) <= len(lines) + 1  # one placement more
    assert {path.name for path in save_search(again, out, checkpoint)} == {
        "precision.yaml", "search.json", "search.md", "pareto.png"
    }  # fmt: skip
    config = load_config(out / "precision.yaml", [])
    assert set(config.quant.include or ()) == {*again.chosen.quantized}
    placed = {name: list(again.chosen.placed[name.upper()]) for name in LAYER_FORMATS}
    assert {name: getattr(config.quant, name) or [] for name in LAYER_FORMATS} == placed
    assert {precision for each in found.errors.values() for precision in each} == {"FP4", "W4A8", "FP8", "INT8"}
    assert config.train.init_checkpoint == str(checkpoint.resolve())
    run = create_run(tmp_path / "run")
    save_config(with_settings(config, ["seed=7", "quant.exclude=[head]", "train.from_scratch=true"]), run.config_path)
    settings = yaml.safe_load(recipe(again, run.checkpoint("fp16")))
    assert (settings["seed"], settings["quant"]["exclude"], settings["train"]["from_scratch"]) == (7, None, False)
    assert settings["train"]["init_checkpoint"] == str(run.checkpoint("fp16").resolve())
    assert json.loads((out / "search.json").read_text())["latency"].startswith("projected")
    times = tmp_path / "times.json"
    rows = [(name, "FP16", 2.0) for name in found.errors], [("head", "FP4", 1.5), ("up.0", "FP4", 3.0)]
    times.write_text(json.dumps({"layers": [timed("GPU", 1, own) for own in rows]}))
    measured = search(checkpoint, shapes, Budget("ms", 25.5), out, measured=times, **options)  # type: ignore[arg-type]
    assert measured.chosen.placed["FP4"] == ("head",)  # up.0 takes longer in FP4
    assert (measured.chosen.ms, measured.fp16.ms, measured.gpu) == (25.5, 26.0, "GPU")
    save_search(measured, out, checkpoint)
    assert json.loads((out / "search.json").read_text())["latency"].startswith("measured")
    with pytest.raises(InputError, match="belongs to a search of another checkpoint"):
        search(checkpoint, shapes, Budget("drop", 1.0), out, images=1)
    with pytest.raises(InputError, match="No placement needs at most bytes=10"):
        search(checkpoint, shapes, Budget("bytes", 10.0), out, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="which the budget of 1e\\+09 allows: nothing has to be quantised"):
        search(checkpoint, shapes, Budget("bytes", 1e9), out, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="takes the FP16 checkpoint"):
        search(untrained.checkpoint("nvfp4"), shapes, Budget("drop", 1.0), out)
    assert read_card(checkpoint).precision == "fp16"


def timed(device: str, batch: int, rows: list[tuple[str, str, float]]) -> dict[str, Any]:
    """One network of `profile --json`."""
    layers = [{"layer": layer, "precision": precision, "ms": ms} for layer, precision, ms in rows]
    return {"device": device, "batch": batch, "layers": layers}


def test_measured_times_of_layers(tmp_path: Path) -> None:
    half = timed("GPU", 1, [("0", "FP16", 2.0), ("relu", "FP16", 9.0), ("1", "FP16", 3.0)])
    four = timed("GPU", 4, [("0", "FP4, weight decoded at load", 2.0), ("0", "FP4", 2.0)])
    path = tmp_path / "times.json"
    others = timed(
        "GPU", 1, [(str(at), name, 90.0) for at, name in enumerate(("FP8 as TF32", "W4A8 as TF32", "INT8 as TF32"))]
    )
    path.write_text(json.dumps({"layers": [half, four, others]}))  # decoded layers take no time for others
    times, device = measured_layers(path)
    assert device == "GPU"
    costs = with_measured(dict.fromkeys("01", LayerCost(COSTS, COSTS)), times)
    assert costs["0"].ms == {"FP4": 1.0, "FP16": 2.0}  # both uses, of 4 images
    assert (costs["0"].precisions, costs["1"].precisions) == (("FP4",), ())
    assert costs["0"].bytes["FP4"] == 1
    path.write_text(json.dumps({"layers": [half, four, timed("GPU", 1, [("1", "W4A8", 1.5)])]}))  # by its kernel
    assert with_measured(costs, measured_layers(path)[0])["1"].precisions == ("W4A8",)
    with pytest.raises(InputError, match="The times are not of 2 in FP16"):
        with_measured(dict.fromkeys("02", costs["0"]), times)
    with pytest.raises(InputError, match="not of any layer in FP4"):
        with_measured({"1": costs["1"]}, times)
    path.write_text(json.dumps({"layers": [half, four | {"device": "CPU"}]}))
    with pytest.raises(InputError, match="several devices: CPU, GPU"):
        measured_layers(path)
    path.write_text(json.dumps({"layers": [half | {"batch": 0}]}))
    with pytest.raises(InputError, match=r"batch.*profile --engine FP16\.fp4"):
        measured_layers(path)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_network_that_was_not_measured_here_is_enough(tmp_path: Path, place: int) -> None:
    for changed, said in (({"label": "estimated"}, "estimated times"), ({"device": "B200"}, "several devices")):
        networks = [timed("GPU", 1, [("0", name, 2.0)]) for name in ("FP16", "FP4", "FP4")]
        networks[place] |= changed
        (tmp_path / "times.json").write_text(json.dumps({"layers": networks}))
        with pytest.raises(InputError, match=said):
            measured_layers(tmp_path / "times.json")


def test_the_front_has_no_point_that_another_beats() -> None:
    points = [Point({}, 0.0, cost, 0.0, miou) for cost, miou in ((1, 0.3), (2, 0.2), (2, 0.5), (3, 0.5), (4, 0.6))]
    front = pareto_front(points, lambda each: each.bytes)
    assert [(each.bytes, each.score) for each in front] == [(1, 0.3), (2, 0.5), (4, 0.6)]


def test_a_folder_is_searched_in_by_one_process(untrained: Run, shapes: Path, tmp_path: Path) -> None:
    lock = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="is in use by another process"):
        search(untrained.checkpoint("fp16"), shapes, Budget("drop", 1.0), tmp_path)
    os.close(lock)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_format_that_a_kernel_multiplies_was_timed(tmp_path: Path) -> None:
    """ "FP8" is that kernel's time; "FP8 as TF32" that of a decoded layer, which is no format's."""
    rows = [[("a", "FP16", 4.0), ("b", "FP16", 6.0)], [("a", "FP4", 1.0), ("b", "FP4 as FP16", 6.0)]]
    rows += [[("a", "FP8", 2.0), ("b", "FP8 as TF32", 9.0)]]
    networks = [
        {
            "device": "B200",
            "batch": 2,
            "layers": [dict(zip(("layer", "precision", "ms"), row, strict=True)) for row in each],
        }
        for each in rows
    ]
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"layers": networks}))
    found = with_measured(dict.fromkeys("ab", LayerCost({}, {})), measured_layers(path)[0])
    assert {name: dict(cost.ms) for name, cost in found.items()} == {
        "a": {"FP4": 0.5, "FP8": 1.0, "FP16": 2.0},
        "b": {"FP4": 3.0, "FP16": 3.0},
    }
