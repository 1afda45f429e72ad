"""Decoders of transformers with their cache of keys and values as tensors, and greedy generation from a file.

    step = with_cache(model)                                a cache that grows, of P tokens before L new ones
    input_ids [N, L], past_0_key [N, heads, P, D], ...      -> logits [N, L, V], present_0_key [N, heads, P + L, D], ...

    step = with_cache(model, length=S)                      a static cache, position [N]: how many tokens are in it
    input_ids, position, past_0_key [N, heads, S, D], ...   -> logits, present_0_key [N, heads, S, D], ...

A file has no objects, and `transformers.Cache` is one: it is taken apart here. Of a growing cache an ONNX file leaves P
open, and L where it is asked to. A static cache has one size whatever the position, which may differ from sample to
sample; rows behind it are masked. Of a decoder that reads an encoder, as Whisper's, keys and values of what the encoder
gives are inputs too, `cross_0_key`, ...: `crossing` is the module that computes them, once a sequence.

Masks are made here, of positions: a token sees those before it. A window shorter than the cache is refused.
`transformers` is imported where a cache is made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.graph.modes import evaluating

IDS, POSITION, LOGITS = "input_ids", "position", "logits"
PAST, PRESENT, CROSS = "past", "present", "cross"
PARTS = ("key", "value")
TOKENS, BEFORE = "L", "P"  # names of open axes

Tensors = dict[str, torch.Tensor]


def with_cache(model: nn.Module, length: int | None = None, **others: torch.Tensor) -> CachedDecoder:
    """A decoder as a module whose cache is tensors, for `export_onnx` and `pack`; it shares the model's layers.

    Args:
        model: of transformers, plain or prepared, that takes `input_ids` and a cache and gives logits.
        length: tokens that a static cache has room for; None: a cache that grows with each call.
        others: what it reads besides, [1, ...], such as `encoder_hidden_states`.

    Raises:
        InputError: a model without such a cache, or with a window shorter than it.

    >>> with_cache(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    fp4deploy.errors.InputError: Linear takes no input_ids with a cache of keys and values: nothing to hold.
    """
    return CachedDecoder(model, length, others)


class CachedDecoder(nn.Module):
    """What `with_cache` gives: forward takes and gives tensors by name, as the module's docstring lists them."""

    def __init__(self, model: nn.Module, length: int | None, others: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        arguments = inspect.signature(model.forward).parameters
        self.argument = next((name for name in ("cache", "past_key_values") if name in arguments), "")
        if not self.argument or IDS not in arguments:
            raise InputError(f"{type(model).__name__} takes no {IDS} with a cache of keys and values: nothing to hold.")
        _require_no_window(model, length)
        self.model, self.length, self.others = model, length, tuple(others)
        self.past, self.cross = ([tuple(x.shape[1:]) for x in each] for each in self.first(others))  # [heads, S, D]
        position = [POSITION] if length else []
        names = [IDS, *position, *_names(PAST, len(self.past)), *_names(CROSS, len(self.cross))]
        self.__class__ = _class_of(tuple(names))

    def first(self, others: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values after a token of its own, and of what an encoder gives."""
        count = next(iter(others.values())).shape[0] if others else 1
        ids = torch.zeros((count, 1), dtype=torch.int64, device=_parameter(self.model).device)
        with torch.no_grad(), evaluating(self.model):
            result = self._call(ids, self._cache(None, None), **others)
        found = getattr(result, self.argument, None) if self.argument in result else result.past_key_values
        own: Any = getattr(found, "self_attention_cache", found)
        crossed = getattr(found, "cross_attention_cache", None)
        return _states(own.layers), [] if crossed is None else _states(crossed.layers)

    def step(self, given: Mapping[str, torch.Tensor]) -> Tensors:
        """The forward."""
        ids = given[IDS]
        past = [given[name] for name in _names(PAST, len(self.past))]
        cross = [given[name] for name in _names(CROSS, len(self.cross))]
        before = given[POSITION] if self.length else torch.full_like(ids[:, 0], past[0].shape[2])
        steps = before[:, None] + torch.arange(ids.shape[1], device=ids.device)  # [N, L]
        seen = self.length or past[0].shape[2] + ids.shape[1]
        visible = torch.arange(seen, device=ids.device) <= steps[:, None, :, None]
        mask = torch.zeros_like(visible, dtype=past[0].dtype).masked_fill(~visible, -math.inf)
        layers = [_Layer(*each, at=before if self.length else None) for each in _pairs(past)]
        cache = self._cache(layers, [_Layer(*each) for each in _pairs(cross)])
        read = dict.fromkeys(self.others, cross[0] if cross else None)  # not looked at
        result = self._call(ids, cache, attention_mask=mask, position_ids=steps, **read)
        return {LOGITS: result[0], **dict(zip(_names(PRESENT, len(past)), _states(layers), strict=True))}

    def example(self, batch: int = 1, tokens: int = 1, before: int = 4) -> Tensors:
        """Inputs by name: `tokens` new ones behind `before` others, of small numbers."""
        parameter = _parameter(self.model)
        ids = torch.zeros((batch, tokens), dtype=torch.int64, device=parameter.device)
        found: Tensors = {IDS: ids} | ({POSITION: torch.full_like(ids[:, 0], before)} if self.length else {})
        past = [(heads, self.length or before, width) for heads, _, width in self.past]
        names = [*_names(PAST, len(past)), *_names(CROSS, len(self.cross))]
        for name, shape in zip(names, [*past, *self.cross], strict=True):
            found[name] = torch.randn((batch, *shape)).to(parameter.device, parameter.dtype)
        return found

    @property
    def open_axes(self) -> dict[str, dict[int, str]]:
        """`dynamic` of `export_onnx`: the new tokens, and of a cache that grows the tokens before."""
        grown = {} if self.length else {name: {2: BEFORE} for name in _names(PAST, len(self.past))}
        return {IDS: {1: TOKENS}, **grown}

    def crossing(self) -> nn.Module:
        """The module that gives `cross_0_key`, ... of what an encoder gives, [N, S, C].

        Raises:
            InputError: it was made without.
        """
        if not self.cross:
            raise InputError(f"{type(self.model).__name__} was given no encoder's output: with_cache(model, NAME=x).")
        return Crossing(self)

    def _call(self, ids: torch.Tensor, cache: object, **more: object) -> Any:
        return self.model(input_ids=ids, use_cache=True, **{self.argument: cache}, **more)

    def _cache(self, own: list[_Layer] | None, cross: list[_Layer] | None) -> Any:
        """The library's cache of these layers, or an empty one."""
        from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

        CacheLayerMixin.register(_Layer)

        def made(layers: list[_Layer] | None) -> Any:
            return Cache(layer_class_to_replicate=_Layer) if layers is None else Cache(layers=layers)

        if not self.others:
            return made(own)
        both = EncoderDecoderCache(made(own), made(cross))
        both.is_updated = dict.fromkeys(range(len(own or ())), True)
        return both


class Crossing(nn.Module):
    """What `CachedDecoder.crossing` gives."""

    def __init__(self, decoder: CachedDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, encoded: torch.Tensor) -> Tensors:
        """Keys and values [N, heads, S, D] of each layer."""
        found = self.decoder.first(dict.fromkeys(self.decoder.others, encoded))[1]
        return dict(zip(_names(CROSS, len(found)), found, strict=True))


class _Layer:
    """Keys and values of one layer, as the library's caches call them; at: tokens in a static cache, [N]."""

    is_sliding = is_compileable = False

    def __init__(
        self, keys: torch.Tensor | None = None, values: torch.Tensor | None = None, at: torch.Tensor | None = None
    ) -> None:
        self.keys, self.values, self.at = keys, values, at
        self.is_initialized = keys is not None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add those of new tokens [N, heads, L, D], and give all."""
        self.keys, self.values = self._with(self.keys, keys), self._with(self.values, values)
        self.is_initialized = True
        return self.keys, self.values

    def _with(self, past: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        if past is None:
            return new
        if self.at is None:
            return torch.cat([past, new], 2)
        count = new.shape[2]
        places = torch.arange(past.shape[2], device=new.device) - self.at[:, None]  # [N, length]: which new token it is
        if count > 1:
            rows = places.clamp(0, count - 1)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
            new = new.gather(2, rows)
        return torch.where(((places >= 0) & (places < count))[:, None, :, None], new, past)

    def get_seq_length(self) -> int:
        """Tokens that it holds, or has room for."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, the first of them), for a mask that is not made here: of a first token."""
        return self.get_seq_length() + query_length, 0


def generate(
    run: Callable[[dict[str, Any]], Any], ids: NDArray[np.int64], count: int, **cross: object
) -> NDArray[np.int64]:
    """The most likely next tokens, one after another, by a file of `with_cache`.

    Args:
        run: of `open_runtime`.
        ids: tokens to begin with, [N, T].
        count: how many to add; a static cache has to have room for all but the last.
        cross: `cross_0_key`, ... where the file takes them.

    Returns:
        [N, T + count].

    Raises:
        InputError: a file of something else, or a static cache that is too short.

    >>> generate(print, np.array([[1, 2]]), 3)  # no runtime of such a file
    Traceback (most recent call last):
    fp4deploy.errors.InputError: This file takes no inputs by name, and no input_ids with a cache.
    """
    ports = {port.name: port for port in getattr(run, "inputs", ())}
    past = [port for name, port in ports.items() if name.startswith(f"{PAST}_")]
    if IDS not in ports or not past:
        raise InputError(f"This file takes {', '.join(ports) or 'no inputs by name'}, and no {IDS} with a cache.")
    room = past[0].extents[2]
    if POSITION not in ports and isinstance(room, int):
        raise InputError(
            f"The cache of this file has {room} tokens and cannot grow. Make it static: with_cache(length=N)."
        )
    room = room if isinstance(room, int) else 0
    if room and ids.shape[1] + count - 1 > room:
        raise InputError(f"{ids.shape[1]} tokens and {count} more do not fit into a cache of {room}. Make it longer.")
    cache = {port.name: np.zeros((len(ids), port.extents[1], room, port.extents[3]), port.dtype) for port in past}
    chunk = ports[IDS].extents[1]
    done, found = 0, np.asarray(ids, np.int64)
    while found.shape[1] < ids.shape[1] + count:
        new = found[:, done : done + chunk if isinstance(chunk, int) else None]
        position = {POSITION: np.full(len(ids), done, np.int64)} if POSITION in ports else {}
        given = run({IDS: new, **position, **cache, **cross})
        cache = {name: given[name.replace(PAST, PRESENT, 1)] for name in cache}
        done += new.shape[1]
        if done == found.shape[1]:
            found = np.concatenate([found, given[LOGITS][:, -1:].argmax(-1)], 1)
    return found


def _names(kind: str, count: int) -> list[str]:
    """Names of `count` tensors: keys and values of each layer in turn."""
    return [f"{kind}_{number // 2}_{PARTS[number % 2]}" for number in range(count)]


def _states(layers: Sequence[Any]) -> list[torch.Tensor]:
    return [x for layer in layers for x in (layer.keys, layer.values)]


def _pairs(states: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(states[::2], states[1::2], strict=True))


def _parameter(model: nn.Module) -> torch.Tensor:
    return next(each for each in model.parameters() if each.is_floating_point())


def _require_no_window(model: nn.Module, length: int | None) -> None:
    config = getattr(model, "config", None)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window and (kinds is None or "sliding_attention" in kinds) and (length is None or length > window):
        raise InputError(
            f"{type(model).__name__} attends to a window of {window} tokens. A cache of all of them has none: give "
            f"a static one no longer than that, length={window} or less."
        )


@lru_cache(maxsize=64)
def _class_of(names: tuple[str, ...]) -> type[CachedDecoder]:
    """A class whose forward has these arguments, by which exporters name inputs."""

    def forward(self: CachedDecoder, *inputs: torch.Tensor, **named: torch.Tensor) -> Tensors:
        return self.step({**dict(zip(names, inputs, strict=False)), **named})

    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, either) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type("CachedDecoder", (CachedDecoder,), {"forward": forward, "names": names})
