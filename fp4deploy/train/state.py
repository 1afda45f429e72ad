"""Everything an exact resume needs, in one safetensors file, replaced by one rename.

Tensors: the model (quantiser state included), both Adam moments of every parameter, what other parts of the training
keep (averaged weights, the window of the weight resets), the random number states. The metadata holds the counters and
the loss scaler as JSON, and a SHA-256 over all of it, which a resume compares first (`models.checkpoint`). The learning
rate is a function of the step, the order and the augmentation of the data are functions of (seed, epoch), so neither
needs saving. One file means that a crash, a full disk or Ctrl-C leaves either the old state or the new one, never half
of each; nothing is pickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models.checkpoint import read_signed, write_tensors
from fp4deploy.system.schema import Count, parse_json, validated
from fp4deploy.train.logging.running_statistics import EpochStatistics

PROGRESS_KEY = "fp4deploy.progress"
DAMAGE = (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, InputError)


class Stateful(Protocol):
    """A part of a training with tensors of its own."""

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors, by name."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore them; KeyError where one is missing."""


NO_PARTS: Mapping[str, Stateful] = MappingProxyType({})


@dataclass
class Progress:
    """Counters of one training.

    `epoch` counts whole epochs; `seconds` and `skipped` are their time (validation included) and their skipped steps,
    `best_score` (mIoU or AP) and `per_class` belong to the best of them. Of the next one, `batch` of its `batches` are
    done, in `epoch_seconds`, and `counts` holds their `running_statistics.EpochStatistics`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    epoch: Count = 0
    step: Count = 0
    best_score: float = -1.0
    seconds: float = 0.0
    per_class: dict[str, float | None] = field(default_factory=dict)
    skipped: Count = 0
    batch: Count = 0
    batches: Count = 0
    epoch_seconds: float = 0.0
    counts: dict[str, Any] = field(default_factory=dict)


class SavingPace:
    """When to save: within an epoch every so many minutes, after an epoch as long as that costs little.

    The state of a UNet of scale 1.0 is half a gigabyte. Saved after every epoch of a second it would be a third of
    the training. A crash costs at most twenty times as long as saving takes.
    """

    SHARE = 0.05  # of the time

    def __init__(self, minutes: float) -> None:
        self._most, self._cost, self._saved_at = 60 * minutes, 0.0, time.monotonic()

    def due_within_epoch(self) -> bool:
        """Whether the minutes have passed."""
        return time.monotonic() - self._saved_at > self._most

    def due_after_epoch(self) -> bool:
        """Whether the last saving took at most its share of the time since then."""
        return self._cost <= self.SHARE * (time.monotonic() - self._saved_at) or self.due_within_epoch()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the saving itself."""
        start = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - start


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any | None,
    progress: Progress,
    parts: Mapping[str, Stateful] = NO_PARTS,
) -> None:
    """Write the state between two steps, atomically; `parts`: what else has a state, by the prefix of its tensors.

    Raises:
        InputError: the disk is full; the state saved before survives.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
    for prefix, part in parts.items():
        tensors |= {f"{prefix}.{name}": value for name, value in part.state().items()}
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    scale = scaler.state_dict() if scaler is not None else None
    write_tensors(
        path, tensors, {PROGRESS_KEY: json.dumps({"progress": asdict(progress), "scaler": scale})}, signed=True
    )


def load_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any | None,
    parts: Mapping[str, Stateful] = NO_PARTS,
) -> Progress:
    """Put everything back as `save_state` found it.

    Raises:
        InputError: the file is damaged or belongs to another model.
    """
    try:
        metadata, tensors = read_signed(path)
        meta = _meta(path, metadata)
        weights = _below(tensors, "model.")
        broken = [name for name, value in weights.items() if not torch.isfinite(value).all()]
        if broken:
            raise ValueError(f"NaN or Inf in {broken[0]}")
        model.load_state_dict(weights)
        optimizer.load_state_dict({"state": _moments(tensors), "param_groups": optimizer.state_dict()["param_groups"]})
        _lay_out_like_parameters(optimizer)
        for prefix, part in parts.items():
            part.load_state(_below(tensors, f"{prefix}."))
        progress = _progress(path, meta)
        if scaler is not None and meta.get("scaler"):
            scaler.load_state_dict(validated(dict[str, int | float], meta["scaler"], path))
        torch.set_rng_state(tensors["random.cpu"])
        if torch.cuda.is_available() and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"])
    except DAMAGE as error:
        raise _damaged(path, error) from error
    return progress


def read_progress(path: Path) -> Progress:
    """Only the counters of a saved state.

    Raises:
        InputError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return _progress(path, _meta(path, file.metadata() or {}))
    except DAMAGE as error:
        raise _damaged(path, error) from error


def _meta(path: Path, metadata: Mapping[str, str]) -> dict[str, object]:
    return validated(dict[str, Any], parse_json(metadata[PROGRESS_KEY], PROGRESS_KEY, nan="keep"), path)


def _progress(path: Path, meta: dict[str, object]) -> Progress:
    fields = dict(validated(dict[str, Any], meta["progress"], path))
    if "best_miou" in fields:  # its name before there was another score
        fields["best_score"] = fields.pop("best_miou")
    counts = dict(validated(dict[str, Any], fields.get("counts", {}), path))
    if "row" in counts:  # the name before `consecutive`
        counts["consecutive"] = counts.pop("row")
    known = asdict(validated(EpochStatistics, counts, path)) if counts else {}
    return validated(Progress, {**fields, "counts": known}, path)


def _damaged(path: Path, error: Exception) -> InputError:
    cause = " ".join(str(error).split())[:200]
    return InputError(
        f"{path} cannot be resumed from ({cause}). Remove it to train this model again from its start, "
        "or begin a new run without --resume."
    )


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _lay_out_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """A file is in row-major order; fused optimisers want moments with the strides of their parameters."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _moments(tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in _below(tensors, "optimizer.").items():
        index, _, moment = name.partition(".")
        state.setdefault(int(index), {})[moment] = value
    return state
