"""Small prepared models and their canonical graphs, each traced once for all tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.verify.agreement import OutputAgreement
from fp4deploy.models import build_unet
from fp4deploy.models.meaning import Classes
from fp4deploy.qat import calibrate, prepare, round_to_deployed
from tests.shallow import cached

UNET_SHAPE = (3, 32, 32)


def pixels_that_differ(pixels: int, differing: int) -> tuple[OutputAgreement, ...]:
    """The agreement of one class map."""
    return (OutputAgreement("logits", Classes(1), pixels, differing),)


class Shapes(nn.Module):
    """Every layer form the exporter promises: padding to 16 channels, stride, dilation, groups, reuse, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.strided = nn.Conv2d(24, 8, 3, stride=2, padding=1)
        self.dilated = nn.Conv2d(8, 32, 3, padding="same", dilation=2)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=2, bias=False)
        self.pointwise = nn.Conv2d(32, 32, 1)
        self.up = nn.ConvTranspose2d(64, 24, 3, stride=2, padding=1, output_padding=1)
        self.tokens = nn.Linear(24, 20)
        self.pooled = nn.Linear(20, 16, bias=False)
        self.last = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.dilated(torch.relu(self.strided(x))))
        skip = x
        x = torch.relu(self.pointwise(self.pointwise(self.grouped(x))))
        x = torch.relu(self.up(torch.cat([skip, x], dim=1)))
        x = torch.relu(self.tokens(x.flatten(2).transpose(1, 2)))
        return self.last(self.pooled(x.mean(dim=1)))


def images(count: int, shape: tuple[int, ...] = UNET_SHAPE, seed: int = 1) -> torch.Tensor:
    """Random inputs [count, *shape] that are exact in FP16."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed)).half().float()


def prepared(model: nn.Module, recipe: str | None, shape: tuple[int, ...] = UNET_SHAPE) -> nn.Module:
    """Random affine parameters, quantised layers calibrated, everything else rounded to FP16."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    if recipe:
        prepare(model, recipe)
        calibrate(model, [images(4, shape)])
    round_to_deployed(model)
    return model.eval()


@cached
def unet(recipe: str | None = "nvfp4_qat") -> tuple[nn.Module, onnx.ModelProto]:
    """A UNet of scale 0.25 at 32x32 with 5 classes, and its canonical graph."""
    torch.manual_seed(0)
    model = prepared(build_unet(5, 0.25), recipe)
    return model, export_graph(model, UNET_SHAPE)


@cache
def shapes() -> tuple[nn.Module, onnx.ModelProto]:
    """The model with every layer form, and its canonical graph."""
    torch.manual_seed(0)
    model = prepared(Shapes(), "nvfp4_qat", (3, 16, 24))
    return model, export_graph(model, (3, 16, 24))


def traced_once(trace: Callable[..., onnx.ModelProto]) -> Callable[..., onnx.ModelProto]:
    """`export_graph` that traces a model once: for equal tensors, layers and arguments it gives a copy."""
    kept: dict[tuple[str, str, str], bytes] = {}

    def traced(model: nn.Module, *arguments: object, **options: object) -> onnx.ModelProto:
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
        key = digest.hexdigest(), repr(model), repr((arguments, options))
        if key not in kept:
            kept[key] = trace(model, *arguments, **options).SerializeToString()
        return onnx.ModelProto.FromString(kept[key])

    return traced


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    """The initialiser of that name."""
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def reference_logits(model: onnx.ModelProto, x: torch.Tensor) -> np.ndarray:
    """What ONNX's reference evaluator computes, float32."""
    return ReferenceEvaluator(model).run(None, {"image": x.numpy().astype(np.float16)})[0].astype(np.float32)
