"""Sizes that torch.export takes as they are in the example, although their axes are open.

    F.avg_pool2d(x, x.shape[2:])     the window is a number in the graph, 8 x 8 of an example of 8 x 8

torch notes the condition, here that the height is 8, and runs the graph for other sizes all the same. A condition that
an input of twice the size does not meet is such a size; one of divisibility (`x.shape[2] // 4 * 4 == x.shape[2]`) holds
there as well, and is the network's to refuse.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fp4deploy.graph.replacement import replaced

AUTO = torch.export.Dim.AUTO


@contextmanager
def watched() -> Iterator[list[str]]:
    """Inside, `fixed_axis` of each program that torch.export makes in this thread, for exporters that keep none of its
    conditions.
    """
    found = [""]

    def watching(export: Callable[..., torch.export.ExportedProgram]) -> Callable[..., torch.export.ExportedProgram]:
        def watched_export(*arguments: object, **options: object) -> torch.export.ExportedProgram:
            program = export(*arguments, **options)
            found.append(fixed_axis(program))
            return program

        return watched_export

    with replaced(torch.export, "export", watching):
        yield found


class Specializing(TorchFunctionMode):
    """Remembers the call at which torch first took a size as it is in the example, while a module is traced.

    call: "linear in 'head'", or "". frames: file and line of what was running, the outermost first.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
        self.call, self.frames = "", list[tuple[str, int]]()
        self.environment: object = None
        self.known = set[object]()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Call, and look at the conditions that torch has noted meanwhile."""
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            if not self.call:
                self._look(func, [*tree_leaves((args, kwargs))])
        return result

    def _look(self, func: Callable[..., object], values: list[object]) -> None:
        sizes = [size for x in values if isinstance(x, torch.Tensor) for size in x.shape]
        size = next((each for each in (*sizes, *values) if isinstance(each, torch.SymInt)), None)
        if size is None:
            return
        if size.node.shape_env is not self.environment:
            self.environment, self.known = size.node.shape_env, set()
        noted = [each for each in _equations(self.environment) if each not in self.known]
        self.known.update(noted)
        if any(_is_of_one_size(each, self.environment) for each in noted):
            frames = list(traceback.walk_stack(sys._getframe(2)))
            owners = (self.names.get(id(frame.f_locals.get("self"))) for frame, _ in frames)
            layer = next((owner for owner in owners if owner), "")
            self.call = getattr(func, "__name__", str(func)).strip("_") + (f" in '{layer}'" if layer else "")
            self.frames = [(frame.f_code.co_filename, line) for frame, line in frames][::-1]


def specializing(
    model: nn.Module, positional: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]
) -> Specializing:
    """What sees a size fixed as a module is traced anew, for exporters whose own conditions come later than calls."""
    found = Specializing(model)
    open_axes = [{0: AUTO} | dict.fromkeys(range(2, x.ndim), AUTO) for x in (*positional, *named.values())]
    shapes: Any = tuple(open_axes) if positional else dict(zip(named, open_axes, strict=True))
    with torch.no_grad(), suppress(Exception), found:
        torch.export.export(model, positional, named, dynamic_shapes=shapes, strict=False)
    return found


def _equations(environment: object) -> list[Any]:
    """The equations of sizes that torch has noted."""
    import sympy  # type: ignore[import-untyped]  # torch's, which takes a while to import

    noted = [guard.expr for guard in getattr(environment, "guards", ())]
    for checks in getattr(environment, "deferred_runtime_asserts", {}).values():  # where an exporter asks for these
        noted += [check.expr for check in checks]
    return [expression for expression in noted if isinstance(expression, sympy.Eq)]


def _is_of_one_size(condition: Any, environment: object) -> bool:
    """Whether an equation that holds in the example does not where some of its sizes are twice as large."""
    import sympy

    values = getattr(environment, "backed_var_to_val", None) or getattr(environment, "var_to_val", {})
    symbols = sorted(condition.free_symbols, key=str)
    if not symbols or not all(symbol in values for symbol in symbols):
        return False
    several = itertools.product((1, 2), repeat=len(symbols))
    sizes = (
        {symbol: factor * values[symbol] for symbol, factor in zip(symbols, each, strict=True)} for each in several
    )
    return any(condition.xreplace(each) == sympy.false for each in sizes)


def fixed_axis(program: torch.export.ExportedProgram) -> str:
    """An axis of an input, as "x.2", that a program needs as it was in the example though open; "" if there is none."""
    import sympy

    axes: dict[object, tuple[str, int]] = {}  # symbol -> axis, its size in the example
    environment: object = None
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if axis and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                axes.setdefault(size.node.expr, (f"{node.name}.{axis}", int(size.node.hint)))
                environment = size.node.shape_env
    conditions = _equations(environment)
    for factors in itertools.product((1, 2), repeat=len(axes)):
        grown = {symbol: factor for symbol, factor in zip(axes, factors, strict=True) if factor > 1}
        sizes = {symbol: sympy.Integer(size * grown.get(symbol, 1)) for symbol, (_, size) in axes.items()}
        for condition in conditions:
            free = condition.free_symbols
            changed = [axes[symbol][0] for symbol in grown if symbol in free]
            if changed and free <= set(sizes) and condition.xreplace(sizes) == sympy.false:
                return changed[0]
    return ""
