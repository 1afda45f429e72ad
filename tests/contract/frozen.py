"""What is frozen, as plain data, and how a recorded state is compared with the present one.

The rule is "recorded is a subset of actual": everything recorded must still be there and be the same, new names, flags
and keys may be added. So a dict may gain keys and a list may gain elements at its end; anything else must be equal.
`record.py` writes the JSON files of `recorded/`; it is run by hand, and its diff is read before it is committed.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.contract import internals

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
MODULES = ("fp4deploy.formats", "fp4deploy.qat", "fp4deploy.plugins", "fp4deploy.export")
Facts = dict[str, Any]


def recorded(name: str) -> Facts:
    """The content of recorded/NAME.json."""
    found: Facts = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def lost(before: Any, now: Any, where: str = "") -> list[str]:
    """Everything of `before` that is missing or different in `now`, one line each; empty where nothing was lost."""
    if isinstance(before, dict) and isinstance(now, dict):
        lines = [f"{where}/{key} is gone" for key in before if key not in now]
        return lines + [line for key in before if key in now for line in lost(before[key], now[key], f"{where}/{key}")]
    if isinstance(before, list) and isinstance(now, list):
        return [] if now[: len(before)] == before else [f"{where} was {before} and begins {now[: len(before)]}"]
    return [] if before == now and type(before) is type(now) else [f"{where} was {before!r} and is {now!r}"]


# --- Python names


def python_names() -> Facts:
    """Module -> public name -> what it is."""
    return {module: _names(importlib.import_module(module)) for module in MODULES}


def _names(module: Any) -> Facts:
    return {name: _describe(getattr(module, name)) for name in sorted(module.__all__)}


def _describe(value: Any) -> Facts:
    if inspect.isclass(value):
        found: Facts = {"is": "class", "bases": [base.__name__ for base in value.__mro__[1:] if base is not object][:1]}
        found |= _signature(value)
        # The methods of a quantised layer are the training's; what others rely on are its parameters' names.
        return found if issubclass(value, torch.nn.Module) else {**found, "members": _members(value)}
    if callable(value):
        return {"is": "function", **_signature(value)}
    return {"is": type(value).__name__, "value": _plain(value)}


def _members(owner: type) -> Facts:
    found: Facts = {}
    for name, member in vars(owner).items():
        if name.startswith("_"):
            continue
        inner = getattr(member, "__func__", member)
        if isinstance(member, property):
            found[name] = {"is": "property"}
        elif inspect.isfunction(inner):
            found[name] = {"is": type(member).__name__ if inner is not member else "method", **_signature(inner)}
        elif not inspect.ismemberdescriptor(member):
            found[name] = {"is": "value", "value": _plain(member)}
    if dataclasses.is_dataclass(owner):
        found |= {field.name: {"is": "field"} for field in dataclasses.fields(owner) if field.name not in found}
    return found


def _signature(value: Any) -> Facts:
    """Positional parameters in order, all parameters as text, and which must be given."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return {}
    ours = not inspect.isclass(value) or "fp4deploy" in getattr(value.__init__, "__module__", "")
    ours = ours or dataclasses.is_dataclass(value)
    shown = [each if ours else each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    fixed = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return {
        "positional": [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD],
        "parameters": {each.name: f"{each.kind.description}: {each}" for each in shown},
        "required": ", ".join(each.name for each in fixed if each.default is each.empty),
    }


def _plain(value: Any) -> Any:
    """A value as JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if callable(value):  # its text has an address
        return f"{value.__module__}.{value.__qualname__}"
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# --- the command line


def command_line() -> Facts:
    """Command -> its options and arguments, each with names, default, and the values it takes."""
    return {name or "fp4deploy": _command(command) for name, command in internals.commands().items()}


def _command(command: Any) -> Facts:
    function = inspect.unwrap(command.callback) if command.callback else None
    hints = typing.get_type_hints(function) if function else {}
    options: Facts = {}
    arguments: list[Facts] = []
    for parameter in command.params:
        facts: Facts = {"required": bool(parameter.required), "repeatable": bool(parameter.multiple)}
        facts["choices"] = dict.fromkeys(_choices(hints.get(parameter.name)), "valid")
        if parameter.default is None or isinstance(parameter.default, str | int | float | bool):
            facts["default"] = parameter.default
        if parameter.param_type_name == "argument":
            arguments.append({**facts, "repeatable": parameter.nargs != 1})
            continue
        for number, names in enumerate((parameter.opts, parameter.secondary_opts)):
            for name in names:
                options[name] = facts | {"flag": bool(parameter.is_flag), "switches": "off" if number else "on"}
    return {"options": options, "arguments": arguments}


def _choices(hint: Any) -> list[str]:
    """Values of the Literal or Enum in an annotation."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [str(member.value) for member in hint]
    if typing.get_origin(hint) is typing.Literal:
        return [str(value) for value in typing.get_args(hint)]
    return [choice for part in typing.get_args(hint) if not isinstance(part, str) for choice in _choices(part)]


# --- torch operators and TensorRT plugins


def operators() -> Facts:
    """Operator -> schema, of all that `torch.ops.fp4deploy` has once every module of kernels is imported."""
    internals.import_every_kernel_module()
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fp4deploy::")]
    return {f"{each.name}.{each.overload_name}".rstrip("."): str(each) for each in sorted(schemas, key=str)}


def tensorrt_plugins() -> Facts:
    """Namespace, version, and of each plugin the tensors and attributes in their order; order is part of an engine."""
    namespace, version, plugins = internals.tensorrt_plugins()
    facts: Facts = {"namespace": namespace, "version": version}
    for name, plugin in plugins.items():
        orders = {part: ", ".join(getattr(plugin, part)) for part in ("inputs", "outputs", "attributes")}
        facts[name] = {"identifier": plugin.identifier, **orders, "types": ", ".join(plugin.types())}
    return facts


# --- JSON schemas

Schema = dict[str, Any]
LEAF = "type()"


def schema(value: Any, keyed: Callable[[str], bool], where: str = "") -> Schema:
    """Keys and types of a JSON value: {key: ...}, {"[]": of all elements}, {"type()": "null|number"}.

    Args:
        keyed: whether the keys of the object at a path are data (names of models, of classes); they become "*".
    """
    if isinstance(value, dict):
        if keyed(where):
            return {"*": merged([schema(part, keyed, f"{where}/*") for part in value.values()])}
        return {key: schema(part, keyed, f"{where}/{key}") for key, part in value.items()}
    if isinstance(value, list):
        return {"[]": merged([schema(part, keyed, f"{where}/[]") for part in value])}
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (type(None), "null"))
    return {LEAF: next(name for kind, name in kinds if isinstance(value, kind))}


