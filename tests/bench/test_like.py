"""ONNX files of other tools are scored with the classes and the input of another file, as ours are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

from fp4deploy.bench.artifact import bench_artifact
from fp4deploy.bench.runtimes.like import Like, read_like
from fp4deploy.bench.runtimes.open import open_for_images
from fp4deploy.errors import InputError
from fp4deploy.models import read_card
from fp4deploy.runs import Run
from tests.interop.onnx_files import segmenter

NAMES = ("background", "circle", "square", "triangle", "star", "ring", "cross")
WHOLE = Like(NAMES, background=True)


def saved(path: Path, classes: int = 7, **options: Any) -> Path:
    onnx.save(segmenter(classes, **options), path)
    return path


def test_a_file_without_its_card_scores_as_with_it(untrained: Run, shapes: Path, tmp_path: Path) -> None:
    ours = untrained.export_dir / "unet.fp16.portable.onnx"
    bare = onnx.load(ours)
    bare.ClearField("metadata_props")
    onnx.save(bare, tmp_path / "bare.onnx")
    card = read_card(untrained.checkpoint("fp16"))
    fields = {"class_names": list(card.class_names), "background": True, "height": card.height, "width": card.width}
    (tmp_path / "like.yaml").write_text(yaml.safe_dump(fields))
    expected = bench_artifact(ours, shapes, iterations=1)
    for like in (untrained.checkpoint("nvfp4"), ours, tmp_path / "like.yaml"):
        found = bench_artifact(tmp_path / "bare.onnx", shapes, iterations=1, like=read_like(like))
        assert (found.miou, found.evidence) == (expected.miou, expected.evidence)
        assert found.latency_ms is not None


def test_height_and_width_are_not_exchanged(tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", size=("N", 3, 24, 40))
    for like in (WHOLE, Like(NAMES, height=24, width=40), Like(NAMES, height=24), Like(NAMES, width=40)):
        card = open_for_images(path, like=like).card
        assert (card.height, card.width) == (24, 40)
    opened = saved(tmp_path / "open.onnx", size=("N", 3, "H", "W"))
    card = open_for_images(opened, like=Like(NAMES, height=24, width=40)).card
    assert (card.height, card.width) == (24, 40)
    with pytest.raises(InputError, match="--like says 40x24"):
        open_for_images(path, like=Like(NAMES, height=40, width=24))


def test_a_fixed_number_of_images_is_fed_in_parts(shapes: Path, tmp_path: Path) -> None:
    fixed, free = (saved(tmp_path / f"{n}.onnx", size=(n, 3, 32, 32)) for n in (2, "N"))
    images = np.random.default_rng(0).standard_normal((5, 3, 32, 32)).astype(np.float32)
    outputs = [open_for_images(path, like=WHOLE).infer(images) for path in (fixed, free)]
    assert outputs[0].shape == (5, 7, 32, 32)
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    entry = bench_artifact(fixed, shapes, iterations=1, like=WHOLE)
    assert (entry.batch, entry.precision) == (2, "FP32")


def test_classes_that_nobody_named_are_those_of_the_data(shapes: Path, tmp_path: Path) -> None:
    """As in the card of a file that was quantised on photos."""
    path = saved(tmp_path / "net.onnx", size=("N", 3, 32, 32))
    found, expected = (bench_artifact(path, shapes, iterations=1, like=like) for like in (Like(()), WHOLE))
    assert found.miou == expected.miou
    with pytest.raises(InputError, match=r"knows the classes class_0, class_1, class_2; .* gives background, circle"):
        bench_artifact(saved(tmp_path / "few.onnx", 3, size=("N", 3, 32, 32)), shapes, iterations=1, like=Like(()))


@pytest.mark.parametrize(
    ("like", "options", "message"),
    [
        (Like(NAMES[:3]), {"size": ("N", 3, 32, 32)}, r"\[\?, 7, 32, 32\], is no map of logits \[N, 3, 32, 32\]"),
        (Like(NAMES, height=64, width=64), {"size": ("N", 3, 32, 32)}, "--like says 64x64"),
        (WHOLE, {"size": ("N", 3, "H", "W")}, "leaves the size of its images open. Add height and width"),
    ],
)
def test_what_does_not_fit_is_refused(like: Like, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        open_for_images(saved(tmp_path / "net.onnx", **options), like=like)


def test_an_output_of_another_size_is_refused(shapes: Path, tmp_path: Path) -> None:
    """Also where the file does not say its size before it runs."""
    model = segmenter(7, size=("N", 3, "H", "W"))
    last = model.graph.node[-1]
    model.graph.output[0].name = last.input[0]
    for extent in model.graph.output[0].type.tensor_type.shape.dim:
        extent.dim_param = f"any{extent.dim_value}"
    model.graph.node.remove(last)
    onnx.save(model, tmp_path / "half.onnx")
    with pytest.raises(InputError, match=r"answers float32 \[\d+, 7, 16, 16\] .* Give --like the network's own"):
        bench_artifact(tmp_path / "half.onnx", shapes, like=Like(NAMES, True, 32, 32))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("like.yaml", "class_names: [a]", "class_names"),
        ("like.yaml", "class_names: [a, a]", "a name is given twice"),
        ("like.yaml", "classes: [a, b]", "class_names is missing; classes is not a known field"),
        ("like.yaml", "class_names: [a, b]\nstd: [0, 1, 1]", "std"),
        ("like.json", "{}", "takes a checkpoint"),
        ("absent.yaml", None, "There is no file"),
    ],
)
def test_a_file_that_says_nothing_is_refused(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_like(tmp_path / name)
