"""Systematic mistakes, one at a time: what a hand slips into a comparison, a constant, a call, a branch or a statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "//", ast.BitOr: "&",
    ast.BitAnd: "|", ast.LShift: ">>", ast.RShift: "<<", ast.Pow: "*",
}  # fmt: skip
TWINS = {"min": "max", "amin": "amax", "any": "all", "floor": "ceil", "sum": "mean", "argmax": "argmin", "minimum": "maximum",
         "clamp_min": "clamp_max", "startswith": "endswith", "ceil": "round", "height": "width", "rglob": "glob"}  # fmt: skip
TWINS |= {other: name for name, other in TWINS.items()}
COPIES = ("clone", "copy", "detach", "contiguous", "sort", "float", "abs", "resolve")


@dataclass(frozen=True)
class Mistake:
    """kind: of the operator; function: the one that is wrong; start, end: which part of the text `new` replaces."""

    kind: str
    function: str
    start: int
    end: int
    new: str


def mistakes(text: str) -> Iterator[Mistake]:
    """Every mistake that can be made in the functions of a module, in the order of the text."""
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()))
    encoded = text.encode()

    def place(node: ast.AST) -> tuple[int, int]:
        at: Any = node
        return offsets[at.lineno - 1] + at.col_offset, offsets[at.end_lineno - 1] + at.end_col_offset

    def source(node: ast.AST) -> str:
        start, end = place(node)
        return encoded[start:end].decode()

    def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield (
                "comparison",
                node,
                f"{source(node.left)} {COMPARISONS[type(node.ops[0])]} {source(node.comparators[0])}",
            )
        elif (
            isinstance(node, ast.BinOp)
            and not isinstance(node.left, ast.Constant | ast.JoinedStr)
            and type(node.op) in ARITHMETIC
        ):
            yield "arithmetic", node, f"{source(node.left)} {ARITHMETIC[type(node.op)]} {source(node.right)}"
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield "and/or", node, f"({word.join(f'({source(each)})' for each in node.values)})"
            yield (
                "condition dropped",
                node,
                f"({(' and ' if word == ' or ' else ' or ').join(f'({source(each)})' for each in node.values[:-1])})",
            )
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield "sign", node, source(node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield "flag", node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield "constant", node, str(node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0)
        elif isinstance(node, ast.If | ast.IfExp):
            yield "branch", node.test, f"(not ({source(node.test)}))"
        elif isinstance(node, ast.comprehension) and node.ifs:
            yield "filter", node.ifs[0], "True"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "statement dropped", node, "pass"
        elif isinstance(node, ast.AugAssign):
            yield "accumulation", node, f"{source(node.target)} = {source(node.value)}"
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            for end in (node.slice.lower, node.slice.upper):
                if end is not None:
                    yield "slice", end, f"({source(end)}) + 1"
        elif isinstance(node, ast.Call):
            named = [each for each in node.keywords if each.arg]
            if named:
                yield "argument dropped", named[-1], "**{}"
            if len(node.args) > 1 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
                yield (
                    "arguments exchanged",
                    _span(node.args[0], node.args[1]),
                    f"{source(node.args[1])}, {source(node.args[0])}",
                )
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if isinstance(node.func, ast.Attribute) and name in COPIES and not node.args:
                yield "call dropped", node, source(node.func.value)
            if name in TWINS:
                new = (
                    f"{source(node.func.value)}.{TWINS[name]}" if isinstance(node.func, ast.Attribute) else TWINS[name]
                )
                yield "twin", node.func, new

    for function in _functions(ast.parse(text)):
        body = function.body
        for statement in body:
            for node in _walk(statement):
                for kind, where, new in changes(node):
                    yield Mistake(kind, function.name, *place(where), new)
        for default in [*function.args.defaults, *filter(None, function.args.kw_defaults)]:
            for _, where, new in changes(default):
                yield Mistake("default", function.name, *place(where), new)


def apply(text: str, mistake: Mistake) -> str:
    """The module with the mistake."""
    encoded = text.encode()
    return (encoded[: mistake.start] + mistake.new.encode() + encoded[mistake.end :]).decode()


def _span(first: ast.expr, last: ast.expr) -> ast.expr:
    joined = ast.Constant(None, lineno=first.lineno, col_offset=first.col_offset)
    joined.end_lineno, joined.end_col_offset = last.end_lineno, last.end_col_offset
    return joined


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions of modules and methods of classes; what is defined inside them belongs to them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (each for each in node.body if isinstance(each, ast.FunctionDef))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """What decides something: no messages of errors, annotations, asserts or strings."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    yield node
    for name, child in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST):
                    yield from _walk(each)
