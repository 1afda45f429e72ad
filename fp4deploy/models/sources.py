"""Networks of other libraries, one builder a source: (name, output channels, arguments, inputs) -> untrained module.

The libraries are the extra `zoo`, imported when one is named. No weights are ever downloaded: every builder asks for
random weights, also of classes that download some by default, and an argument that would fetch or unpickle some is
refused. A checkpoint's card may hold these names and arguments, so both are checked before a library sees them: an
argument does not replace the name, and no text names a file, a folder, an address or a repository of a hub.
`models.build` calls the builders without a connection (`system.offline`).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp4deploy.errors import InputError, named_cause, suggest
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.pyramid import PyramidSegmenter
from fp4deploy.models.torchvision_detectors import METHODS, with_raw_output
from fp4deploy.models.volumes import NetworkInput
from fp4deploy.requirements import ZOO

CLASS_ARGUMENTS = ("classes", "num_classes", "out_channels", "n_classes", "channels_out")
_FETCHING = re.compile("pretrain|weights|checkpoint|url|hub|path|file|cache", re.IGNORECASE)
_PRETRAINED = re.compile(r"pretrain|encoder_weights\Z|weights_backbone\Z|weights\Z|url|download", re.IGNORECASE)
_NAME = re.compile(r"[\w.\-]+\Z")
_TEXT = re.compile(r"[\w.\-+ ]{0,100}\Z")
_FILE = re.compile(r"\.(bin|ckpt|gz|h5|json|npz|onnx|pickle|pkl|pt|pth|safetensors|tar|ya?ml|zip)\Z", re.IGNORECASE)
Arguments = Mapping[str, Any]


def call_factory(factory: Callable[..., object], name: str, channels: int, arguments: Arguments) -> nn.Module:
    """Call a factory with the output channels, under the name that it has for them, and the given arguments.

    Raises:
        InputError: it does not take the arguments, fails, or returns no module.
    """
    given = dict(arguments)
    parameters = _parameters(factory)
    own = next((each for each in CLASS_ARGUMENTS if each in parameters), None)
    if own is not None:
        given.setdefault(own, channels)
    _check_arguments(name, parameters, given)
    try:
        network = factory(**given)
    except Exception as error:
        raise InputError(
            f"{name} cannot be built with {_listed(given)}: {named_cause(error, 300)}. "
            f"Its parameters: {', '.join(parameters) or 'not known'}. Set one with --set model.args.NAME=VALUE."
        ) from error
    if not isinstance(network, nn.Module):
        raise InputError(f"{name} returned {type(network).__name__} and not a torch.nn.Module; return the network.")
    return network


def _parameters(factory: Callable[..., object]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return {}


def _check_arguments(name: str, parameters: dict[str, inspect.Parameter], given: Arguments) -> None:
    open_ended = not parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [] if open_ended else [key for key in given if key not in parameters]
    if unknown:
        raise InputError(
            f"{name} has no parameter {', '.join(unknown)}.{suggest(unknown[0], parameters)} "
            f"Its parameters: {', '.join(parameters)}."
        )
    missing = [
        key
        for key, each in parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL) and key not in given
    ]
    if missing:
        settings = " ".join(f"--set model.args.{key}=..." for key in missing)
        raise InputError(
            f"{name} needs {', '.join(missing)}. Set {'it' if len(missing) == 1 else 'them'} with: {settings}"
        )


def _smp(name: str, channels: int, arguments: Arguments, inputs: NetworkInput) -> nn.Module:
    """Architecture / encoder; without an encoder the library's default."""
    _require_images(f"smp:{name}", inputs)
    smp = _library("segmentation_models_pytorch")
    architecture, _, encoder = name.partition("/")
    kinds = {key: value for key, value in vars(smp).items() if inspect.isclass(value) and issubclass(value, nn.Module)}
    kind = _chosen(architecture, kinds, "smp:ARCHITECTURE/ENCODER")
    given = _harmless(f"smp:{name}", arguments, ("encoder_name",) if encoder else ()) | {"encoder_weights": None}
    if encoder:
        given["encoder_name"] = _plain_name(encoder)
    return call_factory(kind, f"smp:{name}", channels, given)


def _torchvision(name: str, channels: int, arguments: Arguments, inputs: NetworkInput) -> nn.Module:
    _require_images(f"torchvision:{name}", inputs)
    vision = _library("torchvision")
    if name in METHODS:
        raise InputError(f"torchvision:{name} is a detector. Add --task detection, or name a segmentation network.")
    names = vision.models.list_models(module=vision.models.segmentation)
    builder = _chosen(name, {each: vision.models.get_model_builder(each) for each in names}, "torchvision:NAME")
    given = _harmless(f"torchvision:{name}", arguments) | {"weights": None, "weights_backbone": None}
    return call_factory(builder, f"torchvision:{name}", channels, {**given, "num_classes": channels})


