"""PTX text -> instructions.

    entry = parse(text)               the only kernel of the text
    entry.instructions[7].opcode      "ld.shared.v4.b32"

PTX is read as far as compilers write it: one `.entry`, registers, variables in shared memory, labels, instructions.
Scopes `{ ... }`, which inline assembly opens, have their own registers and labels; these get a suffix here, so that
one flat list of instructions is left. Debug information is skipped.

Source: PTX ISA, "Syntax", "State Spaces, Types, and Variables", "Instruction Operands".
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fp4deploy_emulator.faults import UnknownInstruction

BYTES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}
_TOKEN = re.compile(
    r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?0[xX][0-9a-fA-F]+U?|\d+\.\d+|-?\d+U?|[%$\w.:]+|[][{}(),|+<>=!-]"
)
_SKIPPED = re.compile(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file)\b[^\n]*", re.MULTILINE | re.DOTALL)
_SPACE, _LABEL = re.compile(r"\s*"), re.compile(r"([\w$]+)\s*:(?!:)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_MODULE_VARIABLE = re.compile(
    r"^[ \t]*(?:\.visible |\.extern |\.weak )*(\.(?:shared|global|const) [^;]*);", re.MULTILINE
)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(.*?)([\w$]+)\s*(?:\[(\d+)\])?\s*$", re.DOTALL)
_NAMES = re.compile(r"([\w$]+)\s*(?:\[\d+\])?\s*(?:,|$)")
_CALL = re.compile(r"call(?:\.uni)?\s+(?:\((.*?)\)\s*,\s*)?([\w$]+)\s*(?:,\s*\((.*?)\))?\s*", re.DOTALL)
_FUNCTION = re.compile(r"\.func\s+(?:\.\w+\s+)*(?:\(([^)]*)\)\s*)?(?:\.\w+\s+)*([\w$]+)\s*\(([^)]*)\)[^;{]*\{")
_DECLARED = re.compile(
    r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*((?:\[\d*\])*)\s*(?:=\s*\{(.*)\})?$",
    re.DOTALL,
)


@dataclass(frozen=True)
class Register:
    """A register or a special register such as `%tid.x`; `_` is the sink of results that nobody needs."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """An integer; of `0f...` and `0d...` the bits."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or of a parameter, or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]; of a tensor copy also the coordinates."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """a|b: two results."""

    first: Operand
    second: Operand