def merged(schemas: list[Schema]) -> Schema:
    """One schema for several values; `type()` lists every type found."""
    found: Schema = {}
    for each in schemas:
        for key, part in each.items():
            if isinstance(part, str):
                found[key] = "|".join(sorted({*filter(None, str(found.get(key, "")).split("|")), *part.split("|")}))
            else:
                found[key] = merged([found.get(key, {}), part])
    return found


def schema_lost(before: Schema, now: Schema, where: str = "") -> list[str]:
    """Keys that went and types that changed; null says only that this machine or this run has no value."""
    lines: list[str] = []
    if not now and where.endswith(("[]", "*")):  # no element, so nothing to compare
        return lines
    null_now, null_before = now.get(LEAF) == "null", before.get(LEAF) == "null"
    if (null_now and isinstance(now[LEAF], str)) or (null_before and isinstance(before[LEAF], str)):
        return lines
    for key, part in before.items():
        if isinstance(part, str):
            types = [set(str(each.get(key, "")).split("|")) - {"null", ""} for each in (before, now)]
            if types[0] and not (types[1] and types[1] <= types[0]):
                lines.append(f"{where} was {part} and is {now.get(key, 'no such value')}")
        elif key in now:
            lines += schema_lost(part, now[key], f"{where}/{key}")
        elif key not in ("[]", "*") or LEAF in now:
            lines.append(f"{where}/{key} is gone")
    return lines


# --- bytes


def without_version(content: bytes, version: str) -> bytes:
    """A safetensors file of this project with its version and the digest over the version replaced.

    The header is JSON, and its metadata holds one entry that is JSON again: {"format", "version", ..., "sha256"}, in a
    packed network with "about", which is JSON once more and names the version too. Only these values are replaced, in
    the text, and the spaces that align the header are dropped; all else stays as it is.

    Raises:
        ValueError: the metadata does not name this version.
    """
    size = int.from_bytes(content[:8], "little")
    header, tensors = content[8 : 8 + size], content[8 + size :]
    ((_, text),) = json.loads(header)["__metadata__"].items()
    facts = json.loads(text)
    if facts.get("version") != version:
        raise ValueError(f"the file says version {facts.get('version')} and not {version}")
    for value, name, times in ((version, "version", 1 + ("about" in facts)), (facts["sha256"], "sha256", 1)):
        pattern = re.compile(rb'(\\+"' + name.encode() + rb'\\+": ?\\+")' + re.escape(value.encode()) + rb'(\\+")')
        header, count = pattern.subn(rb"\1X\2", header)
        if count != times:
            raise ValueError(f"{name} {value} stands {count} times in the header, and not {times}")
    return header.rstrip(b" ") + tensors
