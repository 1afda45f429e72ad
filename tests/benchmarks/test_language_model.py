"""The small language model: it learns, by a recipe as without; one that diverges has an error for a score."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import language_model
from benchmarks.language_model import EVERY, PART, Decoder, Settings, Training, corpus, main, split

TINY = Settings(width=32, depth=1, heads=2, context=16, batch=8, steps=30, lr=1e-2, evaluate_every=10, windows=4)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.dz"
    path.write_bytes(gzip.compress(b"blocks of sixteen share a scale; " * 8000))
    return path


def test_no_byte_is_in_both_parts(text: Path) -> None:
    whole = corpus(text)
    numbered = torch.arange(EVERY * PART + 5)
    train, val = split(numbered)
    assert torch.equal(torch.cat([train, val]).sort().values, numbered)
    assert len(val) == PART + 5
    assert bytes(whole[:6].tolist()) == b"blocks"


@pytest.mark.parametrize("recipe", ["fp16", "tetrajet_v2"])
def test_it_learns(recipe: str, text: Path) -> None:
    found = Training(recipe, 0, TINY, torch.device("cpu")).run(0, *split(corpus(text)))
    assert [line["epoch"] for line in found["curve"]] == [10, 20, 30]
    assert found["bits"] < 3.5  # of 8 before


def test_one_command_makes_the_file_and_a_divergence_is_in_it(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(tasks: Sequence[tuple[str, int]], settings: Settings, path: Path, *_: Any) -> Iterator[dict[str, Any]]:
        for recipe, seed in tasks:
            with monkeypatch.context() as patch:
                if recipe == "tetrajet":
                    patch.setattr(Decoder, "forward", lambda self, x: self.head(self.tokens(x)) * torch.nan)
                yield language_model._train(recipe, seed, settings, path)

    monkeypatch.setattr(language_model, "trained", here)
    monkeypatch.setattr(language_model, "MAX_NOT_FINITE", 2)
    path, sizes = tmp_path / "lm.json", {**vars(TINY), "steps": 30, "evaluate_every": 10}
    options = ["--recipes", "fp16", "nvfp4_sr", "tetrajet", "--seeds", "0"]
    options += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    main(["--text", str(text), "--json", str(path), *options])
    found = json.loads(path.read_text())
    ended = {row["recipe"]: row for row in found["rows"]}
    assert ended["tetrajet"]["error"] == "the loss is not finite at step 20"
    assert ended["fp16"]["bits"] > 0
    assert [gap["recipe"] for gap in found["gaps_bits"]] == ["nvfp4_sr"]
