"""From a set of volumes to its scores: training, export, packing and the gate on Dice, on a tiny network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fp4deploy.bench.artifact import bench_artifact
from fp4deploy.bench.evidence import PixelCounts, VoxelCounts, read_evidence, write_pixels
from fp4deploy.bench.gate.baseline import find_baseline
from fp4deploy.bench.gate.bootstrap import paired_drop, value
from fp4deploy.bench.gate.decision import gate_drop
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data import open_dataset
from fp4deploy.errors import InputError
from fp4deploy.experiments.search.run import Budget, search
from fp4deploy.export import export_checkpoint
from fp4deploy.export.to_packed import pack
from fp4deploy.metrics import SegmentationScore, hausdorff95
from fp4deploy.models import ModelCard, name_model, read_card
from fp4deploy.runs import Run
from fp4deploy.tasks.volumes import VolumeEvaluation, applied
from fp4deploy.train import load_config, train_models
from fp4deploy.train.models import open_splits
from fp4deploy.train.volumes import sized
from tests.volumes import write_set

NETWORK = """from torch import nn


def build(classes):
    convs = [nn.Conv3d(before, after, 3, padding=1) for before, after in ((2, 16), (16, 16), (16, 16))]
    return nn.Sequential(*(part for conv in convs for part in (conv, nn.ReLU())), nn.Conv3d(16, classes, 1))
"""
SETTINGS = (
    *(
        "train.epochs=8",
        "train.lr=0.02",
        "train.evaluate_every=8",
        "train.finetune_epochs=1",
        "train.batch_size=2",
        "train.channels_last=true",
        "telemetry.every=0",
    ),
    *("data.depth=8", "data.height=16", "data.width=16"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on thick slices of two channels, whose data is beside it."""
    folder = tmp_path_factory.mktemp("volumes")
    data = write_set(folder / "data", shape=(18, 20, 8), spacing=(1.0, 1.0, 3.0), axes="LPS", channels=("T1", "T2"))
    run = Run(folder / "run")
    run.path.mkdir()
    (folder / "net.py").write_text(NETWORK)
    spec = f"{folder / 'net.py'}:build"
    name_model(spec)
    train_models(load_config(None, [f"data.root={json.dumps(str(data))}", f"model.spec={spec}", *SETTINGS]), run)
    return run


def data_of(run: Run) -> Path:
    return run.path.parent / "data"


def test_the_card_is_of_the_set(trained: Run) -> None:
    card = read_card(trained.checkpoint("nvfp4"))
    assert card.volume is not None
    assert (card.size, card.input_shape) == ((8, 16, 16), (2, 8, 16, 16))
    assert (card.volume.channels, card.volume.spacing) == (("T1", "T2"), (3.0, 1.0, 1.0))
    assert ModelCard.from_json(card.to_json()) == card
    runtime = open_runtime(trained.checkpoint("nvfp4"))
    assert runtime.infer(np.zeros((1, 2, 8, 16, 16), np.float32)).shape == (1, 3, 8, 16, 16)
    lines = (trained.model_dir("nvfp4") / "metrics.jsonl").read_text().splitlines()
    assert set(json.loads(lines[-1])["dice_per_class"]) == {"small", "large"}


