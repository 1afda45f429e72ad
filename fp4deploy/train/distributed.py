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

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp4deploy.errors import Fp4DeployError
from fp4deploy.qat import QuantizedLayer
from fp4deploy.runs import is_first_process, processes
from fp4deploy.tracing import not_compiled

T = TypeVar("T")
NEVER = 2**31 - 1  # steps


def join() -> PartialState:
    """This process as one of those that a launcher started; joins the process group where there are several.

    Buffers of collectives in a CUDA graph are not registered with NCCL, unless the user says so. Registering them is a
    call of all ranks in the middle of a capture, which waits for ever where one rank's capture has failed; and the
    collectives of a captured step would not be the kernels of the launched step.
    """
    if processes() > 1:
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    return PartialState(cpu=not torch.cuda.is_available())


def replicated(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """`model`, on `device`, with gradients averaged over the processes; on a GPU its step can be captured."""
    devices = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices)
    # It times every hundredth step by events, which cannot be read where that is the captured one.
    wrapped._set_ddp_runtime_logging_sample_rate(NEVER)
    return wrapped


def from_first(make: Callable[[], T]) -> T:
    """What `make` gives in the first process, which alone calls it, in every process; its error likewise."""
    if processes() == 1:
        return make()
    join()
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


def agreed_reason(reason: str | None) -> str | None:
    """The reason of the first process that has one, in every process; None where none has. All have to call it."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    given = [(rank, each) for rank, each in enumerate(reasons) if each is not None]
    if not given:
        return None
    rank, first = given[0]
    return first if all(each == first for each in reasons) else f"process {rank}: {first}"


@torch.no_grad()
def share_amaxes(layers: Iterable[QuantizedLayer]) -> None:
    """Set every `input_amax` to its maximum over the processes of the default group."""
    amaxes = [layer.input_amax for layer in layers if layer.input_amax is not None]
    if not amaxes:
        return
    stacked = torch.stack(amaxes)
    dist.all_reduce(stacked, op=dist.ReduceOp.MAX)
    torch._foreach_copy_(amaxes, stacked.unbind())
