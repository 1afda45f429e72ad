"""An image of any size, mode and orientation comes back as a mask of its own size."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pycocotools import mask as coco_mask

from fp4deploy.bench.runtimes.protocol import Array, NotFinite, checked, finite
from fp4deploy.data import EvalTransform
from fp4deploy.data.palette import colours, png_palette, tinted
from fp4deploy.data.sample import Sample
from fp4deploy.detection import Detections
from fp4deploy.detection.draw import draw_boxes
from fp4deploy.errors import InputError
from fp4deploy.instances.decode import Instances, decode
from fp4deploy.instances.draw import draw_instances
from fp4deploy.models import InstanceHead
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.heads import OFFSET_UNIT
from fp4deploy.predict import predictor as module
from fp4deploy.predict.prediction import Prediction
from fp4deploy.predict.predictor import Predictor, load
from fp4deploy.predict.sources import find_sources
from fp4deploy.predict.video import RATE, opened, predict_frames, predict_video, stated_rate
from fp4deploy.predict.write import describe, likeliest_classes, mean_shares, objects_of_classes, predict_files
from fp4deploy.runs import Run
from tests.predict.pointwise import Pointwise, card, classes_of, photo


@pytest.mark.parametrize(
    "name",
    ["fp16/best.safetensors", "export/unet.nvfp4.onnx", "export/unet.nvfp4.portable.onnx", "export/unet.nvfp4.fp4"],
)
def test_every_artefact_predicts_what_its_runtime_answers(untrained: Run, name: str) -> None:
    predictor = load(untrained.path / name)
    image = photo(40, 70)
    found = predictor.predict(image)
    model = predictor.card
    sample = Sample(image, np.zeros((40, 70), np.uint8), "")
    normalised, _ = EvalTransform(model.height, model.width, model.mean, model.std)(sample)
    logits = torch.from_numpy(predictor.runtime.infer(normalised.numpy()[None]))
    expected = F.interpolate(logits, (40, 70), mode="bilinear", align_corners=False)[0].argmax(0).numpy()
    assert found.mask.dtype == np.uint8
    assert (found.mask == expected).mean() > 0.999  # the order of two sums differs
    assert found.class_names == model.class_names


def test_tiles_keep_what_resizing_loses() -> None:
    image = np.zeros((320, 480, 3), np.uint8)
    image[::2, :, 0] = 255  # lines of one pixel
    whole, cut = (Predictor(Pointwise(card()), tile=tile).predict(image).mask for tile in (False, True))
    assert (cut == classes_of(image)).all()
    assert (whole != cut).mean() > 0.4


def test_tiles_are_given_in_batches_and_counted_in_rows() -> None:
    runtime, told = Pointwise(card()), []
    predictor = Predictor(runtime, tile=True, batch=4)
    predictor.progress = lambda *progress: told.append(progress)
    image = photo(80, 200)
    assert (predictor.predict(image).mask == classes_of(image)).all()
    assert max(batch[0] for batch in runtime.batches) == 4
    assert (told[0], told[-1]) == (("rows of pixels", 0, 80), ("rows of pixels", 80, 80))


def test_a_small_image_is_not_cut() -> None:
    runtime = Pointwise(card())
    Predictor(runtime, tile=True).predict(photo(32, 48))
    assert runtime.batches == [(1, 3, 32, 48)]


def test_a_batch_of_different_sizes_is_one_call() -> None:
    runtime = Pointwise(card())
    found = Predictor(runtime).predict_batch([photo(20, 30), photo(64, 64), photo(32, 48)])
    assert runtime.batches == [(3, 3, 32, 48)]
    assert [each.mask.shape for each in found] == [(20, 30), (64, 64), (32, 48)]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_files_of_every_mode(mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(photo(32, 48))
    path = tmp_path / ("photo.tif.jpg" if mode == "CMYK" else "photo.png")
    (Image.fromarray(np.zeros((32, 48), np.uint16)) if mode == "I;16" else image.convert(mode)).save(path)
    assert Predictor(Pointwise(card())).predict(path).mask.shape == (32, 48)


def test_exif_orientation_turns_a_photo_upright(tmp_path: Path) -> None:
    upright = photo(48, 32)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored a quarter turn to the left
    stored = Image.fromarray(np.ascontiguousarray(np.rot90(upright)))
    stored.save(tmp_path / "photo.png", exif=exif)
    predictor = Predictor(Pointwise(card(48, 32)))
    for given in (tmp_path / "photo.png", Image.open(tmp_path / "photo.png")):
        assert (predictor.predict(given).mask == classes_of(upright)).all()


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8)]
)
def test_an_array_that_is_no_image_is_refused(array: np.ndarray) -> None:
    with pytest.raises(InputError, match="RGB pixels uint8"):
        Predictor(Pointwise(card())).predict(array)


def test_the_classes_of_an_image_add_up() -> None:
    found = Predictor(Pointwise(card())).predict(photo(32, 48))
    classes = found.classes()
    assert sum(each["pixels"] for each in classes) == 32 * 48
    assert sum(each["share"] for each in classes) == pytest.approx(1)
    assert [each["pixels"] for each in classes] == sorted((each["pixels"] for each in classes), reverse=True)
    for each in classes:
        assert each["pixels"] == (found.mask == each["id"]).sum()
        assert each["name"] == found.class_names[each["id"]]


def test_records_have_what_was_looked_for() -> None:
    """Objects of each kind that looks for them, also where none was found; pixels where they have classes."""
    mask, names, none = np.zeros((4, 6), np.uint8), ("a", "b"), np.zeros(0, np.int64)
    detections = Detections(np.zeros((0, 4), np.float32), none, np.zeros(0, np.float32))
    instances = Instances(np.zeros((4, 6), np.int32), none, np.zeros(0, np.float32), mask)
    given: list[tuple[dict[str, Any], bool, bool]] = [
        ({}, False, True),
        ({"detections": detections}, True, False),
        ({"instances": instances}, True, True),
        ({"scores": np.array([0.9, 0.1], np.float32)}, False, False),
    ]
    for parts, objects, pixels in given:
        found = Prediction(mask, names, colours(names, False), **parts)
        assert (found.counts_objects, found.has_mask) == (objects, pixels)
        assert found.to_json().get("objects", "not looked for") == ([] if objects else "not looked for")


def test_a_classifier_names_its_five_likeliest_classes_the_first_of_equals_first() -> None:
    scores = np.array([0.05, 0.2, 0.05, 0.3, 0.1, 0.2, 0.1], np.float32)
    found = Prediction(np.full((4, 6), 3, np.uint8), tuple("abcdefg"), colours("abcdefg", False), scores=scores)
    assert [(each["id"], each["name"]) for each in found.classes()] == [
        (3, "d"),
        (1, "b"),
        (5, "f"),
        (4, "e"),
        (6, "g"),
    ]
    assert [each["score"] for each in found.classes()] == pytest.approx([0.3, 0.2, 0.2, 0.1, 0.1])
    image = np.zeros((64, 96, 3), np.uint8)
    drawn = dataclasses.replace(found, mask=np.full((64, 96), 3, np.uint8)).overlay(image)
    whole = Detections(np.array([[0, 0, 96, 64]], np.float32), np.array([3]), np.array([0.3], np.float32))
    assert (drawn == draw_boxes(image, whole, found.class_names)).all()


def test_a_mask_file_keeps_class_ids_and_shows_colours(tmp_path: Path) -> None:
    found = Predictor(Pointwise(card())).predict(photo(32, 48))
    found.mask_image().save(tmp_path / "mask.png")
    read = Image.open(tmp_path / "mask.png")
    assert read.mode == "P"
    assert (np.asarray(read) == found.mask).all()
    table = np.array(png_palette(found.palette)).reshape(256, 3)
    assert (np.asarray(read.convert("RGB")) == table[found.mask]).all()


def test_an_overlay_tints_classes_and_leaves_background_grey() -> None:
    image = photo(32, 48)
    mask = classes_of(image)
    drawn = tinted(image, mask, colours(("background", "a", "b", "c"), background=True)).astype(int)
    background = drawn[mask == 0]
    assert (background.max(1) == background.min(1)).all()
    assert (np.ptp(drawn[mask > 0], axis=1) > 0).all()


class Squares:
    """An instance runtime of the centre method that has seen squares of 8 pixels in the image, whatever it is."""

    name, device, precision = "squares", "CPU", "FP32"

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self.places = places
        self.card = card(32, 48, InstanceHead("centres", 4))

    def infer(self, images: Array) -> Array:
        """[N, 4 + 1 + 2, 32, 48]."""
        output = np.zeros((7, 32, 48), np.float32)
        output[0] = 8.0
        for top, left in self.places:
            area = slice(top, top + 8), slice(left, left + 8)
            output[0][area], output[2][area] = 0.0, 8.0
            rows, columns = np.mgrid[area]
            output[5][area], output[6][area] = (top + 3 - rows) / OFFSET_UNIT, (left + 3 - columns) / OFFSET_UNIT
            output[4, top + 3, left + 3] = 0.9 if top else 0.4
        return np.repeat(output[None], len(images), 0)

    def time(self, images: Array, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Nothing is timed."""
        raise NotImplementedError