Operand = Register | Immediate | Symbol | Address | Vector | Pair


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    parts: the opcode split at its dots. guard, negated: the predicate `@p` or `@!p`. line: in the text, from 1.
    """

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    line: int
    text: str


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: where it lies in the parameter buffer."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Variable:
    """A variable of the module or the kernel; `content` of constants."""

    name: str
    space: str
    align: int
    size: int
    content: bytes = b""


@dataclass
class Entry:
    """A kernel of the module `text`.

    registers: name or prefix -> type; labels: name -> index of the next instruction; steps: see `machine.compiled`.
    """

    name: str
    target: str
    text: str = field(default="", repr=False)
    parameters: list[Parameter] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    cluster: int = 1
    steps: list[Any] | None = field(default=None, repr=False, compare=False)

    def register_type(self, name: str) -> str | None:
        """ "b32" for %r7 under `.reg .b32 %r<9>`; None where nothing declares it."""
        base, mark, scope = name.partition("@")
        return self.registers.get(name) or self.registers.get(base.rstrip("0123456789") + "<>" + mark + scope)


@dataclass(frozen=True)
class Function:
    """A device function: names of results and parameters, and where its body begins."""

    results: tuple[str, ...]
    parameters: tuple[str, ...]
    start: int


def parse(text: str, name: str = "") -> Entry:
    """A kernel of a module: `name`, or the only one.

    Raises:
        UnknownInstruction: no such kernel, or a line that is not understood.
    """
    # Comments become spaces, so that positions and line numbers stay.
    clean = _SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
    heads = [head for head in _ENTRY.finditer(clean) if name in ("", head.group(1))]
    if len(heads) != 1:
        raise UnknownInstruction(f"The PTX has {len(heads)} kernels{f' named {name}' if name else ''}; one is needed.")
    target = re.search(r"\.target\s+(\w+)", clean)
    entry = Entry(heads[0].group(1), target.group(1) if target else "", text)
    end = clean.index(")", heads[0].end())
    _parameters(entry, clean[heads[0].end() : end])
    for found in _MODULE_VARIABLE.finditer(clean):
        _variable(entry, found.group(1))
    start = clean.index("{", end)
    cluster = re.search(r"\.(?:reqnctapercluster|maxclusterrank)\s+(\d+)", clean[end:start])
    entry.cluster = int(cluster.group(1)) if cluster else 1
    functions = {}
    for found in _FUNCTION.finditer(clean):
        results, parameters = (tuple(_NAMES.findall(found.group(i) or "")) for i in (1, 3))
        functions[found.group(2)] = Function(results, parameters, found.end())
    _Body(entry, text, clean, start + 1, functions).read()
    return entry


def _parameters(entry: Entry, text: str) -> None:
    offset = 0
    for each in filter(str.strip, text.split(",")):
        found = _PARAMETER.search(each)
        if found is None:
            raise UnknownInstruction(f"The parameter is not understood: {each.strip()}")
        size = BYTES[found.group(2)]
        align = int(found.group(1) or size)
        offset = -(-offset // align) * align
        entry.parameters.append(Parameter(found.group(4), offset, size * int(found.group(5) or 1)))
        offset += entry.parameters[-1].size


def _variable(entry: Entry, statement: str) -> bool:
    found = _DECLARED.search(" ".join(statement.split()))
    if found is None:
        return False
    space, align, kind, name, bounds, values = found.groups()
    width, count = BYTES[kind], 1
    for bound in re.findall(r"\[(\d*)\]", bounds):
        count *= int(bound or 0)
    content = b""
    for value in values.split(",") if values else ():
        content += (int(value, 0) % (1 << 8 * width)).to_bytes(width, "little")
    content = content.ljust(width * count, b"\0") if values else b""
    entry.variables.append(Variable(name, space, int(align or width), width * count, content))
    return True


class _Body:
    """Reads statements from one `{` to its `}`; scopes nest, and calls are replaced by the body of the function."""

    def __init__(self, entry: Entry, text: str, clean: str, start: int, functions: dict[str, Function]) -> None:
        self.entry, self.clean, self.at, self.functions = entry, clean, start, functions
        self.breaks = [found.start() for found in re.finditer("\n", clean)]
        self.scopes: list[dict[str, str]] = [{}]
        self.ends: list[str] = []  # where `ret` goes, of the functions that are being read
        self.opened = 0

    def read(self) -> None:
        """Up to the `}` of the scope that is open now."""
        depth = len(self.scopes)
        while len(self.scopes) >= depth:
            found = _SPACE.match(self.clean, self.at)
            self.at = found.end() if found else self.at
            if self.clean[self.at] == "{":
                self.opened += 1
                self.at += 1
                self.scopes.append(self._declared(f"@{self.opened}"))
            elif self.clean[self.at] == "}":
                self.scopes.pop()
                self.at += 1
            elif label := _LABEL.match(self.clean, self.at):
                self.entry.labels[self._name(label.group(1))] = len(self.entry.instructions)
                self.at = label.end()
            else:
                end = self.clean.index(";", self.at)
                self._statement(self.clean[self.at : end].strip(), self.at)
                self.at = end + 1

    def _declared(self, suffix: str) -> dict[str, str]:
        """Registers and labels of the scope that begins here, without those of scopes inside it."""
        depth, names, at = 1, {}, self.at
        for piece in re.finditer(r"[{}]|\.reg\s+\.\w+\s+([^;]+);|^\s*([\w$]+)\s*:(?!:)", self.clean[at:], re.MULTILINE):
            depth += {"{": 1, "}": -1}.get(piece.group(), 0)
            if depth == 0:
                break
            for name in re.findall(r"[%\w$]+", piece.group(1) or piece.group(2) or "") if depth == 1 else ():
                names[name] = name + suffix
            for prefix in re.findall(r"([%\w$]+)<\d+>", piece.group(1) or "") if depth == 1 else ():
                names[f"{prefix}<>"] = suffix
        return names

    def _name(self, name: str) -> str:
        ranged = name.rstrip("0123456789") + "<>"
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
            if ranged in scope:
                return name + scope[ranged]
        return name

    def _statement(self, statement: str, at: int) -> None:
        if not statement:
            return
        if statement.startswith(".reg"):
            found = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL)
            assert found is not None
            for name in found.group(2).split(","):
                ranged = re.match(r"\s*([%\w$]+)<\d+>", name)
                prefix = f"{ranged.group(1)}<>" if ranged else ""
                key = prefix + self.scopes[-1].get(prefix, "") if ranged else self._name(name.strip())
                self.entry.registers[key] = found.group(1)
            return
        if statement.startswith("."):
            if not statement.startswith((".pragma", ".param")) and not _variable(self.entry, statement):
                raise UnknownInstruction(f"The directive is not implemented: {statement}")
            return
        if statement.startswith("call"):
            self._call(statement)
            return
        if self.ends and re.fullmatch(r"(?:@\S+\s+)?ret(?:\.uni)?", statement):
            statement = re.sub(r"ret(?:\.uni)?$", f"bra {self.ends[-1]}", statement)
        self._instruction(statement, at)

    def _call(self, statement: str) -> None:
        found = _CALL.fullmatch(statement)
        function = self.functions.get(found.group(2)) if found else None
        if found is None or function is None:
            raise UnknownInstruction(f"The call is not implemented: {statement}")
        actual = [name for group in (1, 3) for name in re.findall(r"[\w$]+", found.group(group) or "")]
        self.opened += 1
        back, end = self.at, f"$end_of_call_{self.opened}"
        self.at = function.start
        names = self._declared(f"@{self.opened}")
        self.scopes.append(names | dict(zip((*function.results, *function.parameters), actual, strict=True)))
        self.ends.append(end)
        self.read()
        self.ends.pop()
        self.entry.labels[end] = len(self.entry.instructions)
        self.at = back

    def _instruction(self, statement: str, at: int) -> None:
        line = bisect_left(self.breaks, at) + 1
        guard = re.match(r"@(!?)\s*([%\w$]+)\s+", statement)
        rest = statement[guard.end() :] if guard else statement
        opcode, _, operands = rest.partition(" ") if " " in rest.split("\t")[0] else rest.partition("\t")
        opcode = opcode.strip()
        tokens = _TOKEN.findall(operands)
        try:
            parsed = _Operands(tokens, self._name, self.entry).all()
        except (IndexError, ValueError) as error:
            raise UnknownInstruction(f"Line {line} is not understood: {statement}") from error
        shown = " ".join(statement.split())
        self.entry.instructions.append(
            Instruction(
                opcode,
                tuple(opcode.split(".")),
                parsed,
                self._name(guard.group(2)) if guard else None,
                bool(guard and guard.group(1)),
                line,
                shown if len(shown) < 200 else f"{shown[:200]} ...",
            )
        )


class _Operands:
    def __init__(self, tokens: list[str], name: Callable[[str], str], entry: Entry) -> None:
        self.tokens, self.at, self.name, self.entry = tokens, 0, name, entry

    def all(self) -> tuple[Operand, ...]:
        found: list[Operand] = []
        while self.at < len(self.tokens):
            found.append(self._one())
            if self.at < len(self.tokens):
                self._take(",")
        return tuple(found)

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, expected: str = "") -> str:
        token = self.tokens[self.at]
        if expected and token != expected:
            raise ValueError(token)
        self.at += 1
        return token

    def _one(self) -> Operand:
        operand = self._simple()
        if self._peek() == "|":
            self._take()
            return Pair(operand, self._simple())
        return operand

    def _simple(self) -> Operand:
        token = self._take()
        if token == "{":
            parts = [self._one()]
            while self._peek() == ",":
                self._take()
                parts.append(self._one())
            self._take("}")
            return Vector(tuple(parts))
        if token == "[":
            return self._address()
        if token == "-":
            value = self._simple()
            assert isinstance(value, Immediate)
            return Immediate(-value.value)
        if token[:2] in ("0f", "0F", "0d", "0D"):
            return Immediate(int(token[2:], 16))
        if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?", token):
            return Immediate(int(token.rstrip("U"), 0))
        if re.fullmatch(r"\d+\.\d+", token):  # the share of a cache policy, which nothing computes with
            return Symbol(token)
        name = self.name(token)
        if name.startswith("%") or self.entry.register_type(name) or name == "_":
            return Register(name)
        return Symbol(name)

    def _address(self) -> Address:
        base, offset = self._one(), 0
        coordinates: tuple[Operand, ...] = ()
        while self._peek() != "]":
            token = self._take()
            if token in "+-":
                value = self._simple()
                assert isinstance(value, Immediate)
                offset += value.value if token == "+" else -value.value
            elif token == ",":
                vector = self._one()
                assert isinstance(vector, Vector)
                coordinates = vector.parts
            else:
                offset += int(token.rstrip("U"), 0)  # a negative offset: the sign is part of the number
        self._take("]")
        return Address(base, offset, coordinates)
