"""Hand-made dataset folders that tests break in one place each."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.hand_made import CONTENT, HEIGHT, WIDTH

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def make_coco(tmp_path: Path) -> Callable[..., Path]:
    """Write the folder; `change` edits the content of both annotation files first."""

    def make(change: Change | None = None, name: str = "coco") -> Path:
        root = tmp_path / name
        content = copy.deepcopy(CONTENT)
        if change:
            change(content)
        for seed, split in enumerate(("train", "val")):
            (root / f"{split}2017").mkdir(parents=True)
            for number, image in enumerate(("a.png", "empty.png")):
                pixels = np.random.default_rng(number + 10 * seed).integers(
                    0, 256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8
                )
                Image.fromarray(pixels).save(root / f"{split}2017" / image)
            path = root / "annotations" / f"instances_{split}2017.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content))
        return root

    return make


@pytest.fixture
def make_masks(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder of palette masks with the values 0, 3 and 200."""

    def make(classes: str | None = "sky\nroad\ncar\ntree\n") -> Path:
        root = tmp_path / "masks_set"
        values = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
        values[2:5], values[8:] = 3, 200
        for split in ("train", "val"):
            (root / split).mkdir(parents=True)
            (root / "masks" / split).mkdir(parents=True)
            mask = Image.frombytes("P", (WIDTH, HEIGHT), values.tobytes())
            mask.putpalette([(7 * n) % 256 for n in range(768)])
            mask.save(root / "masks" / split / "x.png")
            colour = (10, 20, 30) if split == "train" else (30, 20, 10)
            Image.new("RGB", (WIDTH, HEIGHT), colour).save(root / split / "x.jpg")
        if classes is not None:
            (root / "classes.txt").write_text(classes)
        return root

    return make
