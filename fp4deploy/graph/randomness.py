"""Networks that are random in evaluation: no file computes what torch does, since torch does not either.

    F.dropout(x, 0.3)                    without training=self.training
    x + 0.1 * torch.randn_like(x)        noise that belongs to the training

The forward runs twice with other random numbers, if it draws any at all; what a generator of the network's own draws,
or what has no part in the result, is the same both times.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4deploy.errors import InputError
from fp4deploy.graph.copies import copied
from fp4deploy.tracing import DispatchMode

OWN = str(Path(__file__).parents[1])


def refuse_random(model: nn.Module, inputs: Sequence[torch.Tensor], named: dict[str, torch.Tensor]) -> None:
    """Refuse a module, without fake-quantised layers, whose evaluation draws random numbers; it is not changed.

    Raises:
        InputError: naming the operation and its line.

    >>> refuse_random(nn.Sequential(nn.Dropout(), nn.ReLU()), [torch.ones(2, 3)], {})
    """
    results: list[list[torch.Tensor]] = []
    drawn = _Drawn()
    for seed in (1, 2):
        network = copied(model).cpu().float().eval()  # anew: it may count its calls
        given = [_float(x) for x in inputs], {name: _float(x) for name, x in named.items()}
        try:
            with torch.no_grad(), torch.random.fork_rng([]), drawn:
                torch.manual_seed(seed)
                found = network(*given[0], **given[1])
        except Exception:  # what is wrong with it, whoever traces it says
            return
        if not drawn.calls:
            return
        results.append([each for each in tree_leaves(found) if isinstance(each, torch.Tensor)])
    same = all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*results, strict=True))
    if same:
        return
    name, place = drawn.calls[0]
    raise InputError(
        f"{type(model).__name__} is random in evaluation: it calls {name}{place}, so that two runs on one input "
        "differ, and no file could be compared with it. Let it depend on self.training, as in F.dropout(x, p, "
        "training=self.training)."
    )


def _float(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, since a forward may change its input; of numbers, float32."""
    return x.detach().cpu().float().clone() if x.is_floating_point() else x.detach().cpu().clone()


class _Drawn(DispatchMode):
    """The calls that draw from torch's default generator: (operation, place of the user's code)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags or "rrelu" in func._schema.name
        if draws and not (kwargs or {}).get("generator"):
            self.calls.append(_place(func._schema.name.rpartition("::")[2].rstrip("_")))
        return func(*args, **(kwargs or {}))


def _place(operation: str) -> tuple[str, str]:
    """The function of torch that the user's code calls, and where."""
    library = str(Path(torch.__file__).parent)
    inner = ""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(library):
            functional = frame.filename.endswith("functional.py") and not frame.name.startswith("_")
            inner = frame.name if functional else inner
        elif not frame.filename.startswith(OWN):
            return inner or operation, f" ({Path(frame.filename).name}, line {frame.lineno})"
    return inner or operation, ""
