"""Checkpoints: safetensors with the model card in the metadata; loading one never runs code from it.

What a training writes carries a SHA-256 over all metadata and tensors, which is compared when the weights are read. It
finds damage, not a forger: who can change a tensor can change the digest. A file without one (an older version, another
program) is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from fp4deploy import __version__
from fp4deploy.errors import InputError
from fp4deploy.models.build import network_for
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.models.input_encoding import expand_weight
from fp4deploy.models.spec import UNET
from fp4deploy.models.unet import STRIDE
from fp4deploy.system.files import atomic_write, digest_of
from fp4deploy.system.schema import parse_json

DIGEST_KEY = "fp4deploy.sha256"
PICKLED = (".pth", ".pt", ".ckpt", ".bin")  # as torch.save writes them
QUANTIZER_BUFFERS = (".input_amax", ".outlier_channels")
WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64)  # int64: counters of norms
MAX_TENSORS = 20_000  # of one file
FIRST_WEIGHT = "encoder.0.conv1.weight"


def save_checkpoint(path: Path, model: nn.Module, card: ModelCard, extra: dict[str, str] | None = None) -> None:
    """Write the state dict of `model` with its card, atomically; with `extra` metadata, also their digest.

    Raises:
        InputError: the disk is full or the folder is not writable; an older file at `path` survives.
    """
    write_tensors(path, model.state_dict(), {CARD_KEY: card.to_json(), **(extra or {})}, signed=bool(extra))


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str], signed: bool = False
) -> None:
    """Write tensors from any device as safetensors, atomically.

    Args:
        signed: add the digest that `read_signed` compares.

    Raises:
        InputError: the disk is full or the folder is not writable; an older file at `path` survives.
    """
    host = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    seen: set[int] = set()  # storages: safetensors refuses what two names share, as tied weights and views do
    for name, value in host.items():
        storage = value.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            host[name] = value.clone()
        elif value.numel():
            seen.add(storage.data_ptr())
    if signed:
        metadata = {**metadata, DIGEST_KEY: digest_of(_signed_parts(host, metadata))}
    with atomic_write(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(host, temporary, metadata=metadata)
            _sort_metadata(temporary)
            temporary.chmod(mode)  # safetensors makes its files private, whatever the umask
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _sort_metadata(path: Path) -> None:
    """Sort the metadata in a file's header, in place: safetensors writes it in another order each time."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(length).decode(), path)
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:  # as safetensors writes it; its header ends with spaces
            file.seek(8)
            file.write(text.ljust(length))


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _signed_parts(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[bytes]:
    for name, text in sorted(metadata.items()):
        if name != DIGEST_KEY:
            yield from (name.encode(), text.encode())
    for name, tensor in sorted(tensors.items()):
        yield from (
            name.encode(),
            str(tensor.dtype).encode(),
            str(list(tensor.shape)).encode(),
            digest(tensor).encode(),
        )


def tensor_names(file: Any) -> list[str]:
    """Names of the tensors of a safetensors file that is open.

    Raises:
        ValueError: there are more than `MAX_TENSORS`; a header of 100 MB can list a million empty ones.
    """
    names = list(file.keys())
    if len(names) > MAX_TENSORS:
        raise ValueError(f"it holds {len(names)} tensors, and {MAX_TENSORS} is the limit")
    return names


def read_signed(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a safetensors file, on the CPU, compared with their digest where the file has one.

    Raises:
        InputError: the file cannot be read, or is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in tensor_names(file)}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{path} is corrupt, or not a readable safetensors file ({error}).") from error
    if DIGEST_KEY in metadata and metadata[DIGEST_KEY] != digest_of(_signed_parts(tensors, metadata)):
        raise InputError(
            f"{path} is corrupt: its content is not what was written. Take an earlier copy, or train again."
        )
    return metadata, tensors


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
            tensors = {name: file.get_tensor(name) for name in tensor_names(file)}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a {what}, or not a whole one ({error}). {advice}") from error
    if text is None:
        raise InputError(f"{path} is safetensors, but not a {what}: it lacks the metadata '{key}'. {advice}")
    try:
        found = parse_json(text, path)
    except InputError:
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
    if path.suffix.lower() in PICKLED:
        raise InputError(state_dict_advice(path))
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is corrupt, or not a readable safetensors file ({error}). Copy it again, or train the model again."
        ) from error
    if CARD_KEY not in metadata:
        raise InputError(state_dict_advice(path))
    return ModelCard.from_json(metadata[CARD_KEY], f"{path}: model card")


