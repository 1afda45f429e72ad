"""`quantize` and `search` on the command line: from a checkpoint to one that bench and export take."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fp4deploy.bench.change import measure_change
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data import EvalTransform, validation_set
from fp4deploy.data.part import part_of
from fp4deploy.errors import GateError, InputError, UnavailableError
from fp4deploy.models import read_card, save_checkpoint
from fp4deploy.qat import load_model
from tests.cli.command_line import Invoke


def test_quantize_and_what_it_says_comes_next(invoke: Invoke, checkpoint: Path, shapes: Path) -> None:
    data, few = ("--data", shapes), ("--images", 2, "--batch", 2)
    result = invoke("quantize", checkpoint, *data, *few, "--method", "4/6", "--out", "q.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "q.safetensors (4/6, correction norm, 2 images" in result.stdout
    assert re.search(r"class unchanged against \S+ on \d+\.\d\d % of the pixels; mIoU \d+", result.stderr)
    assert read_card(Path("q.safetensors")).recipe == "nvfp4_4o6_weight_qat"
    compare, export = re.findall(r": fp4deploy (.*?)(?:;|\n|$)", result.stderr)[-2:]
    for command in (compare, export):
        done = invoke(*shlex.split(command))
        assert done.exit_code in (0, 1), done.stderr  # 1: the gate of bench

    gate = ("--baseline", checkpoint, "--max-drop", 100, "--iterations", 1)
    result = invoke("bench", "--engine", "q.safetensors", *data, *gate)
    assert result.exit_code == 0, result.stderr
    assert "Within 100 points" in result.stderr


@pytest.mark.variants
def test_what_a_search_found_is_what_quantize_reads(invoke: Invoke, checkpoint: Path, shapes: Path) -> None:
    """Its file as settings, in `make test`: tests/experiments/test_search.py."""
    data, few = ("--data", shapes), ("--images", 2, "--batch", 2)
    result = invoke("search", checkpoint, *data, *few, "--budget", "drop=100", "--out", "found")
    assert result.exit_code == 0, result.stderr
    assert "in INT8: mIoU" in result.stdout
    result = invoke(
        "quantize", checkpoint, *data, *few, "--method", "amax", "--config", "found/precision.yaml", "--digits",
        "--out", "all.safetensors",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    card = read_card(Path("all.safetensors"))
    assert card.digits
    assert card.include


def test_what_quantize_and_search_refuse(invoke: Invoke, checkpoint: Path, shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"")
    for arguments, message in (
        (("quantize", checkpoint, "--data", shapes, "--method", "gtpq"), "Did you mean 'gptq'"),
        (("quantize", "x.txt", "--data", shapes), "quantize takes a checkpoint"),
        (("quantize", checkpoint, "--data", shapes, "--size", "64"), "a checkpoint of fp4deploy says them itself"),
        (("quantize", "absent.safetensors", "--data", shapes), "There is no checkpoint at absent.safetensors"),
        (("quantize", checkpoint, "--data", shapes, "--correction", "no"), "--correction is 'no'"),
        (("quantize", checkpoint, "--data", shapes, "--out", checkpoint), "is the FP16 checkpoint"),
        (("search", checkpoint, "--data", shapes, "--budget", "fast"), "It takes drop=POINTS, bytes=COUNT"),
        (("search", checkpoint, "--data", shapes, "--budget", "ms=1", "--arch", "sm75"), "no published peaks"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, result.stderr
        assert message in result.stderr
    assert not list(tmp_path.glob("*.safetensors"))


def test_what_quantising_changed_is_counted(
    checkpoint: Path, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against itself nothing; against a head that prefers one class, the pixels that had another."""
    monkeypatch.setattr("fp4deploy.bench.evaluate.BATCH", 1)
    same = measure_change(checkpoint, checkpoint, shapes, 2)
    assert (same.images, same.unchanged, same.metric) == (2, 1.0, "mIoU")
    assert same.before == same.after
    card, model = read_card(checkpoint), load_model(checkpoint)[0]
    model.head.bias.data[3] += 1e4
    save_checkpoint(tmp_path / "other.safetensors", model, card)
    other = measure_change(checkpoint, tmp_path / "other.safetensors", shapes, 2)
    runtime = open_runtime(checkpoint)
    dataset = part_of(validation_set(card, shapes), 2)
    transform = EvalTransform(card.height, card.width, card.mean, card.std)
    images = np.stack([transform(dataset.load(place))[0].numpy() for place in range(2)])
    assert other.unchanged == pytest.approx(float((runtime.infer(images).argmax(1) == 3).mean()))
    assert other.before == same.before
    assert "; 2 images." in other.sentence("fp16.safetensors")


def test_a_drop_that_is_not_excluded_fails_the_command(
    invoke: Invoke, checkpoint: Path, shapes: Path, tmp_path: Path
) -> None:
    """Of two models that differ at least one is not shown to be as good as the other."""
    card, model = read_card(checkpoint), load_model(checkpoint)[0]
    model.head.bias.data[3] += 1e4
    save_checkpoint(tmp_path / "other.safetensors", model, card)
    codes = []
    for one, other in ((checkpoint, "other.safetensors"), ("other.safetensors", checkpoint)):
        given = ("--engine", one, "--baseline", other, "--data", shapes, "--iterations", 1, "--max-drop", 0)
        result = invoke("bench", *given, "--json", "out.json")
        (gate,) = json.loads((tmp_path / "out.json").read_text())["gate"]
        assert gate["max_drop"] == 0  # a number like any other, not the default
        failed = not gate["passed"]
        assert result.exit_code == failed, result.stderr
        codes.append(result.exit_code)
    assert 1 in codes


@pytest.mark.parametrize("error", [InputError, UnavailableError, GateError])
def test_what_cannot_be_compared_leaves_what_is_written(
    error: type[Exception], invoke: Invoke, checkpoint: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error("no labels")

    monkeypatch.setattr("fp4deploy.bench.change.measure_change", refuse)
    few = ("--images", 2, "--method", "amax", "--correction", "none", "--out", "q.safetensors")
    result = invoke("quantize", checkpoint, "--data", shapes, *few)
    assert result.exit_code == 0, result.stderr
    assert "was not compared with its source: no labels" in result.stderr
    assert read_card(Path("q.safetensors")).precision == "nvfp4"
    assert "compared" not in invoke("quantize", checkpoint, "--data", shapes, *few, "--compare", 0).stderr
