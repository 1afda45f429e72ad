"""`fuse`: the fastest way to train a prepared network on the GPU at hand, with its results kept.

    our UNet, a recipe with kernels      FusedUNet: kernels for norm + ReLU + quantise, nothing to compile
    anything else                        torch.compile with the passes of this folder

The module stays the one it was: class (but for the UNet), parameters, names and hooks of the module itself. A network
that is compiled takes minutes at the first step, once for each shape of its input.

On an H200 the generated quantisers gave the bits of the kernels, and small networks were as exact as uncompiled ones
(`tests/qat/test_fusion_gpu.py`); docs/your-model.md has the measured steps, and what was changed since.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4deploy.plugins import available
from fp4deploy.qat.fused_unet import fuse_unet, has_kernels
from fp4deploy.qat.fusion.compiler import backend, codes_kept
from fp4deploy.qat.prepare import quantized_layers


def fuse(model: nn.Module, example_inputs: object = None, recompute: bool | None = None) -> nn.Module:
    """Fuse quantisation with the layers around it, in place; without a GPU the model is returned as it is.

    Args:
        model: on its device; prepared for a recipe, or plain.
        example_inputs: a batch, or a tuple of the forward's arguments. Given, a training step's forward and backward
            run at once, so that the time to compile is spent here; gradients, buffers and the state of random
            generators are as before.
        recompute: keep few inputs of convolutions for the backward: our UNet computes them again
            (`qat.operators.recompute`), of other networks quantised ones are kept as codes and scales (`codes`). Less
            memory, a longer step, the same bits. None: of other networks as many as make up for the bits that
            quantisers keep (`compiler.BALANCED`).

    >>> model = fd.prepare(nn.Sequential(nn.Linear(64, 32)), include="0")
    >>> fd.fuse(model) is model
    True
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if not available(device) or has_kernels(model):
        return fuse_unet(model, bool(recompute))
    mark_fusible(model)
    model.compile(backend=backend(keep_codes=codes_kept(recompute)), dynamic=False)
    if example_inputs is not None:
        _warm_up(model, example_inputs if isinstance(example_inputs, tuple) else (example_inputs,))
    return model


def mark_fusible(model: nn.Module) -> None:
    """Let the quantised layers write their quantisers in elementary operators when they are captured."""
    for layer in quantized_layers(model).values():
        layer.fusible = True


def _warm_up(model: nn.Module, inputs: tuple[object, ...]) -> None:
    """Compile forward and backward, and leave no trace."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    given = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.is_leaf]
    leaves = [*model.parameters(), *given]
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None  # backward adds to a gradient in place
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            outputs = tree_leaves(model(*inputs))
            tensors = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
            torch.autograd.backward([each.float().sum() for each in tensors])
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
