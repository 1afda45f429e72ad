"""`quantize`: a trained model to NVFP4, FP8 and INT8 on a few images, without labels and without training it again.

    prepare (recipe of the method) -> static scales of the activations -> codes of the weights -> correction

Everything works on a copy of the full-precision model beside the quantised one: what a layer should give is what it
gave. The result is a prepared model, whose weights are values that its recipe quantises to themselves (`grid`), so that
it is saved, exported, packed and benched like a trained one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.graph.copies import copied
from fp4deploy.graph.modes import evaluating
from fp4deploy.precisions import shares_by_error
from fp4deploy.ptq import correction as corrections
from fp4deploy.ptq.activations import PERCENTILE, calibrate_activations
from fp4deploy.ptq.forward import autocast
from fp4deploy.ptq.gptq import gptq
from fp4deploy.ptq.grid import choose_scales, diagonal_blocks, encode, hold_amax, steps
from fp4deploy.ptq.matrix import WeightMatrix, blocks, fp4_layers, has_hessian, input_rows
from fp4deploy.ptq.methods import LEARNED, Method, find_method
from fp4deploy.ptq.reconstruct import align, reconstruct, units_of
from fp4deploy.qat.batches import arguments_of, batches_of, first_tensor, run
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.prepare import prepare
from fp4deploy.qat.selection import Selection, with_names
from fp4deploy.qat.sensitive import sensitive_layers
from fp4deploy.system.progress import progress as shown

if TYPE_CHECKING:
    from fp4deploy.system.progress import Phase

ITERATIONS = 400
Say = Callable[[str], None]


@dataclass
class Result:
    """What was done: method, correction, seconds, error of each unit before and after its reconstruction.

    sensitive: names of the layers that were left in "fp16" and "fp8" for the errors that they have in FP4.
    """

    method: str
    recipe: str
    correction: str
    images: int
    seconds: float = 0.0
    units: dict[str, tuple[float, float]] = field(default_factory=dict)
    corrected: list[str] = field(default_factory=list)
    sensitive: dict[str, list[str]] = field(default_factory=dict)


def quantize(
    model: nn.Module,
    images: Tensor | Mapping[str, Tensor] | Iterable[object],
    method: str = "gptq",
    *,
    include: Selection = None,
    exclude: Selection = None,
    fp16_macs: float = 0.0,
    fp8_macs: float = 0.0,
    fp4_macs: float = 0.0,
    correction: str = "norm",
    activations: str | None = None,
    percentile: float = PERCENTILE,
    iterations: int = ITERATIONS,
    seed: int = 0,
    say: Say = lambda text: None,
    progress: Phase | None = None,
    **formats: Selection,
) -> Result:
    """Quantise a full-precision model to NVFP4, in place.

    Args:
        model: any module that `qat.prepare` takes, on any device.
        images: model inputs, such as normalised images [N, 3, H, W]: one batch or several, on the model's device, as of
            `qat.calibrate`: tensors, dicts of arguments, or samples of a DataLoader.
        method: one of `methods.METHODS`.
        include, exclude, formats: which layers, as of `prepare`.
        fp16_macs, fp8_macs: shares of the multiply-accumulates of the quantised layers. The layers that lose most in
            FP4 for their work (`qat.sensitive`) stay in FP16, and become FP8, as far as they fit into them.
        fp4_macs: the least share of the whole network's that stays in FP4; alone, FP8 may have the rest.
        correction: "none", "bias", "norm" or "both" (`correction`).
        activations: "amax", "percentile" or "mse"; None as the method says.
        iterations: training steps of each unit (adaround, faar, brecq).
        say: gets lines about what is done.
        progress: is called with the running phase, what is done of it, and all of it; shown on stderr by default.

    Raises:
        InputError: an unknown name, no images, or a model that cannot be quantised.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 1))
    >>> quantize(model, torch.rand(2, 3, 12, 12), "gptq").recipe
    'nvfp4_4o6_weight_qat'
    """
    chosen = find_method(method)
    for name, share in {"fp16_macs": fp16_macs, "fp8_macs": fp8_macs, "fp4_macs": fp4_macs}.items():
        if not 0 <= share <= 1:
            raise InputError(f"{name} is {share:g}: a share from 0 to 1, such as 0.05.")
    if correction not in corrections.CHOICES:
        raise InputError(f"--correction is '{correction}'. Valid: {', '.join(corrections.CHOICES)}.")
    batches = list(batches_of(images))
    count = sum(len(first_tensor(batch)) for batch in batches)
    if not count:
        raise InputError("Quantisation needs images to calibrate on. Give some with: --data DIR")
    with ExitStack() as stack:
        report = progress or stack.enter_context(shown("quantising")).phase
        began = time.monotonic()
        stack.enter_context(evaluating(model))
        reference = model
        if correction != "none" or chosen.weights in LEARNED:  # otherwise nothing is compared with it
            reference = copied(model)
            for parameter in reference.parameters():
                parameter.requires_grad_(False)
        example = arguments_of(model, batches[0])
        prepare(model, chosen.recipe, include, exclude, example_inputs=example, **formats)
        result = Result(method, chosen.recipe, correction, count)
        for form, share in shares_by_error(fp16_macs, fp8_macs, fp4_macs).items():
            report(f"layers for {form.upper()}", 0, None)
            with autocast(batches[0]):
                calibrate_activations(model, batches)
                names = result.sensitive[form] = sensitive_layers(model, batches, share, fp4_macs)
            say(f"{form.upper()} for the largest errors in FP4: {', '.join(names) or 'no layer'}.")
            if names and form == "fp16":
                exclude = with_names(exclude, names)
            elif names:
                formats |= {form: with_names(formats.get(form), names)}
            prepare(model, chosen.recipe, include, exclude, example_inputs=example, **formats)
        say(f"Activations: {activations or chosen.activations} over {result.images} images.")
        report("activations", 0, None)
        with autocast(batches[0]):
            calibrate_activations(model, batches, activations or chosen.activations, percentile)
        _quantize_weights(model, reference, batches, chosen, iterations, seed, result, say, report)
        say(f"Correction: {correction}.")
        result.corrected = corrections.correct(model, reference, batches, correction, report)
        result.seconds = time.monotonic() - began
    return result


def _quantize_weights(
    model: nn.Module,
    reference: nn.Module,
    batches: list[object],
    method: Method,
    iterations: int,
    seed: int,
    result: Result,
    say: Say,
    progress: Phase,
) -> None:
    if method.weights == "nearest":
        return
    hessians = hessians_of(model, batches, seed, progress) if method.uses_inputs else {}
    if method.weights in LEARNED:
        local = {name: diagonal_blocks(hessian) for name, hessian in hessians.items()}
        hessians.clear()
        if method.weights == "network":
            count, learned = len(fp4_layers(model)) + 1, align(model, reference, batches, local, iterations, seed)
        else:
            units = units_of(model, method.weights == "block", batches[0])
            count = len(units)
            learned = ((unit, reconstruct(model, reference, unit, batches, local, iterations, seed)) for unit in units)
        progress("weights of the units", 0, count)
        for number, (unit, errors) in enumerate(learned, start=1):
            progress("weights of the units", number, count)
            result.units[unit] = errors
            say(f"  {unit}: squared error {errors[0]:.3g} -> {errors[1]:.3g}")
        return
    layers = fp4_layers(model)
    for number, (name, layer) in enumerate(layers.items()):
        progress("weights of the layers", number, len(layers))
        set_weight(layer, quantized_rows(layer, method.weights, hessians.pop(name, None)))


@torch.no_grad()
def quantized_rows(layer: QuantizedLayer, weights: str, hessian: Tensor | None) -> Tensor:
    """The matrix of a layer on the grid, by "mse", "sweep" or "gptq"; without H by "mse"."""
    rows = WeightMatrix.of(layer).rows(layer.weight.detach())
    amax = rows.abs().max()
    if not amax > 0:
        return rows
    if weights == "gptq" and hessian is not None:
        return hold_amax(gptq(rows, amax, hessian), rows, amax)
    local = diagonal_blocks(hessian) if weights == "sweep" and hessian is not None else None
    step = steps(choose_scales(rows, amax, local), amax).unsqueeze(-1)
    return (encode(blocks(rows), step) * step).flatten(1)


@torch.no_grad()
def set_weight(layer: QuantizedLayer, rows: Tensor) -> None:
    """Put a matrix of `quantized_rows` into the layer's weight."""
    layer.weight.copy_(WeightMatrix.of(layer).weight(rows))


@torch.no_grad()
def hessians_of(
    model: nn.Module, batches: Sequence[object], seed: int = 0, progress: Phase = lambda phase, done, of: None
) -> dict[str, Tensor]:
    """H = X^T X / n [K, K] of the quantised inputs of every layer whose inputs can be written as rows."""
    layers = {name: layer for name, layer in fp4_layers(model).items() if has_hessian(layer)}
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(layers, 0)
    generator = torch.Generator().manual_seed(seed)

    def measure(name: str) -> Callable[[QuantizedLayer, tuple[Tensor, ...]], None]:
        def hook(layer: QuantizedLayer, inputs: tuple[Tensor, ...]) -> None:
            with torch.autocast(inputs[0].device.type, enabled=False):
                rows = input_rows(layer, layer.quantized_input(inputs[0]), generator)
                product = rows.T @ rows
            sums[name] = sums[name] + product if name in sums else product
            counts[name] += len(rows)

        return hook

    handles = [layer.register_forward_pre_hook(measure(name)) for name, layer in layers.items()]
    try:
        for number, batch in enumerate(batches):
            progress("inputs of the layers", number, len(batches))
            with autocast(batch):
                run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: total / max(1, counts[name]) for name, total in sums.items()}