def test_objects_have_boxes_areas_and_masks() -> None:
    found = Predictor(Squares([(0, 4), (20, 30)])).predict(photo(32, 48))
    objects = found.objects()
    assert [each["bbox"] for each in objects] == [[30, 20, 8, 8], [4, 0, 8, 8]]
    assert [each["area"] for each in objects] == [64, 64]
    assert objects[0]["score"] > objects[1]["score"]
    for each in objects:
        left, top, width, height = each["bbox"]
        drawn = coco_mask.decode(each["segmentation"])
        assert drawn.sum() == drawn[top : top + height, left : left + width].sum() == each["area"]
    assert sorted(np.unique(found.mask)) == [0, 2]
    json_classes = {each["name"]: each["pixels"] for each in found.classes()}
    assert json_classes["green"] == 128


def test_weak_objects_are_left_out_of_list_and_mask() -> None:
    found = Predictor(Squares([(0, 4), (20, 30)]), min_score=0.5).predict(photo(32, 48))
    assert len(found.objects()) == 1
    assert (found.mask == 2).sum() == 64


def test_a_score_of_just_the_least_is_enough() -> None:
    runtime = Squares([(0, 4), (20, 30), (8, 16)])
    scores = Predictor(runtime).predict(photo(32, 48)).instances.scores  # type: ignore[union-attr]
    for least in map(float, [*scores, *(scores - 1e-3), *(scores + 1e-3), 0.0, 1.0]):
        found = Predictor(runtime, min_score=least).predict(photo(32, 48))
        expected = int((scores >= np.float32(least)).sum())
        assert (len(found.objects()), (found.mask == 2).sum()) == (expected, 64 * expected)


