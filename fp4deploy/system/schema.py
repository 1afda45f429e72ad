"""Reading files that anyone may have written: size first, then syntax, then types and limits, then use.

Every file that fp4deploy reads goes through here once, where it enters. What comes out has the types and lies within
the limits that its reader relies on; what does not is one `InputError` that names file, field, value and limit:

    best.safetensors: model card: height = 0: input should be greater than or equal to 1.

| step | refuses |
|---|---|
| `read_text` | a missing file, a folder or device, more bytes than this kind of file may have, text that is not UTF-8 |
| `parse_json` | nesting beyond `MAX_DEPTH`, a repeated key, NaN, infinity, integers beyond 64 bits, lone surrogates |
| `parse_yaml` | the same; tags, aliases that expand to more than `MAX_NODES` values; dates stay text |
| `read_lines` | a damaged line, by its number; a cut last line is dropped, since a training may be writing it |
| `whole_lines`, `records` | nothing: lines that cannot be read, or are no such record, are left out |
| `validated` | what pydantic refuses, in the words of `problems` |

JSON and YAML values reach pydantic, which by itself takes "1" and True for the number 1. The types below do not: files
are written by programs, and a value of another type is damage.
"""

from __future__ import annotations

import codecs
import copy
import json
import math
import os
import re
import reprlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from fp4deploy.errors import InputError

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

MAX_DEPTH = 64
MAX_NODES = 20_000  # values of a YAML file after aliases are expanded
MAX_BYTES = 32 << 20
MAX_YAML_BYTES = 256 << 10
MAX_LINES_BYTES = 1 << 30
MAX_LINE_BYTES = 4 << 20
MAX_PROBLEMS = 5  # listed in one message

Int = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=500)]


def read_bytes(path: Path, most: int = MAX_BYTES, advice: str = "") -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        InputError: it is missing, is no regular file, is larger, or cannot be read.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise InputError(_sentence(f"There is no file {path}", advice))
        with path.open("rb") as file:
            content = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)  # what is asked for is allocated
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(_sentence(f"{path} cannot be read: {cause}", advice)) from None
    if len(content) > most:
        raise InputError(_sentence(f"{path} is larger than {most >> 10} KiB, the limit for this kind of file", advice))
    return content


def read_text(path: Path, most: int = MAX_BYTES, advice: str = "") -> str:
    """`read_bytes` as UTF-8 text, without a byte order mark.

    Raises:
        InputError: as `read_bytes`, or the bytes are not UTF-8.
    """
    try:
        return read_bytes(path, most, advice).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(_sentence(f"{path} is not UTF-8 text: byte {error.start} is not", advice)) from None


def parse_json(text: str, source: object, advice: str = "", nan: Literal["refuse", "keep", "none"] = "refuse") -> Any:
    """The value of a JSON text; `source` begins the message of an error, `advice` ends it.

    nan: what becomes of NaN and infinity: an error, themselves (a training that diverged has them in its state), None.

    Raises:
        InputError: it is not JSON, or the module's table says what else.
    """
    try:
        value = json.loads(
            text,
            parse_constant={"refuse": _refuse_constant, "keep": None, "none": lambda _: None}[nan],
            parse_float={"refuse": _finite, "keep": None, "none": finite_or_none}[nan],
            parse_int=_integer,
            object_pairs_hook=_unique,
        )
        _check_tree(value)
    except RecursionError:
        raise InputError(_sentence(f"{source} is nested deeper than {MAX_DEPTH} levels", advice)) from None
    except ValueError as error:  # json.JSONDecodeError too
        raise InputError(_sentence(f"{source} cannot be read as JSON: {error}", advice)) from None
    return value


def read_json(path: Path, advice: str = "", most: int = MAX_BYTES) -> Any:
    """`read_text` and `parse_json`."""
    return parse_json(read_text(path, most, advice), path, advice)


