"""Initial weights from a file (`--init`): safetensors, or a PyTorch file that holds nothing but tensors.

A `.pth` file is unpickled with `weights_only=True`, which builds tensors and containers and calls nothing else; numbers
of numpy beside them are read as Python's (`pickled`). The state dict may lie under "state_dict", "model",
"model_state_dict" or "network_weights" (nnU-Net), and its names may begin with "module." of DistributedDataParallel.
Names and shapes must be those of the network, or of one of its children: the weights of a backbone fit the `encoder` of
a network.

Tensors of output layers may differ in the number of their output channels: such a layer keeps its random weights, since
it has other classes. So may be absent what a backbone's file cannot have. A notice lists both.

Weights are dense tensors of a floating-point type whose values are finite in the network's; torch would cast whatever
else it can (integers, truth values, the real part of complex numbers), and a network of such numbers answers nothing.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fp4deploy.errors import InputError, counted, first_line
from fp4deploy.models.pickled import numbers_of_numpy

CONTAINERS = ("state_dict", "model_state_dict", "model", "network_weights")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NOT_NEGATIVE = ("running_var", "num_batches_tracked")
WRAPPERS = (  # of DataParallel and AveragedModel, of torch.compile, of FSDP, of Lightning Fabric
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_forward_module.",
)
LEVELS = 3  # of dicts around a state dict
AVERAGED = "n_averaged"  # the counter of AveragedModel
OUTER = ("model.", "net.", "network.")  # attributes of Lightning modules and trainers that hold the network
_CLASSIFIERS = ("fc.", "classifier.", "head.", "last_linear.")  # of a backbone trained to classify
Tensors = Mapping[str, torch.Tensor]


def load_initial(model: nn.Module, path: Path, whole: bool = False) -> str:
    """Load initial weights, in place; returns a notice of what was loaded and what was not.

    whole: all weights of the network have to be in the file, and none starts from random numbers.

    Raises:
        InputError: the file cannot be read, or fits neither the network nor one of its children; the message lists what
            is missing, unknown and of another shape.
    """
    wanted = model.state_dict()
    tensors = unwrapped(read_weights(path), wanted)
    _refuse(path, {name: _layout(value) for name, value in tensors.items()})
    children = ["", *(f"{name}." for name, _ in model.named_children() if not whole)]
    prefix = max(children, key=lambda child: sum(child + name in wanted for name in tensors))
    given = {prefix + name: value for name, value in tensors.items()}
    unknown = [name for name in given if name not in wanted]
    if prefix:
        unknown = [name for name in unknown if not name.removeprefix(prefix).startswith(_CLASSIFIERS)]
    missing = [name for name in wanted if name.startswith(prefix) and name not in given and not _is_counter(name)]
    heads = {name for name in given if name in wanted and not whole and _other_classes(given[name], wanted[name])}
    differing = [
        f"{name} {list(given[name].shape)} instead of {list(wanted[name].shape)}"
        for name in given
        if name in wanted and given[name].shape != wanted[name].shape and name not in heads
    ]
    if unknown or missing or differing or len(heads) == len(given):
        raise InputError(
            f"{path} does not fit this network: {_difference(missing, unknown, differing)}. Name the network that it "
            "was trained in, and its arguments: --model SPEC --set model.args.NAME=VALUE"
        )
    loaded = {name: value for name, value in given.items() if name in wanted and name not in heads}
    _refuse(path, {name: _kind(value, wanted[name]) for name, value in loaded.items()})
    broken = [name for name, value in loaded.items() if not torch.isfinite(value.to(wanted[name].dtype)).all()]
    if broken:
        raise InputError(
            f"{path} holds NaN, Inf or numbers beyond FP32 in {', '.join(broken[:3])}. Take an earlier file of weights."
        )
    negative = [name for name, value in loaded.items() if name.endswith(NOT_NEGATIVE) and (value < 0).any()]
    if negative:
        raise InputError(
            f"{path} holds negative variances or counts in {', '.join(negative[:3])}; valid: from 0. Take an earlier "
            "file of weights."
        )
    model.load_state_dict(loaded, strict=False)
    notice = f"{counted(len(loaded), 'tensor')} of {path}"
    if prefix:
        notice += f", all of {prefix.rstrip('.')}; the rest of the network starts from random weights"
    if heads:
        notice += f"; {', '.join(sorted(heads))} start from random weights, because the file has other classes"
    return f"Initial weights: {notice}."


def unwrapped(tensors: dict[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without what a trainer puts before the names, as "model." of Lightning, where `wanted` fits then."""
    for start in OUTER:
        inner = _without(tensors, start)
        while start := next((each for each in WRAPPERS if inner and all(name.startswith(each) for name in inner)), ""):
            inner = _without(inner, start)
        if set(wanted) - set(tensors) and not {name for name in wanted if not _is_counter(name)} - set(inner):
            return inner
    return tensors


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The state dict of a file, on the CPU, its names without the prefix of a parallel wrapper.

    Raises:
        InputError: the file is missing or damaged, or holds something else than tensors.
    """
    found = _inner(read_containers(path))
    if not _is_state(found):
        held = ", ".join(map(str, _held(found)[:8]))
        choose = f" It holds several: {held}. Save the one that is meant." if held else ""
        raise InputError(f"{path} holds no state dict: it has to map names to tensors.{choose}")
    tensors = {str(name): value for name, value in found.items()}
    if any(name.startswith(WRAPPERS) for name in tensors):
        tensors.pop(AVERAGED, None)
    while start := next((each for each in WRAPPERS if tensors and all(name.startswith(each) for name in tensors)), ""):
        tensors = _without(tensors, start)
    return tensors


def _inner(found: Any) -> Any:
    """The state dict inside dicts of a trainer: under a name that is known for it, or the only one."""
    for _ in range(LEVELS):
        held = _held(found)
        known = [name for name in CONTAINERS if name in held]
        if _is_state(found) or not (known or len(held) == 1):
            break
        found = found[known[0] if known else held[0]]
    return found


def _held(found: Any) -> list[Any]:
    """Under which keys something holds a state dict, or a dict with one of the known names."""
    if not isinstance(found, Mapping):
        return []
    inner = [(key, value) for key, value in found.items() if isinstance(value, Mapping)]
    return [key for key, value in inner if key in CONTAINERS or _is_state(value) or value.keys() & set(CONTAINERS)]


def _is_state(found: Any) -> bool:
    """Names with tensors."""
    return isinstance(found, Mapping) and bool(found) and all(isinstance(each, torch.Tensor) for each in found.values())


def _without(tensors: Mapping[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    return {name[len(start) :]: value for name, value in tensors.items() if name.startswith(start)}


def read_containers(path: Path) -> Any:
    """What a file of weights holds, on the CPU: tensors in plain containers; unpickling calls nothing else.

    Raises:
        InputError: the file is missing or damaged, or holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no file {path} with weights.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        _require_stored(path)
        with numbers_of_numpy():
            return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251  tensors alone
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        MemoryError,
        zipfile.BadZipFile,
    ) as error:
        raise InputError(f"{path} cannot be read as weights: {first_line(error)}") from error
    except Exception as error:  # pickle's own errors: something that is no tensor
        raise InputError(
            f"{path} holds more than tensors, and loading it would run code. Save model.state_dict() instead, best as "
            "safetensors."
        ) from error