def test_every_artefact_has_the_scores_of_its_checkpoint(trained: Run, tmp_path: Path) -> None:
    """Conv3d in FP4 through the canonical, the decomposed and the packed form, and the gate on Dice."""
    data, checkpoint = data_of(trained), trained.checkpoint("nvfp4")
    exported = export_checkpoint(checkpoint, tmp_path / "net.onnx", portable=True, data=data, images=1)
    assert exported.fp4_layers == 2
    packed = pack(checkpoint, tmp_path / "net.fp4", data=data, images=1)
    assert packed.verification is not None
    assert exported.verification is not None
    for verified in (exported.verification, packed.verification):
        assert " voxels" in verified.sentence()
    entries = [bench_artifact(path, data, iterations=1) for path in (checkpoint, exported.path, packed.file.path)]
    first = entries[0]
    assert first.dice is not None
    assert first.metric == "Dice"
    assert first.accuracy == first.dice
    assert set(first.dice_per_class) == set(first.hd95_mm_per_class) == {"small", "large"}
    for other in entries[1:]:
        assert other.dice == pytest.approx(first.dice, abs=0.02)
        assert other.data_sha256 == first.data_sha256
    record = {
        "artifacts": [first.model_dump(mode="json")],
        "evidence": [first.evidence and first.evidence.model_dump()],
    }
    (tmp_path / "baseline.json").write_text(json.dumps(record))
    baseline = find_baseline(tmp_path / "baseline.json", data)
    assert (baseline.metric, baseline.value) == ("Dice", first.dice)
    decisions = gate_drop(entries, baseline, 5)
    assert all(decision.passed and decision.metric == "Dice" for decision in decisions)


def test_a_perfect_network_at_another_spacing_scores_the_masks_that_were_drawn(tmp_path: Path) -> None:
    data = open_dataset(write_set(tmp_path, shape=(24, 20, 16)), "train")
    halved = data.at((1.6, 1.0, 1.2))  # type: ignore[attr-defined]
    evaluation = VolumeEvaluation(halved)
    for index in range(len(halved)):
        sample = halved.load(index)
        scores = torch.nn.functional.one_hot(torch.from_numpy(sample.mask).long(), 3).movedim(-1, 0)[None].float()
        evaluation.update(scores, torch.tensor([index]))
    found = evaluation.compute()
    assert found.mean_dice is not None
    assert 0.9 < found.mean_dice < 1, "what the coarser grid loses is lost"
    assert found.mean_hd95 is not None
    assert found.mean_hd95 <= 1.6
    names, counts = evaluation.counts()
    assert names == [f"case_{number:03d}" for number in range(4)]
    assert value(VoxelCounts(names, halved.class_names, counts)) == pytest.approx(found.mean_dice)


def test_dice_is_a_mean_over_volumes() -> None:
    counts = np.array([[[9, 10, 10], [5, 10, 10], [0, 0, 0]], [[9, 10, 10], [90, 100, 100], [2, 4, 4]]])
    voxels = VoxelCounts(["a", "b"], ["background", "x", "y"], counts)
    assert np.allclose(voxels.per_class(np.ones(2)), [np.nan, (0.5 + 0.9) / 2, 0.5], equal_nan=True)
    assert value(voxels) == pytest.approx((0.7 + 0.5) / 2)
    name, constant = voxels.constant()  # every voxel "x": Dice 2/3 and 200/214 alone, "y" 0
    assert (name, constant) == ("x", pytest.approx((20 / 30 + 200 / 214) / 2 / 2))
    again = read_evidence(write_pixels(voxels), "here")
    assert isinstance(again, VoxelCounts)
    assert isinstance(again, PixelCounts)
    worse = counts.copy()
    worse[1, 1, 0] = 40
    drop = paired_drop(voxels, VoxelCounts(["a", "b"], voxels.classes, worse))
    assert drop.metric.drop == pytest.approx(0.5 * 0.25)
    assert drop.images[0] == 0
    assert drop.images[1] > 0


def test_distances_are_those_of_monai() -> None:
    random, spacing = np.random.default_rng(0), (2.0, 1.0, 0.5)
    masks = []
    for _ in range(2):
        centre = random.uniform(4, 12, 3)
        grids = np.indices((16, 16, 16))
        masks.append(sum((at - middle) ** 2 for at, middle in zip(grids, centre, strict=True)) < random.uniform(9, 25))
    own = hausdorff95(masks[0], masks[1], spacing)
    assert own is not None
    assert hausdorff95(masks[0], np.zeros_like(masks[0]), spacing) is None
    assert hausdorff95(masks[0], masks[0], spacing) == 0
    metrics = pytest.importorskip("monai.metrics")
    given = [torch.from_numpy(mask)[None, None].float() for mask in masks]
    theirs = metrics.compute_hausdorff_distance(*given, include_background=True, percentile=95, spacing=spacing)
    assert own == pytest.approx(float(theirs), abs=1e-4)


