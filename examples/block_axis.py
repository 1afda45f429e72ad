"""What an emulator hides when its blocks do not follow the contraction axis.

    python examples/block_axis.py

A tensor core multiplies 16 neighbours of the contracted axis under one scale: for a convolution, 16 input channels of
one tap. An emulator may put its blocks anywhere and still print an accuracy. Three placements, for the inner 3x3
convolutions of a small UNet trained in FP32 on generated shapes:

    placement    activation [N, C, H, W]    weight [O, C, 3, 3]                         can be executed
    channels     along C                    along C                                     yes
    flattened    along C                    along C*3*3 flattened: blocks cross taps    no
    width        along W                    along the kernel's width, 3 of 16 filled    no

The network is quantised after training: as trained, and after an exact change of variables that multiplies each
channel between the two convolutions of a block by a power of two in GroupNorm and divides the next weight by it. In
FP32 all these networks are equal bit by bit. Channels of different scale then share a block along C, as they would on
the hardware; blocks along the width stay within one channel and see nothing.

Errors are root mean squares relative to the exact tensor; an output's error is that of one convolution fed by the FP32
network. `pixels changed` and mIoU are of the whole network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.bench.environment import environment
from fp4deploy.data import EvalTransform, TrainTransform, eval_loader, open_dataset, train_loader
from fp4deploy.data.generated.shapes import generate_shapes
from fp4deploy.formats import fake_quantize_nvfp4
from fp4deploy.metrics import SegmentationScore
from fp4deploy.models.unet import Block, UNet, build_unet
from fp4deploy.train.losses.segmentation import SegmentationLoss

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """One placement on one network; errors relative, changed pixels and mIoU in percent."""

    network: str
    placement: str
    activation_error: float
    weight_error: float
    output_error: float
    pixels_changed: float
    miou: float


def quantize_activation(x: torch.Tensor, placement: str) -> torch.Tensor:
    """x [N, C, H, W], dynamic global scale."""
    return fake_quantize_nvfp4(x, (-1 if placement == "width" else 1,))[0]


def quantize_weight(weight: torch.Tensor, placement: str) -> torch.Tensor:
    """Weight [O, C, KH, KW]."""
    if placement == "flattened":
        return fake_quantize_nvfp4(weight.flatten(1), (1,))[0].view_as(weight)
    return fake_quantize_nvfp4(weight, (-1 if placement == "width" else 1,))[0]


PLACEMENTS = ("channels", "flattened", "width")


def inner_convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    """The 3x3 convolutions but the first."""
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)}
    return dict(list(found.items())[1:])


def train_unet(folder: Path, epochs: int, images: int, size: int) -> tuple[UNet, Batches]:
    """A UNet of scale 0.25 trained in FP32 on generated shapes, and the validation batches."""
    generate_shapes(folder, images, max(8, images // 4), size, 0)
    data, validation = (open_dataset(folder, split) for split in ("train", "val"))
    torch.manual_seed(0)
    model = build_unet(len(data.class_names), 0.25)
    loader = train_loader(data, TrainTransform(size, size), 8)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, epochs * len(loader), pct_start=0.1)
    criterion = SegmentationLoss()
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch, masks in loader:
            loss = criterion(model(batch), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {epochs}, loss {loss.item():.3f}", flush=True)
    return model.eval(), list(eval_loader(validation, EvalTransform(size, size), 8))


@torch.no_grad()
def scale_channels(model: UNet, octaves: int) -> UNet:
    """The same function, the channels between a block's convolutions multiplied by 2^k, k in -octaves .. octaves."""
    model = deepcopy(model)
    random = torch.Generator().manual_seed(0)
    for block in model.modules():
        if isinstance(block, Block):
            channels = block.norm1.num_channels
            factor = torch.exp2(torch.randint(-octaves, octaves + 1, (channels,), generator=random).float())
            block.norm1.weight *= factor
            block.norm1.bias *= factor
            block.conv2.weight /= factor.view(1, -1, 1, 1)
    return model


@contextmanager
def quantized(model: nn.Module, placement: str) -> Iterator[nn.Module]:
    """A copy of the network whose inner convolutions are quantised by `placement`."""
    copy = deepcopy(model)
    for layer in inner_convolutions(copy).values():
        layer.weight.data = quantize_weight(layer.weight.data, placement)
        layer.register_forward_pre_hook(lambda _, inputs: (quantize_activation(inputs[0], placement),))
    yield copy


