"""nn.MultiheadAttention whose projections are linear layers: four products that can be quantised, attention between.

    q, k, v = q_proj(query), k_proj(key), v_proj(value)        y = out_proj(softmax(q k^T / sqrt(D) + mask) v)

torch's class multiplies its weights itself and calls none of its layers. `open_attention` changes it in place:
parameters and the keys of the state dict stay. `q_proj`, `k_proj` and `v_proj` are modules that hold no parameter: each
reads its rows of `in_proj_weight` [3 E, E], or its own weight where key or value have other widths, and its part of the
bias. Three layers, and not one of 3 E rows, since query, key and value may be three tensors, each with its own scale.

nn.TransformerEncoderLayer multiplies the weights of all its layers in one operator in evaluation, and
nn.TransformerEncoder packs sequences of different lengths for it (the fast path). Around quantised layers both are off.

Only the class itself is opened; a subclass may compute something else. `close_attention` undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.errors import InputError

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
FAST = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
FORMER = "fast_path"  # what that attribute was


class Projection(nn.Linear):
    """One of the three input projections: [..., C] -> [..., E]; weight and bias are views of the attention's."""

    owner: nn.MultiheadAttention

    def __init__(self, owner: nn.MultiheadAttention, place: int) -> None:
        nn.Module.__init__(self)
        vars(self)["owner"] = owner  # not a child: it holds this module
        self.place = place
        self.in_features = (owner.embed_dim, owner.kdim, owner.vdim)[place]
        self.out_features = owner.embed_dim

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """[E, C]."""
        own = self.owner._parameters.get(f"{PROJECTIONS[self.place]}_weight")
        return self._rows("in_proj_weight") if own is None else own

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """[E]."""
        return None if self.owner.in_proj_bias is None else self._rows("in_proj_bias")

    def _rows(self, name: str) -> torch.Tensor:
        size = self.out_features
        return cast(torch.Tensor, self.owner._parameters[name])[self.place * size : (self.place + 1) * size]


class OpenAttention(nn.MultiheadAttention):
    """What `open_attention` makes of nn.MultiheadAttention: the same results, by calls of four linear layers."""

    q_proj: Projection
    k_proj: Projection
    v_proj: Projection

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As nn.MultiheadAttention, with its arguments and results.

        `is_causal` changes nothing: the mask is applied. Where no weights are asked for, torch then hides what
        `add_bias_kv` and `add_zero_attn` append; with weights it shows it, as this does always.
        """
        if is_causal and attn_mask is None:
            raise InputError("is_causal says what attn_mask is; give that mask, too.")
        batched = query.dim() == 3
        enter, leave = self._layout(batched)
        q, k, v = self.q_proj(enter(query)), self.k_proj(enter(key)), self.v_proj(enter(value))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, b.to(x.dtype).expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask = self._mask(attn_mask, key_padding_mask, k)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = q / math.sqrt(self.head_dim) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            context = weights @ v
        else:
            context = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        result = leave(self.out_proj(context.transpose(1, 2).flatten(2)))
        if not need_weights:
            return result, None
        said = weights.mean(1) if average_attn_weights else weights
        return result, said if batched else said.squeeze(0)

    def _layout(self, batched: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """From the layout of the inputs to [N, L, E], and back."""
        if not batched:
            return (lambda x: x.unsqueeze(0)), (lambda x: x.squeeze(0))
        if self.batch_first:
            return (lambda x: x), (lambda x: x)
        return (lambda x: x.transpose(0, 1)), (lambda x: x.transpose(0, 1))

    def _mask(
        self, attention: torch.Tensor | None, padding: torch.Tensor | None, key: torch.Tensor
    ) -> torch.Tensor | None:
        """Both masks as numbers to add to scores [N, heads, L, S]; what was appended to `key` is seen."""
        masks = []
        if attention is not None:
            attention = _added(attention, key.dtype)
            masks.append(attention if attention.dim() == 2 else attention.unflatten(0, (-1, self.num_heads)))
        if padding is not None:
            padding = _added(padding, key.dtype)
            masks.append((padding if padding.dim() == 2 else padding.unsqueeze(0))[:, None, None])
        if not masks:
            return None
        whole = masks[0] if len(masks) == 1 else masks[0] + masks[1]
        appended = (self.bias_k is not None) + int(self.add_zero_attn)
        return F.pad(whole, (0, appended)) if appended else whole


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is added: one of truth values hides where it is true."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def open_attention(model: nn.Module) -> None:
    """Open every nn.MultiheadAttention of a model and switch its fast paths off, in place."""
    for layer in list(model.modules()):
        if type(layer) is nn.MultiheadAttention:
            layer.__class__ = OpenAttention
            layer.out_proj.__class__ = nn.Linear  # type: ignore[assignment]
            projections = {name: Projection(layer, place) for place, name in enumerate(PROJECTIONS)}
            layer._modules = {**projections, **layer._modules}
        for kind, name in FAST.items():
            if isinstance(layer, kind) and FORMER not in vars(layer):
                vars(layer)[FORMER] = getattr(layer, name)
                setattr(layer, name, 0)


def close_attention(model: nn.Module, kept: Callable[[nn.Module], bool] = lambda _: False) -> None:
    """Undo `open_attention`, in place, but in modules that hold a layer for which `kept` is true."""
    for layer in model.modules():
        if any(map(kept, layer.modules())):
            continue
        if isinstance(layer, OpenAttention):
            layer.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
            layer.out_proj.__class__ = nn.modules.linear.NonDynamicallyQuantizableLinear
            for name in PROJECTIONS:
                del layer._modules[name]
        for kind, name in FAST.items():
            if isinstance(layer, kind) and FORMER in vars(layer):
                setattr(layer, name, vars(layer).pop(FORMER))


@contextmanager
def opened(model: nn.Module, kept: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Inside, attention is open; afterwards only that with a layer for which `kept` is true."""
    open_attention(model)
    try:
        yield
    finally:
        close_attention(model, kept)


def unquantized_rows(model: nn.Module, quantized: Callable[[nn.Module], bool]) -> dict[str, list[torch.Tensor]]:
    """Of the weights of open attention by name, the views that belong to projections which are not quantised."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Projection):
            attention = name.rpartition(".")[0]
            own = f"{PROJECTIONS[layer.place]}_weight"
            key = own if layer.owner._parameters.get(own) is not None else "in_proj_weight"
            views = found.setdefault(f"{attention}.{key}" if attention else key, [])
            views += [] if quantized(layer) else [layer.weight]
    return found
