"""Post-training quantisation as a model of a run: no step, the same files, the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.errors import InputError
from fp4deploy.models import read_card
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, train_models, with_settings
from fp4deploy.train.loop import Trainer
from tests.train.launch import copy_of


def test_ptq_is_the_fp16_model_calibrated(
    tiny: Config, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_of(tiny_run, tmp_path / "run", ["fp16"])
    result = train_models(tiny, run, ("nvfp4_ptq",))["nvfp4_ptq"]
    assert run.models() == ["fp16", "nvfp4_ptq"]
    assert result.epochs == 0
    (line,) = [json.loads(text) for text in (run.model_dir("nvfp4_ptq") / "metrics.jsonl").open()]
    assert (line["epoch"], line["step"], line["loss"]) == (0, 0, None)
    assert line["miou"] == result.best_score
    before, after = load_file(run.checkpoint("fp16")), load_file(run.checkpoint("nvfp4_ptq"))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(after[name] > 0 for name in after.keys() - before.keys())
    card = read_card(run.checkpoint("nvfp4_ptq"))
    assert (card.precision, card.recipe) == ("nvfp4", "nvfp4_qat")
    assert len(quantized_layers(load_model(run.checkpoint("nvfp4_ptq"))[0])) == 11

    def never(self: Trainer) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(Trainer, "evaluate", never)
    assert train_models(tiny, run, ("nvfp4_ptq",), resume=True)["nvfp4_ptq"].best_score == result.best_score


def test_ptq_needs_a_finished_fp16(tiny: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fine-tuned from an FP16 checkpoint"):
        train_models(tiny, create_run(tmp_path / "run"), ("nvfp4_ptq",))


def test_the_choice_of_layers_reaches_the_checkpoint(tiny: Config, tiny_run: Run, tmp_path: Path) -> None:
    run, start = create_run(tmp_path / "run"), f"train.init_checkpoint={tiny_run.checkpoint('fp16')}"
    chosen = ["quant.include=['*']", "quant.exclude=[head]", "quant.percentile=99", "train.finetune_epochs=1"]
    train_models(with_settings(tiny, [*chosen, start]), run, ("fp16_control", "nvfp4_ptq", "nvfp4"))
    for model in ("nvfp4_ptq", "nvfp4"):
        layers = quantized_layers(load_model(run.checkpoint(model))[0])
        assert "encoder.0.conv1" in layers
        assert "head" not in layers
    assert read_card(run.checkpoint("fp16_control")).include is None
    with pytest.raises(InputError, match="No layer matches 'haed'"):
        train_models(
            with_settings(tiny, ["quant.exclude=[haed]", "train.from_scratch=true"]),
            create_run(tmp_path / "x"),
            ("nvfp4",),
        )


def test_dynamic_scales_need_no_calibration(tiny: Config, tiny_run: Run, tmp_path: Path) -> None:
    run, start = create_run(tmp_path / "run"), f"train.init_checkpoint={tiny_run.checkpoint('fp16')}"
    settings = ["recipe=nvfp4_qat+dynamic", "train.finetune_epochs=1", start]
    train_models(with_settings(tiny, settings), run, ("nvfp4",))
    assert not [name for name in load_file(run.checkpoint("nvfp4")) if name.endswith("input_amax")]
    load_model(run.checkpoint("nvfp4"))
