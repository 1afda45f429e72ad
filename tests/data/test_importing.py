"""Folders as people have them, made dataset folders by `fp4deploy data import`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp4deploy.data import PhotoDataset, are_photos, check_dataset, import_folder, open_boxes, open_dataset
from fp4deploy.data.importing.splits import divide
from fp4deploy.data.sample import Pixels
from fp4deploy.errors import InputError

HEIGHT, WIDTH = 12, 16
HALF = np.zeros((HEIGHT, WIDTH), np.uint8)
HALF[:, 8:] = 1
Folder = Callable[..., Path]


def image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, quality=95)


def mask(path: Path, values: Pixels, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """images/N.jpg and labels/N_L.png of the values 0 and 255."""

    def make(count: int = 10, values: Pixels = HALF * 255, mode: str = "L", suffix: str = ".png") -> Path:
        for number in range(count):
            image(tmp_path / "in" / "images" / f"{number}.jpg", number)
            mask(tmp_path / "in" / "labels" / f"{number}_L{suffix}", values, mode)
        return tmp_path / "in"

    return make


def imported(source: Path, **options: Any) -> Path:
    """The dataset folder that is made of a folder of siblings."""
    out = source.parent / "out"
    import_folder(source, None, None, out, **{"suffix": "_L", "val_share": 0.3, "seed": 1, **options})
    return out


def splits(root: Path) -> dict[str, set[str]]:
    return {split: {path.stem for path in (root / split).iterdir()} for split in ("train", "val")}


def test_binary_masks_beside_images_become_a_dataset(folder: Folder) -> None:
    said: list[str] = []
    root = imported(folder(), classes=("sky", "road"), say=said.append)
    assert said == ["Binary masks: 0 is class 0, 255 is class 1."]
    assert check_dataset(root) == []
    dataset = open_dataset(root, "train")
    assert (dataset.class_names, dataset.load(0).mask.tolist()) == (("sky", "road"), HALF.tolist())
    found = splits(root)
    assert (len(found["train"] | found["val"]), found["train"] & found["val"]) == (10, set())
    shutil.rmtree(root)
    assert splits(imported(folder())) == found, "a seed gives the same splits"


def test_copies_of_one_image_stay_in_one_split(folder: Folder) -> None:
    source = folder(12)
    for number in range(6):
        shutil.copy(source / "images" / f"{number}.jpg", source / "images" / f"{number}copy.jpg")
        shutil.copy(source / "labels" / f"{number}_L.png", source / "labels" / f"{number}copy_L.png")
    root = imported(source, val_share=0.5)
    assert all(min(map(len, splits(root).values())) > 1 for _ in "x")
    assert not [defect for defect in check_dataset(root) if defect.kind == "shared-image"]


@pytest.mark.parametrize(
    ("values", "mode", "suffix", "options", "expected"),
    [
        (HALF, "L", ".png", {}, HALF),
        (HALF * 255, "RGB", ".png", {}, HALF),
        (HALF * 200 + 20, "L", ".jpg", {"threshold": 128}, HALF),
        (HALF * 90 + np.tri(HEIGHT, WIDTH, dtype=np.uint8) * 50, "L", ".tif", {}, HALF * 2 + np.tri(HEIGHT, WIDTH)),
    ],
    ids=["numbered", "grey as RGB", "JPEG", "spread"],
)
def test_values_become_classes(
    folder: Folder, values: Pixels, mode: str, suffix: str, options: dict[str, Any], expected: Pixels
) -> None:
    root = imported(folder(values=values, mode=mode, suffix=suffix), **options)
    np.testing.assert_array_equal(open_dataset(root, "val").load(0).mask, expected)


def test_masks_that_are_numbered_are_linked(folder: Folder) -> None:
    source = folder(values=HALF)
    root = imported(source)
    name = next(iter(splits(root)["val"]))
    assert (root / "masks" / "val" / f"{name}.png").samefile(source / "labels" / f"{name}_L.png")


def test_masks_in_the_layout_of_a_dataset_are_numbered(folder: Folder, tmp_path: Path) -> None:
    root = imported(folder())
    for path in (root / "masks").rglob("*.png"):
        mask(path, HALF * 255)
    assert {defect.kind for defect in check_dataset(root)} == {"binary-masks"}
    import_folder(root, None, None, tmp_path / "again")
    assert check_dataset(tmp_path / "again") == []
    assert splits(tmp_path / "again") == splits(root)


def test_folders_of_splits_are_kept(folder: Folder) -> None:
    source = folder(4)
    for split, numbers in (("train", (0, 1, 2)), ("valid", (3,))):
        for kind, end in (("images", ".jpg"), ("labels", "_L.png")):
            (source / kind / split).mkdir()
            for number in numbers:
                (source / kind / f"{number}{end}").rename(source / kind / split / f"{number}{end}")
    assert splits(imported(source, val_share=0.0)) == {"train": {"0", "1", "2"}, "val": {"3"}}


def lose(source: Path) -> None:
    (source / "labels" / "3_L.png").unlink()


def cut(source: Path) -> None:
    for number in (2, 5):
        mask(source / "labels" / f"{number}_L.png", HALF[:5] * 255)


def colour(source: Path) -> None:
    Image.fromarray(np.stack([HALF * 128, HALF, HALF], -1)).save(source / "labels" / "0_L.png")


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (None, {"suffix": ""}, r"10 images of \S+ without a mask .* Did you mean 0_L.png\? .*--mask-suffix _L"),
        (lose, {}, r"1 image of \S+ without a mask \(3; wanted 3_L.png\)\. Add what is missing, or remove them\.$"),
        (cut, {}, r"2 pairs of image and mask, of 10, .*2.jpg is 16x12 pixels .* says 16x5"),
        (colour, {}, r"labelmap.txt with a line NAME:R,G,B:: .*; its most frequent colours are 0,0,0; 128,1,1"),
        (None, {"val_share": 0.0}, "no validation split"),
        (None, {"val_share": 1e-9}, "No image falls into the split val"),
        (None, {"classes": ("one",)}, "1 names are given: one"),
        (None, {"threshold": 1, "classes": ("a", "b"), "seed": 0, "out": True}, "exists already"),
    ],
)
def test_what_cannot_be_imported_is_named_and_leaves_nothing(
    folder: Folder, tmp_path: Path, change: Callable[[Path], None] | None, options: dict[str, Any], said: str
) -> None:
    source = folder()
    if change is not None:
        change(source)
    if options.pop("out", False):
        (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=said):
        imported(source, **options)
    assert not (tmp_path / "out" / "masks").exists()


def test_masks_of_one_class_are_refused(folder: Folder) -> None:
    with pytest.raises(InputError, match="The masks hold the value 0 alone"):
        imported(folder(values=HALF * 0))


@pytest.fixture
def yolo(tmp_path: Path) -> Folder:
    """A set of YOLO with this text in each label file."""

    def make(text: str, about: str = "train: ../train/images\nval: valid/images\nnames: [cup, ball]\n") -> Path:
        for number in range(4):
            part = tmp_path / "yolo" / ("valid" if number == 3 else "train")
            image(part / "images" / f"{number}.jpg", number)
            (part / "labels").mkdir(exist_ok=True)
            if number != 1:
                (part / "labels" / f"{number}.txt").write_text(text)
        (tmp_path / "yolo" / "data.yaml").write_text(about)
        return tmp_path / "yolo"

    return make


def test_polygons_of_yolo(yolo: Folder, tmp_path: Path) -> None:
    import_folder(yolo("1 0.5 0 1 0 1 1 0.5 1\n"), None, None, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out", "train")
    assert dataset.class_names == ("background", "cup", "ball")
    masks = [dataset.load(at).mask for at in range(len(dataset))]
    assert sorted(int(each.max()) for each in masks) == [0, 2, 2], "an image without a file has no objects"
    np.testing.assert_array_equal(masks[0], HALF * 2)
    assert len(open_dataset(tmp_path / "out", "val")) == 1
    written = json.loads((tmp_path / "out" / "annotations" / "instances_train.json").read_text())
    assert [each["area"] for each in written["annotations"]] == [WIDTH * HEIGHT / 2] * 2


def test_boxes_of_yolo(yolo: Folder, tmp_path: Path) -> None:
    import_folder(yolo("0 0.5 0.5 0.5 0.5\n"), None, None, tmp_path / "out")
    (box,) = open_boxes(tmp_path / "out", "val").load(0).boxes.tolist()  # type: ignore[union-attr]
    assert box[1:] == [4.0, 3.0, 12.0, 9.0]
    assert check_dataset(tmp_path / "out", boxes=True) == []


@pytest.mark.parametrize(
    ("text", "about", "said"),
    [
        ("2 0.5 0.5 0.5 0.5\n", None, r"0.txt, line 1: .* a class from 0 to 1"),
        ("0 0.5 0.5 0.5\n", None, r"0.txt, line 1"),
        ("0 0.1 0.1 0.5 nan\n", None, r"0.txt, line 1"),
        ("", "train: train/images\nval: valid/images\n", "names no classes"),
        ("", "train: train/images\nval: absent\nnames: [a]\n", "The images of val are not there"),
        ("", "train: train.txt\nnames: [a]\n", "Read are folders of images"),
        ("", "train: train/images\nnames: {0: a, 1: b}\n", "no validation split"),
    ],
)
def test_what_is_wrong_with_a_set_of_yolo(
    yolo: Folder, tmp_path: Path, text: str, about: str | None, said: str
) -> None:
    source = yolo(text, about) if about else yolo(text)
    with pytest.raises(InputError, match=said):
        import_folder(source, None, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cityscapes_has_its_19_classes(tmp_path: Path) -> None:
    values = np.full((HEIGHT, WIDTH), 7, np.uint8)
    values[:4], values[4:6], values[6] = 26, 3, 33  # car, void, bicycle
    for split in ("train", "val"):
        image(tmp_path / "in" / "leftImg8bit" / split / "ulm" / "ulm_0_leftImg8bit.png", len(split))
        mask(tmp_path / "in" / "gtFine" / split / "ulm" / "ulm_0_gtFine_labelIds.png", values)
    import_folder(tmp_path / "in", None, None, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out", "train")
    assert (dataset.class_names[0], len(dataset.class_names)) == ("road", 19)
    assert dataset.load(0).mask[[0, 4, 6, 8], 0].tolist() == [13, 255, 18, 0]
    (tmp_path / "in" / "gtFine" / "val" / "ulm" / "ulm_0_gtFine_labelIds.png").unlink()
    with pytest.raises(InputError, match=r"no gtFine/val/ulm/ulm_0_gtFine_labelIds\.png"):
        import_folder(tmp_path / "in", None, None, tmp_path / "again")


def nnunet(root: Path, about: dict[str, Any]) -> Path:
    for number in range(6):
        image(root / "imagesTr" / f"case_{number}_0000.png", number)
        mask(root / "labelsTr" / f"case_{number}.png", HALF)
    usual = {"channel_names": {"0": "RGB"}, "labels": {"background": 0, "road": 1}, "file_ending": ".png"}
    (root / "dataset.json").write_text(json.dumps(usual | about))
    return root


def test_images_of_nnunet(tmp_path: Path) -> None:
    source = nnunet(tmp_path / "in", {"labels": {"ignore": 2, "road": 1, "background": 0}})  # numbers say the order
    import_folder(source, None, None, tmp_path / "out", val_share=0.4)
    assert open_dataset(tmp_path / "out", "val").class_names == ("background", "road")
    for about, said in (
        ({"file_ending": ".nii.gz"}, "of volumes .*read where it is"),
        ({"labels": {"background": 0, "whole": [1, 2]}}, "Read are numbers from 0 without gaps"),
    ):
        with pytest.raises(InputError, match=said):
            import_folder(nnunet(tmp_path / "in", about), None, None, tmp_path / "again", val_share=0.4)
    image(source / "imagesTr" / "case_0_0001.png", 1)
    with pytest.raises(InputError, match="channels in files of their own"):
        import_folder(nnunet(tmp_path / "in", {}), None, None, tmp_path / "again", val_share=0.4)


def test_the_command(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.cli.main import app
    from typer.testing import CliRunner

    folder()
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    (tmp_path / "coco" / "annotations" / "instances_train.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    two = ["--images", "in/images", "--masks", "in/labels", "--mask-suffix", "_L", "--val-share", "0.3"]
    for arguments, code, text in (
        ([*two, "--out", "a"], 0, "fp4deploy train --data a"),
        (["in", *two[4:], "--out", "b"], 0, "Binary masks"),
        ([*two[:2], *two[4:], "--out", "c"], 0, "Binary masks"),
        (["--out", "d"], 2, "Nothing to import"),
        (["in", "--masks", "in/labels", "--out", "d"], 2, "Give one of"),
        (["coco", "--out", "d"], 2, "coco is a dataset already"),
        (["in/images", "--out", "d"], 2, "has none of the layouts"),
    ):
        result = CliRunner().invoke(app, ["data", "import", *arguments])
        assert (result.exit_code, text in result.stderr) == (code, True), result.output
    result = CliRunner().invoke(app, ["data", "check", "a"])
    assert (result.exit_code, "width x height 16 x 12" in result.stdout) == (0, True)
    result = CliRunner().invoke(app, ["data", "check", "in"])
    assert "fp4deploy data import" in result.stderr


def test_every_split_has_its_share_of_the_images(tmp_path: Path) -> None:
    """To four standard deviations; where an image goes depends on itself and the seed alone."""
    places = {str(number): tmp_path / str(number) for number in range(600)}
    for name, path in places.items():
        path.write_text(name)
    for val, test in ((0.1, 0.3), (0.3, 0.1), (0.25, 0.25), (0.0, 0.2), (0.2, 0.0)):
        found = divide(places, {"val": val, "test": test}, seed=3)
        for split, share in (("val", val), ("test", test), ("train", 1 - val - test)):
            away = abs(list(found.values()).count(split) - 600 * share)
            assert away <= 4 * (600 * share * (1 - share)) ** 0.5, (split, share)
        some = dict(list(places.items())[::7])
        assert divide(some, {"val": val, "test": test}, seed=3) == {name: found[name] for name in some}
        assert divide(places, {"val": val, "test": test}, seed=4) != found


def cityscapes(root: Path) -> Path:
    for number, split in enumerate(("train", "val")):
        image(root / "leftImg8bit" / split / "ulm" / "ulm_0_leftImg8bit.png", number)
        mask(root / "gtFine" / split / "ulm" / "ulm_0_gtFine_labelIds.png", HALF * 19 + 7)
    return root


@pytest.mark.parametrize("layout", ["siblings", "yolo", "cityscapes", "nnunet"])
def test_where_a_folder_lies_changes_nothing(layout: str, folder: Folder, yolo: Folder, tmp_path: Path) -> None:
    """Its parents may be called as a folder inside is."""
    made: dict[str, Callable[[], Path]] = {
        "siblings": folder,
        "yolo": lambda: yolo("1 0.5 0.5 0.5 0.5\n"),
        "cityscapes": lambda: cityscapes(tmp_path / "in"),
        "nnunet": lambda: nnunet(tmp_path / "in", {}),
    }
    source = made[layout]()
    options: dict[str, Any] = {"siblings": {"suffix": "_L", "val_share": 0.3}, "nnunet": {"val_share": 0.3}}.get(
        layout, {}
    )
    moved = shutil.copytree(
        source, tmp_path.joinpath("images", "labels", "train", "masks", "leftImg8bit", "val", "set")
    )
    found = []
    for number, root in enumerate((source, moved)):
        out = tmp_path / f"out{number}"
        import_folder(root, None, None, out, **options)
        found.append({path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert len(found[0]) > 2
    assert found[0] == found[1]


def test_photos_are_not_their_masks(folder: Folder) -> None:
    """A folder of siblings holds ten photos, of which every fifth is kept to compare on."""
    source = folder()
    names = [
        [each.load(at).name for at in range(len(each))] for each in (PhotoDataset(source, s) for s in ("train", "val"))
    ]
    assert (len(names[0]), len(names[1]), names[1]) == (8, 2, ["4.jpg", "9.jpg"])
    assert len(PhotoDataset(source / "labels")) == 10, "asked for by itself"
    assert are_photos(source)
    assert not are_photos(imported(source))
