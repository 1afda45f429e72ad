"""Networks that are random in evaluation: no file computes what torch does, since torch does not either.

    F.dropout(x, 0.3)                    without training=self.training
    x + 0.1 * torch.randn_like(x)        noise that belongs to the training

    x * np.random.rand(); self.calls += 1    what torch does not know of

Where it draws, the forward runs with other random numbers until a result differs, a few times: of two paths that are
dropped with a probability of 0.2, none is in two runs of five. What has no part in the result is the same each time.
Where it draws nothing that torch knows of, it is called a second time.
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
SEEDS = 8  # runs; each is one more forward of a network that draws what has no part in the result
CLOSE = 1e-4  # of the largest value: what two runs of one kernel may differ by


def refuse_random(model: nn.Module, inputs: Sequence[torch.Tensor], named: dict[str, torch.Tensor]) -> None:
    """Refuse a module, without fake-quantised layers, that gives several results for one input; it is not changed.

    Raises:
        InputError: naming the operation that is random, and its line; or it keeps a state.

    >>> refuse_random(nn.Sequential(nn.Dropout(), nn.ReLU()), [torch.ones(2, 3)], {})
    """
    first: list[torch.Tensor] | None = None
    drawn = _Drawn()
    network = copied(model).cpu().float().eval()
    for seed in range(SEEDS):
        if drawn.calls:
            network = copied(model).cpu().float().eval()  # anew: no state of the run before
        given = [_float(x) for x in inputs], {name: _float(x) for name, x in named.items()}
        try:
            with torch.no_grad(), torch.random.fork_rng([]), drawn:
                torch.manual_seed(seed)
                found = network(*given[0], **given[1])
        except Exception:  # what is wrong with it, whoever traces it says
            return
        leaves = [each.clone() for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        if first is not None and not all(map(_same, first, leaves)):
            break
        if first is not None and not drawn.calls:
            return
        first = leaves
    else:
        return
    if not drawn.calls:
        raise InputError(
            f"{type(model).__name__} gives another result when it is called again on one input: it keeps a state, or "
            "draws random numbers outside of torch, so that no file could be compared with it. Let that depend on "
            "self.training, and pass a state in and out."
        )
    name, place = drawn.calls[0]
    raise InputError(
        f"{type(model).__name__} is random in evaluation: it calls {name}{place}, so that two runs on one input "
        "differ, and no file could be compared with it. Let it depend on self.training, as in F.dropout(x, p, "
        "training=self.training)."
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.nan_to_num(), other.nan_to_num()
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    return bool((one - other).abs().max() <= CLOSE * one.abs().max())


def _float(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, since a forward may change its input; of numbers, float32."""
    return x.detach().cpu().float().clone() if x.is_floating_point() else x.detach().cpu().clone()


class _Drawn(DispatchMode):
    """The calls that draw from torch's default generator: (operation, place of the user's code)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        draws = torch.Tag.nondeterministic_seeded in func.tags or "rrelu" in func._schema.name
        parameters = func._schema.arguments
        given = {each.name: each.default_value for each in parameters} | (kwargs or {})
        given |= {each.name: value for each, value in zip(parameters, args, strict=False)}
        if draws and not given.get("generator") and given.get("dropout_p") != 0:  # an attention, as it is deployed
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
