"""Systematic mistakes, one at a time: what a hand slips into a comparison, a constant, a call, a branch or a statement."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "//", ast.BitOr: "&",
    ast.BitAnd: "|", ast.BitXor: "|", ast.MatMult: "*", ast.LShift: ">>", ast.RShift: "<<", ast.Pow: "*",
}  # fmt: skip
TWINS = {"min": "max", "amin": "amax", "any": "all", "floor": "ceil", "sum": "mean", "argmax": "argmin", "minimum": "maximum",
         "clamp_min": "clamp_max", "startswith": "endswith", "ceil": "round", "height": "width", "rglob": "glob"}  # fmt: skip
TWINS |= {other: name for name, other in TWINS.items()}
COPIES = ("clone", "copy", "detach", "contiguous", "sort", "float", "abs", "resolve")
LEAVING = (ast.Raise, ast.Return, ast.Continue, ast.Break)
# What changes no answer: a message, a layout of a file, a check of two lengths that are always equal.
SILENT_CALLS = ("cast", "debug", "info", "log", "not_compiled", "warn", "warning")
SILENT_KEYWORDS = ("daemon", "desc", "encoding", "errors", "help", "indent", "label", "name", "stacklevel", "strict", "title")  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """kind: of the operator; start, end: which part of the text `new` replaces; lines: what a test executes to meet it."""

    kind: str
    start: int
    end: int
    new: str
    lines: range


def mistakes(text: str) -> Iterator[Mistake]:
    """Every mistake that can be made in the functions and the tables of a module."""
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

    def between(left: ast.AST, operator: str, right: ast.AST) -> str:
        return f"(({source(left)}) {operator} ({source(right)}))"

    def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield "comparison", node, between(node.left, COMPARISONS[type(node.ops[0])], node.comparators[0])
        elif isinstance(node, ast.BinOp) and not any(map(_is_text, (node.left, node.right))):
            yield "arithmetic", node, between(node.left, ARITHMETIC[type(node.op)], node.right)
        elif isinstance(node, ast.BoolOp):
            word, other = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
            yield "and/or", node, f"({other.join(f'({source(each)})' for each in node.values)})"
            yield "condition dropped", node, f"({word.join(f'({source(each)})' for each in node.values[:-1])})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield "sign", node, source(node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield "flag", node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield "constant", node, str(node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0)
        elif isinstance(node, ast.If | ast.IfExp):
            yield "branch", node.test, f"(not ({source(node.test)}))"
            if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], LEAVING):
                yield "guard dropped", node.test, "False"
        elif isinstance(node, ast.Dict) and len(node.keys) > 1 and isinstance(node.keys[-1], ast.Constant):
            yield "entry dropped", _span(node.keys[-1], node.values[-1]), ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            yield "statement dropped", node, "pass"
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
            named = [each for each in node.keywords if each.arg and each.arg not in SILENT_KEYWORDS]
            if named:
                yield "argument dropped", named[-1], "**{}"
            if len(node.args) > 1 and _alike(*node.args[:2]):
                first, second = node.args[:2]
                yield "arguments exchanged", _span(first, second), f"{source(second)}, {source(first)}"
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if isinstance(node.func, ast.Attribute) and name in COPIES and not node.args:
                yield "call dropped", node, f"({source(node.func.value)})"
            if name in TWINS and (isinstance(node.func, ast.Attribute) or name != "sum"):
                of = f"({source(node.func.value)})." if isinstance(node.func, ast.Attribute) else ""
                yield "twin", node.func, of + TWINS[name]

    def made(node: ast.AST, lines: range | None = None, kind: str = "") -> Iterator[Mistake]:
        for own, where, new in changes(node):
            at: Any = where
            yield Mistake(kind or own, *place(where), new, lines or range(at.lineno, at.end_lineno + 1))

    for node in ast.parse(text).body:
        for function in [node, *(node.body if isinstance(node, ast.ClassDef) else ())]:
            if isinstance(function, ast.FunctionDef):
                for each in itertools.chain.from_iterable(map(_walk, function.body)):
                    yield from made(each)
                inside = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
                for default in [*function.args.defaults, *filter(None, function.args.kw_defaults)]:
                    if not isinstance(default, ast.Call):
                        yield from made(default, inside, "default")
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for each in _walk(node.value):
                if not (isinstance(each, ast.BinOp) and isinstance(each.op, ast.BitOr)):  # a type, most often
                    yield from made(each, range(1, len(lines) + 1), "table")


def apply(text: str, mistake: Mistake) -> str:
    """The module with the mistake."""
    encoded = text.encode()
    return (encoded[: mistake.start] + mistake.new.encode() + encoded[mistake.end :]).decode()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _alike(first: ast.expr, second: ast.expr) -> bool:
    """What somebody could take for each other: two names, two attributes, two constants of one type."""
    if isinstance(first, ast.Constant) and isinstance(second, ast.Constant):
        return type(first.value) is type(second.value) and first.value != second.value
    named = isinstance(first, ast.Name | ast.Attribute) and isinstance(second, ast.Name | ast.Attribute)
    return named and ast.dump(first) != ast.dump(second)


def _span(first: ast.expr, last: ast.expr) -> ast.expr:
    joined = ast.Constant(None, lineno=first.lineno, col_offset=first.col_offset)
    joined.end_lineno, joined.end_col_offset = last.end_lineno, last.end_col_offset
    return joined


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """What decides something: no messages of errors, annotations, asserts or strings."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in SILENT_CALLS:
        return
    if isinstance(node, ast.keyword) and node.arg in SILENT_KEYWORDS:
        return
    yield node
    for name, child in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST):
                    yield from _walk(each)
