"""Answers as plain data, and how close two of them have to be."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from fp4deploy.errors import Fp4DeployError

Answer = Callable[[], Any]
ERRORS = (Fp4DeployError, ValueError, AssertionError, KeyError, IndexError, TypeError, RuntimeError, ZeroDivisionError)


def plain(value: Any) -> Any:
    """A value as JSON: arrays as sums, dataclasses as dicts."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float() if value.is_floating_point() else value.detach()
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.ndim:
        return _sums(value)
    if isinstance(value, np.generic | np.ndarray):
        value = value.item()
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, bytes | str | bool | int | None):
        return value.decode("latin-1") if isinstance(value, bytes) else value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Iterable):
        return [plain(each) for each in value]
    return str(value)


def _sums(x: np.ndarray[Any, Any]) -> list[Any]:
    flat = x.reshape(-1).astype(np.float64) if x.dtype.kind in "biuf" else np.array([len(str(each)) for each in x.flat])
    finite = np.where(np.isfinite(flat), flat, 0)
    order = np.cos(np.arange(len(flat)))
    numbers = (finite.sum(), np.abs(finite).sum(), finite @ order)
    return [list(x.shape), *(plain(float(each)) for each in numbers), int((~np.isfinite(flat)).sum())]


def each(function: Callable[..., Any], *arguments: Iterable[Any], **options: Iterable[Any]) -> Answer:
    """The answers to every combination of arguments and options."""

    def answers() -> list[Any]:
        found = []
        for values in itertools.product(*arguments, *options.values()):
            positional, named = values[: len(arguments)], dict(zip(options, values[len(arguments) :], strict=True))
            try:
                found.append(plain(function(*positional, **named)))
            except ERRORS as error:
                found.append(type(error).__name__)
        return found

    return answers


def close(before: Any, now: Any) -> bool:
    """Whether two answers are the same, numbers to four digits and sums to a thousandth; keys may be added."""
    if isinstance(before, float | int) and isinstance(now, float | int) and not isinstance(before, bool):
        return math.isclose(before, now, rel_tol=2e-4, abs_tol=2e-5)
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() <= now.keys() and all(close(before[key], now[key]) for key in before)
    if isinstance(before, list) and isinstance(now, list):
        if before and isinstance(before[0], list) and len(before) == len(now) == 5 and before[0] == now[0]:
            terms = 1e-3 * abs(before[2]) + 2e-5 if isinstance(before[2], float) else 0
            if terms and all(isinstance(each, float | int) for each in (*before[1:], *now[1:])):
                return all(abs(one - other) <= terms for one, other in zip(before[1:], now[1:], strict=True))
        return len(before) == len(now) and all(map(close, before, now))
    return bool(before == now) and type(before) is type(now)
