"""Layers whose class has a forward of its own that is still one convolution or one linear layer.

    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) * self.gain
            return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)

The weight that such a layer multiplies with is computed from its parameters, and that weight is what is quantised: in
training gradients flow through quantiser and computation into the parameters, and a file holds the codes of the weight
as computed. Layers with `torch.nn.utils.parametrizations`, such as weight_norm, are of this kind too.

Linear layers of classes outside torch (`own_linear`) have a quantised class here as well.

Their quantised class has a property `weight`, the computed one, and computes as that of the torch class does; what it
is computed from keeps its names in the state dict. For it to be right, forward may do nothing else: one call of the
torch class's operator, on the layer's input, with the layer's bias, stride, padding, dilation and groups, whose result
it returns, and with a weight that does not depend on the input. `why_not_plain` tries a copy of the layer on two small
inputs and says what is otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fp4deploy.graph.copies import copied
from fp4deploy.graph.own_linear import weight_axis
from fp4deploy.models.checkpoint import QUANTIZER_BUFFERS
from fp4deploy.qat.attention import Projection, unquantized_rows
from fp4deploy.qat.experts import QuantExperts
from fp4deploy.qat.layers import QUANTIZED, QuantizedLayer, QuantLinear
from fp4deploy.qat.operators.gemms import ConvGemms, LinearGemms
from fp4deploy.rest import Rest

GEOMETRY = ("stride", "padding", "dilation", "groups")
TRANSPOSED_GEOMETRY = ("stride", "padding", "output_padding", "groups", "dilation")
DEFAULTS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
OPERATORS: dict[type[nn.Module], tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {  # and arguments by position
    nn.Conv1d: (F.conv1d, ("input", "weight", "bias", *GEOMETRY)),
    nn.Conv2d: (F.conv2d, ("input", "weight", "bias", *GEOMETRY)),
    nn.Conv3d: (F.conv3d, ("input", "weight", "bias", *GEOMETRY)),
    nn.ConvTranspose2d: (F.conv_transpose2d, ("input", "weight", "bias", *TRANSPOSED_GEOMETRY)),
    nn.ConvTranspose3d: (F.conv_transpose3d, ("input", "weight", "bias", *TRANSPOSED_GEOMETRY)),
    nn.Linear: (F.linear, ("input", "weight", "bias")),
}
Seen = list[tuple[dict[str, Any], Any]]  # of each call: arguments by name, result


class ComputedWeight(QuantizedLayer):
    """What the quantised classes of such layers add: the property `weight`, computed by the class that they were."""

    holds_weight = False
    plain: type[Any]  # the class that `restore` gives back

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight that the plain class multiplies with; within its forward, the parameter."""
        if vars(self).get("inside_plain"):
            return _own_weight(self, self.plain)
        vars(self)["inside_plain"] = True
        try:
            return _weight_of(self, self.plain)
        except AttributeError as error:  # which nn.Module would answer with the parameter
            raise RuntimeError(f"{self.plain.__name__} could not compute its weight: {error}") from error
        finally:
            del vars(self)["inside_plain"]


class OwnLinear(ComputedWeight):
    """What the quantised classes of linear layers outside torch add: the parameter as a weight [out, in]."""

    input_axis: int
    multiplying = False

    @property
    def _rows(self) -> torch.Tensor:
        weight = cast(torch.Tensor, self._parameters["weight"])
        return weight if self.input_axis else weight.T

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The parameter, its input channels last; outside of a forward as it is before a library has loaded its data,
        which compares its shape.
        """
        rows = self._rows
        return rows.T if rows.is_meta and not (self.multiplying or self.input_axis) else rows

    def multiply(self, x: torch.Tensor, gemms: LinearGemms | ConvGemms) -> torch.Tensor:
        """As of any layer."""
        if not x.is_meta:
            return super().multiply(x, gemms)
        vars(self)["multiplying"] = True
        try:
            return super().multiply(x, gemms)
        finally:
            del vars(self)["multiplying"]

    @property
    def in_features(self) -> int:
        """Input channels."""
        return self._rows.shape[1]

    @property
    def out_features(self) -> int:
        """Output channels."""
        return self._rows.shape[0]

    def in_channels_of_weight(self) -> int:
        """Input channels."""
        return self.in_features


class QuantProjection(ComputedWeight, QuantLinear, Projection):
    """A projection of attention, whose weight is a view of a parameter."""

    plain = Projection
    weight = Projection.weight


EXACT: dict[type[nn.Module], type[QuantizedLayer]] = {**QUANTIZED, Projection: QuantProjection}


def masters(model: nn.Module) -> set[str]:
    """Names of the parameters and buffers that the weights of quantised layers are, or are computed from."""
    found = set()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            own = [key for key in layer.state_dict(keep_vars=True) if key != "bias"]
            found |= {f"{name}.{key}" for key in own if isinstance(layer, ComputedWeight) or key == "weight"}
        elif isinstance(layer, QuantExperts):
            found |= {f"{name}.{key}" for key in layer.names}
    return found


def rest_tensors(model: nn.Module, rest: Rest) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the parameters and buffers that are deployed in the precision of the rest."""
    quantized = masters(model)
    rows = unquantized_rows(model, lambda layer: isinstance(layer, QuantizedLayer))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        own = name in quantized or name.endswith(QUANTIZER_BUFFERS)  # a learned amax is a parameter
        if tensor.is_floating_point() and not own and not rest.is_wide_number(tensor):
            yield from ((name, part) for part in rows.get(name, [tensor]))