def torchvision_detector(name: str, head: DetectionHead, arguments: Arguments) -> nn.Module:
    """A detector of torchvision with random weights, which returns its raw output.

    Raises:
        InputError: torchvision has no such detector, or none that is taken; or there are arguments.
        UnavailableError: torchvision is not installed.
    """
    if name not in METHODS:
        raise InputError(
            f"torchvision:{name} is none of torchvision's detectors that are taken, which are "
            f"{', '.join(METHODS)}.{suggest(name, METHODS)} unet, timm:NAME and functions of your own that return "
            "feature maps get this project's head."
        )
    vision = _library("torchvision")
    if arguments:
        raise InputError(
            f"torchvision:{name} takes no model.args ({', '.join(arguments)}): its boxes are read as "
            "detection.threshold, .nms and .max_detections say, and images are sized by data.height and .width."
        )
    given = {"weights": None, "weights_backbone": None, "num_classes": head.classes}
    network = call_factory(vision.models.get_model_builder(name), f"torchvision:{name}", head.classes, given)
    return with_raw_output(network, head)


def _monai(name: str, channels: int, arguments: Arguments, inputs: NetworkInput) -> nn.Module:
    nets = importlib.import_module(f"{_library('monai').__name__}.networks.nets")
    kinds = {key: value for key, value in vars(nets).items() if inspect.isclass(value) and issubclass(value, nn.Module)}
    kind = _chosen(name, kinds, "monai:NAME")
    usual = {"spatial_dims": inputs.axes, "in_channels": inputs.channels, "out_channels": channels}
    own = {key: value for key, value in usual.items() if key in _parameters(kind)}
    given = _harmless(f"monai:{name}", arguments) | _random_weights(kind)
    return call_factory(kind, f"monai:{name}", channels, own | given)


def _timm(name: str, channels: int, arguments: Arguments, inputs: NetworkInput) -> nn.Module:
    """A backbone as a pyramid of features, under a plain decoder; `decoder_width` is the decoder's."""
    _require_images(f"timm:{name}", inputs)
    timm = _library("timm")
    given = _harmless(f"timm:{name}", arguments, ("model_name",))
    width = given.pop("decoder_width", 64)
    if not timm.is_model(_plain_name(name)):
        raise InputError(f"timm has no model '{name}'.{suggest(name, timm.list_models())} Write timm:NAME.")
    wanted = {"pretrained": False, "features_only": True}
    backbone = call_factory(timm.create_model, f"timm:{name}", channels, {**given, "model_name": name, **wanted})
    backbone = _channels_first(backbone)
    return PyramidSegmenter(backbone, tuple(backbone.feature_info.channels()), channels, width)  # type: ignore[union-attr, operator]


def _timm_maps(name: str, strides: Sequence[int], arguments: Arguments) -> nn.Module:
    """A backbone that returns its feature maps of these strides, as far as it has them."""
    timm = _library("timm")
    given = _harmless(f"timm:{name}", arguments, ("model_name",))
    if not timm.is_model(_plain_name(name)):
        raise InputError(f"timm has no model '{name}'.{suggest(name, timm.list_models())} Write timm:NAME.")
    wanted = {**given, "model_name": name, "pretrained": False, "features_only": True}
    whole: Any = call_factory(timm.create_model, f"timm:{name}", 0, wanted)
    kept = [place for place, stride in enumerate(whole.feature_info.reduction()) if stride in strides]
    return _channels_first(call_factory(timm.create_model, f"timm:{name}", 0, {**wanted, "out_indices": tuple(kept)}))


def _channels_first(backbone: nn.Module) -> nn.Module:
    """A timm backbone whose feature maps are [N, C, H, W]; Swin's and MambaOut's own are [N, H, W, C].

    A hook, so that names of parameters stay timm's.
    """
    if getattr(backbone, "output_fmt", "NCHW") == "NHWC":
        backbone.register_forward_hook(_as_nchw)
    return backbone


def _as_nchw(module: nn.Module, images: object, features: list[torch.Tensor]) -> list[torch.Tensor]:
    return [feature.permute(0, 3, 1, 2) for feature in features]


def _timm_classifier(name: str, channels: int, arguments: Arguments, inputs: NetworkInput) -> nn.Module:
    """timm's own classifier; one that is built for a size of images is built for that of the data."""
    timm = _library("timm")
    given = _harmless(f"timm:{name}", arguments, ("model_name", "num_classes"))
    if not timm.is_model(_plain_name(name)):
        raise InputError(f"timm has no model '{name}'.{suggest(name, timm.list_models())} Write timm:NAME.")
    if getattr(timm.get_pretrained_cfg(name, allow_unregistered=True), "fixed_input_size", False):
        given.setdefault("img_size", inputs.size)
    wanted = {"model_name": name, "pretrained": False, "num_classes": channels}
    return call_factory(timm.create_model, f"timm:{name}", channels, {**given, **wanted})


