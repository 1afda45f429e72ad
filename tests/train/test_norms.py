"""Statistics of batch norms measured again: their numbers, what is kept, and that training does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.data import expand
from fp4deploy.models import spec
from fp4deploy.qat import load_model
from fp4deploy.runs import create_run
from fp4deploy.train import Config, train_models, with_settings
from fp4deploy.train.batches import make_loaders
from fp4deploy.train.models import open_splits
from fp4deploy.train.norms import NormStatistics
from tests.train.small_network import NORMED, Normed

MEAN, VARIANCE = "norm.running_mean", "norm.running_var"


def test_statistics_are_the_means_over_batches_and_the_own_ones_come_back() -> None:
    torch.manual_seed(0)
    model = Normed(4).eval()
    batches = [torch.randn(2, 3, 8, 8) * scale for scale in (1.0, 3.0)]
    with torch.no_grad():
        seen = [model.body(torch.relu(model.stem(x))).movedim(1, 0).flatten(1) for x in batches]
    own = {name: value.clone() for name, value in model.norm.named_buffers()}
    statistics = NormStatistics(model)
    with statistics.applied():
        assert all(torch.equal(value, own[name]) for name, value in model.norm.named_buffers())
    statistics.measure(model, batches)
    with pytest.raises(KeyError), statistics.applied():
        torch.testing.assert_close(model.norm.running_mean, torch.stack([x.mean(1) for x in seen]).mean(0))
        torch.testing.assert_close(model.norm.running_var, torch.stack([x.var(1) for x in seen]).mean(0))
        raise KeyError
    assert all(torch.equal(value, own[name]) for name, value in model.norm.named_buffers())
    assert not model.norm.training
    assert model.norm.momentum == 0.1


def test_a_checkpoint_has_the_measured_ones_and_the_training_its_own(tiny: Config, tmp_path: Path) -> None:
    spec.name_model(NORMED)
    settings = [f"model.spec={NORMED}", "train.from_scratch=true", "train.ema=0.9", "train.epochs=2"]
    files = []
    for count in (0, 2):
        config = with_settings(tiny, [*settings, f"train.norm_batches={count}"])
        run = create_run(tmp_path / str(count))
        train_models(config, run, ("nvfp4",))
        state = load_file(run.model_dir("nvfp4") / "state/last.safetensors")
        files.append((load_file(run.checkpoint("nvfp4")), state, run.checkpoint("nvfp4")))
    (tracked, state, _), (measured, other, checkpoint) = files
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in state.items())  # the training did not notice
    assert torch.equal(tracked["body.weight"], measured["body.weight"])
    assert not torch.equal(tracked[MEAN], measured[MEAN])
    model, _ = load_model(checkpoint)
    loader, _ = make_loaders(config, *open_splits(config))
    statistics = NormStatistics(model)
    statistics.measure(model, [expand(*batch)[0] for batch in loader.first(2)])
    with statistics.applied():
        for name in (MEAN, VARIANCE):
            torch.testing.assert_close(measured[name], model.state_dict()[name], rtol=2e-3, atol=2e-3)


def test_first_batches_are_those_of_the_first_epoch(tiny: Config) -> None:
    loader, _ = make_loaders(tiny, *open_splits(tiny))
    loader.set_epoch(1)
    first = list(loader.first(99))
    loader.set_epoch(0)
    assert len(first) == len(loader)
    for one, other in zip(first, loader, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
