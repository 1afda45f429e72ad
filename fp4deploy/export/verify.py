"""The gate between torch and ONNX: the twin must answer as the model it was made from.

Both run on the same real validation images, torch with the weights as they ship (`qat.load_model`), and the class of
every pixel is compared. At most 0.1 % of the pixels may differ.

Why not zero: torch and ONNX Runtime add a convolution's terms in different orders, so their results differ in the last
bits, and now and then one of them lies on the other side of a rounding boundary of E2M1. That element then differs by a
whole step, which is enough to move its neighbours in the next layer over their boundaries. In a trained network this
shows in the logits (their largest difference is of the size of a quantisation step) and hardly ever in the classes:
measured on a UNet trained on generated shapes at 96 x 96, 0.005 % of the pixels, as many as when torch itself sees its
input one ulp off, and fewer than between torch's own NCHW and channels_last kernels (0.03 %). FP16 models agree fully.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from fp4deploy.data import EvalTransform, open_dataset
from fp4deploy.errors import GateError, InputError
from fp4deploy.models.card import ModelCard

REQUIRED_AGREEMENT = 0.999


@dataclass(frozen=True)
class Agreement:
    """How far ONNX Runtime and torch agree.

    images, pixels: how much was compared. differing: pixels whose argmax differs.
    largest: the largest absolute difference of two logits.
    """

    images: int
    pixels: int
    differing: int
    largest: float

    @property
    def share(self) -> float:
        """Share of pixels with the same argmax, 0..1."""
        return 1 - self.differing / max(self.pixels, 1)


def portable_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """An ONNX Runtime CPU session of a portable twin."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compare_with_torch(model: nn.Module, portable: onnx.ModelProto, images: Iterable[torch.Tensor]) -> Agreement:
    """Run both on `images` (float32 [N, C, H, W] each) and compare the logits [N, classes, ...] along axis 1."""
    session = portable_session(portable)
    (name,) = (value.name for value in session.get_inputs())
    count = pixels = differing = 0
    largest = 0.0
    for batch in images:
        with torch.inference_mode():
            expected = model(batch).float().numpy()
        logits: Any = session.run(None, {name: batch.numpy()})[0]
        classes = expected.argmax(axis=1)
        count += len(batch)
        pixels += classes.size
        differing += int((logits.argmax(axis=1) != classes).sum())
        largest = float(np.fmax(largest, np.abs(logits - expected).max()))
        if not np.isfinite(logits).all():
            differing, largest = pixels, float("inf")
            break
    return Agreement(count, pixels, differing, largest)


def require_agreement(agreement: Agreement, name: str) -> None:
    """Let a model through only if enough pixels agree.

    Raises:
        GateError: more than 0.1 % differ, or nothing was compared.
    """
    if agreement.pixels and agreement.share >= REQUIRED_AGREEMENT:
        return
    raise GateError(
        f"{name}: ONNX Runtime and torch disagree on {100 * (1 - agreement.share):.3f} % of {agreement.pixels} pixels "
        f"({agreement.images} images; logits differ by up to {agreement.largest:.3g}), and at most "
        f"{100 * (1 - REQUIRED_AGREEMENT):g} % may. Nothing was written. A model that is hardly trained has near ties "
        "everywhere: train it longer, then export again."
    )


def validation_images(data: Path, card: ModelCard, count: int) -> Iterator[torch.Tensor]:
    """`count` validation images, spread evenly over the set, each float32 [1, 3, H, W] as the card wants them.

    Raises:
        InputError: there is no usable validation set at `data`.
    """
    dataset = open_dataset(data, "val")
    if not len(dataset):
        raise InputError(f"{data} has no validation images to verify the export on. Give another --data.")
    transform = EvalTransform(card.height, card.width, card.mean, card.std)
    indices = np.unique(np.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().astype(int))
    for index in indices:
        yield transform(dataset.load(int(index)))[0][None]
