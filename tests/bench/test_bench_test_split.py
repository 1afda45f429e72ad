"""`--split test`: the same measurement on images that no training chose anything by."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fp4deploy.bench.artifact import bench_artifact
from fp4deploy.bench.gate.baseline import find_baseline
from fp4deploy.data import open_dataset
from fp4deploy.errors import InputError
from fp4deploy.runs import Run


@pytest.fixture
def with_test(shapes: Path, tmp_path: Path) -> Path:
    """The shapes, their training split under the name of a test split as well."""
    folder = tmp_path / "data"
    shutil.copytree(shapes, folder)
    annotations = folder / "annotations"
    suffix = "2017" if (annotations / "instances_train2017.json").is_file() else ""
    shutil.copy(annotations / f"instances_train{suffix}.json", annotations / f"instances_test{suffix}.json")
    shutil.copytree(folder / f"train{suffix}", folder / f"test{suffix}")
    return folder


def test_the_split_that_is_named_is_measured(untrained: Run, with_test: Path, shapes: Path) -> None:
    path = untrained.checkpoint("fp16")
    found = bench_artifact(path, with_test, iterations=1, split="test").miou
    assert found == bench_artifact(path, shapes, iterations=1, split="train").miou
    assert found != bench_artifact(path, shapes, iterations=1).miou
    assert find_baseline(path, with_test, split="test").value == found


def test_data_without_a_test_split_is_one_clear_error(untrained: Run, shapes: Path) -> None:
    with pytest.raises(InputError, match="test"):
        bench_artifact(untrained.checkpoint("fp16"), shapes, iterations=1, split="test")
    with pytest.raises(InputError, match="no split 'valid'; the splits are: train, val, test"):
        open_dataset(shapes, "valid")


def test_masks_of_a_test_split_alone_can_be_opened(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "test").mkdir()
    (tmp_path / "masks" / "test").mkdir(parents=True)
    Image.new("RGB", (20, 10)).save(tmp_path / "test" / "a.png")
    Image.new("L", (20, 10), 2).save(tmp_path / "masks" / "test" / "a.png")
    found = open_dataset(tmp_path, "test")
    assert found.class_names == ("class_0", "class_1", "class_2")
    assert (found.load(0).mask == 2).all()
