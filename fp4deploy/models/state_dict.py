"""A state dict of PyTorch as an FP16 checkpoint: weights alone, to which the user adds the network and its images.

A checkpoint is a state dict with a model card. What the card needs and the file lacks comes from the user (network,
size, mean and standard deviation of the images) and from the weights: the number of output channels.

**Output channels.** A network whose factory takes the number of classes is built for two numbers; the sizes of tensors
that differ are linear in it, and the file's sizes give the file's number. A network that always has the same channels
is run on an image of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models.build import build_model
from fp4deploy.models.card import CARD_KEY, ModelCard, numbered
from fp4deploy.models.checkpoint import PICKLED, save_checkpoint
from fp4deploy.models.initial import load_initial, read_weights, unwrapped
from fp4deploy.models.output import LogitsOutput, pick_logits
from fp4deploy.models.spec import ModelSpec

SOURCE_KEY = "fp4deploy.weights_of"  # metadata: the name of the state dict
TRIED = (5, 8)  # numbers of classes for which a network is built, to see which tensors have them
UNKNOWN = 2  # classes of a network whose tensors the file lacks: loading says what is missing
ADVICE = "Name the network that it belongs to: --model SPEC, such as net.py:make or smp:Unet/resnet34"


def is_state_dict(path: Path) -> bool:
    """Whether a file is one of PyTorch's, or safetensors without a model card."""
    if path.suffix.lower() in PICKLED:
        return True
    metadata = _metadata(path)
    return metadata is not None and CARD_KEY not in metadata


def is_checkpoint_of(path: Path, source: Path) -> bool:
    """Whether `checkpoint_of` wrote a file, of a state dict of this name."""
    return (_metadata(path) or {}).get(SOURCE_KEY) == source.name


def _metadata(path: Path) -> dict[str, str] | None:
    """Of a safetensors file; None where it is none that can be read."""
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return None


def checkpoint_of(
    path: Path,
    spec: ModelSpec,
    out: Path,
    size: tuple[int, int],
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    class_names: tuple[str, ...] = (),
    background: bool = False,
) -> str:
    """Write the FP16 checkpoint of a state dict; a notice of what was loaded and how its classes are called.

    Args:
        path: as `initial.load_initial` takes it.
        spec: its network, which may be code of the user.
        size: height and width of its images in pixels.
        mean, std: of its images, in units of [0, 1] RGB.
        class_names, background: of its output channels; numbers where these are not as many.

    Raises:
        InputError: the file cannot be read, does not fit the network as a whole, or the network gives no map of two or
            more classes.
    """
    tensors = read_weights(path)
    channels = _channels_by_shape(spec, tensors)
    network = build_model(spec, UNKNOWN if channels is None else channels)
    if channels is None:
        channels = _channels_by_run(network, spec, size)
    if channels < 2:
        raise InputError(
            f"{spec.text} gives one channel, and the class of a pixel is the largest of two or more. Of one channel of "
            "logits x return torch.cat([torch.zeros_like(x), x], 1): the same classes as x > 0."
        )
    loaded = load_initial(network, path, whole=True)
    fits = len(class_names) == channels
    names = class_names if fits else numbered(channels)
    card = ModelCard("fp16", 1.0, names, *size, mean, std, background and fits)
    if spec.scale is not None:
        card = replace(card, scale=spec.scale)
    card = replace(card, architecture=spec.text, arguments=dict(spec.arguments), output=spec.output)
    save_checkpoint(out, network, ModelCard.from_json(card.to_json(), path), {SOURCE_KEY: path.name})
    return f"{loaded} {channels} classes: {_listed(names)}{'' if fits else ' (their names: --classes)'}."


def _channels_by_shape(spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> int | None:
    """The number of classes for which the network has tensors of these sizes; None where none depends on it."""
    first, second = ({name: value.shape for name, value in _shapes(spec, each).items()} for each in TRIED)
    given = unwrapped(dict(tensors), dict.fromkeys(first, torch.empty(0)))
    depends = False
    for name, shape in first.items():
        for axis, (one, other) in enumerate(zip(shape, second.get(name, shape), strict=False)):
            if one == other:
                continue
            depends = True
            if name in given and given[name].ndim == len(shape):
                found = Fraction(given[name].shape[axis] - one, other - one) * (TRIED[1] - TRIED[0]) + TRIED[0]
                if found.denominator == 1 and found > 0:
                    return int(found)
    return UNKNOWN if depends else None


def _shapes(spec: ModelSpec, channels: int) -> dict[str, Any]:
    if spec.known:
        with suppress(RuntimeError, NotImplementedError, ValueError), torch.device("meta"):
            return build_model(spec, channels).state_dict()
    return build_model(spec, channels).state_dict()


@torch.no_grad()
def _channels_by_run(network: nn.Module, spec: ModelSpec, size: tuple[int, int]) -> int:
    assert isinstance(network, LogitsOutput)
    found = pick_logits(network.eval()._outputs(torch.zeros(1, 3, *size)), spec.text, spec.output)
    if found.ndim != 4:
        raise InputError(f"{spec.text} gives {list(found.shape)}, and no map of logits [N, classes, h, w].")
    network.logits_channels = found.shape[1]
    return found.shape[1]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
