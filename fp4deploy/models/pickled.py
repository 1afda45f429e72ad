"""Numbers of numpy in a pickled file of weights, read without numpy's own functions.

Trainers keep losses and learning rates beside the weights, and a number that came from numpy is pickled as a call of
`numpy.core.multiarray.scalar` on a `numpy.dtype` and a few bytes. `torch.load(weights_only=True)` makes such a call
only if it is allowed. Here both names stand for the class and the function below, so that the file calls no code of
numpy, and a number becomes an int, a float or a bool.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import numpy as np
import torch

_PLAIN = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])\Z")


class _Kind:
    """What a file says of a type of numbers, in place of numpy.dtype."""

    def __init__(self, code: object = "", *_: object) -> None:
        if not isinstance(code, str) or not _PLAIN.match(code):
            raise ValueError(f"it holds numbers of numpy's type {str(code)[:20]!r}, and plain ones are read")
        self.code = code

    def __setstate__(self, state: object) -> None:
        """The byte order, which numpy keeps here."""
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else "="
        if order in ("<", ">"):
            self.code = order + self.code.lstrip("<>|=")


def _number(kind: object = None, content: object = b"") -> int | float | bool:
    """In place of numpy.core.multiarray.scalar."""
    if not isinstance(kind, _Kind) or not isinstance(content, bytes):
        raise ValueError("it holds a number of numpy without a type or without bytes")
    wanted = np.dtype(kind.code)
    if len(content) != wanted.itemsize:
        raise ValueError(f"it holds {len(content)} bytes for a number of {wanted.itemsize}")
    value: int | float | bool = np.frombuffer(content, wanted)[0].item()
    return value


def numbers_of_numpy() -> AbstractContextManager[object]:
    """While it is entered, `torch.load(weights_only=True)` reads numbers of numpy as Python's."""
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    return torch.serialization.safe_globals([(_Kind, "numpy.dtype"), *((_number, name) for name in names)])