def _require_stored(path: Path) -> None:
    """Refuse a compressed archive: torch writes its parts as they are, and a small file could ask for any memory."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(part.file_size for part in archive.infolist()) > path.stat().st_size:
                raise ValueError("it is compressed, which torch.save does not do")


def _refuse(path: Path, reasons: Mapping[str, str | None]) -> None:
    """Raise InputError for the tensors that have a reason."""
    refused = [(name, reason) for name, reason in reasons.items() if reason]
    if refused:
        more = f" ({len(refused) - 1} more)" if len(refused) > 1 else ""
        raise InputError(
            f"{path} holds no weights in {refused[0][0]}{more}: {refused[0][1]}. Valid: dense tensors of "
            f"{_types(FLOATS)}. Save the file again, each tensor by value.dequantize() if it is quantized, "
            "value.to_dense() if it is sparse, and value.float()."
        )


def _layout(value: torch.Tensor) -> str | None:
    """Why a tensor has no plain array of numbers; None where it has."""
    if value.is_nested:
        return "it is a nested tensor"
    if value.layout != torch.strided:
        return f"it is a sparse tensor ({str(value.layout).removeprefix('torch.')})"
    if value.is_quantized:
        return f"it is a quantized tensor ({_types([value.dtype])})"
    return "it is a meta tensor, which has no numbers" if value.is_meta else None


def _kind(given: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Why the type of a tensor cannot be that of the network's; None where it can."""
    if wanted.is_floating_point():
        fits = given.dtype in FLOATS
    elif wanted.is_complex() or wanted.dtype == torch.bool:
        fits = given.dtype == wanted.dtype
    else:
        fits = torch.can_cast(given.dtype, wanted.dtype) and given.dtype != torch.bool
    return None if fits else f"it is {_types([given.dtype])}, and the network has {_types([wanted.dtype])} there"


def _types(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _other_classes(given: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal in all but the first axis, the output channels."""
    return given.shape != wanted.shape and given.ndim == wanted.ndim > 0 and given.shape[1:] == wanted.shape[1:]


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _difference(missing: list[str], unknown: list[str], differing: list[str]) -> str:
    parts = [
        f"{counted(len(names), 'tensor')} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for names, what in ((missing, "missing"), (unknown, "unknown"), (differing, "of another shape"))
        if names
    ]
    return ", ".join(parts) or "only output layers of other classes"
