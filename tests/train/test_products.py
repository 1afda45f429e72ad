"""`train.products=fp4` reaches the layers of a training."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fp4deploy.qat.fp4_gemms import dispatch
from fp4deploy.runs import create_run
from fp4deploy.train import Config, train_models, with_settings


def test_a_training_multiplies_packed_operands(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(("fprop", "dgrad", "wgrad"), 0)

    def counted(name: str) -> None:
        original = getattr(dispatch, name)

        def count(*arguments: object) -> object:
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(dispatch, name, count)

    for name in counts:
        counted(name)
    run = create_run(tmp_path / "run")
    settings = [
        "recipe=nvfp4_train",
        "train.products=fp4",
        "train.epochs=1",
        "telemetry.every=0",
        "quant.include=['decoder.0.conv2']",
    ]
    train_models(with_settings(tiny, settings), run, ("nvfp4",), from_scratch=True)
    (line,) = [json.loads(text) for text in (run.model_dir("nvfp4") / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(line["loss"])
    assert counts["fprop"] > counts["dgrad"] == counts["wgrad"] > 0  # the validation has a forward only
