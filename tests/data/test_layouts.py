"""Datasets as annotation tools write them: each layout gives the samples of the same set in COCO's own layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp4deploy.data import check_dataset, generate_shapes, import_coco, open_dataset, summarise
from fp4deploy.data.coco.annotations import parse
from fp4deploy.data.folders import FolderDataset
from fp4deploy.errors import InputError
from fp4deploy.provenance import digest

COLOURS = [(0, 0, 0), (255, 0, 0), (0, 200, 10), (9, 9, 250), (200, 100, 0), (120, 0, 120), (1, 2, 3)]


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four training and three validation scenes in COCO's layout."""
    folder = tmp_path_factory.mktemp("layouts") / "coco"
    generate_shapes(folder, train=4, val=3, size=32, seed=3)
    return folder


def file_of(coco: Path, split: str) -> Path:
    return coco / "annotations" / f"instances_{split}2017.json"


def images_of(coco: Path, split: str) -> Path:
    return coco / f"{split}2017"


def same(one: Path, other: Path, split: str, names: bool = True) -> None:
    """The two folders give equal samples."""
    first, second = open_dataset(one, split), open_dataset(other, split)
    assert len(first) == len(second) > 0
    assert first.class_names == second.class_names
    for index in range(len(first)):
        a, b = first.load(index), second.load(index)
        assert np.array_equal(a.image, b.image)
        assert np.array_equal(a.mask, b.mask)
        assert not names or a.name == b.name


def test_roboflow(coco: Path, tmp_path: Path) -> None:
    for split, folder in (("train", "train"), ("val", "valid")):
        shutil.copytree(images_of(coco, split), tmp_path / folder)
        content = json.loads(file_of(coco, split).read_text())
        for category in content["categories"]:
            category["supercategory"] = "shapes"
        content["categories"].insert(0, {"id": 0, "name": "shapes", "supercategory": "none"})
        (tmp_path / folder / "_annotations.coco.json").write_text(json.dumps(content))
    same(coco, tmp_path, "train")
    same(coco, tmp_path, "val")
    assert check_dataset(tmp_path) == []


def test_a_category_that_is_annotated_is_no_group(coco: Path, tmp_path: Path) -> None:
    shutil.copytree(coco, tmp_path / "set")
    path = file_of(tmp_path / "set", "train")
    content = json.loads(path.read_text())
    first = content["categories"][0]
    first["supercategory"] = "none"
    for category in content["categories"][1:]:
        category["supercategory"] = first["name"]
    path.write_text(json.dumps(content))
    assert first["name"] in open_dataset(tmp_path / "set", "train").class_names


def test_cvat_coco_with_an_images_folder(coco: Path, tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        shutil.copytree(images_of(coco, split), tmp_path / "images" / split)
        shutil.copy(file_of(coco, split), tmp_path / "annotations" / f"instances_{split}.json")
    same(coco, tmp_path, "train")


@pytest.mark.parametrize("coloured", [False, True])
def test_pascal_voc_and_cvat_masks(coco: Path, tmp_path: Path, coloured: bool) -> None:
    for folder in ("SegmentationClass", "JPEGImages", "ImageSets/Segmentation"):
        (tmp_path / folder).mkdir(parents=True)
    names = open_dataset(coco, "train").class_names
    labels = [f"{name}:{','.join(map(str, colour))}::" for name, colour in zip(names, COLOURS, strict=False)]
    (tmp_path / "labelmap.txt").write_text("# label:color_rgb:parts:actions\n" + "\n".join(labels) + "\n")
    for split in ("train", "val"):
        dataset, stems = open_dataset(coco, split), []
        for index in range(len(dataset)):
            sample = dataset.load(index)
            stems.append(f"{split}_{index}")
            mask = Image.fromarray(sample.mask)
            if coloured:
                table = np.full((256, 3), 224, np.uint8)
                table[: len(names)] = COLOURS[: len(names)]
                mask = Image.fromarray(table[sample.mask])
            mask.save(tmp_path / "SegmentationClass" / f"{stems[-1]}.png")
            Image.fromarray(sample.image).save(tmp_path / "JPEGImages" / f"{stems[-1]}.png")
        (tmp_path / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(stems) + "\n")
    same(coco, tmp_path, "train", names=False)
    same(coco, tmp_path, "val", names=False)
    assert check_dataset(tmp_path) == []


@pytest.mark.parametrize(
    "line", ["road", "road:1,2::", "road:256,0,0::", "road:0,0,0::\nsky:0,0,0::", "a:1,2,3::\na:3,2,1::"]
)
def test_a_wrong_label_map(tmp_path: Path, line: str) -> None:
    for folder in ("masks/train", "train"):
        (tmp_path / folder).mkdir(parents=True)
        Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / folder / "a.png")
    (tmp_path / "labelmap.txt").write_text(line + "\n")
    with pytest.raises(InputError, match="labelmap.txt"):
        open_dataset(tmp_path, "train")