def parse_yaml(text: str, source: object, advice: str = "", numbered: bool = False) -> object:
    """The value of a YAML text, None where it is empty. numbered: keys may also be whole numbers.

    Raises:
        InputError: it is not YAML, or the module's table says what else.
    """
    try:
        return copy.deepcopy(_parsed(text, numbered))
    except RecursionError:
        raise InputError(_sentence(f"{source} is nested deeper than {MAX_DEPTH} levels", advice)) from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(_sentence(f"{source} is not valid YAML: {' '.join(str(error).split())}", advice)) from None


@lru_cache(maxsize=32)
def _parsed(text: str, numbered: bool) -> object:
    """The tree of a text, which callers copy: a sweep reads one configuration for each variant and seed."""
    value = yaml.load(text, Loader=_Yaml)
    _check_tree(value, numbered)
    return value


def read_yaml(path: Path, advice: str = "", numbered: bool = False) -> Any:
    """`read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path, MAX_YAML_BYTES, advice), path, advice, numbered)


def read_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Number (from 1) and value of each line of a JSON Lines file, read line by line; nothing where it is missing.

    A last line without its newline is dropped if it cannot be read: the process that writes it may not have finished.

    Raises:
        InputError: another line cannot be read, or the file is too large.
    """
    path = Path(path)
    if not path.is_file():
        return
    try:
        if path.stat().st_size > MAX_LINES_BYTES:
            raise InputError(f"{path} is larger than {MAX_LINES_BYTES >> 20} MiB.")
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                source = f"{path}, line {number},"
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(f"{source} is longer than {MAX_LINE_BYTES >> 20} MiB.")
                if not line.strip():
                    continue
                try:
                    value = parse_json(line.decode("utf-8"), source)
                except UnicodeDecodeError:
                    if line.endswith(b"\n"):
                        raise InputError(f"{source} is not UTF-8 text.") from None
                    return
                except InputError:
                    if line.endswith(b"\n"):
                        raise
                    return
                yield number, value
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None


def whole_lines(path: Path, most: int = MAX_LINES_BYTES) -> Iterator[Any]:
    """Values of the lines of a JSON Lines file that can be read; nothing where the file cannot, or is larger."""
    for line in lines_of(path, most):
        with suppress(InputError):
            yield parse_json(line.decode("utf-8", errors="replace"), path, nan="none")


def records(kind: type[M], lines: Iterable[object]) -> Iterator[M]:
    """The lines that are of a pydantic model; others are left out."""
    for line in lines:
        with suppress(ValidationError):
            yield kind.model_validate(line)


def text_of(content: bytes) -> str:
    """A text file's content: UTF-8, or what its byte order mark says, without that.

    >>> text_of("a".encode("utf-16")), text_of(b"\\xef\\xbb\\xbfa"), text_of(b"a")
    ('a', 'a', 'a')
    """
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")


