"""Learned rounding: a unit of the network is trained to give the outputs it had, by rounding its weights up or down.

Between two neighbours lo <= w / step <= hi of E2M1 a weight is w' = step (lo + h (hi - lo)), h in [0, 1], with

    h = clip(1.2 sigmoid(v) - 0.1, 0, 1)      v learned, starting where w' = w
    loss = |unit(x') - unit_fp(x)|^2 + lambda sum 1 - |2h - 1|^beta      beta from 20 to 2: h ends at 0 or 1

x' is what the unit gets from the quantised network before it, x from the full-precision one, so that a unit also makes
up for the error of the units before it. A unit is one layer (AdaRound) or the block that holds several (BRECQ), where
roundings of one layer can make up for those of another, or first each layer and then the whole network (FAAR's two
stages, `align`); biases and the affine parameters of norms in it are trained as well. E2M1's neighbours lie 0.5 apart
below 2 and 2 apart above 4, and the scale of a block stays what `grid.choose_scales` chose: the largest code of a block
is not learned, so that the block stays a fixed point of quantisation.

Sources: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020; Li et al., "BRECQ: Pushing
the Limit of Post-Training Quantization by Block Reconstruction", 2021; rounding between the neighbours of a
non-uniform format, and the second stage: Li et al., "FAAR: Format-Aware Adaptive Rounding for NVFP4", 2026. The loss of
both stages is the squared error above, which is this project's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fp4deploy.errors import InputError
from fp4deploy.ptq.forward import Call, autocast, call_of, order_of
from fp4deploy.ptq.grid import choose_scales, signed_values, steps
from fp4deploy.ptq.matrix import WeightMatrix, blocks, fp4_layers
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.tracing import make_no_folder

STRETCH, OFFSET = 1.2, -0.1
WARM = 0.2  # share of the iterations without the regulariser
BETA = (20.0, 2.0)
WEIGHT = 0.01  # lambda, relative to the mean loss of an output channel
SOFT = 2.197  # v where h is 0.98


class SoftRounding(nn.Module):
    """The weight of one layer between its two neighbours; a parametrisation of `weight`."""

    def __init__(self, weight: Tensor, matrix: WeightMatrix, hessian: Tensor | None) -> None:
        super().__init__()
        self.matrix = matrix
        rows = matrix.rows(weight.detach())
        amax = rows.abs().max()
        step = steps(choose_scales(rows, amax, hessian), amax).unsqueeze(-1)
        cut = blocks(rows)
        ratio = torch.where(step > 0, cut / step.clamp(min=1e-38), 0.0).clamp(-6, 6)
        low, high = neighbours(ratio)
        largest = ratio.abs() >= ratio.abs().amax(-1, keepdim=True)
        nearest = torch.where(high - ratio <= ratio - low, high, low)
        top = torch.where(largest, nearest.abs(), 0.0).amax(-1, keepdim=True)
        low, high = (torch.where(largest, nearest, each).clamp(-top, top) for each in (low, high))
        share = ((ratio - low) / (high - low).clamp(min=1e-6)).clamp(0.02, 0.98)
        for name, value in (("step", step), ("low", low), ("gap", high - low)):
            self.register_buffer(name, value)
        self.v = nn.Parameter(torch.logit((share - OFFSET) / STRETCH))
        self.hard = True

    @torch.no_grad()
    def soften(self) -> None:
        """Bring decided roundings back to where h has a gradient."""
        self.v.clamp_(-SOFT, SOFT)

    def h(self) -> Tensor:
        """How far up each weight is, [R, B, 16] in [0, 1]."""
        soft = (STRETCH * torch.sigmoid(self.v) + OFFSET).clamp(0, 1)
        return (soft >= 0.5).to(soft.dtype) if self.hard else soft

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that is used instead of `weight`."""
        step, low, gap = (getattr(self, name) for name in ("step", "low", "gap"))
        return self.matrix.weight((step * (low + self.h() * gap)).flatten(1)).to(weight.dtype)

    def undecided(self, beta: float) -> Tensor:
        """Sum of 1 - |2h - 1|^beta over the weights that have two neighbours."""
        gap: Any = self.gap
        return ((1 - (2 * self.h() - 1).abs().pow(beta)) * (gap > 0)).sum()