def test_a_list_cannot_name_files_outside(tmp_path: Path) -> None:
    for folder in ("SegmentationClass", "JPEGImages", "ImageSets/Segmentation"):
        (tmp_path / "voc" / folder).mkdir(parents=True)
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "secret.png")
    (tmp_path / "voc" / "ImageSets" / "Segmentation" / "train.txt").write_text("../../secret\n")
    with pytest.raises(InputError):
        open_dataset(tmp_path / "voc", "train")


def test_two_files_and_one_folder_of_images(coco: Path, tmp_path: Path) -> None:
    files = {}
    for split in ("train", "val"):
        content = json.loads(file_of(coco, split).read_text())
        (tmp_path / "all").mkdir(exist_ok=True)
        for image in content["images"]:
            new = f"{split}-{image['file_name']}"
            shutil.copy(images_of(coco, split) / image["file_name"], tmp_path / "all" / new)
            image["file_name"] = new
        files[split] = tmp_path / f"{split}.json"
        files[split].write_text(json.dumps(content))
    found = import_coco(files, [tmp_path / "all"], tmp_path / "out")
    assert [(each.split, each.images) for each in found] == [("train", 4), ("val", 3)]
    same(coco, tmp_path / "out", "train", names=False)
    same(coco, tmp_path / "out", "val", names=False)


def test_a_name_that_two_folders_have_is_refused(coco: Path, tmp_path: Path) -> None:
    files = {split: file_of(coco, split) for split in ("train", "val")}
    with pytest.raises(InputError, match="is in two folders"):
        import_coco(files, [images_of(coco, "train"), images_of(coco, "val")], tmp_path / "out")


def label_studio(coco: Path, folder: Path) -> Path:
    """One file for all images, which it names with a folder, as Label Studio writes it."""
    shutil.copytree(images_of(coco, "train"), folder / "images")
    content = json.loads(file_of(coco, "train").read_text())
    for image in content["images"]:
        image["file_name"] = f"images\\{image['file_name']}"
    (folder / "result.json").write_text(json.dumps(content))
    return folder / "result.json"


def test_one_file_is_divided_by_the_names_of_its_images(coco: Path, tmp_path: Path) -> None:
    path = label_studio(coco, tmp_path)
    shares: dict[str, Any] = {"val_share": 0.5, "seed": 1}
    first = import_coco({"train": path}, [tmp_path], tmp_path / "a", **shares)
    again = import_coco({"train": path}, [tmp_path], tmp_path / "b", **shares)
    assert first == again
    assert sum(each.images for each in first) == 4
    assert min(each.images for each in first) > 0
    whole = json.loads(path.read_text())
    assert sum(each.annotations for each in first) == len(whole["annotations"])
    for split in ("train", "val"):
        same(tmp_path / "a", tmp_path / "b", split)
    assert check_dataset(tmp_path / "a") == []


def test_equal_names_in_different_folders_stay_apart(coco: Path, tmp_path: Path) -> None:
    content = json.loads(file_of(coco, "train").read_text())
    for number, image in enumerate(content["images"]):
        folder = tmp_path / f"camera{number}"
        folder.mkdir()
        shutil.copy(images_of(coco, "train") / image["file_name"], folder / "frame.png")
        image["file_name"] = f"camera{number}/frame.png"
    (tmp_path / "train.json").write_text(json.dumps(content))
    files = {"train": tmp_path / "train.json", "val": file_of(coco, "val")}
    import_coco(files, [tmp_path, images_of(coco, "val")], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "train").iterdir())[:2] == ["frame.2.png", "frame.3.png"]
    same(coco, tmp_path / "out", "train", names=False)


def test_what_cannot_be_imported_leaves_nothing(coco: Path, tmp_path: Path) -> None:
    path = label_studio(coco, tmp_path)
    out = tmp_path / "out"
    for files, folders, options, said in (
        ({"train": path}, [tmp_path], {}, "no validation split"),
        ({"train": path}, [tmp_path / "nowhere"], {"val_share": 0.5}, "is in none of the folders"),
        ({"train": path}, [tmp_path], {"val_share": 0.6, "test_share": 0.4}, "leave some"),
        ({"train": path, "val": file_of(coco, "val")}, [tmp_path], {"val_share": 0.5}, "there is a split val already"),
        ({"train": path}, [tmp_path], {"val_share": 1e-9}, "No image falls into the split val"),
        ({"train": tmp_path / "images"}, [tmp_path], {"val_share": 0.5}, "There is no file"),
    ):
        with pytest.raises(InputError, match=said):
            import_coco(files, folders, out, **options)
        assert not out.exists()
    import_coco({"train": path}, [tmp_path], out, val_share=0.5, seed=1)
    with pytest.raises(InputError, match="exists already"):
        import_coco({"train": path}, [tmp_path], out, val_share=0.5)


