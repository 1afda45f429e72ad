"""What the checks work on: generated scenes, and a small UNet trained on them for seconds, exported in every form.

Everything is made when a check asks for it, in a temporary folder, from fixed seeds; nothing is downloaded. The small
network is trained for `STEPS` because logits of random weights lie close together: with them, FP16 instead of FP32
activations change the class of 10 % of the pixels, after 40 steps 0.4 % (scale 0.25, 64 x 64 pixels). The large one,
which is only timed, has random weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fp4deploy.architecture import Architecture
from fp4deploy.data import IGNORE, IMAGE_MEAN, IMAGE_STD, EvalTransform, generate_shapes, open_dataset
from fp4deploy.export.engine.build import BuildResult, build_engine
from fp4deploy.export.to_onnx import ExportResult, export_checkpoint
from fp4deploy.export.to_packed import PackedResult, pack
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from fp4deploy.qat import calibrate, prepare
from fp4deploy.tracing import make_no_folder

Precision = Literal["fp16", "nvfp4"]
RECIPE = "nvfp4_qat"
IMAGES = 4
TRAINING_IMAGES, STEPS, BATCH, LEARNING_RATE = 16, 40, 8, 2e-3


@dataclass(frozen=True)
class Size:
    """A UNet of `scale` for images of `height` x `width` pixels."""

    scale: float
    height: int
    width: int


SMALL = Size(0.25, 64, 64)  # compared with torch on the CPU
LARGE = Size(1.0, 352, 480)  # timed on a GPU


class Context:
    """A folder to work in and the device under test."""

    def __init__(self, folder: Path, device: torch.device, small: Size = SMALL, large: Size = LARGE) -> None:
        self.folder, self.device, self.small, self.large = folder, device, small, large
        self.checkpoint = lru_cache(self._checkpoint)

    @property
    def architecture(self) -> Architecture | None:
        """Of the GPU under test; None for the CPU."""
        return Architecture.of_device(self.device.index) if self.device.type == "cuda" else None

    @cached_property
    def data(self) -> Path:
        """Generated scenes in COCO format."""
        out = self.folder / "data"
        generate_shapes(out, train=TRAINING_IMAGES, val=IMAGES, size=max(self.small.height, self.small.width), seed=0)
        return out

    @cached_property
    def images(self) -> torch.Tensor:
        """Scenes that the small network was not trained on, float32 [4, 3, H, W], normalised."""
        return self._scenes("val")[0]

    @cached_property
    def exported(self) -> ExportResult:
        """The small network as canonical and decomposed ONNX, compared with torch.

        Raises:
            GateError: they disagree.
        """
        source = self.checkpoint("nvfp4", self.small)
        return export_checkpoint(source, self.folder / "unet.onnx", portable=True, data=self.data, images=IMAGES)

    @cached_property
    def packed(self) -> PackedResult:
        """The small network as packed file, compared with torch on the CPU.

        Raises:
            GateError: they disagree.
        """
        source = self.checkpoint("nvfp4", self.small)
        return pack(source, self.folder / "unet.fp4", data=self.data, images=IMAGES)

    def build(self, backend: str, arch: str) -> BuildResult:
        """An engine of the small network."""
        return build_engine(self.exported.path, self.folder / f"unet-{backend}.plan", backend, arch)

    def _scenes(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Images float32 [N, 3, H, W] of the small network's size, normalised, and their masks [N, H, W]."""
        dataset = open_dataset(self.data, split)
        transform = EvalTransform(self.small.height, self.small.width, IMAGE_MEAN, IMAGE_STD)
        images, masks = zip(*(transform(dataset.load(index)) for index in range(len(dataset))), strict=True)
        return torch.stack(images), torch.stack(masks)

    def _checkpoint(self, precision: Precision, size: Size) -> Path:
        names = open_dataset(self.data, "val").class_names
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build_unet(len(names), size.scale)
            images = torch.randn(1, 3, size.height, size.width)
            if size == self.small:
                images, masks = self._scenes("train")
                fit(model, images, masks)
            if precision == "nvfp4":
                prepare(model, RECIPE)
                calibrate(model, [images])
        recipe = RECIPE if precision == "nvfp4" else None
        shape = (size.height, size.width)
        card = ModelCard(precision, size.scale, names, *shape, IMAGE_MEAN, IMAGE_STD, True, recipe)
        path = self.folder / f"{precision}-{size.scale:g}-{size.height}x{size.width}.safetensors"
        save_checkpoint(path, model.eval(), card)
        return path


def fit(model: nn.Module, images: torch.Tensor, masks: torch.Tensor) -> None:
    """Train for `STEPS` on random batches, by Adam and cross-entropy; deterministic under torch's seed."""
    make_no_folder()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        batch = torch.randperm(len(images))[:BATCH]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), masks[batch].long(), ignore_index=IGNORE).backward()
        optimizer.step()
