"""Activation checkpointing: a block keeps its input alone, and computes the rest again in the backward pass.

A UNet's memory is its activations at full resolution; without those inside the blocks a batch needs about a third of
it less for one more forward pass of time. Quantised layers know a recomputation when they see one: it moves no
tracked amax and quantises with the amax of the first time (`qat.layers`), so that losses and gradients are the same
bits.

The fused forward does not call the blocks, and keeps less to begin with; asking for checkpointing gives the plain one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from fp4deploy.models.unet import Block


def checkpoint_blocks(model: nn.Module) -> int:
    """Make every `Block` of the model, in place, compute its forward twice; returns how many there are.

    Names, parameters and hooks stay as they are, and evaluation computes once as before.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.forward = partial(_twice, block)  # type: ignore[method-assign]
    return len(blocks)


def _twice(block: Block, x: Any) -> Any:
    plain = partial(type(block).forward, block)
    if not block.training:
        return plain(x)
    return checkpoint(plain, x, use_reentrant=False)