@torch.no_grad()
def layer_errors(model: nn.Module, images: torch.Tensor, placement: str) -> tuple[float, float, float]:
    """Mean over the inner convolutions of the relative errors of activation, weight and output."""
    layers = inner_convolutions(model)
    inputs: dict[str, torch.Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0]}))
        for name, layer in layers.items()
    ]
    model(images)
    for handle in handles:
        handle.remove()
    errors = []
    for name, layer in layers.items():
        x, weight = inputs[name], layer.weight
        xq, wq = quantize_activation(x, placement), quantize_weight(weight, placement)
        exact, found = F.conv2d(x, weight, padding=1), F.conv2d(xq, wq, padding=1)
        errors.append([relative(xq, x), relative(wq, weight), relative(found, exact)])
    activation, weight_error, output = (statistics.fmean(column) for column in zip(*errors, strict=True))
    return activation, weight_error, output


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of `exact`."""
    return ((value - exact).norm() / exact.norm()).item()


@torch.no_grad()
def score(model: nn.Module, batches: Batches, classes: int) -> tuple[torch.Tensor, float]:
    """Predicted classes of all pixels, and mIoU in percent."""
    scores, predictions = SegmentationScore(classes, [str(index) for index in range(classes)]), []
    for images, masks in batches:
        predictions.append(model(images).argmax(1))
        scores.update(predictions[-1], masks)
    return torch.cat(predictions), 100 * scores.compute().miou


def compare(model: UNet, batches: Batches, network: str) -> list[Row]:
    """FP32 first, then each placement."""
    exact, miou = score(model, batches, model.classes)
    rows = [Row(network, "FP32", 0.0, 0.0, 0.0, 0.0, miou)]
    for placement in PLACEMENTS:
        errors = layer_errors(model, batches[0][0], placement)
        with quantized(model, placement) as copy:
            prediction, miou = score(copy, batches, model.classes)
        changed = 100 * (prediction != exact).float().mean().item()
        rows.append(Row(network, placement, *errors, changed, miou))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="What blocks off the contraction axis hide.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=256, help="training images (default 256)")
    parser.add_argument("--size", type=int, default=96, help="height and width, a multiple of 16 (default 96)")
    parser.add_argument(
        "--octaves", type=int, nargs="+", default=[2, 4], help="multiply channels by 2^-octaves .. 2^octaves"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order on any number of cores
    with tempfile.TemporaryDirectory() as folder:
        model, batches = train_unet(Path(folder) / "shapes", arguments.epochs, arguments.images, arguments.size)
    rows, equal = compare(model, batches, "as trained"), True
    for octaves in arguments.octaves:
        scaled = scale_channels(model, octaves)
        with torch.no_grad():
            equal &= torch.equal(model(batches[0][0]), scaled(batches[0][0]))
        rows += compare(scaled, batches, f"channels times 2^-{octaves} .. 2^{octaves}")
    print(f"\nFP32 logits of all networks equal bit by bit: {equal}\n")
    print("| network | placement | activation error | weight error | output error | pixels changed | mIoU |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        errors = (row.activation_error, row.weight_error, row.output_error)
        cells = [f"{error:.3f}" for error in errors] if row.placement != "FP32" else [""] * 3
        changed = f"{row.pixels_changed:.2f} %" if row.placement != "FP32" else ""
        print(f"| {' | '.join([row.network, row.placement, *cells, changed, f'{row.miou:.2f}'])} |")
    if arguments.json:
        _write(arguments, equal, rows)


def _write(arguments: argparse.Namespace, equal: bool, rows: list[Row]) -> None:
    machine = environment() | {"packages": {"torch": torch.__version__}}
    del machine["platform"]
    settings = {name: getattr(arguments, name) for name in ("epochs", "images", "size", "octaves")}
    content: dict[str, Any] = {
        "command": "python examples/block_axis.py",
        "date": date.today().isoformat(),
        "machine": machine,
        "settings": settings,
        "fp32_logits_equal": equal,
        "rows": [asdict(row) for row in rows],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
