"""A copy of a module whatever its code keeps in it.

    self.auxiliary = [head(x) for head in self.heads]      in a forward, for the loss

Such results belong to the graph of a training step, and `copy.deepcopy` refuses them. The copy holds their values.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module) -> Module:
    """A deep copy; tensors that its code has computed and kept are copied as values.

    >>> layer = nn.Linear(2, 2)
    >>> layer.seen = layer(torch.ones(1, 2))
    >>> copied(layer).seen.requires_grad
    False
    """
    kept = (leaf for each in module.modules() for leaf in tree_leaves(vars(each)))
    computed = [leaf for leaf in kept if isinstance(leaf, torch.Tensor) and not leaf.is_leaf]
    return copy.deepcopy(module, {id(leaf): leaf.detach().clone() for leaf in computed})


def for_capture(module: Module) -> Module:
    """A copy on the CPU in evaluation, whose experts are chosen without a loop that depends on values.

    Experts of transformers multiply in the way that their configuration names. A loop over them and a grouped GEMM of
    sorted tokens cannot be captured; one product with the chosen weights of each token computes the same.
    """
    plain = copied(module).cpu().eval()
    for each in plain.modules():
        config = getattr(each, "config", None)
        if hasattr(each, "has_gate") and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
    return plain