def test_a_set_of_masks_cannot_be_tiled() -> None:
    runtime = Pointwise(card(head=InstanceHead("set", 0, masks=4)))
    with pytest.raises(InputError, match="--tile"):
        Predictor(runtime, tile=True)


def test_unnamed_classes_are_numbered() -> None:
    runtime = Pointwise(dataclasses.replace(card(), class_names=()))
    assert Predictor(runtime).predict(photo(32, 48)).class_names == ("class 0", "class 1", "class 2", "class 3")


def test_an_image_that_is_too_large_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = dataclasses.replace(card(), task="instance", head=InstanceHead("centres", 4))
    runtime = Pointwise(instance)
    runtime.infer = lambda images: np.zeros((len(images), instance.channels, 32, 48), np.float32)  # type: ignore[method-assign]
    predictor = Predictor(runtime)
    for name, side in (("a", 32), ("b", 64), ("c", 32)):
        Image.fromarray(photo(side, side)).save(tmp_path / f"{name}.png")
    monkeypatch.setattr(module, "LARGEST_INSTANCES", instance.channels * 32 * 32)
    document, failures = predict_files(
        predictor, Path("model"), find_sources([str(tmp_path)]), tmp_path / "out", batch=3, overlays=False
    )
    assert [("error" in entry) for entry in document["images"]] == [False, True, False]
    assert "b.png: An image of 64x64 pixels is too large" in failures[0]


