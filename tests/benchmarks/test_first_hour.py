"""The walk of docs/first-hour.md is the one that is measured, on files as the page begins with."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.first_hour import COMMANDS, begin
from fp4deploy.data import import_folder, open_dataset
from fp4deploy.models import name_model, parse_spec
from fp4deploy.models.build import build_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "first-hour.md"


def test_the_page_has_the_commands_that_are_measured() -> None:
    page = re.sub(r" \\\n +", " ", PAGE.read_text(encoding="utf-8"))
    assert [line for line in page.splitlines() if line.startswith("fp4deploy ")] == list(COMMANDS)


def test_the_walk_begins_with_files_of_no_known_layout(tmp_path: Path) -> None:
    begin(tmp_path, 5)
    assert np.unique(np.array(Image.open(tmp_path / "labels" / "000_L.png"))).tolist() == [0, 255]
    more = {"suffix": "_L", "val_share": 0.4, "classes": ("floor", "ball")}
    import_folder(None, tmp_path / "photos", tmp_path / "labels", tmp_path / "ball", **more)
    assert open_dataset(tmp_path / "ball", "train").class_names == ("floor", "ball")
    spec = f"{tmp_path / 'net.py'}:make"
    name_model(spec)
    assert build_model(parse_spec(spec), 2).head.out_channels == 2
