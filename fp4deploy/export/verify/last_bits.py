"""What last bits of float32 decide: how far torch differs from itself when the result of every operator is off by some.

    pixels of equal values, normalised: (x - mean) / sqrt(var + 1e-12)        their noise, enlarged to numbers like 1
    a small map of classes                                                    one pixel in 768 is more than 0.1 %

Runtimes sum in other orders, and their results differ by a relative 1e-7 to 1e-6 (`NOISE`). What FP4, a comparison or a
quotient makes of that may be any number, and then a file differs from torch though it computes the same. Whether it
does is not guessed from how much differs: torch runs several times with noise of that size on its input and on every
result, and **each element** of the file may differ from torch's by a small multiple (`FACTOR`) of what torch's own
element moved. A wrong constant, operator or axis moves elements that noise leaves alone.

Where noise alone moves more than a small share of an output far (`MOST`), the comparison could not see a fault, and
nothing is excused. In deep networks FP4 amplifies noise until it explains missing quantisers and wrong resizing, so
that quantised networks are asked with reference inputs only, as they are compared (`layerwise`, `packed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fp4deploy.qat import quantized_layers

NOISE = 2.0**-21  # of each result, standard deviation: four last bits
RUNS = 8
FACTOR = 4  # times the largest movement of these runs
MOST = 0.05  # of what is compared


class _Noise(TorchFunctionMode):
    """Noise on what functions compute, outside of quantised layers; views and what is changed in place stay one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inside = 0
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call, with noise on the result."""
        result = func(*args, **(kwargs or {}))
        if self.inside or not isinstance(result, torch.Tensor | tuple | list):
            return result
        read = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        return tree_map_only(torch.Tensor, lambda x: x if _storage(x) in read else self.on(x), result)

    def on(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor with noise; whole numbers, which runtimes compute alike, as they are."""
        if not x.is_floating_point():
            return x
        with torch._C.DisableTorchFunction():  # none on what computes it
            noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype, device=self.generator.device)
            return torch.where(x == x.round(), x, x * (1 + NOISE * noise))

    def enter(self, *_: object) -> None:
        """The first hook of a quantised layer, whose formulas runtimes compute alike."""
        self.inside += 1

    def leave(self, _layer: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        """The last one: its sum has noise."""
        self.inside -= 1
        return output if self.inside else self.on(output)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@contextmanager
def noise(model: nn.Module, seed: int) -> Iterator[_Noise]:
    """Inside, what a model computes has noise of the size of last bits."""
    mode, handles = _Noise(seed), []
    for layer in quantized_layers(model).values():
        handles.append(layer.register_forward_pre_hook(mode.enter, prepend=True))
        handles.append(layer.register_forward_hook(mode.leave))
    try:
        with mode:
            yield mode
    finally:
        for handle in handles:
            handle.remove()


def movements(
    model: nn.Module,
    run: Callable[[Any], Sequence[torch.Tensor]],
    inputs: object,
    expected: Sequence[torch.Tensor],
    differing: Callable[[Sequence[torch.Tensor]], Sequence[float]],
    most: float = MOST,
) -> list[torch.Tensor]:
    """How far each element of each tensor that a network computes moves by noise; 0 in one that moves too much.

    Args:
        run: gives of such inputs what `expected` holds, by calling the model.
        differing: of what `run` gave, the share, 0..1, of each tensor that moved further than any small number.
        most: of a tensor that may.
    """
    largest = [torch.zeros_like(x, dtype=torch.float64) for x in expected]
    counts = [True] * len(expected)
    for seed in range(RUNS):
        with noise(model, seed) as own:
            moved = run(tree_map_only(torch.Tensor, own.on, inputs))
        if [x.shape for x in moved] != [x.shape for x in expected]:
            return [torch.zeros_like(each) for each in largest]
        counts = [held and share <= most for held, share in zip(counts, differing(moved), strict=True)]
        for found, x, y in zip(largest, expected, moved, strict=True):
            torch.maximum(found, (x.double() - y.double()).abs().nan_to_num(0.0, 0.0), out=found)
    return [found * held for found, held in zip(largest, counts, strict=True)]


def settled(expected: torch.Tensor, given: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """What a file gives, with torch's own elements in place of those that noise explains; NaN and Inf are never."""
    explained = (expected.double() - given.double()).abs() <= FACTOR * moved
    return torch.where(explained, expected, given.to(expected.dtype))