class Spoiled(Pointwise):
    """A runtime that takes arrays, and computes NaN of images with a white pixel at the top left."""

    def infer(self, images: Array) -> Array:
        """Logits [N, 4, H, W]."""
        outputs = super().infer(images)
        outputs[images[:, :, 0, 0].min(1) == 1, 2, 5] = np.nan
        return finite(outputs, images, "model.onnx")


class SpoiledOnDevice(Spoiled):
    """The same on a device."""

    where = torch.device("cpu")

    def on_device(self, images: torch.Tensor) -> torch.Tensor:
        """Logits."""
        try:
            return torch.from_numpy(self.infer(images.numpy()))
        except NotFinite as error:
            return torch.from_numpy(error.outputs)


@pytest.mark.parametrize("kind", [Spoiled, SpoiledOnDevice])
@pytest.mark.parametrize("tile", [False, True])
def test_an_image_without_an_answer_is_named_and_gets_no_mask(kind: type[Spoiled], tile: bool, tmp_path: Path) -> None:
    images = [photo(64, 96, seed) for seed in range(4)]
    images[2][:8, :8] = 255
    for name, image in zip("abcd", images, strict=True):
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    (tmp_path / "bb.png").write_bytes(b"no image")
    predictor, out = Predictor(kind(card()), tile=tile), tmp_path / "out"
    document, failures = predict_files(predictor, Path("m"), find_sources([str(tmp_path)]), out, 3, overlays=False)
    assert [Path(entry["file"]).name for entry in document["images"]] == ["a.png", "b.png", "bb.png", "c.png", "d.png"]
    assert ["error" in entry for entry in document["images"]] == [False, False, True, True, False]
    assert "c.png: The network answers NaN or Inf" in failures[1]
    assert sorted(path.name for path in out.glob("*.png")) == ["a.mask.png", "b.mask.png", "d.mask.png"]
    for name, image in (("b", images[1]), ("d", images[3])):
        with Image.open(out / f"{name}.mask.png") as mask:
            assert np.array_equal(np.asarray(mask), predictor.predict(image).mask)
    with pytest.raises(InputError, match="^Image 3: The network answers NaN"):
        predictor.predict_batch(images)
    with pytest.raises(InputError, match="^The network answers NaN"):
        predictor.predict(images[2])
    assert predictor.predict_batch([]) == []
    with pytest.raises(InputError, match="c.png: The network answers NaN"):
        predictor.predict(str(tmp_path / "c.png"))


def test_a_frame_without_an_answer_ends_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_video(monkeypatch, [photo(32, 48), np.full((32, 48, 3), 255, np.uint8), photo(32, 48)])
    with pytest.raises(InputError, match=r"clip\.mp4, frame 2: The network answers NaN"):
        predict_video(Predictor(SpoiledOnDevice(card())), "clip.mp4", tmp_path / "clip.overlay.mp4", batch=2)
    assert not (tmp_path / "clip.overlay.mp4").exists()


class Placed(Pointwise):
    """Always answers the same, the other way round where the network is higher than wide."""

    def infer(self, images: Array) -> Array:
        """Logits [N, 4, H, W]."""
        fixed = np.random.default_rng(0).standard_normal((4, 32, 48), np.float32)
        return np.stack([fixed if self.card.height < self.card.width else fixed.swapaxes(1, 2)] * len(images))


@pytest.mark.parametrize("batch", [1, 4])
def test_an_upright_network_cuts_an_upright_image_as_a_wide_one_a_wide_image(batch: int) -> None:
    wide, upright = (Predictor(Placed(card(*size)), tile=True, batch=batch) for size in ((32, 48), (48, 32)))
    image = photo(70, 133)
    expected, found = wide.predict(image).mask, upright.predict(np.ascontiguousarray(image.swapaxes(0, 1))).mask
    assert (expected == found.T).mean() > 0.999  # tiles are added in another order


