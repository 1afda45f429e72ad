"""The gate: interval of the drop, what a baseline is bound to, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4deploy.bench.artifact import bench_artifact
from fp4deploy.bench.evidence import LabelCounts, PixelCounts, VoxelCounts, read_evidence, write_matches, write_pixels
from fp4deploy.bench.gate.baseline import Baseline, find_baseline
from fp4deploy.bench.gate.bootstrap import FEW_IMAGES, Interval, paired_drop, value
from fp4deploy.bench.gate.decision import MAX_LISTED, Decision, decide, doubt, fastest, gate_drop, require_passed
from fp4deploy.bench.records import ArtifactEntry, Quantiles
from fp4deploy.errors import GateError, InputError
from fp4deploy.instances.matches import ClassMatches, Matches
from fp4deploy.runs import Run
from tests.bench.perfect import perfect

CLASSES = ("road", "sky", "tree")


def counts(images: int, right: float, seed: int = 0, spread: float = 0.02) -> PixelCounts:
    """Pixels of images whose share of right pixels varies about `right`; wrong pixels go to the next class."""
    random = np.random.default_rng(seed)
    truth = random.integers(200, 2000, (images, len(CLASSES)))
    share = np.clip(right + spread * random.standard_normal((images, 1)), 0, 1)
    hit = (truth * share).astype(np.int64)
    predicted = hit + np.roll(truth - hit, 1, axis=1)
    return PixelCounts([f"{n}.png" for n in range(images)], CLASSES, np.stack([hit, truth, predicted], -1))


def entry(found: PixelCounts, name: str = "unet.onnx", **changes: Any) -> ArtifactEntry:
    fields: dict[str, Any] = {"path": name, "model": "nvfp4", "status": "ok", "miou": value(found), "split": "val"}
    return ArtifactEntry(**{**fields, "data_sha256": "a" * 64, "evidence": write_pixels(found), **changes})


def baseline(found: PixelCounts, split: str = "val") -> Baseline:
    return Baseline("unet-fp16.onnx", "mIoU", value(found), split, "a" * 64, found)


def test_the_drop_is_of_pooled_counts() -> None:
    first, second = counts(40, 0.9), counts(40, 0.85)
    found = paired_drop(first, second)

    def pooled(of: PixelCounts) -> float:
        hit, truth, predicted = (part.sum(0) for part in (of.hit, of.truth, of.predicted))
        return float(np.mean(hit / (truth + predicted - hit)))

    assert found.metric.drop == pytest.approx(pooled(first) - pooled(second))
    assert found.metric.low < found.metric.drop < found.metric.high


def test_the_interval_covers_the_drop_of_the_population() -> None:
    """Splits of 60 images out of 20,000: 95 % intervals hold the drop of all of them in about 95 % of the splits."""
    population = 20_000
    random = np.random.default_rng(1)
    stacked = [
        np.stack([part.hit, part.truth, part.predicted], -1)
        for part in (counts(population, 0.9, 0, 0.05), counts(population, 0.88, 0, 0.08))
    ]
    names = [str(number) for number in range(population)]
    whole = value(PixelCounts(names, CLASSES, stacked[0])) - value(PixelCounts(names, CLASSES, stacked[1]))
    covered = 0
    for _ in range(200):
        chosen = random.integers(0, population, 60)
        first, second = (PixelCounts(names[:60], CLASSES, part[chosen]) for part in stacked)
        found = paired_drop(first, second, replicates=200).metric
        covered += found.low <= whole <= found.high
    assert 175 <= covered <= 200


def test_the_interval_is_as_wide_as_its_level_says() -> None:
    """Of one class whose predictions lie within it, IoU is a mean over images: its standard error is known."""
    images = 400
    missed = np.random.default_rng(2).integers(0, 100, images)
    truth = np.full(images, 1000)
    stacked = [np.stack([truth - lost, truth, truth - lost], -1)[:, None] for lost in (0 * missed, missed)]
    first, second = (PixelCounts([f"{n}.png" for n in range(images)], ("road",), part) for part in stacked)
    error = float(missed.std()) / 1000 / math.sqrt(images)
    found = decide(entry(second), baseline(first), 1.0)
    assert "95 % interval" in found.text()
    assert (found.drop.high - found.drop.drop) / error == pytest.approx(1.96, abs=0.12)
    assert (found.drop.drop - found.drop.low) / error == pytest.approx(1.96, abs=0.12)
    narrow = paired_drop(first, second, level=0.90).metric
    assert (narrow.high - narrow.low) / error == pytest.approx(2 * 1.645, abs=0.2)


def test_equal_predictions_have_no_width() -> None:
    found = paired_drop(counts(5, 0.7), counts(5, 0.7)).metric
    assert (found.drop, found.low, found.high) == (0, 0, 0)


def test_the_same_gate_decides_the_same_way_twice() -> None:
    first, second = counts(50, 0.9), counts(50, 0.88, seed=3)
    assert paired_drop(first, second).metric == paired_drop(first, second).metric


def test_an_image_that_got_worse_is_listed_first() -> None:
    first = counts(30, 0.9)
    changed = np.stack([first.hit, first.truth, first.predicted], -1)
    changed[7, 0, 0] = 0
    second = PixelCounts(first.images, CLASSES, changed)
    found = decide(entry(second), baseline(first), 0.5)
    assert [name for name, _ in found.images] == ["7.png"]
    assert found.classes[0][0] == "road"
    assert 100 * found.images[0][1] == pytest.approx(100 * (value(first) - value(second)))


def test_what_lost_most_comes_first_and_nothing_that_gained() -> None:
    random = np.random.default_rng(0)
    names = tuple("abcdefgh")
    truth = random.integers(200, 2000, (12, len(names)))
    shares = 0.9 - random.uniform(-0.05, 0.3, (1, len(names))) * random.uniform(0, 1, (12, 1))
    hits = (np.rint(truth * 0.9), np.rint(truth * shares))
    first, second = (
        PixelCounts([f"{n}.png" for n in range(12)], names, np.stack([hit, truth, hit], -1).astype(np.int64))
        for hit in hits
    )
    found = decide(entry(second), baseline(first), 0.5)
    whole = np.ones((1, 12))
    drops = dict(zip(names, (first.iou(whole) - second.iou(whole))[0].tolist(), strict=True))
    lost = sorted((name for name, drop in drops.items() if drop > 0), key=drops.__getitem__, reverse=True)
    assert 0 < len(lost) < len(names)
    assert [name for name, _ in found.classes] == lost[:MAX_LISTED]
    assert [drop.drop for _, drop in found.classes] == [pytest.approx(drops[name]) for name in lost[:MAX_LISTED]]
    costs = [cost for _, cost in found.images]
    assert costs == sorted(costs, reverse=True)
    every = dict(zip(first.images, paired_drop(first, second, replicates=10).images.tolist(), strict=True))
    assert dict(found.images) == {name: every[name] for name, _ in found.images}
    assert all(cost <= min(costs) for name, cost in every.items() if name not in dict(found.images))


def test_passing_needs_the_whole_interval() -> None:
    first = counts(200, 0.9)
    require_passed([decide(entry(counts(200, 0.899)), baseline(first), 1.0)])
    with pytest.raises(GateError, match=r"and --max-drop allows 0\.5\. Train NVFP4 longer"):
        require_passed([decide(entry(counts(200, 0.8)), baseline(first), 0.5)])
    noisy = decide(entry(counts(8, 0.9, seed=5, spread=0.2)), baseline(counts(8, 0.9, seed=5)), 0.0)
    drop = max(0.0, 100 * noisy.drop.drop)
    undecided = decide(entry(counts(8, 0.9, seed=5, spread=0.2)), baseline(counts(8, 0.9, seed=5)), drop + 0.01)
    assert not undecided.passed
    with pytest.raises(GateError, match=r"is not shown\. Measure on more images"):
        require_passed([undecided])


@pytest.mark.parametrize(("first", "second", "limit"), [(0.75, 0.5, 25), (0.75, 0.745, 0.5), (0.8, 0.8, 0)])
def test_a_drop_of_exactly_the_limit_passes(first: float, second: float, limit: float) -> None:
    drop = Interval(*[first - second] * 3)
    found = Decision("a.onnx", "mIoU", second, first, drop, limit, 100, (), ())
    assert found.passed
    assert not dataclasses.replace(found, max_drop=limit - 1e-6).passed


def test_few_images_are_mentioned() -> None:
    interval = Interval(0.0125, -0.01, 0.03)
    found = Decision("runs/a/unet.onnx", "mIoU", 0.7, 0.7125, interval, 0.5, FEW_IMAGES, (), ())
    sentence = "unet.onnx: mIoU 70.00 %, drop 1.25 (-1.00 to 3.00) points from 71.25 %, 95 % interval over"
    assert found.text() == f"{sentence} {FEW_IMAGES} images."
    fewer = dataclasses.replace(found, split_images=FEW_IMAGES - 1)
    assert fewer.text() == (
        f"{sentence} {FEW_IMAGES - 1} images (only {FEW_IMAGES - 1} images: the interval itself is uncertain)."
    )
    assert "over 1 image (only 1 image:" in dataclasses.replace(found, split_images=1).text()


def test_what_is_unknown_is_no_number() -> None:
    nothing = PixelCounts(["1.png", "2.png"], CLASSES, np.zeros((2, 3, 3), np.int64))
    found = paired_drop(nothing, nothing, replicates=10)
    assert all(math.isnan(number) for number in (value(nothing), *dataclasses.astuple(found.metric)))
    assert found.classes == {}


def test_one_class_is_its_own_mean() -> None:
    assert value(PixelCounts(["1.png"], ("road",), np.array([[[3, 4, 5]]]))) == 0.5


@pytest.mark.parametrize(("metric", "unit", "drop"), [("mIoU", "points of mIoU", "2.50"), ("AP", "objects", "0.03")])
def test_what_lost_most_is_listed(metric: str, unit: str, drop: str) -> None:
    interval = Interval(0.25, 0.125, 0.375)
    classes, images = (("road", interval), ("sky", interval)), (("1.png", 0.025),)
    found = Decision("runs/a/unet.onnx", metric, 0.5, 0.75, interval, 0.5, 40, classes, images)
    assert found.losses() == [
        "unet.onnx: classes that lost most: road 25.00 (12.50 to 37.50), sky 25.00 (12.50 to 37.50).",
        f"unet.onnx: images that lost most ({unit}): 1.png {drop}.",
    ]
    assert dataclasses.replace(found, classes=(), images=()).losses() == []


def test_a_decision_as_json() -> None:
    known, unknown = Interval(0.25, 0.125, 0.375), Interval(0.5, math.nan, math.inf)
    images = (("1.png", 0.025),)
    found = Decision("runs/a/unet.onnx", "mIoU", 0.5, 0.75, known, 0.5, 40, (("sky", unknown),), images)
    assert found.to_json() == {
        "artefact": "runs/a/unet.onnx", "metric": "mIoU", "value": 0.5, "baseline": 0.75,
        "drop": 0.25, "low": 0.125, "high": 0.375, "level": 0.95, "images": 40, "max_drop": 0.005, "passed": False,
        "classes": {"sky": {"drop": 0.5, "low": None, "high": None}}, "worst_images": {"1.png": 0.025},
    }  # fmt: skip


def test_the_worst_of_several_is_named() -> None:
    first = counts(100, 0.9)
    found = gate_drop([entry(counts(100, 0.89), "a.onnx"), entry(counts(100, 0.7), "b.onnx")], baseline(first), 0.5)
    with pytest.raises(GateError, match=r"b\.onnx has .* mIoU, .* points below the baseline's"):
        require_passed(found)


def test_a_failure_states_drop_and_interval() -> None:
    failed = Decision("a/unet.onnx", "mIoU", 0.7, 0.8, Interval(0.1, 0.0625, 0.15), 0.5, 40, (), ())
    with pytest.raises(
        GateError, match="has 70.00 % mIoU, 10.00 points below .* 80.00 %; the 95 % .* is 6.25 to 15.00, and"
    ):
        require_passed([failed])


def of_masks(kind: type[PixelCounts], truth: np.ndarray, predicted: np.ndarray) -> PixelCounts:
    """Counts of masks [N, pixels] by plain loops; 255 is void."""
    cells = [
        [[((t == c) & (p == c)).sum(), (t == c).sum(), ((p == c) & (t != 255)).sum()] for c in range(len(OCCURRING))]
        for t, p in zip(truth, predicted, strict=True)
    ]
    return kind([f"{n}.png" for n in range(len(truth))], OCCURRING, np.array(cells, np.int64))


OCCURRING = ("background", "usual", "missed", "nowhere", "invented")


@pytest.mark.parametrize("kind", [PixelCounts, VoxelCounts, LabelCounts])
def test_what_counts_say_is_true_of_their_masks(kind: type[PixelCounts]) -> None:
    random = np.random.default_rng(0)
    shape, void = ((40, 1), 2) if kind is LabelCounts else ((9, 60), 255)
    truth = random.choice([0, 1, 2, void], shape)
    predicted = np.where(random.random(shape) < 0.6, truth % 2, random.choice([0, 1, 4], shape))
    found = of_masks(kind, truth, predicted)
    assert found.never_predicted() == ["missed"]
    answers = {OCCURRING[c]: value(of_masks(kind, truth, np.full(shape, c))) for c in range(kind is VoxelCounts, 3)}
    name, score = found.constant()
    assert score == pytest.approx(max(answers.values()), rel=1e-12)
    assert answers[name] == pytest.approx(score, rel=1e-12)
    known = truth != 255
    both, either = zip(
        *(
            (((truth == c) & (predicted == c)).sum(), (((truth == c) | (predicted == c)) & known).sum())
            for c in range(5)
        ),
        strict=True,
    )
    assert either[3] == 0
    expected = np.divide(both, either, out=np.full(5, np.nan), where=np.array(either) > 0)
    np.testing.assert_allclose(found.iou(np.ones(len(truth))), expected, rtol=1e-12)


def test_what_each_image_costs_leaves_out_a_class_that_never_occurs() -> None:
    first, second = (counts(5, right, seed=seed) for right, seed in ((0.9, 0), (0.8, 1)))
    pairs = []
    for each in (first, second):
        stacked = np.stack([each.hit, first.truth, each.predicted], -1)
        stacked[:, 2] = 0
        pairs.append(stacked)
    names = [f"{n}.png" for n in range(5)]
    before, after = (PixelCounts(names, CLASSES, each) for each in pairs)
    alone = [np.where(np.arange(5)[:, None, None] == place, pairs[1], pairs[0]) for place in range(5)]
    expected = [value(before) - value(PixelCounts(names, CLASSES, each)) for each in alone]
    np.testing.assert_allclose(paired_drop(before, after).images, expected, rtol=1e-12)


def test_a_volume_costs_its_share_of_the_mean() -> None:
    counts = np.array([[[1, 1, 1], [10, 10, 10]], [[1, 1, 1], [10, 10, 10]]])
    worse = counts.copy()
    worse[1, 1, 0] = 5
    pair = [VoxelCounts(["a", "b"], ["background", "x"], each) for each in (counts, worse)]
    drop = paired_drop(*pair)
    assert drop.images.tolist() == pytest.approx([0.0, 0.25])
    assert drop.images.sum() == pytest.approx(drop.metric.drop)


def test_a_measured_baseline_has_the_limits_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def bench(path: Path, data: Path | None, **options: Any) -> ArtifactEntry:
        asked.update(options)
        return ArtifactEntry(path="a.onnx", status="ok")

    monkeypatch.setattr("fp4deploy.bench.gate.baseline.bench_artifact", bench)
    with pytest.raises(InputError, match="has no accuracy"):
        find_baseline(Path("a.onnx"), None, 7, "test", 3.0, limit=5)
    assert asked == {"iterations": 1, "max_detections": 7, "split": "test", "timeout": 3.0, "limit": 5, "like": None}


@pytest.mark.parametrize("lacking", ["miou", "evidence", "data_sha256"])
def test_a_measured_baseline_without_all_that_a_drop_needs_is_refused(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = entry(counts(4, 0.8))
    monkeypatch.setattr("fp4deploy.bench.gate.baseline.bench_artifact", lambda *given, **named: whole)
    assert find_baseline(Path("a.onnx"), None).value == whole.accuracy
    whole = whole.model_copy(update={lacking: None})
    with pytest.raises(InputError, match="a.onnx has no accuracy"):
        find_baseline(Path("a.onnx"), None)


def test_gate_without_a_measurement_fails() -> None:
    unmeasured = ArtifactEntry(path="unet.onnx", status="ok")
    with pytest.raises(GateError, match="no artefact gave an mIoU"):
        gate_drop([unmeasured], baseline(counts(4, 0.8)), 0.5)


def test_a_baseline_with_nothing_to_lose_decides_nothing() -> None:
    with pytest.raises(GateError, match=r"the baseline .* has 0\.00 % mIoU, and nothing to lose"):
        gate_drop([entry(counts(4, 0.0, spread=0))], baseline(counts(4, 0.0, spread=0)), 0.5)


def test_a_baseline_no_better_than_one_class_everywhere_is_named() -> None:
    useful = counts(4, 0.8)
    assert doubt(baseline(useful)) is None
    best = int(useful.truth.sum(0).argmax())
    found = np.stack([useful.hit, useful.truth, useful.predicted], -1)
    found[..., 0] = found[..., 2] = 0
    found[:, best, 0], found[:, best, 2] = useful.truth[:, best], useful.truth.sum(1)
    said = doubt(baseline(PixelCounts(useful.images, CLASSES, found)))
    assert said is not None
    assert f"no more than calling every pixel {CLASSES[best]}" in said


def test_an_artefact_that_ran_and_has_no_score_fails_the_gate() -> None:
    broken = ArtifactEntry(path="broken.onnx", status="ok")
    with pytest.raises(GateError, match=r"broken\.onnx has no mIoU: the data holds nothing that can be scored"):
        gate_drop([entry(counts(4, 0.8)), broken], baseline(counts(4, 0.8)), 0.5)
    waiting = ArtifactEntry(path="unet.plan", status="built, not run")
    assert len(gate_drop([entry(counts(4, 0.8)), waiting], baseline(counts(4, 0.8)), 0.5)) == 1


def test_other_images_and_splits_are_refused() -> None:
    found = counts(4, 0.8)
    with pytest.raises(InputError, match="were measured on different images"):
        decide(entry(found, data_sha256="b" * 64), baseline(found), 0.5)
    with pytest.raises(InputError, match="were measured on different images"):
        decide(entry(found, split="test"), baseline(found), 0.5)


def test_counts_survive_their_text() -> None:
    found = counts(6, 0.8)
    again = read_evidence(write_pixels(found), "x")
    assert isinstance(again, PixelCounts)
    assert all(np.array_equal(getattr(again, part), getattr(found, part)) for part in ("hit", "truth", "predicted"))


@pytest.mark.parametrize("line", ["1/2", "3/2/4 - -", "1/2/3 - x/1/1", "-1/2/3 - -", "1/9999999999999999/1 - -"])
def test_counts_that_are_none_are_refused(line: str) -> None:
    evidence = write_pixels(counts(1, 0.8)).model_copy(update={"lines": [line]})
    with pytest.raises(InputError, match=r"base\.json"):
        read_evidence(evidence, "base.json")


def matches(images: int, seed: int, hit: float) -> Matches:
    random = np.random.default_rng(seed)
    objects = random.integers(0, 4, (images, 2))
    detections = []
    for place in range(2):
        image = np.repeat(np.arange(images), objects[:, place])
        score = np.sort(random.random(len(image)).round(2))[::-1]
        quality = random.random(len(image)) + hit
        matched = quality[None] > np.linspace(0.5, 0.95, 10)[:, None]
        detections.append(ClassMatches(random.permutation(image), score, matched, np.zeros_like(matched)))
    return Matches(tuple(f"{n}.png" for n in range(images)), ("cell", "dust"), objects, tuple(detections))


def test_a_weight_of_two_is_an_image_twice() -> None:
    found = matches(5, 0, 0.3)
    weights = np.array([2.0, 0, 1, 1, 3])
    places = np.repeat(np.arange(5), weights.astype(int))
    copies = []
    for each in found.detections:
        rows = [(new, at) for new, old in enumerate(places) for at in np.flatnonzero(each.image == old)]
        image, at = (np.array(part, np.int64) for part in zip(*rows, strict=True))
        order = np.argsort(-each.score[at], kind="mergesort")
        image, at = image[order], at[order]
        copies.append(ClassMatches(image, each.score[at], each.matched[:, at], each.ignored[:, at]))
    twice = Matches(tuple(map(str, places)), found.classes, found.objects[places], tuple(copies))
    assert found.ap(weights) == pytest.approx(twice.ap(np.ones(len(places))), abs=0.03)  # ties of a score


def test_matches_survive_their_text() -> None:
    found = matches(6, 1, 0.2)
    again = read_evidence(write_matches(found), "x")
    assert isinstance(again, Matches)
    everything = np.ones(6)
    assert again.ap(everything) == pytest.approx(found.ap(everything), abs=0.02)  # ties of a score
    assert np.array_equal(again.objects, found.objects)
    drop = paired_drop(found, again).metric
    assert drop.low <= drop.drop <= drop.high


def bench_json(untrained: Run, shapes: Path, path: Path) -> dict[str, Any]:
    """What `bench --json` writes of the FP16 checkpoint."""
    found = bench_artifact(untrained.checkpoint("fp16"), shapes, iterations=1)
    assert found.evidence is not None
    document = {"artifacts": [found.model_dump(mode="json")], "evidence": [found.evidence.model_dump(mode="json")]}
    path.write_text(json.dumps(document))
    return document


def test_a_recorded_baseline_is_bound(untrained: Run, shapes: Path, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    document = bench_json(untrained, shapes, path)
    read = find_baseline(path, None)
    measured = find_baseline(untrained.checkpoint("fp16"), shapes)
    assert (read.value, read.data_sha256, read.split) == (measured.value, measured.data_sha256, "val")

    def refused(text: str, **changes: Any) -> None:
        path.write_text(json.dumps({**document, "artifacts": [{**document["artifacts"][0], **changes}]}))
        with pytest.raises(InputError, match=text):
            find_baseline(path, None)

    refused("was measured on the split test", split="test")
    evidence = document["evidence"]
    document["evidence"] = [{**evidence[0], "lines": ["x"]}]
    refused(r"base\.json")
    document["evidence"] = evidence
    refused(r"states mIoU 0\.1, and the counts of its images give", miou=0.1)
    refused("is no longer the file that was measured", sha256="0" * 64)
    refused("does not say on which images", data_sha256=None)
    refused("holds counts of the other task", miou=None, ap=0.5)
    path.write_text(json.dumps({**document, "evidence": None}))
    with pytest.raises(InputError, match="does not say on which images"):
        find_baseline(path, None)
    long = {**document["artifacts"][0], "path": "x" * 300}  # longer than a file's name can be: it is not there
    path.write_text(json.dumps({**document, "artifacts": [long]}))
    assert find_baseline(path, None).value == read.value


def test_one_of_several_entries_is_named(untrained: Run, shapes: Path, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    document = bench_json(untrained, shapes, path)
    best = perfect(document)
    best["artifacts"][0].update(path="best.onnx", sha256=None)
    best["artifacts"][0]["path"] = "b/best.onnx"
    both = {key: [*document[key], *best[key]] for key in ("artifacts", "evidence")}
    path.write_text(json.dumps(both))
    assert find_baseline(path, None, artefact="b/best.onnx").value == 1.0
    with pytest.raises(InputError, match=r"holds 2 artefacts: best\.safetensors, best\.onnx\. Choose one with"):
        find_baseline(path, None)
    assert find_baseline(path, None, artefact="best.onnx").value == 1.0
    assert find_baseline(path, None, artefact="best.safetensors").value == document["artifacts"][0]["miou"]
    with pytest.raises(InputError, match=r"has no entry worst\.onnx"):
        find_baseline(path, None, artefact="worst.onnx")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "75", "-0.1", '"0.75"', "true"])
def test_a_baseline_that_is_no_share_is_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(f'{{"artifacts": [{{"miou": {number}}}]}}')
    with pytest.raises(InputError, match=r"base\.json"):
        find_baseline(path, None)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"artifacts": [{}]}', '{"artifacts": [{"miou": null}]}'])
def test_a_json_without_accuracy_is_no_baseline(tmp_path: Path, content: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"baseline .*base\.json"):
        find_baseline(path, None)


def test_an_artefact_is_its_own_baseline(untrained: Run, shapes: Path) -> None:
    path = untrained.checkpoint("fp16")
    found = bench_artifact(path, shapes, iterations=1)
    decided = decide(found, find_baseline(path, shapes), 0.0)
    assert decided.passed
    assert (decided.drop.low, decided.drop.high) == (0, 0)


def test_the_fastest_that_is_accurate_enough() -> None:
    def timed(name: str, model: str, miou: float, p50: float, status: str = "ok") -> ArtifactEntry:
        quantiles = Quantiles(p50=p50, p90=9.0, p99=9.0 - p50)  # of the median alone
        return ArtifactEntry(path=name, model=model, miou=miou, latency_ms=quantiles, status=status)

    rows = [
        timed("unet-fp16-auto.plan", "fp16", 0.730, 4.0),
        timed("unet-auto.plan", "nvfp4", 0.728, 2.0),
        timed("unet-gemm.plan", "nvfp4", 0.720, 1.0),
        timed("unet.fp4", "nvfp4", 0.750, 3.0),
        timed("unet-qdq.plan", "nvfp4", 0.730, 0.5, "failed"),
    ]
    assert [getattr(fastest(rows, drop), "path", None) for drop in (1.0, 0.5, 0.2, 0.0)] == [
        "unet-gemm.plan", "unet-auto.plan", "unet-auto.plan", "unet.fp4",
    ]  # fmt: skip
    assert fastest(rows[4:], 1.0) is None


def test_what_one_answer_for_everything_scores() -> None:
    truth = np.array([[1, 0], [1, 0], [0, 1], [1, 0]])
    counts = np.stack([np.zeros_like(truth), truth, truth[:, ::-1]], -1)
    labels = LabelCounts("abcd", ("cat", "dog"), counts)
    assert labels.constant() == ("cat", 0.75)
    assert PixelCounts("abcd", ("cat", "dog"), counts).constant() == ("cat", 0.375)  # the mean of 0.75 and 0
