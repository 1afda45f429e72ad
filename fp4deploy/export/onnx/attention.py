"""Attention as the exporter of torch and the runtimes take it: handlers for `graph.replacement.Rewriting`.

    mask [..., 1, S] of all queries          [..., L, S]                 ONNX Runtime takes no other
    one head of keys for all queries         repeated                    torch's exporter takes no other
    heads of other sizes in K than in V      zeros beside the smaller    TensorRT-RTX 1.7: "Key and Value must have the
                                                                         same shape"
    heads of fewer than MIN_HEAD channels    zeros beside all            TensorRT-RTX 1.7 refuses 8 and fewer

Zeros beside a head add nothing to a score, and what they give is cut off: no number changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # what may be given by position
MIN_HEAD = 16  # heads of 4 and 8 channels were refused for sm120, of 12 and 16 not (TensorRT-RTX 1.7, 2026-11-29)


def regular_attention(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention with a mask and keys of every query, and heads of one size, of MIN_HEAD channels at least."""
    given = {**dict(zip(ATTENTION, args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in ATTENTION[:3])
    mask, size, out = given.get("attn_mask"), query.shape[-1], value.shape[-1]
    if query.ndim == 4 and key.shape[1] == 1 and not given.get("enable_gqa"):
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    if mask is not None and mask.ndim > 1 and mask.shape[-2] == 1:
        given["attn_mask"] = mask.expand(*mask.shape[:-2], query.shape[-2], mask.shape[-1])
    wide = max(size, out, MIN_HEAD)
    if wide == size == out:
        return call(query, key, value, **given)
    given["scale"] = given.get("scale") or size**-0.5
    padded = (F.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (query, key, value))
    return call(*padded, **given)[..., :out]


def four_axes(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Give queries, keys and values [..., L, E] the four axes that torch's exporter asks for."""
    given = {**dict(zip(ATTENTION, args, strict=False)), **kwargs}
    query, key, value, mask = given.pop("query"), given.pop("key"), given.pop("value"), given.pop("attn_mask", None)
    if query.ndim == 4:
        return call(*args, **kwargs)
    lead = query.shape[:-2]

    def four(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 1, *x.shape[-2:])

    if mask is not None and mask.ndim > 2:
        mask = four(mask.expand(*lead, *mask.shape[-2:]))
    result = call(four(query), four(key), four(value), mask, **given)
    return result.reshape(*lead, *result.shape[-2:])
