"""The UNet's forward for training on a GPU: convolutions, everything between them by fused kernels.

    unfused   conv, + bias, GroupNorm, ReLU, amax, quantise, ...     each a pass over the activation, GroupNorm in FP32
    fused     conv, [+ bias + GroupNorm + ReLU + amax + quantise]    two reads and one write

The bias of a transposed convolution is added by the kernels that read its output, those of the concatenation, and its
gradient is summed in float32 by the kernel that splits the concatenation's.

`fuse_unet` turns a UNet into a `FusedUNet` in place; parameters, names and results are the same, up to the rounding of
FP16 where the unfused model holds FP32 between GroupNorm and the next convolution. An FP16 model gains as well: it is
the same path without the quantisers.

Activations in plain NVFP4, static, dynamic or with a learned amax, are quantised inside these kernels. With 4/6 the
kernels write FP16 and find the amax, the kernel of 4/6 quantises, and those of the backward read its in-range mask. The
gradient of a learned amax takes one more pass over what the layer's gradient reads, in a step in which a block exceeds
the amax (`plugins.quantize.learned`).
Weights are quantised in two launches together, or layer by layer where their format is not the plain one.

Measured fact: H200, 2026-11-30, 18b54c4c, `benchmarks/results/precision_step_h200.json`, one CUDA graph, +-1 %: the
NVFP4 step takes 28.2 ms here and 38.1 by torch.compile with the passes of `qat.fusion`, as every other network, at
scale 1.0, and 7.3 and 10.8 at scale 0.25. So this class stays.

The fused forward does not call the submodules. Whenever that would matter (a hook on one of them, a calibration, a
recipe that the kernels do not have, no autocast, no GPU), the plain forward runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.models import UNet
from fp4deploy.models.unet import Block
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize import learned as learned  # defines its operators
from fp4deploy.plugins.quantize.channels_last import channels_fit
from fp4deploy.plugins.quantize.weights import fake_quantize_weights, weight_fits
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.operators.gemms import ConvGemms
from fp4deploy.qat.operators.quantizers import quantize_operand
from fp4deploy.qat.operators.recompute import computed_by, convolve, is_recomputing, recomputing, transposed
from fp4deploy.qat.operators.ste import fake_quantize
from fp4deploy.qat.recipes import QuantSpec, Recipe

ops = torch.ops.fp4deploy
SIMPLE_INPUT = QuantSpec(scale="static")
SIMPLE_WEIGHT = QuantSpec()
SAME = ConvGemms((3, 3), (1, 1), (1, 1), (1, 1), 1)
POINTWISE = ConvGemms((1, 1), (1, 1), (0, 0), (1, 1), 1)
# With recomputation the concatenations of so many decoder blocks, the deepest, are kept. Each is half as large as the
# next: three of four are half of what would be copied again and less than the fourth, for 9 % more memory.
KEPT_CONCATENATIONS = 3
UPWARDS = ConvGemms((2, 2), (2, 2), (0, 0), (1, 1), 1, transposed=True)

# What relu(a x + b) is computed from: x [N, C, H, W] and its coefficients ab [N, 2, C].
Source = tuple[torch.Tensor, torch.Tensor]
# observe(layer, shape [N, C, H, W] of its input, function: slice of the batch -> that input before quantisation)
Observe = Callable[[nn.Module, torch.Size, Callable[[slice], torch.Tensor]], None]
ObserveOutput = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]  # (layer, its input, its output)


def fuse_unet(model: nn.Module, recompute: bool = False) -> nn.Module:
    """Give a UNet the fused forward, in place; any other model is returned as it is.

    recompute: compute inputs of convolutions again in the backward (`recompute`), but for images, pooled ones and the
        deepest concatenations.
    """
    if type(model) is UNet and model.axes == 2:
        model.__class__ = FusedUNet
        cast(FusedUNet, model).recomputes = recompute
    return model


def has_kernels(model: nn.Module) -> bool:
    """The kernels compute what every layer of this network does, by its recipe and channels."""
    return (
        isinstance(model, UNet)
        and model.axes == 2
        and all(_is_simple(module) for module in model.modules() if module is not model)
    )


class FusedUNet(UNet):
    """`UNet` whose forward uses the fused kernels where it can."""

    recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = _compute_dtype(x)
        if dtype is None or not self._fusable():
            return super().forward(x)
        again = recomputing() if self.recomputes and torch.is_grad_enabled() else nullcontext()
        with torch.autocast("cuda", enabled=False), again:
            return self._fused(self.read_image(x).to(dtype, memory_format=torch.channels_last))

    def fuses(self, x: torch.Tensor) -> bool:
        """The fused forward would take `x` now, in the autocast that this is called in."""
        return _compute_dtype(x) is not None and self._fusable()

    @contextmanager
    def observe_inputs(self, observe: Observe, outputs: ObserveOutput | None = None) -> Iterator[None]:
        """Call `observe` with the input of every layer, which the fused kernels quantise before it reaches memory.

        Called after the layer's amax was tracked. The input is recomputed from what the kernel read, for the images of
        the batch that `observe` asks for; GroupNorm's moments are per image, so the values are the same, rounded to
        FP16.

        outputs: called with input and output of the layers that quantise their gradients.
        """
        self.__dict__.update(_observe=observe, _observe_output=outputs)
        try:
            yield
        finally:
            del self.__dict__["_observe"], self.__dict__["_observe_output"]

    def _observe_input(
        self, layer: nn.Module | None, shape: tuple[int, ...], read: Callable[[slice], torch.Tensor]
    ) -> None:
        observe: Observe | None = self.__dict__.get("_observe")
        if observe is not None and layer is not None:
            observe(layer, torch.Size(shape), read)

    def _fusable(self) -> bool:
        if not available(self.head.weight.device):
            return False
        return all(
            not (module._forward_hooks or module._forward_pre_hooks) and _is_simple(module) for module in self._parts()
        )

    def _parts(self) -> tuple[nn.Module, ...]:
        """All submodules; `prepare` and `restore` change them in place, so that the list stays valid."""
        if "_listed" not in self.__dict__:
            self.__dict__["_listed"] = tuple(module for module in self.modules() if module is not self)
        return cast("tuple[nn.Module, ...]", self.__dict__["_listed"])

    def _fused(self, x: torch.Tensor) -> torch.Tensor:
        weights = self._weights(x.dtype)
        skips: list[tuple[torch.Tensor, torch.Tensor, Source | None]] = []
        modules: Any = (self.encoder, self.up, self.decoder)
        encoder, ups, decoder = (list(module) for module in modules)
        deepest = len(encoder) - 1
        encoded = x
        self._observe_input(encoder[0].conv1, x.shape, lambda images: encoded[images])
        if _here(encoder[0].conv1):  # by default it stays as it is
            x = encoder[0].conv1.quantized_input(x)
        for level, block in enumerate(encoder):
            x = self._convolve(x, block.conv1, weights, None, SAME)  # its input is not held while the block goes on
            x, bias = self._block(block, x, weights)
            if level < deepest:
                again = deepest - level > KEPT_CONCATENATIONS
                x = self._downwards(block, x, bias, encoder[level + 1].conv1, skips, again)
        before = encoder[-1]
        for up, block in zip(ups, decoder, strict=True):
            x = self._convolved(x, bias, before.norm2, up, weights, None, UPWARDS)
            x = self._joined(x, up.bias, *skips.pop(), block.conv1)
            x = self._convolve(x, block.conv1, weights, None, SAME)
            x, bias = self._block(block, x, weights)
            before = block
        return self._convolved(x, bias, before.norm2, self.head, weights, _cast(self.head.bias, x), POINTWISE)

    def _block(self, block: Block, x: torch.Tensor, weights: dict[nn.Module, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """From the output of the first convolution to that of the second, whose bias is still to be added."""
        return self._convolved(x, block.conv1.bias, block.norm1, block.conv2, weights, None, SAME), block.conv2.bias

    def _convolved(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: nn.GroupNorm,
        layer: nn.Module,
        weights: dict[nn.Module, torch.Tensor],
        layer_bias: torch.Tensor | None,
        gemms: ConvGemms,
    ) -> torch.Tensor:
        """The output of `layer`, the only one that reads relu(norm(x + bias))."""
        y = None
        if not _both_ways(layer):
            y = _norm_convolution(x, bias, norm, layer, weights[layer], layer_bias, gemms)
        if y is None:
            read, largest, _ = _norm(x, bias, norm, _here(layer))
            y = self._convolve(read, layer, weights, layer_bias, gemms, largest)
        self._observe_input(layer, x.shape, lambda images: _normalized(x[images], bias, norm))
        return y

    def _convolve(
        self,
        x: torch.Tensor,
        layer: nn.Module,
        weights: dict[nn.Module, torch.Tensor],
        bias: torch.Tensor | None,
        gemms: ConvGemms,
        own: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of `layer`; `own`: the amax of `x`, where a layer that quantises `x` itself may have it."""
        if not _both_ways(layer):
            return convolve(x, weights[layer], bias, gemms)
        own = None if own is None else own.reshape(())
        y = cast(QuantizedLayer, layer).multiply_both_ways(x, gemms, bias, own)
        observe: ObserveOutput | None = self.__dict__.get("_observe_output")
        if observe is not None:
            observe(layer, x.detach(), y)
        return y

    def _downwards(
        self,
        block: Block,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        after: nn.Module,
        skips: list[Any],
        again: bool,
    ) -> torch.Tensor:
        """The input of the next level, from the output of a block's second convolution; `skips` gets the other.

        again: with `recomputing` its concatenation is computed again.
        """
        y, largest, source = _norm(x, bias, block.norm2, None)
        skip, pooled = _pool(y, largest, source, _here(after))
        self._observe_input(after, pooled.shape, partial(_pooled, y))
        skips.append((skip, largest, source if again else None))
        return pooled

    def _joined(
        self,
        upwards: torch.Tensor,
        bias: torch.Tensor | None,
        skip: torch.Tensor,
        largest: torch.Tensor,
        source: Source | None,
        after: nn.Module,
    ) -> torch.Tensor:
        """The input of a block of the decoder; `bias` is still to be added to `upwards`."""
        joined = _concat(skip, upwards, bias, largest, source, _here(after))
        self._observe_input(after, joined.shape, partial(_joined, skip, upwards, bias))
        return joined

    def _weights(self, dtype: torch.dtype) -> dict[nn.Module, torch.Tensor]:
        """The weight of every convolution as it is multiplied, in `dtype`."""
        convolutions: list[Any] = [m for m in self._parts() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
        convolutions = [layer for layer in convolutions if not _both_ways(layer)]
        layers = [layer for layer in convolutions if isinstance(layer, QuantizedLayer)]
        quantized = [layer for layer in layers if layer.recipe.weight == SIMPLE_WEIGHT]
        plain = [layer for layer in convolutions if not isinstance(layer, QuantizedLayer)]
        # The contraction axis: input channels of OIHW, of IOHW for a transposed convolution.
        axes = tuple(0 if isinstance(layer, nn.ConvTranspose2d) else 1 for layer in quantized)
        values = _Weights.apply(axes, dtype, *(layer.weight for layer in (*quantized, *plain)))
        return _WeightsWhenRead(dtype, zip((*quantized, *plain), values, strict=True))


class _WeightsWhenRead(dict[nn.Module, torch.Tensor]):
    """Weights that are not quantised together: each when it is read, while the GPU is busy with the layers before."""

    def __init__(self, dtype: torch.dtype, known: Iterable[tuple[nn.Module, torch.Tensor]]) -> None:
        super().__init__(known)
        self.dtype = dtype

    def __missing__(self, layer: nn.Module) -> torch.Tensor:
        return cast(QuantizedLayer, layer).quantized_weight().to(self.dtype)


class _Weights(torch.autograd.Function):
    """All weights in the dtype of the convolutions, the first len(axes) fake-quantised; gradients straight through."""

    @staticmethod
    def forward(
        ctx: Any, axes: tuple[int, ...], dtype: torch.dtype, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        plain = weights[len(axes) :]
        copies = [torch.empty_like(weight, dtype=dtype) for weight in plain]
        if copies:  # not where every layer is quantised
            torch._foreach_copy_(copies, plain)
        return *(fake_quantize_weights(weights[: len(axes)], axes, dtype) if axes else ()), *copies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        copies = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        if copies:
            torch._foreach_copy_(copies, gradients)
        return None, None, *copies


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        beta: torch.Tensor,
        groups: int,
        eps: float,
        amax: torch.Tensor | None,
        tracked: torch.Tensor | None,
        decay: float,
        quantize: bool,
        delayed: bool,
        clips: bool,
        spec: QuantSpec | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x.contiguous(memory_format=torch.channels_last)
        y, ab, mean_rstd, channel_mean, largest = ops.group_norm_relu(
            x, bias, weight, beta, groups, eps, amax, tracked, decay, quantize, delayed
        )
        used = largest if amax is None else amax
        y, inside = _by_format(y, spec, used, clips)
        ctx.save_for_backward(x, ab, mean_rstd, channel_mean, bias, weight, used, largest, inside)
        ctx.masks = quantize and clips
        ctx.mark_non_differentiable(largest, ab)
        return y, largest, ab

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ab, mean_rstd, channel_mean, bias, weight, used, largest, inside = ctx.saved_tensors
        dy, damax = gradients[0], None
        saved = (ab, mean_rstd, channel_mean, bias, weight)
        if inside is None:
            dx, sums = ops.group_norm_relu_backward(x, dy, *saved, used, ctx.masks)
        else:
            dx, sums = ops.group_norm_relu_backward_clipped(x, dy, *saved, inside)
        if ctx.needs_input_grad[6]:
            damax = ops.group_norm_relu_damax(x, dy, ab, used, largest).reshape(used.shape)
        dgamma, dbeta, dbias = sums.unbind()
        return dx, None if bias is None else dbias, dgamma, dbeta, None, None, damax, *[None] * 6


class _NormConvolution(torch.autograd.Function):
    """`_NormReLU` and the convolution that alone reads its output, which is written again over `x` in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        beta: torch.Tensor,
        groups: int,
        eps: float,
        amax: torch.Tensor | None,
        tracked: torch.Tensor | None,
        decay: float,
        quantize: bool,
        delayed: bool,
        clips: bool,
        kernel: torch.Tensor,
        kernel_bias: torch.Tensor | None,
        gemms: ConvGemms,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous(memory_format=torch.channels_last)
        y, ab, mean_rstd, channel_mean, largest = ops.group_norm_relu(
            x, bias, weight, beta, groups, eps, amax, tracked, decay, quantize, delayed
        )
        used = largest if amax is None else amax
        ctx.save_for_backward(x, ab, mean_rstd, channel_mean, bias, weight, used, kernel)
        ctx.masks, ctx.quantizes, ctx.gemms, ctx.spent = quantize and clips, quantize, gemms, False
        ctx.mark_non_differentiable(largest)
        return gemms.multiply(y, kernel, kernel_bias), largest

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("With train.recompute the backward pass runs once: it overwrites what the forward kept.")
        ctx.spent = True
        x, *saved, kernel = ctx.saved_tensors
        gradient, gemms, bias = gradients[0], ctx.gemms, saved[3]
        dx = transposed(gemms, x.shape[2:], gradient.shape[2:]).multiply(gradient, kernel, None)
        dx = dx.contiguous(memory_format=torch.channels_last)
        dgamma, dbeta, dbias = ops.group_norm_relu_backward_(x, dx, *saved, ctx.masks, ctx.quantizes).unbind()
        _, *own = gemms.backward(gradient, x, kernel, (False, *ctx.needs_input_grad[12:14]))
        return dx, None if bias is None else dbias, dgamma, dbeta, *[None] * 8, *own, None


class _SkipAndPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        amax: torch.Tensor | None,
        clips: bool,
        largest: torch.Tensor,
        source: Source | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # y is kept for the gradient of a learned amax, which reads y itself
        kept = (y, None) if source is None or ctx.needs_input_grad[1] else source
        ctx.save_for_backward(*kept, amax if clips else None, largest)
        return y.view_as(y), ops.pool(y, amax)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, ab, amax, largest = ctx.saved_tensors
        dskip, dpooled = gradients
        damax = ops.pool_damax(y, dpooled, amax, largest).reshape(amax.shape) if ctx.needs_input_grad[1] else None
        if ab is None:
            dy = ops.pool_backward(y, dskip, dpooled, amax)
        else:
            dy = ops.pool_backward_again(y, ab, dskip, dpooled, amax)
        return dy, damax, None, None, None


class _Concat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        amax: torch.Tensor | None,
        clips: bool,
        source: Source | None,
        spec: QuantSpec | None,
        other: torch.Tensor | None,
        tracked: torch.Tensor | None,
        decay: float,
    ) -> torch.Tensor:
        found = ops.concat(a, b, amax if spec is None else None, other, tracked, decay, bias)
        masks = clips and amax is not None
        out, in_range = found if spec is None else _by_format(found[0], spec, amax, masks)
        if source is not None:
            computed_by(out, _concat_again, *source, b, bias, amax, spec, masks)
        inputs = (a, b, bias, amax) if ctx.needs_input_grad[3] else ()
        ctx.save_for_backward(in_range if masks else None, *inputs)
        ctx.first = a.shape[1]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        in_range, *inputs = ctx.saved_tensors
        sums = ctx.needs_input_grad[2]
        da, db, dbias = ops.separate(gradients[0], in_range, ctx.first, sums)
        damax = None
        if inputs:
            a, b, bias, amax = inputs
            damax = ops.concat_damax(a, b, gradients[0], amax, None, bias).reshape(amax.shape)
        return da, db, dbias if sums else None, damax, *[None] * 6


def _by_format(
    y: torch.Tensor, spec: QuantSpec | None, amax: torch.Tensor | None, clips: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a kernel wrote, quantised by `spec` where the kernel did not do that, with its in-range mask."""
    return quantize_operand(y, spec, (1,), cast(torch.Tensor, amax).reshape(()) if clips else None)


def _norm(
    x: torch.Tensor, bias: torch.Tensor | None, norm: nn.GroupNorm, after: nn.Module | None
) -> tuple[torch.Tensor, torch.Tensor, Source | None]:
    """(relu(norm(x + bias)) as the layer `after` reads it, its amax, what it is computed again from)."""
    amax, *how = _quantization(x, after)
    spec = _left(after)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    result = _NormReLU.apply(x, bias, *_of_norm(norm), amax, *how, spec)
    y, largest, ab = result
    _remember(after, largest)
    used = largest if amax is None else amax
    computed_by(y, _norm_again, x, ab, used, _in_kernel(after), spec, _clips(after))
    source = (x.detach().contiguous(memory_format=torch.channels_last), ab) if is_recomputing() else None
    return y, largest, source


def _norm_convolution(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: nn.GroupNorm,
    layer: nn.Module,
    kernel: torch.Tensor,
    kernel_bias: torch.Tensor | None,
    gemms: ConvGemms,
) -> torch.Tensor | None:
    """`layer` of relu(norm(x + bias)) as one function; None where nothing is recomputed, or its gradient asks for more.

    A learned amax has a gradient that reads the input of the norm, and 4/6 quantises in a kernel of its own.
    """
    together = not isinstance(layer, QuantizedLayer) or (_in_kernel(layer) and not layer.recipe.amax_learned)
    if not is_recomputing() or not together or not x.requires_grad:
        return None
    args = (*_of_norm(norm), *_quantization(x, layer), kernel, kernel_bias, gemms)
    result: tuple[torch.Tensor, torch.Tensor] = _NormConvolution.apply(x, bias, *args)
    y, largest = result
    _remember(layer, largest)
    return y


def _both_ways(layer: nn.Module) -> bool:
    """Its recipe quantises gradients, too: it does all quantising itself, and reads what a kernel wrote in FP16."""
    return isinstance(layer, QuantizedLayer) and not layer.recipe.straight_through


def _here(layer: nn.Module) -> QuantizedLayer | None:
    """A layer whose input is quantised here."""
    return layer if isinstance(layer, QuantizedLayer) and not _both_ways(layer) else None


def _of_norm(norm: nn.GroupNorm) -> tuple[torch.Tensor, torch.Tensor, int, float]:
    return norm.weight, norm.bias, norm.num_groups, norm.eps


def _quantization(x: torch.Tensor, after: nn.Module | None) -> tuple[Any, ...]:
    """How the layer `after` quantises `x`: amax, tracked amax, its decay, in the kernel, delayed, clips."""
    amax = tracked = None
    decay, delayed = 0.0, False
    if isinstance(after, QuantizedLayer) and after.is_static:
        tracked = after.input_amax if after.moves_amax else None
        amax = None if after.moves_amax else _fixed_amax(after, x)
        decay, delayed = after.recipe.amax_decay, after.is_delayed and after.moves_amax
    return amax, tracked, decay, _in_kernel(after), delayed, _clips(after)


def _remember(after: nn.Module | None, largest: torch.Tensor) -> None:
    if isinstance(after, QuantizedLayer) and after.is_static and after.is_delayed and after.moves_amax:
        after.remember(largest)


def _norm_again(
    x: torch.Tensor, ab: torch.Tensor, amax: torch.Tensor, quantize: bool, spec: QuantSpec | None, clips: bool
) -> torch.Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    y: torch.Tensor = ops.group_norm_relu_again(x, ab, amax, quantize)
    return _by_format(y, spec, amax, clips)[0]


def _in_kernel(after: nn.Module | None) -> bool:
    """The kernel that writes the input of the layer `after` quantises it."""
    return isinstance(after, QuantizedLayer) and cast(QuantSpec, after.recipe.activation).four_over_six is None


def _left(after: nn.Module | None) -> QuantSpec | None:
    """The format in which the input of the layer `after` is quantised where the kernel that writes it does not."""
    quantized = isinstance(after, QuantizedLayer) and not _in_kernel(after)
    return cast(QuantizedLayer, after).recipe.activation if quantized else None


def _clips(after: nn.Module | None) -> bool:
    """What saturates has no gradient: a static scale."""
    return isinstance(after, QuantizedLayer) and after.is_static


def _quantized(y: torch.Tensor, after: nn.Module | None, amax: torch.Tensor | None) -> torch.Tensor:
    """The input of `after`, which a kernel wrote in FP16, quantised where that is still to be done."""
    spec = _left(after)
    if spec is None:
        return y
    used = cast(torch.Tensor, amax).reshape(()) if _clips(after) else None
    quantized = fake_quantize(y, spec, (1,), used)
    computed_by(quantized, _quantized_again, y, spec, used)
    return quantized


def _quantized_again(y: torch.Tensor, spec: QuantSpec, amax: torch.Tensor | None) -> torch.Tensor:
    return quantize_operand(y, spec, (1,), amax)[0]


def _pool(
    y: torch.Tensor, largest: torch.Tensor, source: Source | None, after: nn.Module | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y for the skip connection, its 2 x 2 maximum as `after` reads it)."""
    amax = _track(y, largest, after, read=False)
    skip, pooled = _SkipAndPool.apply(y, amax if _in_kernel(after) else None, _clips(after), largest, source)
    computed_by(skip, torch.Tensor.detach, y)
    return skip, _quantized(pooled, after, amax)


def _normalized(x: torch.Tensor, bias: torch.Tensor | None, norm: nn.GroupNorm) -> torch.Tensor:
    """relu(norm(x + bias)), not quantised and without a gradient."""
    x = x.detach().contiguous(memory_format=torch.channels_last)
    args = (bias, norm.weight, norm.bias, norm.num_groups, norm.eps, None, None, 0.0, False, False)
    result: torch.Tensor = ops.group_norm_relu(x, *args)[0]
    return result


def _pooled(y: torch.Tensor, images: slice) -> torch.Tensor:
    return F.max_pool2d(y[images], 2)


def _joined(skip: torch.Tensor, upwards: torch.Tensor, bias: torch.Tensor | None, images: slice) -> torch.Tensor:
    second = upwards[images]
    if bias is not None:
        second = second + bias.to(second.dtype)[:, None, None]
    return torch.cat([skip[images], second], 1)


def _track(
    x: torch.Tensor, largest: torch.Tensor, after: nn.Module | None, read: bool, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The amax that the layer `after` quantises its input with; None where it does not.

    largest: amax of the rest of the input; `read`: `x` + `bias` itself counts too.
    """
    if not isinstance(after, QuantizedLayer):
        return None
    if not after.is_static:
        return ops.track_amax(x.detach(), largest, None, 0.0, True, False, bias) if read else largest
    if not after.moves_amax:
        return _fixed_amax(after, x)
    used: torch.Tensor = ops.track_amax(
        x.detach(), largest, after.input_amax, after.recipe.amax_decay, read, after.is_delayed, bias
    )
    return after.remember(used) if after.is_delayed else used


def _fixed_amax(after: QuantizedLayer, x: torch.Tensor) -> torch.Tensor:
    """The amax where this forward moves none, in the shape that a kernel gives: a recomputation saves the same."""
    return cast(torch.Tensor, after.static_amax(x)).reshape(1)


def _concat(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    largest: torch.Tensor,
    source: Source | None,
    after: nn.Module | None,
) -> torch.Tensor:
    """[a, b + bias] as the layer `after` reads it; `largest` is the amax of a. Delayed, only the copy reads b."""
    tracking: tuple[Any, ...] = (None, None, 0.0)
    added = None if bias is None else bias.detach()
    if isinstance(after, QuantizedLayer) and _in_kernel(after) and after.moves_amax and after.is_delayed:
        amax: torch.Tensor | None = after.remember(ops.previous_amax(b.detach(), largest, after.input_amax, added))
        tracking = (largest, after.input_amax, after.recipe.amax_decay)
    else:
        amax = _track(b, largest, after, read=True, bias=added)
    result: torch.Tensor = _Concat.apply(a, b, bias, amax, _clips(after), source, _left(after), *tracking)
    return result


def _concat_again(
    x: torch.Tensor,
    ab: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    amax: torch.Tensor | None,
    spec: QuantSpec | None,
    clips: bool,
) -> torch.Tensor:
    """[relu(a x + b), b + bias] as the layer reads it."""
    joined: torch.Tensor = ops.concat_again(x, ab, b, amax if spec is None else None, bias)
    return _by_format(joined, spec, amax, clips)[0]


def _cast(bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.to(x.dtype)


def _compute_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast computes in; None where the kernels cannot."""
    if x.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return None
    dtype = torch.get_autocast_dtype("cuda")
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def _is_simple(module: nn.Module) -> bool:
    """The kernels compute what this module does."""
    if isinstance(module, QuantizedLayer):
        together = module.recipe.weight != SIMPLE_WEIGHT or weight_fits(module.weight)
        known = _both_ways(module) or (_has_kernels(module.recipe) and together)
        return module.quantizing and not module.observing and module.channel_norms is None and known
    return not isinstance(module, nn.GroupNorm) or channels_fit(module.num_channels)


@lru_cache
def _has_kernels(recipe: Recipe) -> bool:
    activation = recipe.activation
    if activation is None or recipe.weight is None:
        return False
    simple = replace(SIMPLE_INPUT, scale=activation.scale, four_over_six=activation.four_over_six)
    return activation == simple and not (recipe.amax_learned and activation.four_over_six)