def test_an_image_of_two_splits_is_a_defect_whatever_its_name(coco: Path, tmp_path: Path) -> None:
    shutil.copytree(coco, tmp_path / "set")
    train, val = images_of(tmp_path / "set", "train"), images_of(tmp_path / "set", "val")
    shutil.copy(sorted(train.iterdir())[1], sorted(val.iterdir())[0])
    defects = [defect for defect in check_dataset(tmp_path / "set") if defect.kind == "shared-image"]
    assert [defect.file for defect in defects] == [f"val2017/{sorted(val.iterdir())[0].name}"]
    assert sorted(train.iterdir())[1].name in defects[0].message


def test_a_summary_counts_images_annotations_and_sizes(coco: Path) -> None:
    train, val = summarise(coco)
    content = json.loads(file_of(coco, "train").read_text())
    assert (train.split, train.images, val.images) == ("train", 4, 3)
    assert sum((train.annotations or {}).values()) == len(content["annotations"])
    assert set(train.sizes) == {(32, 32)}


def test_a_summary_counts_the_masks_of_each_class(tmp_path: Path) -> None:
    for split, values in (("train", [[0, 1], [1, 255]]), ("val", [[2, 2], [7, 255]])):
        for number, value in enumerate(values):
            for folder, array in (("masks/", value), ("", [9, 9])):
                (tmp_path / f"{folder}{split}").mkdir(parents=True, exist_ok=True)
                image = Image.fromarray(np.array([array] * 2, np.uint8))
                image.save(tmp_path / f"{folder}{split}" / f"{number}.png")
    (tmp_path / "classes.txt").write_text("road\nsky\ncar\n")
    (tmp_path / "masks/val/1.png").write_bytes(b"broken")
    train, val = summarise(tmp_path)
    assert (train.annotations, train.in_masks) == (None, {"road": 1, "sky": 2, "car": 0})
    assert (val.images, val.in_masks) == (2, {"road": 0, "sky": 0, "car": 1})


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32"])
def test_annotations_in_another_encoding_are_imported_as_they_are_checked(
    coco: Path, tmp_path: Path, encoding: str
) -> None:
    path = label_studio(coco, tmp_path)
    path.write_bytes(path.read_text().encode(encoding))
    assert not parse(path).defects
    import_coco({"train": path}, [tmp_path], tmp_path / "out", val_share=0.5, seed=1)
    assert check_dataset(tmp_path / "out") == []


@pytest.mark.parametrize("group", [{}, {"id": [1]}, {"id": 0}])
def test_the_name_of_a_group_is_left_out_whatever_its_id_is(coco: Path, tmp_path: Path, group: dict[str, Any]) -> None:
    path = label_studio(coco, tmp_path)
    content = json.loads(path.read_text())
    for category in content["categories"]:
        category["supercategory"] = "shapes"
    content["categories"].insert(0, {**group, "name": "shapes", "supercategory": "none"})
    path.write_text(json.dumps(content))
    import_coco({"train": path}, [tmp_path], tmp_path / "out", val_share=0.5, seed=1)
    assert "shapes" not in open_dataset(tmp_path / "out", "train").class_names


@pytest.mark.parametrize("layout", ["coco", "masks", "folders"])
def test_where_a_dataset_lies_changes_nothing(layout: str, coco: Path, tmp_path: Path) -> None:
    """The folders around it may be called as those inside are."""
    source = coco
    if layout != "coco":
        source = tmp_path / "made"
        for split in ("train", "val"):
            dataset = open_dataset(coco, split)
            for index in range(len(dataset)):
                sample = dataset.load(index)
                folder = source / split / ("ab"[index % 2] if layout == "folders" else "")
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(sample.image).save(folder / f"{index}.png")
                if layout == "masks":
                    (source / "masks" / split).mkdir(parents=True, exist_ok=True)
                    Image.fromarray(sample.mask).save(source / "masks" / split / f"{index}.png")
    moved = shutil.copytree(source, tmp_path.joinpath("masks", "annotations", "val", "images", "train2017", "train"))
    for split in ("train", "val"):
        if layout == "folders":
            first, second = FolderDataset(source, split), FolderDataset(moved, split)
            assert first.names == second.names
            assert [first.load(at).mask[0, 0] for at in range(len(first))] == [
                second.load(at).mask[0, 0] for at in range(len(second))
            ]
        else:
            same(source, moved, split)
    assert digest(source) == digest(moved)
