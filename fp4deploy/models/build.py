"""Spec, or card -> network: images [N, 3, H, W] -> logits [N, channels, H, W], with random weights; or of volumes.

A factory of the user gets the number of output channels under the name that its signature has for it
(`sources.CLASS_ARGUMENTS`), and the arguments of `model.args` by name. It is imported and run only for a spec that the
user named (`spec.require_named`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from fp4deploy.errors import InputError, suggest
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.card import ModelCard
from fp4deploy.models.detector import UNetDetector, pyramid_detector
from fp4deploy.models.heads import ClassHead
from fp4deploy.models.nnunet.network import untrained_network
from fp4deploy.models.output import with_logits
from fp4deploy.models.sources import BACKBONES, CLASSIFIERS, SOURCES, call_factory, torchvision_detector
from fp4deploy.models.spec import KNOWN, NNUNET, UNET, ModelSpec, require_named
from fp4deploy.models.torchvision_detectors import require_layout
from fp4deploy.models.unet import build_unet
from fp4deploy.models.volumes import IMAGES, NetworkInput
from fp4deploy.system.offline import offline


def build_model(
    spec: ModelSpec,
    channels: int,
    scale: float = 1.0,
    digits: bool = False,
    head: DetectionHead | ClassHead | None = None,
    inputs: NetworkInput = IMAGES,
) -> nn.Module:
    """A freshly initialised network. User's code is imported and run: `spec` is one that the user gave.

    Args:
        channels: of the logits.
        scale, digits: of this project's UNet; the spec's own scale comes first.
        head: of a detector, which the spec's network is the backbone of, or has itself; or of a classifier.
        inputs: what the network reads; of a factory of the user's, which says so itself, not looked at.

    Raises:
        InputError: an unknown name, wrong arguments, a library without networks of so many spatial axes, or a factory
            that returns no module.
        UnavailableError: the library is not installed.

    >>> from fp4deploy.models.spec import parse_spec
    >>> build_model(parse_spec("unet:0.125"), 4).head.out_channels
    4
    """
    if isinstance(head, ClassHead):
        return with_logits(_classifier(spec, channels, inputs), spec.text, channels, spec.output, maps=False)
    if head is not None:
        require_layout(spec, head)
    if spec.source == UNET:
        if spec.arguments:
            names = ", ".join(spec.arguments)
            raise InputError(f"A unet takes no model.args ({names}); it has model.scale and model.digits.")
        width = spec.scale if spec.scale is not None else scale
        return build_unet(channels, width, digits, inputs) if head is None else UNetDetector(head, width, digits)
    if digits:
        raise InputError(f"model.digits is an input encoding of this project's unet; {spec.text} has none.")
    if head is not None and spec.source == "torchvision":
        with offline(spec.text):
            return torchvision_detector(spec.name, head, spec.arguments)
    if head is not None:
        return pyramid_detector(_backbone(spec, channels, head), head, spec.text)
    if spec.source == NNUNET:
        network = untrained_network(spec.location, channels, inputs)
    elif spec.known:
        with offline(spec.text):
            network = SOURCES[spec.source](spec.name, channels, spec.arguments, inputs)
    else:
        network = call_factory(_factory(spec), spec.text, channels, spec.arguments)
    return with_logits(network, spec.text, channels, spec.output)


def network_for(card: ModelCard, where: object = "The model card", model: str | None = None) -> nn.Module:
    """A freshly initialised network as a card describes it.

    Args:
        where: the file of the card, for messages.
        model: the spec that the caller was given for the file; for user's code, it permits to import it.

    Raises:
        InputError: as of `build_model`, another model, or code of the user that they did not name.
        UnavailableError: the library is not installed.
    """
    head = card.head if isinstance(card.head, DetectionHead | ClassHead) else None
    return build_model(
        require_named(card.spec, where, model), card.channels, card.scale, card.digits, head, card.inputs
    )


def _classifier(spec: ModelSpec, channels: int, inputs: NetworkInput) -> nn.Module:
    refused = (
        f"{spec.text} gives a map of logits, and a classifier one class an image. Take "
        f"{', '.join(f'{name}:NAME' for name in CLASSIFIERS)}, such as timm:convnext_atto or hf:vit, or a function "
        "of your own that returns [N, classes]."
    )
    return _made(spec, channels, CLASSIFIERS, (channels, spec.arguments, inputs), refused)


def _backbone(spec: ModelSpec, channels: int, head: DetectionHead) -> nn.Module:
    refused = (
        f"{spec.text} gives a map of logits, and a detector needs feature maps of several strides. Take unet, "
        f"{', '.join(f'{name}:NAME' for name in BACKBONES)}, torchvision:fcos_resnet50_fpn, or a function of your "
        "own that returns them."
    )
    return _made(spec, channels, BACKBONES, (head.strides, spec.arguments), refused)


def _made(
    spec: ModelSpec,
    channels: int,
    sources: Mapping[str, Callable[..., nn.Module]],
    rest: tuple[object, ...],
    refused: str,
) -> nn.Module:
    """The network of one of `sources`, or of the user's own function; `refused` is said of any other source."""
    if not spec.known and spec.source != NNUNET:
        return call_factory(_factory(spec), spec.text, channels, spec.arguments)
    if spec.source not in sources:
        raise InputError(refused)
    with offline(spec.text):
        return sources[spec.source](spec.name, *rest)


def _factory(spec: ModelSpec) -> Callable[..., object]:
    module = _load_file(Path(spec.location)) if spec.source == "file" else _import(spec.location)
    found = getattr(module, spec.name, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(
            f"{spec.location} has no function or class '{spec.name}'.{suggest(spec.name, names)} "
            f"It has: {', '.join(names) or 'none'}."
        )
    return found


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise InputError(f"There is no file {path}, which the model spec names.")
    name = f"fp4deploy_model_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # where dataclasses look for the module of a class
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}.") from error
    return module


def _import(name: str) -> object:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise InputError(
            f"The module {name}, which the model spec names, cannot be imported: {type(error).__name__}: {error}. "
            f"Known sources are: {', '.join(KNOWN)}; a file is named with its suffix, net.py:factory."
        ) from error
