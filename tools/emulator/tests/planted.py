"""Faults planted into PTX, each an edit of its text."""

from __future__ import annotations

import re
from collections.abc import Callable

Edit = Callable[[str], str]


def replaced(pattern: str, replacement: str, which: int | None) -> Edit:
    """Replace the match number `which` (from 0, negative from the end), or with None every match."""

    def edit(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx, re.MULTILINE))
        if not found:
            raise IndexError(pattern)
        for match in reversed(found if which is None else [found[which]]):
            ptx = ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]
        return ptx

    return edit


def without_barrier(which: int = 0) -> Edit:
    """A barrier of the block is missing."""
    return replaced(r"^\s*bar\.sync\s+0;", "", which)


def without_first_barriers(count: int = 2) -> Edit:
    """The first barriers of the block are missing; Triton 3.7.1 writes some that another one makes redundant."""
    first = without_barrier(0)

    def edit(text: str) -> str:
        for _ in range(count):
            text = first(text)
        return text

    return edit


def late_wait(which: int = 0, left: int = 7) -> Edit:
    """Copies are used before they were waited for: the wait allows more groups to be under way."""
    return replaced(r"cp\.async\.wait_group\s+\d+;", f"cp.async.wait_group {left};", which)


def swapped_scales(which: int = 0) -> Edit:
    """The scales of A and B change places."""
    return replaced(
        r"(mma\.sync[^;]*\},\s*)(%r\d+)(,\s*\{\s*0,\s*0\s*\},\s*)(%r\d+)(,\s*\{\s*0,\s*0\s*\};)", r"\1\4\3\2\5", which
    )


def inverted_mask(what: str = r"ld\.global", which: int = 0) -> Edit:
    """A masked access touches exactly what it should not."""
    return replaced(rf"@(%p\d+)(\s+{what})", r"@!\1\2", which)


def other_offset(what: str, by: int, which: int = 0) -> Edit:
    """An access `by` bytes away."""
    return replaced(rf"({what}[^;]*\[\s*%r[d\d]+)(?:\s*\+\s*0)?(\s*\])", rf"\1 + {by}\2", which)


def without_copy(which: int = 0) -> Edit:
    """An asynchronous copy is missing, so that its bytes are never written."""
    return replaced(r"^\s*(?:@\S+\s+)?cp\.async\.c[ag]\.shared\.global[^;]*;", "", which)


def unwritten_register(which: int = 0) -> Edit:
    """An accumulator is not set to zero."""
    return replaced(r"^\s*mov\.b32\s+%r\d+, 0f00000000;", "", which)


def swapped_operands(which: int = 0) -> Edit:
    """Two registers of the A fragment change places."""
    return replaced(r"(mma\.sync[^;{]*\{[^}]*\},\s*\{\s*)(%r\d+),(\s*)(%r\d+)", r"\1\4,\3\2", which)