@pytest.mark.parametrize(("overlap", "expected", "tiles"), [(None, 8, 9), (0, 0, 4), (8, 8, 9), (16, 16, 9)])
def test_tiles_overlap_by_what_is_asked_for(overlap: int | None, expected: int, tiles: int) -> None:
    runtime = Pointwise(card())
    predictor = Predictor(runtime, tile=True, overlap=overlap)
    predictor.predict(photo(64, 96))
    assert (predictor.overlap, sum(count for count, *_ in runtime.batches)) == (expected, tiles)
    assert describe(predictor, Path("model"))["tile"] == {"overlap": expected}


def test_summaries_are_over_all_images() -> None:
    def share(name: str, value: float) -> dict[str, Any]:
        return {"name": name, "share": value}

    entries = [{"classes": [share("a", 0.75), share("b", 0.25)]}, {"classes": [share("a", 1.0)]}, {"error": "broken"}]
    assert mean_shares(entries) == [("a", 2, 0.875), ("b", 1, 0.125)]
    counted = [{"classes": [{"name": "a", "objects": 2}]}, {"classes": [{"name": "a", "objects": 1}]}, {"error": ""}]
    assert objects_of_classes(counted) == [("a", 2, 3)]
    scored = [{"classes": [{"name": "a", "score": 0.5}, {"name": "b", "score": 0.4}]}, {"classes": []}]
    assert likeliest_classes(scored) == [("a", 1, 0.5)]


def test_objects_name_the_image_that_they_are_in(tmp_path: Path) -> None:
    chosen = dataclasses.replace(card(), task="instance", head=InstanceHead("set", 0, masks=2))
    runtime = Pointwise(chosen)
    for number, level in enumerate((0, 200)):  # the second image alone has an object
        Image.fromarray(np.full((32, 48, 3), level, np.uint8)).save(tmp_path / f"{number}.png")

    def infer(images: Array) -> Array:
        outputs = np.full((len(images), chosen.channels, 32, 48), -9.0, np.float32)
        outputs[images.mean((1, 2, 3)) > 0, 0, 4:12, 4:12] = 9.0
        return outputs

    runtime.infer = infer  # type: ignore[method-assign]
    predict_files(Predictor(runtime), Path("model"), find_sources([str(tmp_path)]), tmp_path / "out", batch=2)
    found = json.loads((tmp_path / "out" / "instances.json").read_text())
    of = {each["id"]: Path(each["file_name"]).name for each in found["images"]}
    assert [of[each["image_id"]] for each in found["annotations"]] == ["1.png"]
    assert found["annotations"][0]["bbox"] == [4, 4, 8, 8]
    categories = [{"id": number, "name": name} for number, name in enumerate(chosen.class_names)]
    assert found["categories"] == categories[1:]  # without the background
    assert {each["category_id"] for each in found["annotations"]} <= {each["id"] for each in found["categories"]}


@pytest.mark.parametrize("theirs", ["predictions.json", "instances.json"])
def test_files_of_others_are_not_replaced(tmp_path: Path, theirs: str) -> None:
    chosen = dataclasses.replace(card(), task="instance", head=InstanceHead("centres", 4))
    runtime, out = Pointwise(chosen if theirs == "instances.json" else card()), tmp_path / "out"
    predictor = Predictor(runtime)
    Image.fromarray(photo(32, 48)).save(tmp_path / "a.png")
    sources = find_sources([str(tmp_path / "a.png")])
    out.mkdir()
    (out / theirs).write_text('{"images": []}')
    with pytest.raises(InputError, match=rf"{theirs} is in the way: no prediction wrote it"):
        predict_files(predictor, Path("model"), sources, out)
    assert [path.name for path in out.iterdir()] == [theirs]
    for _ in range(2):  # its own it replaces
        predict_files(Predictor(Pointwise(card())), Path("model"), sources, tmp_path / "other", overlays=False)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 3, 4, 4), "f4"), ((2, 4, 4), "f4"), ((), "f4"), ((2, 3, 4, 4), "i8"), ((2, 3, 0, 4), "f4")],
)
def test_outputs_that_are_not_what_the_card_says(shape: tuple[int, ...], dtype: str) -> None:
    images = np.zeros((2, 3, 4, 4), np.float32)
    named = dataclasses.replace(card(), class_names=("a", "b", "c"))
    for each in (named, dataclasses.replace(named, class_names=())):
        with pytest.raises(InputError, match=r"model.onnx answers .* where its card promises float \[2, "):
            checked(np.zeros(shape, dtype), images, each, "model.onnx")
    assert checked(np.zeros((2, 3, 4, 4), np.float16), images, named, "model.onnx").dtype == np.float32


