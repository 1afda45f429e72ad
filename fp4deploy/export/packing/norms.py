"""Norms of the captured graph -> nodes of the packed network."""

from __future__ import annotations

from typing import Any, cast

import torch

from fp4deploy.errors import InputError
from fp4deploy.export.packing.writer import Writer, owner, refuse
from fp4deploy.graph import ir
from fp4deploy.packed import graph as packed
from fp4deploy.packed.graph import Form


def write_group_norm(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """GroupNorm, with the bias and the ReLU that the module's patterns give it."""
    groups, eps = node.attributes["num_groups"], node.attributes["eps"]
    if not writer.relu(node):
        return _norm(writer, node, forms, groups=groups)
    before = writer.producers.get(node.inputs.get("input", ""))
    bias = writer.bias(before) if before is not None and writer.gives_bias(before) is node else None
    layer = owner(node)
    for part in ("weight", "bias"):
        writer.plain(f"{layer}.{part}", writer.state[node.parameters[part]])
    inputs = [writer.source(node)]
    return packed.GroupNormReLU(layer=layer, inputs=inputs, outputs=forms, groups=groups, eps=eps, bias=bias)


def _norm(writer: Writer, node: ir.Node, forms: list[Form], **more: Any) -> packed.Node:
    layer = None
    if "weight" in node.parameters:
        layer = owner(node)
        weight = writer.state[node.parameters["weight"]]
        bias = writer.state[node.parameters["bias"]] if "bias" in node.parameters else torch.zeros_like(weight)
        writer.plain(f"{layer}.weight", weight)
        writer.plain(f"{layer}.bias", bias)
    inputs = [writer.source(node)]
    op = cast(Any, node.op)
    return packed.Norm(op=op, layer=layer, inputs=inputs, outputs=forms, eps=node.attributes["eps"], **more)


def write_layer_norm(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """LayerNorm over the last axes."""
    shape = list(node.attributes["normalized_shape"])
    if not all(isinstance(size, int) for size in shape):
        raise refuse(node, "a LayerNorm over axes of open size")
    return _norm(writer, node, forms, shape=shape)


def write_instance_norm(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """InstanceNorm; with running statistics it is a BatchNorm."""
    if not node.attributes["use_input_stats"]:
        return write_batch_norm(writer, node, forms)
    return _norm(writer, node, forms)


def write_batch_norm(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """BatchNorm as y = x scale + shift."""
    if node.attributes.get("training"):
        raise refuse(node, "a BatchNorm without running statistics")
    state = {role: writer.state[name].detach().double() for role, name in node.parameters.items()}
    mean, variance = state["running_mean"], state["running_var"]
    scale = state.get("weight", torch.ones_like(mean)) / (variance + node.attributes["eps"]).sqrt()
    shift = state.get("bias", torch.zeros_like(mean)) - mean * scale
    layer = node.parameters["running_mean"].removesuffix(".running_mean")
    for part, value in (("scale", scale), ("shift", shift)):
        if not torch.isfinite(value).all():
            raise InputError(f"{layer} holds NaN or Inf. Export an earlier checkpoint.")
        writer.tensors[f"{layer}.{part}"] = value.float()
    return packed.Affine(layer=layer, inputs=[writer.source(node)], outputs=forms)
