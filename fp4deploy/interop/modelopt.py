"""Models quantised by NVIDIA ModelOpt into this project's layers, and back: weights, amaxes, which layers and how.

    read_modelopt("model.pt")          what `modelopt.torch.opt.save` wrote: plain containers and tensors, nothing runs
    quantizers_in(model)               the same of a model in memory
    from_modelopt(network, quantized)  prepares the network's layers, loads weights, amaxes; says what is not kept
    to_modelopt(model)                 a copy in ModelOpt's layers, with this model's weights and amaxes

Reading needs no ModelOpt. Of a layer are kept: the weight, the amax of its input, and the format, NVFP4 or FP8. What
hardware cannot use is not kept and is named, layer by layer. ModelOpt 0.47 cuts blocks of NVFP4 along a tensor's last
axis: of a linear layer the contraction axis, of a convolution the kernel's or the image's width, where no tensor core
applies a scale. Here they run along the input channels, so the codes of a convolution are others than ModelOpt's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.formats import tracked_amax
from fp4deploy.graph.copies import copied
from fp4deploy.models.initial import read_containers
from fp4deploy.qat.layers import QUANTIZED
from fp4deploy.qat.plan import eight_bits
from fp4deploy.qat.prepare import prepare, quantized_layers, restore
from fp4deploy.requirements import MODELOPT

RECIPE = "nvfp4_qat"
OPERANDS = ("input", "weight")
SMOOTHED = ".input_quantizer._pre_quant_scale"
KNOWN = ("_amax", "_pre_quant_scale")  # tensors of a quantiser, beside others that end in amax
MORE = {
    "_rotate": "it rotates its operands first",
    "_bias": "it adds an offset first",
    "_unsigned": "codes without a sign",
}
SAME = 1e-3  # relative difference of two amaxes that says nothing


@dataclass(frozen=True)
class Quantizer:
    """One of ModelOpt's quantisers. bits: (exponent, mantissa), or a number of integer bits. axis: of its scales, None
    for one scale. block: (axis, size) of its blocks. scale_bits: format of the block scales. amax: None where it has
    none. scaled: it multiplies its input first (SmoothQuant, AWQ). more: what else it does, as clauses.
    """

    bits: Any
    axis: Any = None
    block: tuple[int, int] | None = None
    scale_bits: Any = None
    amax: Tensor | None = None
    scaled: bool = False
    more: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """ "NVFP4", "FP8", or a description of another one."""
        if self.bits == (2, 1) and self.block and self.block[1] == 16 and self.scale_bits == (4, 3):
            return "NVFP4"
        if self.bits == (4, 3) and self.block is None:
            return "FP8"
        kind = f"E{self.bits[0]}M{self.bits[1]}" if isinstance(self.bits, tuple) else f"INT{self.bits}"
        return f"{kind} in blocks of {self.block[1]}" if self.block else kind


@dataclass(frozen=True)
class Quantized:
    """A model of ModelOpt: tensors by name, without its quantisers', and quantisers by layer and operand.

    left: names of other quantisers that are on, by module: of its output, of the operands of its attention.
    """

    tensors: dict[str, Tensor]
    quantizers: dict[str, dict[str, Quantizer]]
    version: str = ""
    left: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Transfer:
    """What became of one layer: precision "FP4", "FP8" or "FP16", and each thing that was not kept."""

    layer: str
    precision: str
    lost: list[str] = field(default_factory=list)


def read_modelopt(path: Path | str) -> Quantized:
    """Read a file of `modelopt.torch.opt.save`.

    Raises:
        InputError: it is missing, damaged, of something else, or loading it would run code.
    """
    found = read_containers(Path(path))
    try:
        history = dict(found["modelopt_state"]["modelopt_state_dict"])
        states = history["quantize"]["metadata"]["quantizer_state"]
        tensors = {str(name): value for name, value in found["model_state_dict"].items()}
        if not all(isinstance(value, Tensor) for value in tensors.values()):
            raise TypeError("a weight is no tensor")
        quantizers = {str(name): _quantizer(dict(state)) for name, state in states.items()}
        version = str(found["modelopt_state"].get("modelopt_version", ""))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} holds no quantised model of ModelOpt ({type(error).__name__}: {str(error)[:100]}). Write one with "
            "modelopt.torch.opt.save(model, path) after modelopt.torch.quantization.quantize."
        ) from error
    return _joined(tensors, quantizers, version)


def quantizers_in(model: nn.Module) -> Quantized:
    """Of a model in memory; its weights and amaxes are not copied.

    Raises:
        InputError: ModelOpt has quantised nothing of it.
    """
    found = {
        name: _quantizer(vars(module))
        for name, module in model.named_modules()
        if name.endswith("_quantizer") and hasattr(module, "_num_bits")
    }
    if not found:
        raise InputError("This model has no quantisers of ModelOpt. Quantise it first, or give one that was.")
    return _joined(dict(model.state_dict()), found, "")


def _quantizer(state: Mapping[str, Any]) -> Quantizer | None:
    """None where it is switched off."""
    if state.get("_disabled", False):
        return None
    sizes = dict(state["_block_sizes"]) if state.get("_block_sizes") else {}
    blocks = [(axis, size) for axis, size in sizes.items() if isinstance(axis, int) and isinstance(size, int)]
    bits = state["_num_bits"]
    bits = tuple(bits) if isinstance(bits, (list, tuple)) else int(bits)
    scale_bits = sizes.get("scale_bits")
    if len(blocks) > 1:
        scale_bits = None  # blocks over several axes are of no format here
    settings = {name: state.get(name) for name in MORE}
    on = [name for name, each in settings.items() if (each.get("enable", True) if isinstance(each, Mapping) else each)]
    block, scales = blocks[0] if blocks else None, tuple(scale_bits) if scale_bits else None
    return Quantizer(bits, state.get("_axis"), block, scales, more=tuple(MORE[name] for name in on))


def _joined(tensors: dict[str, Tensor], found: Mapping[str, Quantizer | None], version: str) -> Quantized:
    """Quantisers by layer, each with its amax; tensors without those of quantisers."""
    layers: dict[str, dict[str, Quantizer]] = {}
    left: dict[str, list[str]] = {}
    for name in tensors:
        of, _, own = name.rpartition(".")
        if "_quantizer" in of and own not in KNOWN and not own.endswith("amax"):
            raise InputError(
                f"{name} is not known here, and may be a part of the weight, as of SVDQuant and of compressed weights. "
                "Quantise the model without it, and save it before it is compressed."
            )
    for name, quantizer in found.items():
        layer, _, own = name.rpartition(".")
        operand = own.removesuffix("_quantizer")
        if quantizer is not None and operand in OPERANDS:
            amax = tensors.get(f"{name}._amax")
            scaled = f"{name}._pre_quant_scale" in tensors
            fields = vars(quantizer) | {"amax": None if amax is None else amax.detach().float(), "scaled": scaled}
            layers.setdefault(layer, {})[operand] = Quantizer(**fields)
        elif quantizer is not None:
            left.setdefault(layer, []).append(own)
    plain = {name: value for name, value in tensors.items() if "_quantizer." not in name}
    for (
        name,
        scale,
    ) in tensors.items():  # also of quantisers that are off: they multiply all the same
        layer = name.removesuffix(SMOOTHED)
        if layer != name and f"{layer}.weight" in plain:
            plain[f"{layer}.weight"] = _unsmoothed(layer, plain[f"{layer}.weight"], scale)
    _require_numbers(plain, layers)
    return Quantized(plain, layers, version, left)


def _require_numbers(plain: Mapping[str, Tensor], layers: Iterable[str]) -> None:
    stored = {layer: plain[f"{layer}.weight"].dtype for layer in layers if f"{layer}.weight" in plain}
    for layer, dtype in stored.items():
        if dtype.itemsize < 2 or not dtype.is_floating_point:
            raise InputError(
                f"{layer} holds the codes of its weight, {str(dtype).removeprefix('torch.')}, and not its numbers. "
                "Save the model before it is compressed."
            )


def _unsmoothed(layer: str, weight: Tensor, scale: Tensor) -> Tensor:
    """The weight of a layer (W / s) that multiplied s into its input: W, for a layer that does not."""
    if weight.ndim < 2 or scale.numel() not in (1, weight.shape[1]) or not scale.isfinite().all():
        raise InputError(
            f"{layer} multiplies its input by a scale {list(scale.shape)} that its weight {list(weight.shape)} has no "
            "channels for. Quantise the model without SmoothQuant or AWQ."
        )
    axes = (1, -1, *(1,) * (weight.ndim - 2))
    return (weight.double() * scale.detach().double().reshape(axes).to(weight.device)).to(weight.dtype)


def from_modelopt(network: nn.Module, quantized: Quantized) -> list[Transfer]:
    """Prepare a network like the one that ModelOpt quantised, and load weights and amaxes, in place.

    Returns:
        One entry for each layer that ModelOpt quantised, in the network's order.

    Raises:
        InputError: the weights are of another network, or no layer can be taken over.
    """
    restore(network)
    try:
        network.load_state_dict(quantized.tensors)
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise InputError(f"The weights are of another network: {' '.join(lines[1:3]).strip()[:300]}") from error
    found = [_transfer(name, layer, quantized.quantizers[name]) for name, layer in network.named_modules()
             if name in quantized.quantizers]  # fmt: skip
    left = dict(quantized.left)
    for each in found:
        each.lost += [f"{name}: left out" for name in left.pop(each.layer, ())]
    found += [Transfer(layer, "FP16", [f"{name}: left out" for name in own]) for layer, own in left.items()]
    names = [each.layer for each in found if each.precision != "FP16"]
    if not names:
        reasons = "; ".join(f"{each.layer}: {each.lost[0]}" for each in found[:3])
        raise InputError(f"None of the quantised layers can be taken over. {reasons}".strip())
    prepare(network, RECIPE, include=names, fp8=[each.layer for each in found if each.precision == "FP8"])
    for name, layer in quantized_layers(network).items():
        amax = quantized.quantizers[name]["input"].amax
        assert amax is not None
        assert layer.input_amax is not None
        layer.input_amax.data.copy_(tracked_amax(amax.max(), amax.max(), 1.0))
    return found


def _transfer(name: str, layer: nn.Module, quantizers: Mapping[str, Quantizer]) -> Transfer:
    weight, x = quantizers.get("weight"), quantizers.get("input")
    refused = _refusal(layer, weight, x)
    if refused or weight is None or x is None:
        return Transfer(name, "FP16", [refused])
    result = Transfer(name, "FP8" if x.format == "FP8" else "FP4")
    values: Any = layer.weight
    if result.precision == "FP4" and not isinstance(layer, nn.Linear):
        result.lost.append(
            f"blocks along axis {weight.block[0] if weight.block else -1} of the weight and "
            f"{x.block[0] if x.block else -1} of the input, the width: cut along the input channels instead"
        )
    if result.precision == "FP8" and weight.amax is not None and weight.amax.numel() == 1:
        result.lost.append("one scale for the weight: one for each output channel instead")
    own = float(values.detach().abs().max())
    if weight.amax is not None and result.precision == "FP4":
        if weight.amax.numel() > 1:
            result.lost.append("amaxes of the weight's blocks: made from the weight instead")
        elif abs(float(weight.amax) - own) > SAME * max(own, 1e-30):
            result.lost.append(f"the weight's amax {float(weight.amax):.4g}: {own:.4g}, that of the weight, instead")
    return result


def _refusal(layer: nn.Module, weight: Quantizer | None, x: Quantizer | None) -> str:
    """Why a layer stays in FP16; empty where it can be taken over."""
    if type(layer) not in QUANTIZED:
        return f"{type(layer).__name__} has no quantised class here"
    if weight is None or x is None:
        return "one operand alone is quantised, and a GEMM in FP4 or FP8 needs both"
    if weight.format != x.format:
        return f"operands in {weight.format} and {x.format}"
    if x.format not in ("NVFP4", "FP8"):
        return f"its format, {x.format}"
    if weight.more or x.more:
        return (*weight.more, *x.more)[0]
    if weight.scaled or x.scaled:
        return "the scale that multiplies its input first"
    if x.amax is None:
        return "its input has no amax: calibrate it"
    if x.amax.numel() != 1:
        return "its input has several amaxes"
    if not 0 < float(x.amax) < math.inf:
        return "the amax of its input is not positive and finite"
    return ""


def to_modelopt(model: nn.Module) -> tuple[nn.Module, list[Transfer]]:
    """A copy of a prepared model in ModelOpt's layers: its weights, and its amaxes in their quantisers.

    Returns:
        The model, and for each quantised layer what ModelOpt cannot keep.

    Raises:
        UnavailableError: ModelOpt is not installed.
        InputError: the model is not prepared, or not calibrated.
    """
    MODELOPT.require("to_modelopt")
    import modelopt.torch.quantization as mtq

    layers = quantized_layers(model)
    if mixed := [name for name, layer in layers.items() if layer.recipe.precision == "W4A8"]:
        raise InputError(f"{mixed[0]} is W4A8: to_modelopt keeps NVFP4, FP8 and INT8.")
    idle = [name for name, layer in layers.items() if layer.input_amax is None or not layer.input_amax > 0]
    if not layers or idle:
        raise InputError(f"to_modelopt takes a prepared and calibrated model; {idle[0] if idle else 'it'} is not.")
    plain = restore(copied(model))
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name, layer in layers.items():
        for operand in OPERANDS:
            cfg: dict[str, Any] = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
            if eight_bits(layer.recipe):
                axis = layer.gemms().weight_axes[0] if operand == "weight" else None
                cfg = {"num_bits": (4, 3) if eight_bits(layer.recipe) == "FP8" else 8, "axis": axis}
            entries.append({"quantizer_name": f"{name}.{operand}_quantizer", "cfg": cfg})
    converted = mtq.quantize(plain, {"quant_cfg": entries, "algorithm": None})
    return converted, [_filled(converted.get_submodule(name), name, layer) for name, layer in layers.items()]


def _filled(other: Any, name: str, layer: Any) -> Transfer:
    """Set the amaxes of one of ModelOpt's layers."""
    eight = eight_bits(layer.recipe)
    weight = layer.weight.detach().abs()
    axis = layer.gemms().weight_axes[0]
    others = [at for at in range(weight.ndim) if at != axis]
    other.input_quantizer.amax = layer.input_amax.detach().clone()
    other.weight_quantizer.amax = weight.amax(others, keepdim=True) if eight else weight.max()
    found = Transfer(name, eight or "FP4")
    if not eight and not isinstance(layer, nn.Linear):
        found.lost.append("blocks along the input channels: ModelOpt cuts along the width")
    if not eight and (layer.recipe.weight.four_over_six or layer.recipe.weight.block == "2d"):
        found.lost.append("4/6 or 2-D blocks of the weight: ModelOpt's dynamic blocks have neither")
    return found