def lines_of(path: Path, most: int = MAX_LINES_BYTES) -> list[bytes]:
    """Lines of a file of at most `most` bytes, without their ends; [] where it is missing or cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > most:
            return []
        return path.read_bytes().splitlines()
    except OSError:
        return []


def validated(wanted: type[T], value: object, source: object, advice: str = "", tags: Sequence[str] = ()) -> T:
    """`value` as the type, a pydantic model or anything else that pydantic knows.

    Raises:
        InputError: it is not of that type; fields, values and limits are listed.
    """
    try:
        found: T = _adapter(cast(Hashable, wanted)).validate_python(value)
        return found
    except ValidationError as error:
        raise InputError(_sentence(f"{source}: {'; '.join(problems(error, tags))}", advice)) from None


@lru_cache
def _adapter(wanted: Any) -> TypeAdapter[Any]:
    return TypeAdapter(wanted)


def problems(error: ValidationError, tags: Sequence[str] = ()) -> list[str]:
    """What is wrong, as "field = value: limit"; at most `MAX_PROBLEMS`, and how many more there are.

    tags: parts of a place that name a member of a union and no field.
    """
    found = error.errors(include_url=False)
    listed = [
        _problem({**each, "loc": [part for part in each["loc"] if part not in tags]}) for each in found[:MAX_PROBLEMS]
    ]
    return [*listed, *([f"and {len(found) - MAX_PROBLEMS} more"] if len(found) > MAX_PROBLEMS else [])]


def briefly(value: object) -> str:
    """A value for a message: one short line, control characters escaped."""
    return _BRIEF.repr(value)


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxtuple = 2, 4, 4, 4


def _problem(entry: Any) -> str:
    field = ".".join(re.sub(r"\s+", " ", str(part))[:60] for part in entry["loc"])
    if entry["type"] == "union_tag_invalid":
        context = entry["ctx"]
        name = str(context["discriminator"]).strip("'")
        return f"{field}.{name} = {briefly(context['tag'])}: input should be one of {context['expected_tags']}"
    if entry["type"] == "missing":
        return f"{field} is missing"
    if entry["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{field} is not a known field"
    message = entry["msg"].removeprefix("Value error, ")
    message = message if message.endswith("...") else message.rstrip(".")
    message = message[:1].lower() + message[1:]
    return f"{field} = {briefly(entry['input'])}: {message}" if field else message


def _sentence(text: str, advice: str) -> str:
    return f"{text}. {advice}".rstrip()


def _refuse_constant(name: str) -> object:
    raise ValueError(f"it holds {name}, which is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def finite_or_none(given: float | str) -> float | None:
    """A number as JSON has it, which knows no NaN and no infinity.

    >>> finite_or_none(0.5), finite_or_none("nan")
    (0.5, None)
    """
    value = float(given)
    return value if math.isfinite(value) else None


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"the number {text[:20]}... is too large")
    value = int(text)
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"the number {text} is too large")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"the key {briefly(_repeated(key for key, _ in pairs))} is given twice")
    return found


def _repeated(keys: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def _check_tree(tree: object, numbered: bool = False) -> None:
    """Refuse deep nesting, keys that are no text and text that UTF-8 cannot hold; without recursion.

    numbered: keys may be whole numbers.
    """
    rest: list[tuple[Any, int]] = [(tree, 1)]
    while rest:
        value, depth = rest.pop()
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, (dict, list)):
            if depth > MAX_DEPTH:
                raise RecursionError
            if isinstance(value, dict):
                _check_keys(value, numbered)
            inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
            rest += [(each, depth + 1) for each in inside if isinstance(each, (str, dict, list))]


def _check_keys(keys: Iterable[object], numbered: bool = False) -> None:
    for key in keys:
        if not isinstance(key, str) and not (numbered and type(key) is int):
            raise ValueError(f"the key {briefly(key)} is not text; put it in quotation marks")
        _check_text(str(key))


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"the text {briefly(text)} holds a null character")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the text {briefly(text)} holds half of a UTF-16 surrogate pair") from None


class _Yaml(yaml.SafeLoader):
    """SafeLoader without tags and dates, with limits; see the module's table."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as in the base class
        first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = self.anchors.get(event.anchor)
            if node is not None and id(node) not in self._sizes:
                raise yaml.YAMLError(f"the alias *{event.anchor} is inside what it stands for")
            self._count(self._sizes.get(id(node), 1))
            return super().compose_node(parent, index)
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"the tag {event.tag} is not supported{event.start_mark}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        before = self._nodes
        self._count(1)
        node = super().compose_node(parent, index)
        self._sizes[id(node)] = self._nodes - before
        self._depth -= 1
        return node

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise yaml.YAMLError(f"it holds more than {MAX_NODES} values, those that aliases stand for included")

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        own = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = _repeated(own)
        if twice is not None:
            raise yaml.YAMLError(f"the key {briefly(twice)} is given twice{node.start_mark}")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> Any:
        value = super().construct_yaml_int(node)
        if not -(1 << 63) <= value < 1 << 64:
            raise yaml.YAMLError(f"the number {node.value[:20]} is too large{node.start_mark}")
        return value

    def construct_yaml_float(self, node: Any) -> Any:
        value = super().construct_yaml_float(node)
        if not math.isfinite(value):
            raise yaml.YAMLError(f"{node.value} is not a finite number{node.start_mark}")
        return value


_Yaml.add_constructor("tag:yaml.org,2002:int", _Yaml.construct_yaml_int)
_Yaml.add_constructor("tag:yaml.org,2002:float", _Yaml.construct_yaml_float)