def test_losses_and_confusion_of_any_number_of_axes() -> None:
    from fp4deploy.train.losses.segmentation import class_sums

    logits, target = torch.randn(2, 3, 4, 5, 6), torch.randint(0, 3, (2, 4, 5, 6))
    target[0, 0] = 255
    weight = torch.tensor([1.0, 2.0, 0.5])
    flat = class_sums(logits.view(2, 3, 20, 6), target.view(2, 20, 6), weight, 0.1)
    assert torch.equal(class_sums(logits, target, weight, 0.1), flat)
    scores = [SegmentationScore(3, "abc") for _ in range(2)]
    scores[0].update(logits, target)
    scores[1].update(logits.argmax(1), target)
    assert torch.equal(scores[0].matrix(), scores[1].matrix())


def test_settings_that_do_not_fit_the_data(tmp_path: Path, trained: Run) -> None:
    root = f"data.root={json.dumps(str(data_of(trained)))}"
    for setting, message in (
        ("augment.rotate=10", "augment.rotate = 10.0: it is of images"),
        ("model.digits=true", "model.digits = True: it is of images"),
    ):
        config = load_config(None, [root, setting])
        with pytest.raises(InputError, match=message):
            sized(config, open_splits(config)[0])
    config = load_config(None, [root, "data.spacing=[1.5, 1.0, 2.0]"])
    found = sized(config, open_splits(config)[0]).data
    assert (found.spacing, found.size) == ((1.5, 1.0, 2.0), (16, 16, 8))
    with pytest.raises(InputError, match=r"smp:Unet has two spatial axes, and the data has 3"):
        train_models(load_config(None, [root, "model.spec=smp:Unet", *SETTINGS]), Run(tmp_path))
    from fp4deploy.data import generate_shapes, validation_set

    generate_shapes(tmp_path / "images", train=1, val=1, size=32, seed=0)
    with pytest.raises(InputError, match="has no class|reads volumes, and"):
        validation_set(read_card(trained.checkpoint("fp16")), tmp_path / "images")
    images = load_config(None, [f"data.root={json.dumps(str(tmp_path / 'images'))}", "data.depth=16"])
    with pytest.raises(InputError, match="are of volumes"):
        sized(images, open_splits(images)[0])


def test_a_search_places_convolutions_over_three_axes(trained: Run, tmp_path: Path) -> None:
    """Bytes of weights by hand: FP16 has 2, four bits with a scale of 16 values 9 / 16, eight bits about 1."""
    checkpoint = trained.path / "fp16" / "best.safetensors"
    weights = {"0": 16 * 2 * 27, "2": 16 * 16 * 27, "4": 16 * 16 * 27, "6": 3 * 16}
    whole = 2 * sum(weights.values()) + 2 * (16 + 16 + 16 + 3)
    found = search(checkpoint, data_of(trained), Budget("bytes", 0.35 * whole), tmp_path / "search", images=1)
    four = {*found.chosen.placed["FP4"], *found.chosen.placed["W4A8"]}
    assert four >= {"2", "4"}  # with either in eight bits the other layers have too few bytes
    assert found.fp16.bytes == whole
    assert whole - (2 - 9 / 16) * sum(weights[name] for name in four) == pytest.approx(
        found.chosen.bytes, abs=weights["0"]
    )
    assert found.chosen.bytes <= 0.35 * whole
    assert found.chosen.score == pytest.approx(found.fp16.score, abs=0.2)


def test_a_network_is_applied_to_a_volume_larger_and_smaller_than_its_input(trained: Run) -> None:
    card = read_card(trained.checkpoint("fp16"))
    for size in ((20, 17, 16), (3, 20, 9)):
        volume = np.random.default_rng(1).normal(size=(1, 2, *size)).astype(np.float32)
        found = applied(card, lambda tiles: tiles[:, [0, 1, 0]], volume)
        assert np.allclose(found[0, :2], volume[0], atol=1e-5)
