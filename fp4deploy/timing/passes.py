"""What operators of torch do that a layer launches beside its product: the bytes of each pass over memory.

The layer's own code runs on tensors without data, so that nobody repeats here which operators it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("convolution", "mm", "addmm", "bmm", "linear")


class _Passes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith("empty") or name in PRODUCTS):
            found = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
            self.bytes.append(float(sum(each.nbytes for each in found)))
        return result


def passes(call: Callable[[], object]) -> list[float]:
    """Bytes that each operator of a call reads and writes, in their order, views and products left out.

    >>> x = torch.empty(2, 3, device="meta")
    >>> passes(lambda: (x @ x.T).relu_().to(torch.float16))
    [32.0, 24.0]
    """
    with _Passes() as found:
        call()
    return found.bytes
