"""Sizes that torch.export takes as they are in the example, although their axes are open.

    F.avg_pool2d(x, x.shape[2:])     the window is a number in the graph, 8 x 8 of an example of 8 x 8

torch notes the condition, here that the height is 8, and runs the graph for other sizes all the same. A condition that
an input of twice the size does not meet is such a size; one of divisibility (`x.shape[2] // 4 * 4 == x.shape[2]`) holds
there as well, and is the network's to refuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp4deploy.graph.replaced import replaced


@contextmanager
def watched() -> Iterator[list[str]]:
    """Inside, `fixed_axis` of each program that torch.export makes in this thread, for exporters that keep none of its
    conditions.
    """
    found = [""]

    def watching(export: Callable[..., torch.export.ExportedProgram]) -> Callable[..., torch.export.ExportedProgram]:
        def watched_export(*arguments: Any, **options: Any) -> torch.export.ExportedProgram:
            program = export(*arguments, **options)
            found.append(fixed_axis(program))
            return program

        return watched_export

    with replaced(torch.export, "export", watching):
        yield found


def fixed_axis(program: torch.export.ExportedProgram) -> str:
    """An axis of an input, as "x.2", that a program needs as it was in the example though open; "" if there is none."""
    import sympy  # type: ignore[import-untyped]  # torch's, which takes a while to import

    axes: dict[Any, tuple[str, int]] = {}  # symbol -> axis, its size in the example
    environment: Any = None
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if axis and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                axes.setdefault(size.node.expr, (f"{node.name}.{axis}", int(size.node.hint)))
                environment = size.node.shape_env
    noted = [guard.expr for guard in getattr(environment, "guards", ())]
    for checks in getattr(environment, "deferred_runtime_asserts", {}).values():  # where an exporter asks for these
        noted += [check.expr for check in checks]
    conditions = [expression for expression in noted if isinstance(expression, sympy.Eq)]
    for factors in itertools.product((1, 2), repeat=len(axes)):
        grown = {symbol: factor for symbol, factor in zip(axes, factors, strict=True) if factor > 1}
        sizes = {symbol: sympy.Integer(size * grown.get(symbol, 1)) for symbol, (_, size) in axes.items()}
        for condition in conditions:
            free = condition.free_symbols
            changed = [axes[symbol][0] for symbol in grown if symbol in free]
            if changed and free <= set(sizes) and condition.xreplace(sizes) == sympy.false:
                return changed[0]
    return ""
