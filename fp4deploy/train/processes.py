"""What the processes of one training share besides gradients: the tracked amaxes of static activation scales.

Each process sees its own part of a batch and moves its own amaxes. DistributedDataParallel broadcasts the buffers of
rank 0 before every forward, and rank 0 writes the checkpoint, so that what only the others saw would be lost. The
maximum over the processes, taken after every backward, is the moving maximum of the whole batch: it does not depend on
how a batch is spread. It is one small all-reduce.

After the backward, because gradient checkpointing quantises there with the amax that the forward had.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from fp4deploy.qat import QuantizedLayer


@torch.no_grad()
def share_amaxes(layers: Iterable[QuantizedLayer]) -> None:
    """Set every `input_amax` to its maximum over the processes of the default group."""
    amaxes = [layer.input_amax for layer in layers if layer.input_amax is not None]
    if not amaxes:
        return
    together = torch.stack(amaxes)
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    torch._foreach_copy_(amaxes, together.unbind())