def neighbours(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The E2M1 values below and above each ratio in [-6, 6]; both are the ratio where it is one of them."""
    values, _ = signed_values(ratio.device)
    ratio = ratio.contiguous()
    low = values[(torch.searchsorted(values, ratio, right=True) - 1).clamp(min=0)]
    high = values[torch.searchsorted(values, ratio).clamp(max=len(values) - 1)]
    return low, high


def units_of(model: nn.Module, by_block: bool, batch: object) -> list[str]:
    """Names of the units, in the order in which they run.

    by_block: the nearest module above each layer that has a forward of its own and is not the whole model, else the
        layer itself.
    """
    wanted = {_unit(model, name) if by_block else name for name in fp4_layers(model)}
    wanted = {name for name in wanted if not any(name.startswith(f"{other}.") for other in wanted)}
    return order_of(model, sorted(wanted), batch)


def _unit(model: nn.Module, name: str) -> str:
    above = name.rpartition(".")[0]
    while above and isinstance(model.get_submodule(above), nn.ModuleList | nn.ModuleDict):
        above = above.rpartition(".")[0]
    return above or name


def reconstruct(
    model: nn.Module,
    reference: nn.Module,
    unit: str,
    batches: Sequence[object],
    hessians: dict[str, Tensor],
    iterations: int,
    seed: int = 0,
) -> tuple[float, float]:
    """Train the roundings of one unit, in place.

    Args:
        reference: the full-precision model.
        hessians: diagonal blocks of H by layer, for the choice of scales; a layer may be missing.

    Returns:
        Mean squared error of the unit's output before (weights rounded to nearest) and after.

    Raises:
        InputError: the unit returns no tensor.
    """
    layers = {f"{unit}.{name}".rstrip("."): each for name, each in fp4_layers(model.get_submodule(unit)).items()}
    with _soft(layers, hessians) as roundings:
        return _learn(model, reference, unit, list(roundings.values()), batches, iterations, seed)


def align(
    model: nn.Module,
    reference: nn.Module,
    batches: Sequence[object],
    hessians: dict[str, Tensor],
    iterations: int,
    seed: int = 0,
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Train each layer's roundings on its output, then all of them on the network's, in place; as `reconstruct`.

    Yields:
        The name of each layer, and "network" at the end, with the squared errors before and after.

    Raises:
        InputError: as of `reconstruct`.
    """
    with _soft(fp4_layers(model), hessians) as roundings:
        for name in order_of(model, list(roundings), batches[0]):
            yield name, _learn(model, reference, name, [roundings[name]], batches, iterations, seed)
        for each in roundings.values():
            each.soften()
        yield "network", _learn(model, reference, "", list(roundings.values()), batches, iterations, seed)


def _learn(
    model: nn.Module,
    reference: nn.Module,
    unit: str,
    roundings: list[SoftRounding],
    batches: Sequence[object],
    iterations: int,
    seed: int,
) -> tuple[float, float]:
    """Train soft roundings, the biases and the norms of one unit; keep them where the hard ones became better."""
    rate = min(0.1, 7 / max(1, iterations))  # a rounding can turn within a third of the iterations
    module: Any = model.get_submodule(unit)
    calls = [call_of(model, unit, batch) for batch in batches]
    targets = [call_of(reference, unit, batch).outputs for batch in batches]
    if not all(targets):
        raise InputError(
            f"{unit or 'The network'} ({type(module).__name__}) returns no tensor, dict, tuple or list of tensors that "
            "could be compared. Take a method that works layer by layer: --method adaround, or gptq"
        )
    rounded = {id(each.v) for each in roundings}
    others = [each for name, each in module.named_parameters() if name.endswith("bias") or ".norm" in f".{name}"]
    others = [each for each in others if each.is_floating_point() and id(each) not in rounded]
    make_no_folder()
    optimizer = torch.optim.Adam(
        [{"params": [each.v for each in roundings], "lr": rate}, {"params": others, "lr": min(0.002, 0.1 * rate)}]
    )
    trained = [*(each.v for each in roundings), *others]
    saved = [(each, each.requires_grad, each.detach().clone()) for each in trained]
    for each in others:
        each.requires_grad_(True)
    before = _error(module, batches, calls, targets)
    random = torch.Generator().manual_seed(seed)
    scale = 1 / max(1e-12, sum(float(_mean_square(each, [0.0] * len(each))) for each in targets) / len(targets))
    for each in roundings:
        each.hard = False
    for step in range(iterations):
        place = int(torch.randint(len(batches), (1,), generator=random))
        with torch.enable_grad(), autocast(batches[place]):
            outputs = calls[place].again(module)
        loss = scale * _mean_square(outputs, targets[place])
        if step >= WARM * iterations:
            share = (step - WARM * iterations) / max(1.0, (1 - WARM) * iterations)
            beta = BETA[1] + (BETA[0] - BETA[1]) * (1 - share)
            count = sum(each.v.numel() for each in roundings)
            loss = loss + WEIGHT * sum(each.undecided(beta) for each in roundings) / count
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    for each in roundings:
        each.hard = True
    after = _error(module, batches, calls, targets)
    better = after < before
    for each, needed, start in saved:
        each.requires_grad_(needed)
        if not better:
            each.data.copy_(start)
    for each in module.parameters():
        each.grad = None
    return before, after if better else before


@contextmanager
def _soft(layers: dict[str, QuantizedLayer], hessians: dict[str, Tensor]) -> Iterator[dict[str, SoftRounding]]:
    """Let the layers read weights of learned roundings, which they keep."""
    recipes = {name: layer.recipe for name, layer in layers.items()}
    roundings: dict[str, SoftRounding] = {}
    try:
        for name, layer in layers.items():
            module: Any = layer
            soft = SoftRounding(module.weight, WeightMatrix.of(module), hessians.get(name))
            parametrize.register_parametrization(module, "weight", soft, unsafe=True)
            module.parametrizations.weight.original.requires_grad_(False)
            layer.recipe = replace(layer.recipe, weight=None)
            roundings[name] = soft
        yield roundings
    finally:
        for name, layer in layers.items():
            module = layer
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
                module.weight = nn.Parameter(module.weight.detach())
            layer.recipe = recipes[name]


@torch.no_grad()
def _error(
    module: nn.Module, batches: Sequence[object], calls: Sequence[Call], targets: Sequence[list[Tensor]]
) -> float:
    """Mean squared error."""
    total = 0.0
    for batch, call, target in zip(batches, calls, targets, strict=True):
        with autocast(batch):
            total += float(_mean_square(call.again(module), target))
    return total / len(calls)


def _mean_square(outputs: Sequence[Tensor], targets: Sequence[Tensor | float]) -> Tensor:
    """Mean squared difference over all elements of what a unit returns."""
    squares = [(output.float() - target).square() for output, target in zip(outputs, targets, strict=True)]
    return torch.stack([each.sum() for each in squares]).sum() / max(1, sum(each.numel() for each in squares))
