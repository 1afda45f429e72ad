"""A plain ONNX convolution network -> calibration -> the canonical NVFP4 file.

    read (onnx_network) -> compare with ONNX Runtime -> quantise (ptq) -> export -> compare with ONNX Runtime again

The first comparison is of the network as it was read with the file itself, both in FP32: an operator that this project
understood in another way than the file's author is found there, whatever it is. The second is the gate of every export:
the decomposed graph of the result against the quantised torch module. Between the two lies the error of quantisation
alone, which the result states as the ratio of signal to error of each output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, EvalTransform, PhotoDataset, are_photos, open_dataset
from fp4deploy.data.sample import TRAIN, evenly
from fp4deploy.errors import GateError, InputError
from fp4deploy.export.onnx.canonical import foreign_graph, read_onnx
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.to_onnx import ExportResult, export_onnx
from fp4deploy.interop.onnx_network import OnnxNetwork, network_of
from fp4deploy.models.card import ModelCard
from fp4deploy.models.meaning import Outputs, known_outputs
from fp4deploy.ptq import Result, quantize

TOLERANCE = 2e-3  # largest difference of an output over its largest value, of files in FP32
HALF_TOLERANCE = 2e-2  # of files in FP16, which ONNX Runtime may compute in FP16
COMPARED = 2  # images that are compared with ONNX Runtime
VERIFIED = 4  # images that the result is verified on
Rgb = tuple[float, float, float]


@dataclass(frozen=True)
class OnnxResult:
    """What was made of a file.

    difference: largest difference between the file and the network that was read of it, over the largest value.
    sqnr: decibels of each output, FP32 over what NVFP4 changed, on the images that were verified.
    """

    quantized: Result
    export: ExportResult
    difference: float
    sqnr: dict[str, float]


def image_size(network: OnnxNetwork, size: tuple[int, int] | None, source: object) -> tuple[int, int]:
    """Height and width of the network's images: the file's own, or the given ones where it leaves them open.

    Raises:
        InputError: neither says them, or they contradict each other.
    """
    _, *extents = network.input_shape
    if size is None:
        if None in extents:
            raise InputError(f"{source} leaves the size of its images open. Give it with: --size HxW")
        return extents[0], extents[1]  # type: ignore[return-value]
    if any(own is not None and own != given for own, given in zip(extents, size, strict=True)):
        raise InputError(f"{source} is for images of {extents[0]}x{extents[1]} pixels, not {size[0]}x{size[1]}.")
    return size


def classes_of(folder: Path) -> tuple[tuple[str, ...], bool]:
    """(class names, whether class 0 is the background) of a dataset; nothing of a plain folder of images."""
    if not folder.is_dir() or are_photos(folder):
        return (), False
    dataset = open_dataset(folder, TRAIN)
    return dataset.class_names, dataset.background


def folder_images(
    folder: Path, count: int, size: tuple[int, int], mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD, batch: int = 4
) -> list[Tensor]:
    """Batches [N, 3, H, W] of `count` images, evenly spaced: of the training split of a dataset, or of those below a
    plain folder that a comparison leaves (`data.photos`).

    Raises:
        InputError: there are none.
    """
    transform = EvalTransform(*size, mean, std)
    has_labels = folder.is_dir() and not are_photos(folder)
    dataset = open_dataset(folder, TRAIN) if has_labels else PhotoDataset(folder, TRAIN)
    images = [transform(dataset.load(at))[0] for at in evenly(len(dataset), count)]
    return [torch.stack(images[start : start + batch]) for start in range(0, len(images), batch)]


def quantize_onnx(
    path: Path | str,
    images: Tensor | Iterable[Tensor],
    out: Path | str,
    method: str = "gptq",
    *,
    mean: Rgb = IMAGE_MEAN,
    std: Rgb = IMAGE_STD,
    class_names: tuple[str, ...] = (),
    background: bool = False,
    device: str = "cpu",
    outputs: Outputs = None,
    **options: Any,
) -> OnnxResult:
    """Quantise an ONNX file of a convolution network in FP16 or FP32 and write the canonical NVFP4 file.

    Args:
        path: the file; operators as of `onnx_operators` and `onnx_layers`.
        images: calibration batches [N, C, H, W], normalised as the network wants them.
        out: the .onnx file to write.
        method, options: as of `ptq.quantize`.
        outputs: what the outputs are, as of `export.verify.exported.verify`; by default as the card says.
        mean, std, class_names, background: what the card of the written file says of its images and classes; a card
            is written for networks of RGB images whose first output is a map.

    Raises:
        InputError: a file or images that cannot be used, or as `ptq.quantize`.
        GateError: the network that was read, or the written file, computes something else than it should.
    """
    path, batches = Path(path), [images] if isinstance(images, Tensor) else list(images)
    if not batches or not len(batches[0]):
        raise InputError("Quantisation needs images to calibrate on. Give some with: --data DIR")
    known_outputs(said=outputs)  # before minutes of work
    model = read_onnx(path)
    network = network_of(model, path)
    shape = tuple(batches[0].shape[1:])
    if len(shape) != 3 or shape[0] != network.input_shape[0]:
        raise InputError(f"{path} reads images with {network.input_shape[0]} channels, not {list(shape)}.")
    network.check_shapes(shape)
    kept = list(torch.cat(batches)[: max(COMPARED, VERIFIED)].split(1))
    difference = compare_with_file(network, model, kept[:COMPARED], path)
    expected = [_named(network, each) for each in kept]
    network.to(device)
    found = quantize(network, [batch.to(device) for batch in batches], method, **options)
    network.cpu()
    card = _card(network, expected[0], shape, found.recipe, mean, std, class_names, background)
    example = torch.cat(kept[:2]) if len(kept) > 1 else kept[0].repeat(2, 1, 1, 1)
    written = export_onnx(network, example, Path(out), data=kept[:VERIFIED], card=card, outputs=outputs)
    sqnr = _sqnr(expected, [_named(network, each) for each in kept])
    return OnnxResult(found, written, difference, sqnr)


@torch.no_grad()
def compare_with_file(network: OnnxNetwork, model: Any, images: Iterable[Tensor], source: object) -> float:
    """Largest difference of an output of the network and of the file in ONNX Runtime, over the file's largest value.

    Raises:
        GateError: it is beyond the tolerance.
        InputError: ONNX Runtime refuses the file, or it answers NaN or infinity.
    """
    half = any(tensor.data_type != 1 for tensor in model.graph.initializer if tensor.data_type in (1, 10, 16))
    with foreign_graph(source):
        session = portable_session(model)
        kind = {"tensor(float16)": np.float16, "tensor(double)": np.float64}.get(
            session.get_inputs()[0].type, np.float32
        )
        worst = 0.0
        for image in images:
            given = session.run(network.output_names, {network.input_name: image.numpy().astype(kind)})
            for name, one, other in zip(network.output_names, given, _named(network, image).values(), strict=True):
                one = np.asarray(one, np.float32)
                if one.shape != tuple(other.shape) or not np.isfinite(one).all():
                    raise InputError(f"{source}: its output {name} is not finite, or of another shape than was read.")
                apart = np.abs(one - other.float().numpy()).max(initial=0.0)
                share = float(apart / max(float(np.abs(one).max(initial=0.0)), 1e-30))
                worst = float(np.maximum(worst, share))  # NaN, where the network gives it
    limit = HALF_TOLERANCE if half else TOLERANCE
    if not worst <= limit:
        raise GateError(
            f"{source}: the network that was read differs from the file in ONNX Runtime by {worst:.2g} of the largest "
            f"output, and {limit:g} is allowed. Nothing was written."
        )
    return worst


@torch.no_grad()
def _named(network: OnnxNetwork, image: Tensor) -> dict[str, Tensor]:
    found = network(image)
    return dict(found) if isinstance(found, Mapping) else {network.output_names[0]: found}


def _sqnr(expected: list[dict[str, Tensor]], given: list[dict[str, Tensor]]) -> dict[str, float]:
    found = {}
    for name in expected[0]:
        power = sum(float(each[name].double().square().sum()) for each in expected)
        error = sum(
            float((each[name] - other[name]).double().square().sum())
            for each, other in zip(expected, given, strict=True)
        )
        found[name] = 10 * math.log10(power / error) if error > 0 and power > 0 else math.inf
    return found


def _card(
    network: OnnxNetwork,
    outputs: dict[str, Tensor],
    shape: tuple[int, ...],
    recipe: str,
    mean: Rgb,
    std: Rgb,
    class_names: tuple[str, ...],
    background: bool,
) -> ModelCard | None:
    first = next(iter(outputs.values()))
    if shape[0] != 3 or first.ndim != 4:
        return None
    fits = tuple(first.shape[1:]) == (len(class_names), *shape[1:])
    return ModelCard(
        precision="nvfp4",
        scale=1.0,
        class_names=class_names if fits else (),
        height=shape[1],
        width=shape[2],
        mean=mean,
        std=std,
        background=background and fits,
        recipe=recipe,
        architecture="onnx:network",  # no checkpoint has it: the network is in the file
    )
