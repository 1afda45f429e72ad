"""Networks and weights whose values are made of integers, so that no generator and no sum of a platform enters them."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4deploy.export import export_graph
from fp4deploy.formats import FourOverSix
from fp4deploy.plugins import FP4WeightCache, fp4_quantize
from fp4deploy.qat import prepare, round_to_deployed
from tests.contract import internals

CLASSES, SCALE, SIZE = 5, 0.125, 32
RECIPE = "nvfp4_qat"


def hashed(shape: tuple[int, ...], seed: int, period: int | None = None) -> torch.Tensor:
    """float32 multiples of 1/256 in [-1, 1): a multiplicative hash of each position, exact on any machine."""
    count = 1
    for size in shape:
        count *= size
    numbers = torch.arange(count, dtype=torch.int64)
    if period is not None:
        numbers = numbers % period
    mixed = ((numbers + 7919 * (seed + 1)) * 2654435761) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return (((mixed >> 13) & 511) - 256).to(torch.float32).reshape(shape) / 256


@torch.no_grad()
def fill(model: nn.Module, period: int | None = None) -> nn.Module:
    """Give every parameter and every static amax a value of its own."""
    for seed, (name, value) in enumerate(sorted(model.state_dict().items())):
        if name.endswith("input_amax"):
            value.copy_(torch.tensor(2 + seed % 7 / 4))
        elif value.ndim == 1 and name.endswith("weight"):  # of a normalisation
            value.copy_(1 + hashed(tuple(value.shape), seed, period) / 4)
        else:
            value.copy_(hashed(tuple(value.shape), seed, period) / 8)
    return model


def checkpoint(path: Path, recipe: str | None = RECIPE, period: int | None = None) -> Path:
    """A checkpoint of a UNet."""
    model = internals.unet(CLASSES, SCALE)
    if recipe:
        prepare(model, recipe)
    internals.save_checkpoint(path, fill(model, period), recipe, CLASSES, SCALE, SIZE)
    return path


class Layers(nn.Module):
    """Layer forms that the UNet lacks: linear layers, stride, dilation, groups, channels that are no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.strided = nn.Conv2d(24, 8, 3, stride=2, padding=1)
        self.dilated = nn.Conv2d(8, 32, 3, padding=2, dilation=2)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(32, 24, 3, stride=2, padding=1, output_padding=1)
        self.tokens = nn.Linear(24, 20)
        self.last = nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.dilated(torch.relu(self.strided(torch.relu(self.first(x))))))
        x = torch.relu(self.up(self.grouped(x)))
        return self.last(torch.relu(self.tokens(x.flatten(2).transpose(1, 2))).mean(dim=1))


def layers_graph() -> Any:
    """The canonical graph of `Layers`."""
    model = fill(prepare(Layers(), RECIPE))
    round_to_deployed(model)
    return export_graph(model.eval(), (3, 16, 24))


def weight_caches() -> dict[str, FP4WeightCache]:
    """Packed weights: linear and convolution, with and without bias and choice of 4 or 6."""
    return {
        "linear": fp4_quantize(hashed((24, 40), 1), hashed((24,), 2)),
        "linear four over six": fp4_quantize(hashed((24, 40), 3), four_over_six=FourOverSix()),
        "convolution": fp4_quantize(hashed((12, 20, 3, 3), 4), hashed((12,), 5)),
    }


def exact_weight() -> tuple[torch.Tensor, torch.Tensor]:
    """A linear weight [24, 48] and bias that NVFP4 holds exactly: E2M1 values times steps of 7/8, 1/2, 1/4 or 1/8.

    The largest value is 5.25 = 6 * 448 / 512, so that the global scale is 1/512 and every block scale is one of E4M3.
    """
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    steps = torch.tensor([0.875, 0.5, 0.25, 0.125])
    numbers = ((hashed((24, 3, 16), 6) + 1) * 256).to(torch.int64)
    codes = values[numbers % 8] * (1 - 2 * (numbers // 8 % 2))
    codes[:, :, 0] = 6.0  # the largest of each block, which the step follows from
    blocks = torch.arange(24 * 3).reshape(24, 3) % 4
    return (codes * steps[blocks][:, :, None]).reshape(24, 48), hashed((24,), 7)


def whole_numbers(*shape: int) -> torch.Tensor:
    """float32 integers from -3 to 3."""
    return torch.floor(hashed(shape, 8) * 3.5 + 0.5)


def sha256(content: bytes | torch.Tensor) -> str:
    """Of bytes, or of a tensor's."""
    if isinstance(content, torch.Tensor):
        content = content.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def unpacked(archive: Path, folder: Path) -> Path:
    """A .gz file's content as a file in a folder."""
    target = folder / archive.stem
    target.write_bytes(gzip.decompress(archive.read_bytes()))
    return target