def torch_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class of torch that a layer is, is a subclass of or computes as, and that has a quantised class."""
    found = next((kind for kind in QUANTIZED if isinstance(layer, kind)), None)
    return nn.Linear if found is None and weight_axis(layer) is not None else found


def quantized_class(layer: nn.Module) -> type[QuantizedLayer]:
    """The class that `prepare` gives a layer without reasons against it."""
    exact, axis = EXACT.get(type(layer)), weight_axis(layer)
    if exact is None and axis is not None:  # also a subclass of torch's that multiplies by another operator
        return _linear_of(cast(Any, type(layer)), axis, layer._parameters.get("bias") is not None)
    return exact or _class_of(cast(Any, type(layer)), cast(Any, torch_class(layer)))


def plain_class(layer: QuantizedLayer) -> type[nn.Module]:
    """The class that a quantised layer was."""
    if isinstance(layer, ComputedWeight):
        return layer.plain
    return next(plain for plain, quantized in QUANTIZED.items() if quantized is type(layer))


@lru_cache(maxsize=512)  # parametrizations give each layer a class
def _class_of(plain: type[nn.Module], kind: type[nn.Module]) -> type[QuantizedLayer]:
    bases = (ComputedWeight, QUANTIZED[kind], plain)
    return cast("type[QuantizedLayer]", type(f"Quant{plain.__name__}", bases, {"plain": plain}))


@lru_cache(maxsize=512)
def _linear_of(plain: type[nn.Module], input_axis: int, has_bias: bool) -> type[QuantizedLayer]:
    own = {"plain": plain, "input_axis": input_axis} | ({} if has_bias else {"bias": None})
    return cast("type[QuantizedLayer]", type(f"Quant{plain.__name__}", (OwnLinear, QUANTIZED[nn.Linear], plain), own))


@torch.no_grad()
def why_not_plain(layer: nn.Module) -> str | None:
    """Why the forward of a subclass is not one product with a weight of its own; None where it is.

    Args:
        layer: of a class for which `torch_class` has one.
    """
    if type(layer) in EXACT or isinstance(layer, QuantizedLayer) or weight_axis(layer) is not None:
        return None
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies its weight itself"
    trial = copied(layer).eval()
    weights = []
    for place in range(2):
        try:
            reason, weight = _tried(trial, place)
            if reason is not None:
                return reason
            weights.append(weight)
            same = torch.equal(weights[0], weight)
        except Exception as error:  # anyone's code
            return f"its own forward fails when it is tried alone ({type(error).__name__})"
    return None if same else "its own forward computes its weight from its input"


def _tried(layer: nn.Module, place: int) -> tuple[str | None, torch.Tensor]:
    """Run a forward on small inputs: what is wrong with it, and the weight that it multiplies with."""
    kind = cast(Any, torch_class(layer))
    x = _small_input(layer, place)
    x += torch.arange(x.numel(), device=x.device).view(x.shape) % 7 - place
    seen: Seen = []
    with _Calls(kind, seen):
        y = layer.forward(x)
    if len(seen) != 1:
        return f"its own forward computes {len(seen) or 'no'} products of that kind, not one", x
    given, result = seen[0]
    if y is not result or given["input"] is not x:
        return "its own forward changes its input or its result", x
    settings = [name for name in DEFAULTS if name in OPERATORS[kind][1]]
    different = [name for name in settings if _each(given.get(name, DEFAULTS[name])) != _each(getattr(layer, name))]
    if different or given.get("bias") is not layer.bias:
        return f"its own forward has another {(different or ['bias'])[0]} than its attribute", x
    return None, given["weight"]


class _Calls(TorchFunctionMode):
    """The calls of the operator of one class: arguments by name, and the result; none is run where `skipped`."""

    def __init__(self, kind: type[nn.Module], seen: Seen, skipped: bool = False) -> None:
        super().__init__()
        self.operator, self.names = OPERATORS[kind]
        self.seen, self.skipped = seen, skipped

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, and remember."""
        if func is not self.operator:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(self.names, args, strict=False)), **(kwargs or {})}
        result = given["input"] if self.skipped else func(*args, **(kwargs or {}))
        self.seen.append((given, result))
        return result


def _weight_of(layer: nn.Module, plain: type[Any]) -> torch.Tensor:
    """What the class's forward gives its operator."""
    seen: Seen = []
    with _Calls(cast(Any, torch_class(layer)), seen, skipped=True):
        plain.forward(layer, _small_input(layer))
    return cast(torch.Tensor, seen[0][0]["weight"])


def _own_weight(layer: nn.Module, plain: type[nn.Module]) -> torch.Tensor:
    """The attribute `weight` of the plain class: a parameter, or a property where it is parametrized."""
    computed: Any = getattr(plain, "weight", None)
    own: Any = computed.__get__(layer) if isinstance(computed, property) else layer._parameters["weight"]
    return cast(torch.Tensor, own)


def _small_input(layer: nn.Module, place: int = 0) -> torch.Tensor:
    """Zeros: of the least size that the layer takes, or of one that padding like TensorFlow's would enlarge."""
    like: Any = next(layer.parameters())
    if isinstance(layer, nn.Linear):
        return torch.zeros(2, layer.in_features, dtype=like.dtype, device=like.device)
    assert isinstance(layer, nn.modules.conv._ConvNd)
    taps = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    least = [(dilation * (kernel - 1) + 1, stride) for kernel, stride, dilation in taps]
    sides = [size + place * ((1 - size) % stride) for size, stride in least]
    return torch.zeros(2, layer.in_channels, *sides, dtype=like.dtype, device=like.device)


def _each(value: object) -> object:
    """One number for all axes where they are the same."""
    if isinstance(value, (tuple, list)):
        return value[0] if len(set(value)) == 1 else tuple(value)
    return value