def _hf_classifier(name: str, channels: int, arguments: Arguments, inputs: NetworkInput) -> nn.Module:
    """The image classifier of a model type of transformers, as its configuration class builds it."""
    transformers = _library("transformers")
    given = _harmless(f"hf:{name}", arguments, ("model_type", "num_labels"))
    kinds = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    names = {config.model_type: config for config in kinds if config.model_type}
    config = _chosen(name, names, "hf:TYPE")
    sized = {"image_size": inputs.size[0]} if "image_size" in _parameters(config) and len({*inputs.size}) == 1 else {}
    settings = call_config(config, f"hf:{name}", {**sized, **given, "num_labels": channels})
    kind = kinds[config]
    return call_factory(lambda: (kind[0] if isinstance(kind, tuple) else kind)(settings), f"hf:{name}", channels, {})


def call_config(config: Callable[..., object], name: str, given: Arguments) -> Any:
    """A configuration of transformers.

    Raises:
        InputError: it has no such setting, or refuses a value.
    """
    known = _parameters(config)
    if unknown := [key for key in given if known and key not in known and key not in ("num_labels", "image_size")]:
        listed = ", ".join(key for key in known if key not in ("self", "kwargs"))
        raise InputError(f"{name} has no setting {unknown[0]}.{suggest(unknown[0], known)} Its settings: {listed}.")
    try:
        return config(**given)
    except Exception as error:
        raise InputError(f"{name} cannot be built with {_listed(given)}: {named_cause(error, 300)}.") from error


def _no_map(name: str, channels: int, arguments: Arguments, inputs: NetworkInput) -> nn.Module:
    raise InputError(f"hf:{name} is an image classifier: add --task classification, or name a segmentation network.")


CLASSIFIERS: dict[str, Callable[[str, int, Arguments, NetworkInput], nn.Module]] = {
    "timm": _timm_classifier,
    "hf": _hf_classifier,
}
BACKBONES: dict[str, Callable[[str, Sequence[int], Arguments], nn.Module]] = {"timm": _timm_maps}
SOURCES: dict[str, Callable[[str, int, Arguments, NetworkInput], nn.Module]] = {
    "smp": _smp,
    "torchvision": _torchvision,
    "monai": _monai,
    "timm": _timm,
    "hf": _no_map,
}


def _require_images(name: str, inputs: NetworkInput) -> None:
    """Refuse volumes for a library whose networks have two spatial axes.

    Raises:
        InputError: naming the sources of networks that have three.
    """
    if inputs.axes != 2:
        raise InputError(
            f"{name} has two spatial axes, and the data has {inputs.axes}. For volumes take --model unet, monai:NAME, "
            "or a function of your own."
        )


def _library(name: str) -> Any:
    return ZOO[name].require("The model")


def _chosen(name: str, known: Mapping[str, Callable[..., object]], form: str) -> Callable[..., Any]:
    if name in known:
        return known[name]
    raise InputError(f"There is no '{name}' in {form}.{suggest(name, known)} Known: {', '.join(sorted(known))}.")


def _plain_name(name: str) -> str:
    if not _NAME.match(name):
        raise InputError(f"'{name}' is not a plain name: letters, digits, '.', '-' and '_' only.")
    return name


def _random_weights(factory: Callable[..., object]) -> dict[str, object]:
    """Arguments by which a factory that takes trained weights on its own does not: False for switches, else None."""
    found = {key: each for key, each in _parameters(factory).items() if _PRETRAINED.search(key)}
    optional = {key: each.default for key, each in found.items() if each.default is not each.empty}
    return {key: False if isinstance(usual, bool) else None for key, usual in optional.items()}


def _harmless(name: str, arguments: Arguments, named: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments, after a check that none fetches or unpickles weights, names a place, or replaces the model's name.

    named: the arguments that the model's name stands for.
    """
    renamed = [key for key in arguments if key in named]
    if renamed:
        raise InputError(
            f"{name}: the argument {renamed[0]} is not passed on, because the name says it. Name the other."
        )
    places = [text for text in _texts(arguments) if not _TEXT.match(text) or _FILE.search(text)]
    if places:
        raise InputError(
            f"{name}: {places[0][:100]!r} is not passed on, because it may name a file, an address or a repository. "
            "Texts in model.args are letters, digits, spaces, '.', '-', '_' and '+', at most 100. Give trained weights "
            "with --init FILE (.safetensors, or .pth of tensors)."
        )
    refused = [key for key in _keys(arguments) if _FETCHING.search(key)]
    if refused:
        raise InputError(
            f"{name}: the argument {refused[0]} is not passed on, because no weights are downloaded and no file is "
            "unpickled. Give trained weights with --init FILE (.safetensors, or .pth of tensors)."
        )
    return dict(arguments)


def _keys(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [str(key) for key in value] + [key for each in value.values() for key in _keys(each)]
    return [key for each in value for key in _keys(each)] if isinstance(value, list | tuple) else []


def _texts(value: object) -> list[str]:
    """All texts in a value, also keys, and what is no number, list or mapping as a text."""
    if isinstance(value, Mapping):
        return [text for pair in value.items() for each in pair for text in _texts(each)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    return [] if value is None or isinstance(value, bool | int | float) else [str(value)]


def _listed(given: Arguments) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in given.items()) or "no arguments"
