"""Experts of a mixture: weights [E, N, K] of one module, quantised along the axis that each expert contracts.

    class MixtralExperts(nn.Module):          num_experts = E; gate_up_proj [E, 2 I, H], down_proj [E, H, I]

A module holds experts where one of its attributes named for them (num_experts, num_local_experts, ...) is the first
size of a three-axis parameter. Each expert is a matrix of its own, with its own global amax, quantised as the weight of
a linear layer: along the last axis, or the one before where the module says `is_transposed` (x W, as in GPT-OSS).

The class is changed in place. Inside its forward the parameters read as quantised, once for each call, with
straight-through gradients; anywhere else they are the parameters, under their names. What goes in is not quantised: the
forward is the library's, and gathers tokens before it multiplies. But with a recipe that quantises gradients, in a
training step, torch's grouped GEMM of sorted tokens, and a product with the weight of one expert, have all six operands
packed (`fp4_gemms.grouped`); other products, such as a batched one of gathered weights, do not. Files hold codes and
scales of the weights, which are decoded when a file is opened (`export.onnx.layer_constants.expert_constants`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fp4deploy.errors import InputError
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.qat.fp4_gemms.autograd import packed_gemms
from fp4deploy.qat.fp4_gemms.grouped import grouped_linear
from fp4deploy.qat.fp4_gemms.requirements import require_packed
from fp4deploy.qat.operators.gemms import LinearGemms
from fp4deploy.qat.operators.ste import fake_quantize
from fp4deploy.qat.recipes import Recipe

PRECISION = "FP4 weights"


class QuantExperts(nn.Module):
    """What the quantised classes of experts add: the recipe, and weights that read as quantised within a forward."""

    recipe: Recipe
    plain: type[nn.Module]
    names: tuple[str, ...]  # of the weights [E, N, K]
    quantizing: bool
    held: Mapping[str, torch.Tensor]  # while they are read

    def forward(self, *inputs: object, **named: object) -> Any:
        """The library's forward, on quantised weights."""
        if not self.quantizing or "held" in vars(self):
            return self.plain.forward(self, *inputs, **named)
        self.hold()
        packs = self.training and trains_packed(self.recipe)
        own = {name: cast(torch.Tensor, self._parameters[name]) for name in self.names}
        try:
            with _PackedProducts([(self.held[name], x) for name, x in own.items()], self.recipe) if packs else NOTHING:
                return self.plain.forward(self, *inputs, **named)
        finally:
            del self.held

    def hold(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Let the parameters read as `weights`, or else as quantised now, until `held` is deleted."""
        self.held = weights or {name: self.quantized_weight(name) for name in self.names}

    def quantized_weight(self, name: str) -> torch.Tensor:
        """A parameter [E, N, K], or [E, K, N] of transposed ones, each expert fake-quantised alone."""
        weight = cast(torch.Tensor, self._parameters[name])
        axes = (1, 0) if contracted(self) == 1 else (0, 1)
        return torch.stack([fake_quantize(each, self.recipe.weight, axes, None, (1, 1)) for each in weight.unbind()])

    def extra_repr(self) -> str:
        """The names of the weights, and how they are quantised."""
        spec = self.recipe.weight
        said = "-" if spec is None else f"{spec.named} {spec}{spec.along('C')}"
        trained = f"; in training {self.recipe.quantizers()}" if trains_packed(self.recipe) else ""
        return f"{', '.join(self.names)}; {self.recipe.name}: W^T {said} of each expert, X -{trained}"


NOTHING = nullcontext()


class _PackedProducts(TorchFunctionMode):
    """Within the forward of experts: products with their quantised weights are those of packed operands.

    weights: (as it reads, the parameter), of which calls are given views.
    """

    def __init__(self, weights: Sequence[tuple[torch.Tensor, torch.Tensor]], recipe: Recipe) -> None:
        super().__init__()
        self.weights, self.recipe = weights, recipe

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, or multiply packed operands."""
        kwargs = kwargs or {}
        kind = PRODUCTS.get(getattr(func, "__name__", ""), "")
        weight = self._parameter(args[1]) if kind and len(args) > 1 and isinstance(args[1], torch.Tensor) else None
        if weight is None or weight.ndim < 2 or not isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        x, rows = args[0], weight if func is F.linear else weight.mT  # [..., N, K]
        if kind == "single" and rows.ndim == 2:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return packed_gemms(x, rows, bias, LinearGemms(), self.recipe)
        given = [name for name, each in kwargs.items() if each is not None]
        if kind == "grouped" and len(args) == 2 and given == ["offs"] and (x.ndim, rows.ndim) == (2, 3):
            return grouped_linear(x, rows, kwargs["offs"], recipe=self.recipe)
        return func(*args, **kwargs)

    def _parameter(self, read: torch.Tensor) -> torch.Tensor | None:
        """The part of a parameter that a view of its quantised values stands for; None of any other tensor."""
        for held, weight in self.weights:
            if read is held or read._base is held:  # which is contiguous
                whole = weight.contiguous()
                offset = whole.storage_offset() + read.storage_offset() - held.storage_offset()
                return whole.as_strided(read.shape, read.stride(), offset)
        return None


PRODUCTS = dict.fromkeys(("grouped_mm", "_grouped_mm"), "grouped")
PRODUCTS |= dict.fromkeys(("linear", "matmul", "__matmul__"), "single")


def trains_packed(recipe: Recipe) -> bool:
    """Whether a training step multiplies experts packed, gradients too."""
    try:
        require_packed(recipe)
    except InputError:
        return False
    return recipe.outlier_control is None


def expert_weights(layer: nn.Module) -> tuple[str, ...]:
    """Names of the weights [E, N, K] of a module that holds experts; () for any other.

    >>> layer = nn.Module()
    >>> layer.num_experts, layer.up = 4, nn.Parameter(torch.zeros(4, 32, 16))
    >>> expert_weights(layer)
    ('up',)
    """
    numbers = {value for name, value in vars(layer).items() if "expert" in name and type(value) is int and value > 1}
    return tuple(
        name
        for name, each in layer._parameters.items()
        if each is not None and each.ndim == 3 and each.is_floating_point() and each.shape[0] in numbers
    )


def contracted(layer: nn.Module) -> int:
    """The axis of the weights that an expert contracts."""
    return 1 if getattr(layer, "is_transposed", False) else 2


def why_not_experts(layer: nn.Module, recipe: Recipe) -> str | None:
    """Why a recipe quantises no weight of a module that holds experts; None where it does."""
    spec = recipe.weight
    if spec is None or not spec.in_four_bits or spec.rounding != "nearest":
        return f"experts, whose weights {recipe.name} does not round to FP4"
    return None


def described(layer: nn.Module, recipe: Recipe) -> str:
    """The reason of a plan."""
    names = expert_weights(layer)
    shapes = {cast(torch.Tensor, layer._parameters[name]).shape for name in names}
    channels = sorted({shape[contracted(layer)] for shape in shapes})
    widths = " and ".join(map(str, channels))
    rest = ", but in a training step" if trains_packed(recipe) else ""
    return (
        f"weights of {next(iter(shapes))[0]} experts ({', '.join(names)}) in blocks of {NVFP4_BLOCK} along {widths} "
        f"input channels; what they multiply stays in high precision{rest}"
    )


def attach(layer: nn.Module, recipe: Recipe) -> None:
    """Change the class of a module that holds experts, in place."""
    layer.__class__ = _class_of(cast(Any, type(layer)), expert_weights(layer))
    layer.recipe, layer.quantizing = recipe, True  # type: ignore[assignment]


def detach(layer: QuantExperts) -> None:
    """Change it back."""
    del layer.recipe, layer.quantizing
    layer.__class__ = layer.plain  # type: ignore[assignment]


@lru_cache(maxsize=512)
def _class_of(plain: Any, names: tuple[str, ...]) -> type[nn.Module]:
    own: dict[str, Any] = {"plain": plain, "names": names, "__module__": plain.__module__}
    return type(f"Quant{plain.__name__}", (QuantExperts, plain), own | {name: _reading(name) for name in names})


def _reading(name: str) -> property:
    def read(self: Any) -> torch.Tensor:
        held = vars(self).get("held")
        return cast(torch.Tensor, self._parameters[name] if held is None else held[name])

    return property(read)


def experts_of(model: nn.Module) -> dict[str, QuantExperts]:
    """The quantised experts of a prepared model by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantExperts)}


@contextmanager
def weights_held(model: nn.Module) -> Iterator[None]:
    """Inside, experts read weights that were quantised before, once."""
    holding = [each for each in experts_of(model).values() if each.quantizing and "held" not in vars(each)]
    for experts in holding:
        experts.hold()
    try:
        yield
    finally:
        for experts in holding:
            del experts.held
