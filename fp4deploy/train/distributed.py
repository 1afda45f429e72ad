"""What the processes of a distributed training share in addition to gradients: run folder, sums of the loss, amaxes.

The loss divides sums over a batch by sums over a batch (labelled pixels, overlaps of a class). The mean of the
processes' own quotients is not the quotient of the whole batch: a process with few labelled pixels would weigh them
too much.

Each process has its own part of a batch and tracks its own amaxes. DistributedDataParallel broadcasts the buffers of
rank 0 before every forward, and rank 0 writes the checkpoint, so that what only the others saw would be lost. The
maximum over the processes, taken after every backward, is the moving maximum of the whole batch: it does not depend on
how a batch is divided. It is one small all-reduce.

After the backward, because gradient checkpointing quantises there with the amax that the forward had.

A signal reaches one process before the others, or one alone. A process that stopped by itself would leave the others
waiting for its gradients. So all ask between the same steps whether any has one, and stop together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState

from fp4deploy.errors import Fp4DeployError
from fp4deploy.qat import QuantizedLayer
from fp4deploy.runs import is_first_process, processes
from fp4deploy.tracing import not_compiled

T = TypeVar("T")


def from_first(make: Callable[[], T]) -> T:
    """What `make` gives in the first process, which alone calls it, in every process; its error likewise."""
    if processes() == 1:
        return make()
    PartialState(cpu=not torch.cuda.is_available())  # joins the process group
    made: list[Any] = [None, None]
    if is_first_process():
        try:
            made[0] = make()
        except Fp4DeployError as error:
            made[1] = error
    dist.broadcast_object_list(made)
    if made[1] is not None:
        raise made[1]
    found: T = made[0]
    return found


def summed(sums: torch.Tensor) -> torch.Tensor:
    """The sums over all processes, as they are where there is one.

    DistributedDataParallel takes the mean of the processes' gradients. The gradient of the sum is the sum of theirs,
    so that each is multiplied by the number of processes here; nothing is sent in the backward pass.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return sums
    return _summed(sums)


@not_compiled
def _summed(sums: torch.Tensor) -> torch.Tensor:
    total = sums.detach().clone()
    dist.all_reduce(total)
    return total + dist.get_world_size() * (sums - sums.detach())


def agreed_signal(number: int, device: torch.device) -> int:
    """The largest of the numbers that the processes give; 0 where nobody has a signal. All of them have to call it."""
    shared = torch.tensor(number, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


@torch.no_grad()
def share_amaxes(layers: Iterable[QuantizedLayer]) -> None:
    """Set every `input_amax` to its maximum over the processes of the default group."""
    amaxes = [layer.input_amax for layer in layers if layer.input_amax is not None]
    if not amaxes:
        return
    stacked = torch.stack(amaxes)
    dist.all_reduce(stacked, op=dist.ReduceOp.MAX)
    torch._foreach_copy_(amaxes, stacked.unbind())