SHADES = 300


class Shades(Pointwise):
    """The class of a pixel is the number that its red and green have, 16 * red + green."""

    def infer(self, images: Array) -> Array:
        """Logits [N, 300, H, W]."""
        numbers = np.round(images[:, 0] * 255) * 16 + np.round(images[:, 1] * 255)
        return -np.abs(numbers[:, None] - np.arange(SHADES, dtype=np.float32)[:, None, None])


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("tile", [True, False])
def test_more_classes_than_a_byte_has(named: bool, tile: bool, tmp_path: Path) -> None:
    names = tuple(f"shade {number}" for number in range(SHADES)) if named else ()
    predictor = Predictor(Shades(dataclasses.replace(card(), class_names=names, background=False)), tile=tile)
    numbers = np.zeros((64 if tile else 32, 48), np.uint16)
    numbers[8:] = 299
    numbers[20:] = 255
    image = np.stack([numbers // 16, numbers % 16, numbers * 0], axis=-1).astype(np.uint8)
    found = predictor.predict(image)
    assert (found.mask == numbers).all()
    assert {each["id"] for each in found.classes()} == {0, 255, 299}
    overlay = found.overlay(image)
    assert len({tuple(overlay[row, 0]) for row in (0, 10, 25)}) == 3
    Image.fromarray(image).save(tmp_path / "a.png")
    predict_files(predictor, Path("m.onnx"), find_sources([str(tmp_path / "a.png")]), tmp_path / "out")
    with Image.open(tmp_path / "out" / "a.mask.png") as written:
        assert (np.asarray(written) == numbers).all()


def test_classes_of_objects_beyond_a_byte() -> None:
    head = InstanceHead("centres", classes=SHADES, stuff=(299,))
    outputs = torch.zeros(head.channels, 8, 8)
    outputs[298, :4], outputs[299, 4:] = 9.0, 9.0
    outputs[SHADES, 2, 4] = 9.0
    found = decode(outputs, head, (8, 8))
    assert found.classes.tolist() == [298]
    assert set(np.unique(found.semantic)) == {298, 299}
    predictor = Predictor(Pointwise(dataclasses.replace(
        card(head=head), class_names=tuple(f"shade {number}" for number in range(SHADES))
    )))  # fmt: skip
    assert set(np.unique(predictor.decoded(outputs.numpy(), (8, 8)).mask)) <= {0, 298, 299}


@pytest.mark.parametrize("stated", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_a_rate_that_no_video_has_is_not_believed(stated: float) -> None:
    assert stated_rate(stated) == RATE
    assert stated_rate(29.97) == 29.97


@pytest.mark.parametrize("number", ["", "-1", "²", "0x1", "9" * 5000])
def test_a_camera_has_a_number(number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cv2 = types.ModuleType("cv2")
    vars(cv2).update(VideoCapture=None)
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    with pytest.raises(InputError, match="names no camera; write its number"):
        predict_video(Predictor(Pointwise(card())), f"camera:{number}", tmp_path / "out.mp4", batch=1)


def test_a_network_reads_rgb_and_a_video_is_written_as_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8) for number in range(3)]  # BGR
    cv2, left, seen = MagicMock(), list(frames), list[np.ndarray]()
    capture, target = cv2.VideoCapture.return_value, tmp_path / "out.mp4"
    capture.get.return_value = 10.0
    capture.read.side_effect = lambda: (True, left.pop(0)) if left else (False, None)
    cv2.VideoWriter.side_effect = lambda path, *_: (Path(path).touch(), cv2.writer)[1]
    monkeypatch.setitem(sys.modules, "cv2", cv2)

    red = Prediction(np.zeros((6, 8), np.uint8), ("thing",), ((255, 0, 0),))

    class Red(Predictor):
        def predict_batches(self, batches: Any) -> Any:
            for images in batches:
                seen.extend(images)
                yield [red] * len(images)

    found = predict_frames(Red(Pointwise(card())), capture, "clip.mp4", target, batch=2)
    assert (found["frames"], found["frames_per_s"], found["height"], found["width"]) == (3, 10.0, 6, 8)
    written = [call.args[0] for call in cv2.writer.write.call_args_list]
    for frame, read, drawn in zip(frames, seen, written, strict=True):
        assert np.array_equal(read, frame[..., ::-1])
        assert np.array_equal(drawn, red.overlay(frame[..., ::-1])[..., ::-1])


LISTS = [b"ffconcat version 1.0\nfile other.mp4\n", b"#EXTM3U\n", b"<?xml?><MPD>", b"v=0\r\no=- 0 0", b"", b"\0" * 300]
LISTS += [
    b"\xef\xbb\xbfffconcat version 1.0\n",
    b"v=0\nftyp\nc=IN IP4 127.0.0.1\n",
    b"RIFF0000WAVE",
    b"\x1a\x45\xdf\xa3\nc=IN IP4",
]


@pytest.mark.parametrize("content", LISTS)
def test_a_list_of_other_files_is_no_video(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cv2 = types.ModuleType("cv2")
    vars(cv2).update(VideoCapture=None)  # not called
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    with (
        pytest.raises(InputError, match=r"is no video by its content\. Valid: MP4, MOV, AVI"),
        opened(str(path)),
    ):
        pass


STARTS = [
    b"\0\0\0\x20ftypisom",
    b"\0\0\0\x08wide\0\0",
    b"RIFF\x10\0\0\0AVI LIST",
    b"\0\0\x01\xba\x44",
    b"\0\0\x01\xb0\x01",
]
STARTS += [b"\x1a\x45\xdf\xa3\x01\0\0\0\0\0\0\x1f\x42\x86\x81\x01\x42\x82\x84webm"]
STARTS += [b"\x1a\x45\xdf\xa3\xa3\x42\x86\x81\x01\x42\xf7\x81\x01\x42\x82\x88matroska"]


@pytest.mark.parametrize("content", STARTS)
def test_containers_are_opened(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cv2, capture = types.ModuleType("cv2"), MagicMock()
    vars(cv2).update(VideoCapture=capture)
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    with opened(str(path)) as found:
        assert found is capture.return_value
    capture.assert_called_once_with(str(path))


def fake_video(monkeypatch: pytest.MonkeyPatch, frames: list[Any]) -> MagicMock:
    """OpenCV that reads these frames, BGR, and the writer that it gives."""
    cv2 = types.ModuleType("cv2")
    reading, writing = MagicMock(), MagicMock()
    reading.read.side_effect = [*((True, frame) for frame in frames), (False, None)]
    reading.get.return_value = 10.0

    def writer(path: str, *_: object) -> MagicMock:
        Path(path).touch()
        return writing

    vars(cv2).update(VideoCapture=lambda path: reading, VideoWriter=writer, CAP_PROP_FPS=5)
    writer.fourcc = lambda *_: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    return writing


def test_a_video_has_the_mean_share_of_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [np.full((32, 48, 3), 0, np.uint8) for _ in range(3)]
    runtime = Pointwise(card())
    numbers = iter((1, 2, 2))  # the class of each frame

    def infer(images: Array) -> Array:
        outputs = np.zeros((len(images), 4, 32, 48), np.float32)
        for each in outputs:
            each[next(numbers)] = 1
        return outputs

    fake_video(monkeypatch, frames)
    monkeypatch.setattr(runtime, "infer", infer)
    found = predict_video(Predictor(runtime), "clip.mp4", tmp_path / "clip.overlay.mp4", batch=2)
    assert [(each["id"], each["share"]) for each in found["classes"]] == [
        (2, pytest.approx(2 / 3)),
        (1, pytest.approx(1 / 3)),
    ]


def test_a_video_of_a_detector_counts_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = fake_video(monkeypatch, [photo(20, 30, seed)[..., ::-1] for seed in range(3)])
    head = DetectionHead("fcos", classes=3)
    runtime = Pointwise(dataclasses.replace(card(), task="detection", head=head))
    boxes = Detections(np.array([[1, 1, 9, 9]] * 3, np.float32), np.array([2, 2, 1]), np.ones(3, np.float32))
    monkeypatch.setattr(runtime, "infer", lambda images: np.zeros((len(images), 1, 1, 1), np.float32))
    monkeypatch.setattr(module, "decode_boxes", lambda *_: boxes)
    found = predict_video(Predictor(runtime), "clip.mp4", tmp_path / "clip.overlay.mp4", batch=2)
    assert found["classes"] == [
        {"id": 2, "name": "green", "objects": 6},
        {"id": 1, "name": "red", "objects": 3},
    ]
    assert (found["frames"], found["height"], found["width"]) == (3, 20, 30)
    assert writing.write.call_count == 3


def test_a_pattern_finds_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "clip.mp4")  # OpenCV would wait for a writer
    with pytest.raises(InputError, match="No image matches"):
        find_sources([str(tmp_path / "*.mp4")])


def test_objects_carry_class_and_score() -> None:
    ids = np.zeros((64, 96), np.int32)
    ids[8:56, 8:88] = 1
    ids[2:5, 2:5] = 2
    found = Instances(ids, np.array([1, 0]), np.array([0.93, 0.1], np.float32), np.zeros((64, 96), np.uint8))
    image = np.full((64, 96, 3), 90, np.uint8)
    drawn = Prediction(np.zeros((64, 96), np.uint8), ("road", "car"), [None, (1, 2, 3)], found).overlay(image)
    changed = (drawn != draw_instances(image, ids)).any(axis=2)
    assert changed[16:48].any()  # "car 0.93" over the middle of the first
    assert not changed[:8].any()  # the second is too unsure to be named


@pytest.mark.parametrize("kind", ["boxes", "instances"])
def test_records_of_objects_say_what_was_found(kind: str) -> None:
    random, names = np.random.default_rng(0), ("background", "a", "b", "c")
    scores, classes = np.linspace(0.9, 0.1, 5, dtype=np.float32), np.array([2, 1, 2, 3, 2])
    mask = np.zeros((30, 50), np.uint8)
    if kind == "boxes":
        corners = np.sort(random.uniform(0, 30, (5, 2, 2)), 1).reshape(5, 4).astype(np.float32)
        found = Prediction(mask, names, (None,) * 4, detections=Detections(corners, classes, scores))
        boxes, areas = corners, (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
        counted = [(each["name"], each["objects"]) for each in found.classes()]
        assert (counted[0], set(counted[1:])) == (("b", 3), {("a", 1), ("c", 1)})
    else:
        ids = np.kron(random.permutation(np.repeat(np.arange(6), 3))[:15].reshape(3, 5), np.ones((10, 10))).astype(
            np.int32
        )
        found = Prediction(mask, names, (None,) * 4, Instances(ids, classes, scores, mask))
        places = [np.argwhere(ids == number)[:, ::-1] for number in range(1, 6)]
        boxes = np.array([[*each.min(0), *(each.max(0) + 1)] for each in places])
        areas = np.array([len(each) for each in places])
        for number, each in enumerate(found.objects(), start=1):
            assert (coco_mask.decode(each["segmentation"]) == (ids == number)).all()
    records = found.objects()
    assert [each["category_id"] for each in records] == classes.tolist()
    assert [each["score"] for each in records] == pytest.approx(scores.tolist())
    assert [each["area"] for each in records] == pytest.approx(areas.tolist(), rel=1e-6)
    sides = np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1)
    np.testing.assert_allclose([each["bbox"] for each in records], sides, rtol=1e-6)
