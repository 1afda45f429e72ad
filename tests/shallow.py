"""UNets of three levels in the place of five: what tests do with them hardly ever depends on the number of levels.

A UNet of five levels has 23 layers, one of three 13: a first level, one that is pooled, read and brought up again, and
the deepest. To trace, quantise, verify and train one takes time by the layer, and most tests have one. Those about the
network itself, and recorded answers, ask for all levels by the fixture `whole_unets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar

import pytest

from fp4deploy.models import unet

POOLINGS = 2
Function = TypeVar("Function", bound=Callable[..., Any])
whole = unet.UNet.__init__


@wraps(whole)
def _shallow(self: unet.UNet, *arguments: Any, **options: Any) -> None:
    names = ("classes", "scale", "in_channels", "digits", "strides")
    given = {**dict(zip(names, arguments, strict=False)), **options}
    with pytest.MonkeyPatch.context() as patch:
        if type(self) is unet.UNet:  # a detector reads deeper levels
            given["strides"] = given.get("strides", ((2, 2),) * POOLINGS)[:POOLINGS]
            patch.setattr(unet, "WIDTHS", unet.WIDTHS[: POOLINGS + 1])
        whole(self, **given)


def is_shallow() -> bool:
    """Whether UNets have three levels here and now."""
    return unet.UNet.__init__ is _shallow


def make_shallow(shallow: bool = True) -> None:
    """From here on, in this process."""
    unet.UNet.__init__ = _shallow if shallow else whole  # type: ignore[method-assign]


@contextmanager
def levels(count: int) -> Iterator[None]:
    """Inside, UNets have three levels, or five as they are, whatever holds outside."""
    before = is_shallow()
    make_shallow(count == POOLINGS + 1)
    try:
        yield
    finally:
        make_shallow(before)


def cached(function: Function) -> Function:
    """`functools.cache` of a function whose UNets have as many levels as there are where it is called."""
    answers = {shallow: cache(function) for shallow in (True, False)}

    @wraps(function)
    def answer(*arguments: Any, **named: Any) -> Any:
        return answers[is_shallow()](*arguments, **named)

    return answer  # type: ignore[return-value]