def state_dict_advice(path: Path) -> str:
    """What a file is that holds weights and says nothing of their network, and the commands that take it."""
    kind = "safetensors without a model card" if path.suffix == ".safetensors" else "a file of PyTorch"
    return (
        f"{path} is {kind}: weights alone, by another program. For a checkpoint and an NVFP4 one of them name their "
        f"network (net.py:make, smp:Unet/resnet34, ...) and a folder of images: fp4deploy quantize {path} "
        f"--model SPEC --data IMAGES; to train on: fp4deploy train --model SPEC --init {path}"
    )


def network_of(path: Path, card: ModelCard, model: str | None = None) -> nn.Module:
    """A freshly initialised network as the card of a checkpoint describes it.

    Its shapes are compared with those in the file before any memory is taken: a card of a few bytes can ask for a
    network of gigabytes. Only code of the user, which may do anything, and networks that cannot be built without memory
    are compared afterwards.

    Args:
        model: the spec that the caller was given for this file; for user's code, it permits to import it.

    Raises:
        InputError: the file holds another network, the network does not take images of the card's size, or code of the
            user would run unasked.
        UnavailableError: the network's library is not installed.
    """
    if card.spec.source == UNET and card.volume is None and any(side % STRIDE for side in card.size):
        raise InputError(
            f"{path}: model card: {card.height} x {card.width} pixels, and a UNet takes multiples of {STRIDE}."
        )
    planned = _planned(path, card, model)
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in tensor_names(file)}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{path} is corrupt, or not a readable safetensors file ({error}).") from error
    _require_fit(path, {name: tuple(value.shape) for name, value in planned.state_dict().items()}, shapes)
    scales = [name for name in shapes if name.endswith(QUANTIZER_BUFFERS)]
    if scales and card.precision == "fp16":
        raise InputError(f"{path}: model card: precision = 'fp16', and the file holds the NVFP4 scale {scales[0]}.")
    return planned if _has_memory(planned) else network_for(card, path, model)


def _planned(path: Path, card: ModelCard, model: str | None) -> nn.Module:
    """The network on the meta device, which takes no memory; with memory where that does not work."""
    if card.spec.known:
        with suppress(RuntimeError, NotImplementedError, ValueError), torch.device("meta"):
            return network_for(card, path, model)
    return network_for(card, path, model)


def _has_memory(model: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def load_weights(model: nn.Module, path: Path, to_encoding: bool = False) -> None:
    """Load a checkpoint into `model`, name by name.

    An FP16 checkpoint fits an NVFP4 model and the reverse: only quantiser state may differ.

    Args:
        to_encoding: the checkpoint is of a UNet that reads RGB and `model` has the FP4 input encoding: the first weight
            is expanded to it.

    Raises:
        InputError: names or shapes differ (another scale, classes or architecture), or a value is not finite.
    """
    _, tensors = read_signed(path)
    expected = model.state_dict()
    types = [f"{name} ({value.dtype})" for name, value in tensors.items() if value.dtype not in WEIGHT_TYPES]
    if types:
        raise InputError(f"{path} holds weights of a type that no checkpoint has: {', '.join(types[:3])}.")
    if to_encoding and FIRST_WEIGHT in tensors and tensors[FIRST_WEIGHT].ndim == 4:
        tensors[FIRST_WEIGHT] = expand_weight(tensors[FIRST_WEIGHT])
    _require_fit(path, *({name: tuple(value.shape) for name, value in each.items()} for each in (expected, tensors)))
    broken = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    if broken:
        raise InputError(f"{path} holds NaN or Inf in {', '.join(broken[:3])}; take an earlier checkpoint.")
    model.load_state_dict({name: value for name, value in tensors.items() if name in expected}, strict=False)


def _require_fit(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the shapes of a network with those of a file; only quantiser state may be absent or additional."""
    differing = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    missing = [name for name in expected if name not in found and not name.endswith(QUANTIZER_BUFFERS)]
    unknown = [name for name in found if name not in expected and not name.endswith(QUANTIZER_BUFFERS)]
    if differing or missing or unknown:
        raise InputError(f"{path} does not fit this model: {_summary(differing, missing, unknown)}")


def _summary(differing: list[str], missing: list[str], unknown: list[str]) -> str:
    if differing:
        count, first = len(differing), differing[0]
        return f"{count} tensors differ in shape, first {first}. Use the scale and classes it was trained with."
    names = [f"{len(missing)} tensors are missing (first {missing[0]})"] if missing else []
    names += [f"{len(unknown)} are unknown (first {unknown[0]})"] if unknown else []
    return " and ".join(names) + ". It belongs to another model."
