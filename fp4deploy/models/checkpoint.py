"""Checkpoints: safetensors with the model card in the metadata; loading one never runs code from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fp4deploy import __version__
from fp4deploy.errors import InputError
from fp4deploy.files import atomic_write
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.models.input_encoding import expand_weight

QUANTIZER_BUFFERS = (".input_amax",)
FIRST_WEIGHT = "encoder.0.conv1.weight"


def save_checkpoint(path: Path, model: nn.Module, card: ModelCard, extra: dict[str, str] | None = None) -> None:
    """Write the state dict of `model` with its card, atomically.

    Raises:
        InputError: the disk is full or the folder is not writable; an older file at `path` survives.
    """
    write_tensors(path, model.state_dict(), {CARD_KEY: card.to_json(), **(extra or {})})


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write tensors from any device as safetensors, atomically.

    Raises:
        InputError: the disk is full or the folder is not writable; an older file at `path` survives.
    """
    host = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with atomic_write(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(host, temporary, metadata=metadata)
            temporary.chmod(mode)  # safetensors makes its files private, whatever the umask
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_tensors(
    path: Path, key: str, what: str, formats: Sequence[str], required: Sequence[str], advice: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The JSON object in the metadata entry `key` of a safetensors file, and all tensors, on the CPU.

    Args:
        what: the kind of file in messages, such as "packed weight".
        formats: accepted values of the object's "format".
        required: keys that the object must have.
        advice: ends each message.

    Raises:
        InputError: the file is missing, truncated or of another kind or format.
    """
    if not path.is_file():
        raise InputError(f"There is no {what} at {path}. {advice}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(key)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(f"{path} is not a {what}, or not a whole one ({error}). {advice}") from error
    if text is None:
        raise InputError(f"{path} is safetensors, but not a {what}: it lacks the metadata '{key}'. {advice}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path}: its metadata '{key}' cannot be read. {advice}")
    if found.get("format") not in formats:
        raise InputError(
            f"{path} has the format '{str(found.get('format', ''))[:40]}', written by fp4deploy "
            f"{str(found.get('version', 'unknown'))[:40]}; this version ({__version__}) reads {' and '.join(formats)}. "
            f"{advice}"
        )
    missing = [name for name in required if name not in found]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)} in its metadata '{key}'. {advice}")
    return found, tensors


def read_card(path: Path) -> ModelCard:
    """Read the model card of a checkpoint.

    Raises:
        InputError: the file is missing, is not safetensors, or carries no card.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no checkpoint at {path}. Train one with: fp4deploy train")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a readable safetensors file ({error}). Train the model again.") from error
    if CARD_KEY not in metadata:
        raise InputError(f"{path} carries no fp4deploy model card: it was written by another program.")
    return ModelCard.from_json(metadata[CARD_KEY])


def load_weights(model: nn.Module, path: Path, to_encoding: bool = False) -> None:
    """Load a checkpoint into `model`, name by name.

    An FP16 checkpoint fits an NVFP4 model and the reverse: only quantiser state may differ.

    Args:
        to_encoding: the checkpoint is of a UNet that reads RGB and `model` has the FP4 input encoding: the first weight
            is expanded to it.

    Raises:
        InputError: names or shapes differ (another scale, classes or architecture), or a value is not finite.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a readable safetensors file ({error}).") from error
    if to_encoding and FIRST_WEIGHT in tensors:
        tensors[FIRST_WEIGHT] = expand_weight(tensors[FIRST_WEIGHT])
    wanted = model.state_dict()
    differing = [
        f"{name} {list(tensors[name].shape)} instead of {list(value.shape)}"
        for name, value in wanted.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    missing = [name for name in wanted if name not in tensors and not name.endswith(QUANTIZER_BUFFERS)]
    unknown = [name for name in tensors if name not in wanted and not name.endswith(QUANTIZER_BUFFERS)]
    if differing or missing or unknown:
        raise InputError(f"{path} does not fit this model: {_summary(differing, missing, unknown)}")
    broken = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    if broken:
        raise InputError(f"{path} holds NaN or Inf in {', '.join(broken[:3])}; take an earlier checkpoint.")
    model.load_state_dict({name: value for name, value in tensors.items() if name in wanted}, strict=False)


def _summary(differing: list[str], missing: list[str], unknown: list[str]) -> str:
    if differing:
        count, first = len(differing), differing[0]
        return f"{count} tensors differ in shape, first {first}. Use the scale and classes it was trained with."
    names = [f"{len(missing)} tensors are missing (first {missing[0]})"] if missing else []
    names += [f"{len(unknown)} are unknown (first {unknown[0]})"] if unknown else []
    return " and ".join(names) + ". It belongs to another model."
