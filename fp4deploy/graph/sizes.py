"""Sizes of tensors as expressions of the sizes of a network's inputs.

A fixed size is an integer. Any other is a tuple in reverse Polish notation of integers, axes of inputs and operators:

    ("x.2", 2, "//", 2, "*")        2 * (x.shape[2] // 2)

Flat and without names to resolve, so that a file can hold it and a reader can bound its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Size = int | tuple[int | str, ...]

LIMIT = 1 << 40
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "max": max,
    "min": min,
}


def output_size(size: int, taps: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Outputs of a convolution or a pooling along one axis; below 1 where the kernel is beyond the padded input."""
    return (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1


def transposed_size(size: int, taps: int, stride: int, padding: int, dilation: int = 1, more: int = 0) -> int:
    """Outputs of a transposed convolution along one axis; more: its output padding."""
    return (size - 1) * stride - 2 * padding + dilation * (taps - 1) + 1 + more


def each(size: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """A size of all axes, or of each, for each.

    >>> each(3, 2), each([3, 1], 2)
    ((3, 3), (3, 1))
    """
    return (size,) * axes if isinstance(size, int) else tuple(size)


class SizeError(ValueError):
    """An expression that is none, or has no value."""


def evaluate(size: Size, inputs: Mapping[str, int]) -> int:
    """The value of a size.

    Args:
        inputs: "<input>.<axis>" -> its size.

    Raises:
        SizeError: an unknown name, a division by zero, an operand too many or too few, a value beyond 2^40.

    >>> evaluate(("x.2", 2, "//"), {"x.2": 33})
    16
    """
    if isinstance(size, int):
        return size
    stack: list[int] = []
    for token in size:
        if isinstance(token, int):
            stack.append(token)
        elif token in OPERATORS:
            if len(stack) < 2:
                raise SizeError(f"'{token}' has no two operands in {text(size)}")
            b, a = stack.pop(), stack.pop()
            if b == 0 and token in ("//", "%"):
                raise SizeError(f"division by zero in {text(size)}")
            stack.append(OPERATORS[token](a, b))
        elif token in inputs:
            stack.append(inputs[token])
        else:
            raise SizeError(f"no input has an axis '{token}'")
        if abs(stack[-1]) > LIMIT:
            raise SizeError(f"{text(size)} is beyond 2^40")
    if len(stack) != 1:
        raise SizeError(f"{text(size)} is no expression")
    return stack[0]


def text(size: Size) -> str:
    """As people read it.

    >>> text(("x.2", 2, "//"))
    'x.2 2 //'
    """
    return str(size) if isinstance(size, int) else " ".join(map(str, size))


def axes_of(sizes: Iterable[Size]) -> set[str]:
    """The axes of inputs that sizes depend on."""
    tokens = (token for size in sizes if not isinstance(size, int) for token in size)
    return {token for token in tokens if isinstance(token, str) and token not in OPERATORS}


def size_of(value: Any, symbols: Mapping[object, Size]) -> Size:
    """A size of torch.export (int, SymInt or sympy expression) as a `Size`; symbols: sympy symbol -> its size.

    Raises:
        SizeError: an expression with other operators.
    """
    expression = value.node.expr if hasattr(value, "node") else value
    if isinstance(expression, int):
        return expression
    if getattr(expression, "is_Integer", False):
        return int(expression)
    found = _tokens(expression, symbols)
    return found[0] if len(found) == 1 and isinstance(found[0], int) else tuple(found)


def _tokens(expression: Any, symbols: Mapping[object, Size]) -> list[int | str]:
    if expression.is_Integer:
        return [int(expression)]
    if expression in symbols:
        size = symbols[expression]
        return [size] if isinstance(size, int) else list(size)
    kind = type(expression).__name__
    parts = [_tokens(each, symbols) for each in expression.args]
    operator = {"Add": "+", "Mul": "*", "Max": "max", "Min": "min"}.get(kind)
    if operator:
        joined = parts[0]
        for part in parts[1:]:
            joined = [*joined, *part, operator]
        return joined
    if kind in ("FloorDiv", "CleanDiv", "Mod", "PythonMod"):
        return [*parts[0], *parts[1], "%" if "Mod" in kind else "//"]
    if kind == "Pow" and expression.args[1].is_Integer and 1 <= int(expression.args[1]) <= 8:
        joined = list(parts[0])
        for _ in range(int(expression.args[1]) - 1):
            joined = [*joined, *parts[0], "*"]
        return joined
    raise SizeError(f"a size depends on the input's by {kind}")
