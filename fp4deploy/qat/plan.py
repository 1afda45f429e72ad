"""Decide layer by layer what runs in FP4, FP8 or INT8, and say why.

Kept in high precision by default: the layers that read the image (of which FP4 leaves 3 bits where
`models.input_encoding` has not encoded it as 13 channels; of token ids an embedding reads, and the layers after it are
not the first), those that give the outputs (their error goes straight into
the logits, with no normalisation after it), both found by what the forward calls (`qat.ends`), layers of at most four
input channels (as one that reads a second image), and everything that is not a GEMM (normalisation, pooling, activation
functions). A subclass with a forward of its own is quantised where that is still one product (`computed`).
A layer that no quantised class implements (another subclass, an embedding) says so.

Of the layers that are quantised, those that are named for one of `precisions.LAYER_FORMATS` have that format; by
default the recipe decides (`Recipe.fp8`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp4deploy.errors import InputError, suggest
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.graph.own_linear import weight_axis
from fp4deploy.precisions import LAYER_FORMATS
from fp4deploy.qat.attention import OpenAttention, opened
from fp4deploy.qat.computed import torch_class, why_not_plain
from fp4deploy.qat.ends import Ends, Inputs, ends_of
from fp4deploy.qat.experts import PRECISION as EXPERTS
from fp4deploy.qat.experts import QuantExperts, described, expert_weights, why_not_experts
from fp4deploy.qat.layers import QUANTIZED, TRANSPOSED, QuantizedLayer
from fp4deploy.qat.placement import is_single_gemm
from fp4deploy.qat.recipes import Recipe, find_recipe
from fp4deploy.qat.selection import Predicate, Selection, predicate_of, require_possible

_OF_AXIS_1 = (nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NORMS = (nn.LayerNorm, *_OF_AXIS_1)


def channel_axis(layer: nn.Module, x: torch.Tensor) -> int:
    """The axis of the channels in what a layer reads and returns: 1 of convolutions and their norms, else -1.

    A LayerNorm of maps, whose own code moves their channels, has them where the map has: x tells.
    """
    if isinstance(layer, (nn.modules.conv._ConvNd, *_OF_AXIS_1)):
        return 1
    moves = isinstance(layer, nn.LayerNorm) and type(layer).forward is not nn.LayerNorm.forward
    return 1 if moves and x.ndim > 3 and x.shape[1] == cast(nn.LayerNorm, layer).normalized_shape[-1] else -1


@dataclass(frozen=True)
class LayerPlan:
    """What one layer computes in, and why.

    `precision` is "FP4", "FP8", "INT8", "W4A8", "FP16", or of experts (`qat.experts`) "FP4 weights"; `kind` the torch
    class.
    """

    name: str
    kind: str
    precision: str
    reason: str


def layer_plan(
    model: nn.Module,
    recipe: str | Recipe | None = "nvfp4_qat",
    include: Selection = None,
    exclude: Selection = None,
    *,
    example_inputs: Inputs | None = None,
    **formats: Selection,
) -> list[LayerPlan]:
    """Plan every layer with weights, in the model's order. A prepared model is described as it is.

    What `prepare` would do to it is planned when `include`, `exclude` or a format is given.

    Args:
        recipe: None plans a model that stays in FP16.
        include: name, glob or keyword, several, or predicate(name, module) (`qat.selection`); given, exactly these
            layers are quantised.
        exclude: likewise; these stay in high precision.
        formats: `fp8`, `int8` or `w4a8` (`precisions.LAYER_FORMATS`), likewise; of the quantised layers these have that
            format. None leaves the choice to the recipe.
        example_inputs: what the forward takes, for a network whose first and output layers are found neither by
            tracing nor with an assumed input (`qat.ends`).

    Raises:
        InputError: unknown recipe, a pattern that matches no layer, or one that includes only what cannot be quantised.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Conv2d(32, 4, 1))
    >>> for layer in layer_plan(model):
    ...     print(layer.name, layer.precision, layer.reason)
    0 FP16 first layer: reads the image (3 input channels, a block has 16)
    1 FP4 blocks of 16 along 16 input channels
    2 FP16 output layer: its error goes straight into the logits
    """
    with opened(model, is_quantized):
        return planned(model, recipe, include, exclude, formats, example_inputs)


def planned(
    model: nn.Module,
    recipe: str | Recipe | None,
    include: Selection,
    exclude: Selection,
    selections: Mapping[str, Selection],
    example_inputs: Inputs | None,
) -> list[LayerPlan]:
    """`layer_plan`, attention open (`qat.attention`); selections: by the formats of `precisions.LAYER_FORMATS`."""
    layers = _layers_with_weights(model)
    lazy = next((name for name, layer in layers if any(map(is_lazy, layer.parameters(recurse=False)))), None)
    if lazy is not None:
        raise InputError(
            f"{lazy or type(model).__name__} is a lazy layer, without weights until it has seen an input. Run one "
            "batch through the model first."
        )
    if recipe is None:
        return [LayerPlan(name, _kind(layer), "FP16", "FP16 model") for name, layer in layers]
    chosen = find_recipe(recipe)
    included, excluded = (predicate_of(each, dict(layers)) for each in (include, exclude))
    formats = formats_of(selections, dict(layers))
    # Once: it tries a subclass's forward.
    impossible = {name: _reason_impossible(layer, chosen) for name, layer in layers}
    ends = ends_of(model, is_gemm, example_inputs) if include is None else Ends((), ())  # it traces a copy
    of_groups = {
        name: crossed_groups(layer, recipe_of(chosen, name, layer, formats))
        for name, layer in layers
        if not impossible[name] and not expert_weights(layer)
    }
    require_possible(include, impossible | of_groups)
    as_it_is = include is None and exclude is None and not formats
    prepared = as_it_is and any(isinstance(layer, QuantizedLayer | QuantExperts) for _, layer in layers)
    plans = []
    for name, layer in layers:
        kept = impossible[name] or _reason_to_keep(name, layer, ends, included, excluded)
        kept = kept or of_groups.get(name)
        if prepared and isinstance(layer, QuantizedLayer | QuantExperts):
            kept = None
        elif prepared and kept is None:
            kept = "excluded when the model was prepared"
        if expert_weights(layer):
            quantised = layer.recipe if prepared and isinstance(layer, QuantExperts) else chosen
            reason = kept or described(layer, quantised)
            plans.append(LayerPlan(name, _kind(layer), "FP16" if kept else EXPERTS, reason))
            continue
        own = (
            layer.recipe if prepared and isinstance(layer, QuantizedLayer) else recipe_of(chosen, name, layer, formats)
        )
        precision = "FP16" if kept else own.precision
        plans.append(LayerPlan(name, _kind(layer), precision, kept or _quantized_reason(layer, own)))
    return plans


def eight_bits(recipe: Recipe) -> str:
    """ "FP8" or "INT8" of a recipe whose layers multiply in eight bits; "" of the others."""
    spec = recipe.weight or recipe.activation
    return spec.named if spec is not None and spec.in_eight_bits else ""


Formats = Mapping[str, Predicate]  # format of `precisions.LAYER_FORMATS` -> which layers have it


OPTIONS = ("include", "exclude", "example_inputs")


def formats_of(selections: Mapping[str, Selection], names: Mapping[str, object]) -> Formats:
    """The selections that are given, as predicates.

    Raises:
        InputError: one is of no format, or a pattern matches no layer.
    """
    for name in selections:
        if name not in LAYER_FORMATS:
            near, valid = suggest(name, (*LAYER_FORMATS, *OPTIONS)), ", ".join(LAYER_FORMATS)
            raise InputError(
                f"'{name}' is neither an option nor a format that layers may have in place of NVFP4.{near} "
                f"Formats: {valid}."
            )
    chosen = {name: predicate_of(selections.get(name), names) for name in LAYER_FORMATS}
    return {name: predicate for name, predicate in chosen.items() if predicate is not None}


def recipe_of(recipe: Recipe, name: str, layer: nn.Module, formats: Formats = MappingProxyType({})) -> Recipe:
    """What one quantised layer gets of a recipe: the recipe, or its form in another format.

    formats: which layers are in which; without any, the recipe decides.

    Raises:
        InputError: it is to be in a format that the recipe has no form of, or in two at once.
    """
    own = [each for each, chosen in formats.items() if chosen(name, layer)]
    if len(own) > 1:
        raise InputError(f"{name} is among the layers of both {own[0]} and {own[1]}. Leave it out of one.")
    if not formats and recipe.fp8 == "convolutions" and not is_single_gemm(layer):
        own = ["fp8"]
    return recipe.in_format(own[0]) if own and own[0].upper() != recipe.precision else recipe


def _layers_with_weights(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if torch_class(layer) is not None
        or (any(True for _ in layer.parameters(recurse=False)) and not isinstance(layer, OpenAttention))
    ]


def is_quantized(layer: nn.Module) -> bool:
    """A layer, or experts, of a prepared model."""
    return isinstance(layer, QuantizedLayer | QuantExperts)


def is_gemm(layer: nn.Module) -> bool:
    return torch_class(layer) is not None and _hooked(layer) is None and why_not_plain(layer) is None


def _kind(layer: nn.Module) -> str:
    return type(layer).__name__.removeprefix("Quant")


def _reason_to_keep(
    name: str, layer: nn.Module, ends: Ends, include: Predicate | None, exclude: Predicate | None
) -> str | None:
    if exclude is not None and exclude(name, layer):
        return "excluded by name"
    if include is not None:
        return None if include(name, layer) else "not in the layers to include"
    if expert_weights(layer):
        return None
    channels, groups = _input_channels(layer)
    if channels == 1 and groups > 1:
        return f"depthwise: {groups} groups of one input channel, nothing for a block of {NVFP4_BLOCK} to share"
    if groups > 1 and channels % NVFP4_BLOCK:  # in eight bits, too
        return _crossed_inputs(channels, groups)
    if not name:  # the model is this one layer, and whoever prepares it means it
        return None
    if name in ends.lent:
        return "its weight is read outside of its own call, where it would not be quantised"
    if name in ends.first:
        return f"first layer: reads the image ({channels} input channels, a block has {NVFP4_BLOCK})"
    if channels <= NVFP4_BLOCK // 4:
        return f"{channels} input channels: three quarters of a block of {NVFP4_BLOCK}, or more, would be padding"
    if name in ends.outputs:
        return "output layer: its error goes straight into the logits"
    return None


def _crossed_inputs(channels: int, groups: int, block: int = NVFP4_BLOCK) -> str:
    return f"{groups} groups of {channels} input channels: a block of {block} would cross groups"


def crossed_groups(layer: nn.Module, recipe: Recipe) -> str | None:
    """Why a file does not hold what a layer with groups is trained as; None where it does, or the recipe has no file.

    Training quantises each group alone. An operator that decodes a file has one axis of all channels.
    """
    channels, groups = _input_channels(layer)
    has_file = recipe.precision.lower() in LAYER_FORMATS or (
        recipe.activation is not None and recipe.activation.scale == "static"
    )
    if groups == 1 or eight_bits(recipe) or not has_file:
        return None
    if channels % _block(recipe):
        return _crossed_inputs(channels, groups, _block(recipe))
    outputs = int(layer.out_channels) // groups  # type: ignore[arg-type]
    blocks_2d = recipe.weight is not None and recipe.weight.block == "2d"
    if blocks_2d and not isinstance(layer, TRANSPOSED) and outputs % NVFP4_BLOCK:
        return f"{groups} groups of {outputs} output channels: a block of 16 x 16 would cross groups"
    return None


def _reason_impossible(layer: nn.Module, recipe: Recipe) -> str | None:
    """Why a recipe cannot quantise this layer; None where it can."""
    if expert_weights(layer):
        return why_not_experts(layer, recipe)
    parent = torch_class(layer)
    if parent is not None and (hooked := _hooked(layer)):
        return hooked
    if parent is not None:
        reason = why_not_plain(layer)
        return reason and f"a subclass of {parent.__name__}: {reason}"
    if isinstance(layer, NORMS) or "norm" in type(layer).__name__.lower():
        return "normalisation: sums over many values and few parameters, kept in high precision"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return "embedding: rows are looked up, and nothing is multiplied"
    if isinstance(layer, nn.MultiheadAttention):
        return (
            "a subclass of nn.MultiheadAttention multiplies its weights itself; write its projections as Linear layers"
        )
    return f"{type(layer).__name__} is none of {', '.join(kind.__name__ for kind in QUANTIZED)}"


def _hooked(layer: nn.Module) -> str | None:
    """A weight or bias that is no parameter but an attribute, which a hook sets before each forward; a new forward."""
    if "forward" in vars(layer):
        return "its forward was replaced by another one, which the quantised layer would not call"
    set_by_hook = [name for name in ("weight", "bias") if isinstance(vars(layer).get(name), torch.Tensor)]
    if not set_by_hook:
        return None
    return (
        f"a hook computes its {' and '.join(set_by_hook)} (weight_norm, spectral_norm or prune of torch.nn.utils); use "
        "torch.nn.utils.parametrizations, or make it permanent with remove_weight_norm or prune.remove"
    )


def _block(recipe: Recipe) -> int:
    """Elements in a block of the forward GEMM."""
    spec = recipe.weight or recipe.activation
    return spec.block_size if spec is not None else NVFP4_BLOCK


def _quantized_reason(layer: nn.Module, recipe: Recipe) -> str:
    if own := eight_bits(recipe):
        return f"{own}: one scale for the input, one for each output channel of the weight"
    block = _block(recipe)
    channels, groups = _input_channels(layer)
    padding = -channels % block
    tail = f", the last block padded with {padding} zeros" if padding else ""
    each = f", {groups} groups" if groups > 1 else ""
    return f"blocks of {block} along {channels} input channels{each}{tail}"


def _input_channels(layer: nn.Module) -> tuple[int, int]:
    """(input channels of one group, groups)."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, 1
    if (axis := weight_axis(layer)) is not None:
        return cast(torch.Tensor, layer.weight).shape[axis], 1
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    return layer.in_channels // layer.groups, layer.groups
