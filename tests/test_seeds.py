"""What takes a seed gives the same for the same one, and something else for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp4deploy.bench.gate.bootstrap import _draws
from fp4deploy.data import Sample, generate_shapes
from fp4deploy.data.augmentation.transforms import TrainTransform
from fp4deploy.data.augmentation.volumes import VolumeTrainTransform
from fp4deploy.data.importing.splits import divide
from fp4deploy.data.loader import EpochSampler
from fp4deploy.ptq import quantize
from fp4deploy.ptq.quantize import hessians_of
from fp4deploy.qat import calibrate, prepare

RANDOM = np.random.default_rng(0)
IMAGE = Sample(RANDOM.integers(0, 255, (32, 32, 3), np.uint8), RANDOM.integers(0, 3, (32, 32), np.uint8), "i")
VOLUME = Sample(RANDOM.random((1, 8, 8, 8), np.float32), RANDOM.integers(0, 3, (8, 8, 8), np.uint8), "v")
BATCHES = [torch.randn(1, 16, 6, 6) * 4**power for power in range(4)]


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1))


def learned(method: str) -> Callable[[int, Path], Any]:
    def of(seed: int, _: Path) -> Any:
        model = layer()
        quantize(model, BATCHES, method, include="0", iterations=30, correction="none", seed=seed)
        return model[0].weight.detach().numpy()  # type: ignore[index]

    return of


def sampled(seed: int, _: Path) -> Any:
    model = prepare(layer(), include="0")
    calibrate(model, BATCHES)
    wide = torch.randn(1, 16, 50, 50, generator=torch.Generator().manual_seed(0))
    return hessians_of(model, [wide], seed)["0"].numpy()


def shapes(seed: int, folder: Path) -> Any:
    out = folder / f"{seed}.{len(list(folder.iterdir()))}"
    generate_shapes(out, 1, 1, 32, seed)
    return b"".join(path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file())


def divided(seed: int, folder: Path) -> Any:
    for number in range(40):
        (folder / f"{number}.png").write_bytes(str(number).encode())
    return sorted(divide({path.name: path for path in folder.iterdir()}, {"val": 0.5}, seed).items())


SEEDED: dict[str, Callable[[int, Path], Any]] = {
    "shapes": shapes,
    "import": divided,
    "order": lambda seed, _: list(EpochSampler(9, seed)),
    "images": lambda seed, _: TrainTransform(32, 32, seed=seed)(IMAGE, 0, 0)[0].numpy(),
    "volumes": lambda seed, _: VolumeTrainTransform((4, 4, 4), seed=seed)(VOLUME, 0, 0)[0].numpy(),
    "bootstrap": lambda seed, _: next(_draws(9, 5, seed)),
    "hessians": sampled,
    **{method: learned(method) for method in ("adaround", "brecq", "faar")},
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_decides(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    of = SEEDED[name]
    first = of(0, tmp_path)
    torch.manual_seed(8)
    np.testing.assert_equal(of(0, tmp_path), first, "whatever other random numbers are drawn")
    assert any(not np.array_equal(of(seed, tmp_path), first) for seed in (1, 2))
