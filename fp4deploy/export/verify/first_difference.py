"""The first operator of a network whose result a file does not compute, for messages.

A file names its nodes otherwise than torch, has more of them or fewer, and may end with an error; but what it computes
right is a tensor of the file. So torch's calls are recorded while the network runs, and one whose result is no tensor
of the file, nor what any later call computes from it, is where they part. (A reshape that the file has folded into its
reader has a reader whose result the file holds.)

Give it the network as it was before it was quantised: FP4 amplifies last bits (`layerwise`).
"""

from __future__ import annotations

import sys
import traceback
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.verify.numbers import rest_numbers
from fp4deploy.export.verify.tensors import feed
from fp4deploy.graph.capture import Inputs, line_of
from fp4deploy.qat.batches import applied
from fp4deploy.rest import Rest

CLOSE, CLOSER = 1e-3, 1e-5  # of the norm of a tensor, without FP4


def onnx_values(portable: onnx.ModelProto, inputs: Inputs) -> list[torch.Tensor]:
    """Every tensor that a decomposed graph computes; those before the node where it ends, if it does not run."""
    names = [value.name for value in portable.graph.input]
    fed, nodes = feed(inputs, names), list(portable.graph.node)

    def run(count: int) -> list[Any] | None:
        part = onnx.ModelProto()
        part.CopyFrom(portable)
        del part.graph.node[count:], part.graph.output[:], part.graph.value_info[:]
        produced = [name for node in nodes[:count] for name in node.output if name]
        part.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in produced)
        try:
            return list(portable_session(part).run(None, fed)) if count else []
        except Exception:  # ONNX Runtime's own errors
            return None

    computed = run(len(nodes))
    if computed is None:
        computed = run(bisect_left(range(len(nodes) + 1), True, key=lambda count: run(count) is None) - 1) or []
    constants = [numpy_helper.to_array(each) for each in portable.graph.initializer]
    return [
        torch.from_numpy(each.copy())
        for each in [*constants, *computed]
        if isinstance(each, np.ndarray) and each.dtype.isbuiltin == 1 and each.dtype.kind in "biuf"
    ]


@dataclass
class _Called:
    """A call that reads what is computed from the inputs. reads: the numbers of the calls that gave it."""

    operator: str
    layer: str
    line: str
    reads: set[int]
    values: list[torch.Tensor]


class _Calls(TorchFunctionMode):
    """Records the calls of a network, with copies of their results, in order."""

    def __init__(self, network: str, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.kept: list[Any] = list(inputs)  # so that no id is another tensor's
        self.of: dict[int, int] = {id(each): -1 for each in self.kept}
        self.calls: list[_Called] = []
        self.layers = [network]

    def entering(self, name: str) -> Callable[..., None]:
        """The first hook of a module, for the names of the calls in it."""
        return lambda *_: self.layers.append(name or self.layers[0])

    def leave(self, *_: object) -> None:
        """The last hook of a module."""
        self.layers.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call, and record what comes of it."""
        result = func(*args, **(kwargs or {}))
        reads = {self.of[id(each)] for each in tree_leaves((args, kwargs)) if id(each) in self.of}
        changed = args[0] if result is None and args else result  # x[...] = y
        tensors = [each for each in tree_leaves(changed) if isinstance(each, torch.Tensor)]
        if reads and tensors:
            self.kept += tensors
            self.of.update(dict.fromkeys(map(id, tensors), len(self.calls)))
            name = getattr(func, "__name__", str(func)).strip("_")
            line = line_of(_frames(sys._getframe(1)))
            self.calls.append(_Called(name, self.layers[-1], line, reads, [each.detach().clone() for each in tensors]))
        return result


def _frames(frame: FrameType) -> list[tuple[str, int]]:
    """File and line of each frame, the outermost first."""
    return [(each.f_code.co_filename, line) for each, line in traceback.walk_stack(frame)][::-1]


def first_difference(
    model: nn.Module, inputs: Inputs, values: Collection[torch.Tensor], rest: Rest, close: float = CLOSE
) -> str:
    """The first operator whose result no tensor of a file is, nor what torch computes from it; "" if there is none.

    Args:
        model: the network in torch, without quantised layers.
        inputs: on which the file differs.
        values: every tensor that the file computes of them, such as `onnx_values`.
        rest: what the file holds numbers of the network's code in.
        close: the share of a tensor's norm by which one that is the same may differ.

    Returns:
        for messages: "interpolate in 'neck' (net.py, line 12)".
    """
    copies = tree_map(torch.clone, inputs)
    record, handles = _Calls(type(model).__name__, tree_leaves(copies)), []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(record.entering(name), prepend=True))
        handles.append(module.register_forward_hook(record.leave, always_call=True))
    try:
        with torch.no_grad(), rest_numbers(model, rest), record:
            outputs = applied(model, copies)
    finally:
        for handle in handles:
            handle.remove()
    ends = {record.of[id(each)] for each in tree_leaves(outputs) if id(each) in record.of}
    return _named(record.calls, ends, values, close)


def _named(calls: Sequence[_Called], ends: set[int], values: Collection[torch.Tensor], close: float) -> str:
    of_shape: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for value in values:
        of_shape[tuple(value.shape)].append(value.double())
    needed = set(ends)
    held = [any(_is_held(x, of_shape[tuple(x.shape)], close) for x in each.values) for each in calls]
    for number in reversed(range(len(calls))):
        if number in needed:
            needed |= calls[number].reads
        if held[number]:
            for earlier in calls[number].reads - {-1}:
                held[earlier] = True
    for number, each in enumerate(calls):
        if number in needed and not held[number]:
            return f"{each.operator} in '{each.layer}'{each.line}"
    return ""


def _is_held(x: torch.Tensor, candidates: Iterable[torch.Tensor], close: float) -> bool:
    x = x.double()
    return any(bool((x - other).norm() <= close * x.norm()) for other in candidates)
