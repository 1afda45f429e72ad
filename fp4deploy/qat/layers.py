"""Fake-quantised Conv1d, Conv2d, Conv3d, ConvTranspose2d, ConvTranspose3d and Linear.

Each is the torch layer with its own parameters and names. A layer whose recipe gives its input a static scale has one
more buffer, `input_amax`: the tracked amax of its input, from which the engine's global scale is made; 0 before the
layer has seen data, and never afterwards: of zeros alone it is `formats.ZEROS_AMAX`. `prepare` turns a layer into its
quantised class in place, so that hooks, parameters and references to the module survive, and `restore` turns it back.

A training step moves the tracked amax, m <- max(amax of x, decay * m), and quantises with the m after that or, where
the recipe's amax_timing is "delayed", before it. Delayed, the pass that quantises x finds its amax as well, and no
other reads x. Gradient checkpointing runs a forward a second time, inside the backward: that moves nothing and
quantises with the amax of the layer's last call, so a layer is not called twice in what one backward recomputes.

A recipe may have the amax learned: then `input_amax` is a parameter under the same name, and nothing moves it but the
optimiser (`learned`). Checkpoints and exports do not know the difference.

Blocks run along the axis that a GEMM contracts (see `gemms`). With groups they run along the channels of one
group, padded to whole blocks, so that no block crosses a group.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.formats import ZEROS_AMAX, tracked_amax
from fp4deploy.graph.sizes import each
from fp4deploy.plugins.quantize.dispatch import finite_amax, previous_amax
from fp4deploy.qat.fp4_gemms.autograd import packed_gemms
from fp4deploy.qat.fp4_gemms.requirements import PRODUCTS
from fp4deploy.qat.operators.backward_gemms import quantize_forward_weight, quantized_gemms
from fp4deploy.qat.operators.gemms import ConvGemms, LinearGemms
from fp4deploy.qat.operators.learned import fake_quantize_learned
from fp4deploy.qat.operators.ste import fake_quantize, fake_quantize_and_measure
from fp4deploy.qat.outliers import OutlierChannels
from fp4deploy.qat.recipes import QuantSpec, Recipe


class QuantizedLayer(nn.Module):
    """What the quantised layers share: the recipe, amax tracking and the quantisers."""

    recipe: Recipe
    prepared_as: str  # the layer's name in the model that was prepared, for messages
    input_amax: torch.Tensor | None
    delayed_amax: torch.Tensor | None  # what the last training step quantised with, where that is not input_amax
    observing: bool
    quantizing: bool  # off, a training step multiplies as the plain layer does, and the tracked amax follows
    holds_weight = True  # its weight is a parameter, which methods may change; else it is computed (`computed`)
    fusible = False  # `fuse` compiles this layer
    fake_quantized = True  # `graph.capture` refuses it
    products: str  # how the GEMMs of a recipe that quantises gradients are computed, one of `fp4_gemms`' PRODUCTS
    weight: torch.Tensor
    outlier_channels: torch.Tensor | None  # int64 [k], -1 before they are chosen; None where the recipe has none
    outliers: OutlierChannels | None  # the chosen ones and the others
    channel_norms: torch.Tensor | None  # float32 [C], sums while they are being chosen

    def attach(self, recipe: Recipe, amax: torch.Tensor | None = None, name: str = "") -> None:
        """Give a layer whose class was just changed its quantiser state; `amax`: a calibrated one to keep."""
        self.recipe = recipe
        self.prepared_as = name or type(self).__name__
        self._calibrated = (0, 0)
        self.products = PRODUCTS[0]
        self.observing = False
        self.quantizing = True
        self.delayed_amax = None
        self.outliers = self.channel_norms = None
        control, channels = recipe.outlier_control, self.in_channels_of_weight()
        count = round(control.share * channels) if control and self.gemms().groups == 1 else 0
        none = torch.full((count,), -1, dtype=torch.int64, device=self.weight.device)
        self.register_buffer("outlier_channels", none if count else None)
        self.register_buffer("input_amax", None)
        if self.is_static:
            start = torch.zeros((), dtype=torch.float32, device=self.weight.device)
            if amax is not None:
                start.copy_(amax.detach())
            self.input_amax = nn.Parameter(start) if recipe.amax_learned else start

    def extra_repr(self) -> str:
        """The layer's own arguments, its recipe and the six quantisers: format, scale rule, rounding and axis of each.

        C and O are input and output channels; the weight gradient contracts tokens or pixels.
        """
        contracted = ("C", "O", self.gemms().summed)
        return f"{super().extra_repr()}, {self.recipe.name}: {self.recipe.quantizers(contracted)}"

    def detach(self) -> None:
        """Take the quantiser state off again, before the class is changed back."""
        del self.recipe, self.prepared_as, self._calibrated
        del self.products, self.observing, self.quantizing, self.delayed_amax, self.input_amax
        del self.outliers, self.channel_norms, self.outlier_channels
        self.__dict__.pop("fusible", None)

    def in_channels_of_weight(self) -> int:
        """Input channels of one group."""
        return self.weight.shape[self.gemms().weight_axes[1]]

    @torch.no_grad()
    def choose_outliers(self, norms: torch.Tensor) -> None:
        """Make the channels of the largest `norms` [C] the layer's outliers, for good."""
        assert self.outlier_channels is not None
        self.outlier_channels.copy_(norms.argsort(descending=True)[: self.outlier_channels.numel()])
        self.channel_norms = None
        self._split_channels()

    def _split_channels(self) -> None:
        chosen = self.outlier_channels
        if chosen is None or bool((chosen < 0).any()):
            self.outliers = None
            return
        channels = self.in_channels_of_weight()
        if bool((chosen >= channels).any()) or chosen.unique().numel() < chosen.numel():
            raise InputError(
                f"outlier_channels holds {chosen.tolist()}, and the layer has channels 0 to {channels - 1}."
            )
        others = torch.ones(channels, dtype=torch.bool, device=chosen.device).index_fill_(0, chosen, False)
        self.outliers = OutlierChannels(chosen, others.nonzero().flatten())

    @torch.no_grad()
    def _sum_norms(self, x: torch.Tensor) -> None:
        if self.channel_norms is not None and self.training and not _recomputing():
            channels = x.detach().movedim(self.gemms().input_axis, 0).flatten(1)
            self.channel_norms += torch.linalg.vector_norm(channels, dim=1, dtype=torch.float32)

    @property
    def is_static(self) -> bool:
        """The input has a static global scale."""
        return self.recipe.activation is not None and self.recipe.activation.scale == "static"

    @property
    def is_delayed(self) -> bool:
        """A training step quantises the input with the tracked amax of the steps before it."""
        return self.recipe.amax_timing == "delayed"

    @property
    def moves_amax(self) -> bool:
        """A forward, now, is a training step: it moves the tracked amax."""
        return self.is_static and self.training and not self.recipe.amax_learned and not _recomputing()

    def gemms(self) -> LinearGemms | ConvGemms:
        """The three GEMMs of this layer, with a convolution's stride, padding, dilation and groups."""
        raise NotImplementedError

    def multiply(self, x: torch.Tensor, gemms: LinearGemms | ConvGemms) -> torch.Tensor:
        """Y from the layer's input, by its recipe; in training the tracked amax follows the input first."""
        if self.channel_norms is not None:  # not called otherwise: torch.export would keep its no_grad as a region
            self._sum_norms(x)
        if self.observing or not self.quantizing:
            if self.observing or self.moves_amax:
                self.track(x)
            return gemms.forward(x, self.weight, cast(Any, self.bias))
        if not self.recipe.straight_through:
            return self.multiply_both_ways(x, gemms, cast(Any, self.bias))
        return gemms.forward(self.quantized_input(x), self.quantized_weight(), cast(Any, self.bias))

    def multiply_both_ways(
        self,
        x: torch.Tensor,
        gemms: LinearGemms | ConvGemms,
        bias: torch.Tensor | None,
        own: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Y by a recipe that quantises the operands of the backward, too; `own`: the amax of `x`, if that is known."""
        arguments = (x, self.weight, bias, gemms, self.recipe, self.static_amax(x), self.outliers)
        return packed_gemms(*arguments) if self.products == "fp4" else quantized_gemms(*arguments, own)

    def quantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantise the input for the forward GEMM; in training the tracked amax follows."""
        gemms = self.gemms()
        traced = self._traced()
        if traced and traced.can_trace(self.recipe.activation):
            choice = traced.choice_of(cast(QuantSpec, self.recipe.activation))
            if traced.supports(x, gemms.input_axis, gemms.groups, choice):
                return self._traced_input(traced, x, gemms.input_axis, gemms.groups, choice)
        operand = (self.recipe.activation, (gemms.input_axis,))
        if self.recipe.amax_learned:
            amax = cast(torch.Tensor, self.static_amax(x))
            return fake_quantize_learned(x, cast(QuantSpec, operand[0]), gemms.input_axis, amax, gemms.groups)
        if not (self.is_delayed and self.moves_amax):
            return fake_quantize(x, *operand, self.static_amax(x), groups=(gemms.groups,))
        quantized, largest = fake_quantize_and_measure(x, *operand, self.amax_before(x), groups=(gemms.groups,))
        self.follow(largest)
        return quantized

    def _traced(self) -> Any:
        """The module of operators that a compiler fuses, where that of `fuse` is capturing this layer."""
        if not (self.fusible and torch.compiler.is_dynamo_compiling()):
            return None
        from fp4deploy.qat.fusion import traced  # with torch._dynamo, two seconds of a process that compiles nothing

        return traced

    def _traced_input(self, traced: Any, x: torch.Tensor, axis: int, groups: int, choice: Any) -> torch.Tensor:
        """`quantized_input` in operators that a compiler fuses."""
        if not self.is_static:
            return traced.quantize(x, traced.amax(x), axis, groups, False, choice)
        amax = cast(torch.Tensor, self.input_amax)
        if self.recipe.amax_learned:
            used = torch.where(amax > 0, amax, float("nan"))
            return traced.quantize_learned(x, used, axis, groups, choice)
        if self.moves_amax:
            with torch.no_grad():
                used, moved = traced.track(traced.amax(x), amax, self.recipe.amax_decay, self.is_delayed)
                amax.copy_(moved)
        else:
            used = cast(torch.Tensor, self.static_amax(x))
        return traced.quantize(x, used, axis, groups, True, choice)

    def quantized_weight(self) -> torch.Tensor:
        """Fake-quantise the weight for the forward GEMM, with its own amax."""
        gemms = self.gemms()
        spec = self.recipe.weight
        traced = self._traced()
        if traced and spec is not None and traced.can_trace(spec):
            groups, choice = gemms.weight_groups, traced.choice_of(spec)
            return traced.quantize_weight(self.weight, spec.block, gemms.weight_axes, groups, choice)
        if self.outliers is not None:
            return quantize_forward_weight(self.weight, gemms, self.recipe, self.outliers)
        return fake_quantize(self.weight, self.recipe.weight, gemms.weight_axes, groups=gemms.weight_groups)

    def static_amax(self, x: torch.Tensor) -> torch.Tensor | None:
        """The global amax that the input is quantised with, in training tracked; None where there is no static scale.

        A layer that never saw data has no scale: in evaluation that is an error, and where nothing can be raised, in
        what a compiler captures, its output is NaN rather than silently zero.

        Raises:
            InputError: in evaluation, with the name that the layer was prepared under.
        """
        if not self.is_static:
            return None
        if self.is_delayed and self.moves_amax:
            amax = self.amax_before(x)
            self.track(x)
            return amax
        if self.moves_amax:
            self.track(x)
        elif self.is_delayed and self.training and self.delayed_amax is not None:
            return self.delayed_amax
        amax = cast(torch.Tensor, self.input_amax)
        if not self.training:
            self._require_calibrated(amax)
        return torch.where(amax > 0, amax, float("nan"))

    def _require_calibrated(self, amax: torch.Tensor) -> None:
        """Refuse a layer without a scale. On a GPU each value is read once, since that waits for all before it."""
        known = type(amax) in (torch.Tensor, nn.Parameter) and amax.device.type != "meta"
        if not known or torch.compiler.is_compiling() or (amax.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        value = (id(amax), 0 if amax.is_inference() else amax._version)
        if amax.is_cuda and value == self._calibrated:
            return
        number = amax.item()
        if not 0 < number < math.inf:
            why = "it was never calibrated" if number == 0 else f"its input_amax is {number:g}"
            raise InputError(
                f"The layer {self.prepared_as} has no static scale of its input: {why}. Run data through the model "
                "first: fp4deploy.calibrate(model, batches), or a training step."
            )
        self._calibrated = value

    @torch.no_grad()
    def amax_before(self, x: torch.Tensor) -> torch.Tensor:
        """The tracked amax of the steps before this one, or where there was none that of `x`, as it is tracked."""
        return self.remember(previous_amax(x, cast(torch.Tensor, self.input_amax)))

    def remember(self, amax: torch.Tensor) -> torch.Tensor:
        """Keep what this step quantises with for a recomputation, of which a compiler takes care itself."""
        if not torch.compiler.is_compiling():
            self.delayed_amax = amax.reshape(())
        return amax

    def track(self, x: torch.Tensor) -> None:
        """Move the tracked amax towards that of `x`: up at once, down by the recipe's decay (observing: never)."""
        if self.input_amax is not None and x.numel():
            self.follow(finite_amax(x.detach()))

    @torch.no_grad()
    def follow(self, largest: torch.Tensor) -> None:
        """Move the tracked amax towards `largest`, the amax of the input."""
        amax = cast(torch.Tensor, self.input_amax)
        decay = 1.0 if self.observing else self.recipe.amax_decay
        amax.copy_(tracked_amax(largest, amax, decay))
        if self.recipe.amax_learned:  # an amax near 0 would clip what comes after the zeros, and have no gradient
            amax.copy_(torch.where(amax > ZEROS_AMAX, amax, 1.0))

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *rest: object) -> None:
        """A checkpoint without `input_amax` leaves the layer the one it has; a layer without one ignores it."""
        if self.input_amax is not None:
            state_dict.setdefault(f"{prefix}input_amax", self.input_amax)
        else:
            state_dict.pop(f"{prefix}input_amax", None)
        if self.outlier_channels is not None:
            state_dict.setdefault(f"{prefix}outlier_channels", self.outlier_channels)
        else:
            state_dict.pop(f"{prefix}outlier_channels", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._split_channels()


class _Convolution(QuantizedLayer):
    """Over any number of spatial axes."""

    def gemms(self) -> ConvGemms:
        return _conv_gemms(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _convolve(self, x)


class _TransposedConvolution(QuantizedLayer):
    """Over any number of spatial axes."""

    def gemms(self) -> ConvGemms:
        return _transposed_gemms(self)

    def forward(self, x: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        return _convolve_transposed(self, x, output_size)


class QuantConv1d(_Convolution, nn.Conv1d):
    """Conv1d with fake-quantised GEMMs: [N, C, L] -> [N, O, L']."""


class QuantConv2d(_Convolution, nn.Conv2d):
    """Conv2d with fake-quantised GEMMs: [N, C, H, W] -> [N, O, H', W']."""


class QuantConv3d(_Convolution, nn.Conv3d):
    """Conv3d with fake-quantised GEMMs: [N, C, D, H, W] -> [N, O, D', H', W']."""


class QuantConvTranspose2d(_TransposedConvolution, nn.ConvTranspose2d):
    """ConvTranspose2d with fake-quantised GEMMs: [N, C, H, W] -> [N, O, H', W']."""


class QuantConvTranspose3d(_TransposedConvolution, nn.ConvTranspose3d):
    """ConvTranspose3d with fake-quantised GEMMs: [N, C, D, H, W] -> [N, O, D', H', W']."""


class QuantLinear(QuantizedLayer, nn.Linear):
    """Linear with fake-quantised GEMMs: [..., C] -> [..., O]."""

    def gemms(self) -> LinearGemms:
        return LinearGemms()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.gemms())


QUANTIZED: dict[type[nn.Module], type[QuantizedLayer]] = {
    nn.Conv1d: QuantConv1d,
    nn.Conv2d: QuantConv2d,
    nn.Conv3d: QuantConv3d,
    nn.ConvTranspose2d: QuantConvTranspose2d,
    nn.ConvTranspose3d: QuantConvTranspose3d,
    nn.Linear: QuantLinear,
}
TRANSPOSED = (nn.ConvTranspose2d, nn.ConvTranspose3d)  # their weights are [C, O, ...]


def _conv_gemms(layer: Any) -> ConvGemms:
    """The GEMMs of a convolution whose input is padded already."""
    none = (0,) * len(layer.kernel_size)
    return ConvGemms(
        tuple(layer.kernel_size), tuple(layer.stride), none, tuple(layer.dilation), layer.groups, output_padding=none
    )


def _transposed_gemms(layer: Any) -> ConvGemms:
    """The GEMMs of a transposed convolution."""
    axes = layer.weight.ndim - 2
    kernel, stride, padding, dilation = (
        each(size, axes) for size in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    return ConvGemms(kernel, stride, padding, dilation, layer.groups, True, (0,) * axes)


def _convolve_transposed(layer: Any, x: torch.Tensor, output_size: list[int] | None) -> torch.Tensor:
    """The forward of a quantised transposed convolution with any number of spatial axes."""
    gemms = layer.gemms()
    axes = len(gemms.kernel)
    places = (layer.stride, layer.padding, layer.kernel_size, axes, layer.dilation)
    extra = layer._output_padding(x, output_size, *places)
    product: torch.Tensor = layer.multiply(x, replace(gemms, output_padding=each(extra, axes)))
    return product


def _convolve(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of a quantised convolution with any number of spatial axes."""
    gemms = _conv_gemms(layer)
    if layer.padding_mode != "zeros":
        ends = layer._reversed_padding_repeated_twice  # (before, after) of the last axis first
        padded: torch.Tensor = layer.multiply(F.pad(x, ends, layer.padding_mode), gemms)
        return padded
    pairs = zeros_around(layer)
    even = [min(pair) for pair in pairs]  # as torch does, so that the bits are the same
    excess = [edge - size for pair, size in zip(pairs, even, strict=True) for edge in pair]
    shifted = F.pad(x, excess) if any(excess) else x
    product: torch.Tensor = layer.multiply(shifted, replace(gemms, padding=tuple(reversed(even))))
    return product


def zeros_around(layer: Any) -> list[tuple[int, int]]:
    """(before, after) of each axis, the last axis first, from the attributes as they are now.

    Libraries change stride, dilation and padding of a finished layer, which torch's own copy of the padding misses.
    """
    if isinstance(layer.padding, str):
        taps = zip(layer.kernel_size, layer.dilation, strict=True)
        totals = [(kernel - 1) * dilation if layer.padding == "same" else 0 for kernel, dilation in taps]
        return [(total // 2, total - total // 2) for total in reversed(totals)]
    return [(edge, edge) for edge in reversed(layer.padding)]


def _recomputing() -> bool:
    """Inside a backward pass: gradient checkpointing runs the forward again, with the amax it had the first time."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
