"""Layers by name: exact names, globs, keywords, or a predicate.

["body.0"]           the layer of that name
["qkv", "proj"]      keywords, where no layer has that name: every layer whose name contains one of them
["*.attn.*"]         a glob
lambda name, layer: layer.in_features > 64
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fp4deploy.errors import InputError

Predicate = Callable[[str, nn.Module], bool]
Selection = Sequence[str] | Predicate | None


def predicate_of(selection: Selection, names: Iterable[str]) -> Predicate | None:
    """A selection of layers as a predicate of (name, layer); None where nothing was said.

    names: of all layers, which decide what a pattern without a wildcard means.

    Raises:
        InputError: a pattern matches none of them.

    >>> chosen = predicate_of(["qkv", "head"], ["blocks.0.attn.qkv", "blocks.0.mlp", "head", "head_drop"])
    >>> [name for name in ("blocks.0.attn.qkv", "blocks.0.mlp", "head", "head_drop") if chosen(name, nn.Identity())]
    ['blocks.0.attn.qkv', 'head']
    """
    if selection is None or callable(selection):
        return selection
    known = list(names)
    found = {pattern: matching(pattern, known) for pattern in patterns_of(selection)}
    if idle := [pattern for pattern, matched in found.items() if not matched]:
        raise InputError(
            f"No layer matches {', '.join(map(repr, idle))}. Give names, globs such as '*.proj' or keywords such as "
            f"'proj'. Layers: {', '.join(known)}."
        )
    chosen = {name for matched in found.values() for name in matched}
    return lambda name, _: name in chosen


def with_names(selection: Selection, names: Sequence[str]) -> Selection:
    """A selection and the layers of these names.

    >>> with_names(None, ["head"]), with_names("*.proj", ["head"])
    (['head'], ['*.proj', 'head'])
    """
    if callable(selection):
        return lambda name, layer: name in names or selection(name, layer)
    return [*patterns_of(selection or ()), *names]


def patterns_of(selection: Sequence[str]) -> Sequence[str]:
    """One pattern, or several."""
    return [selection] if isinstance(selection, str) else selection


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """The names that a glob, an exact name or else a keyword stands for."""
    if pattern in names:
        return [pattern]
    if any(letter in pattern for letter in "*?["):
        return [name for name in names if fnmatchcase(name, pattern)]
    return [name for name in names if pattern in name]


def require_possible(selection: Selection, impossible: Mapping[str, str | None]) -> None:
    """Refuse a pattern that includes only layers that cannot be quantised.

    impossible: of every layer, why not; None where it can.

    Raises:
        InputError: with the first of its layers, and why.
    """
    if selection is None or callable(selection):
        return
    for pattern in patterns_of(selection):
        reasons = {name: impossible[name] for name in matching(pattern, impossible)}
        if all(reasons.values()):
            name, reason = next(iter(reasons.items()))
            raise InputError(f"'{pattern}' includes nothing that can be quantised. {name}: {reason}.")
