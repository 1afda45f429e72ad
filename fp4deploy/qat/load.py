"""Load a checkpoint as the model that ships.

Training keeps FP32 master weights; engines hold FP16, or what the model card says (`fp4deploy.rest`), for whatever is
not FP4. Evaluating the masters would compare every runtime with weights that none of them has, so `load_model` rounds
those parameters to the values of that precision (and keeps computing in FP32). The quantised weights are left alone:
their codes are made from the masters. An ONNX file holds the global scale amax / 2688 rather than the amax, so a static
amax becomes what is read back from it. The running statistics of a BatchNorm are of that precision in an engine too.
`deployed` does the same to a copy of any model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.formats import deployed_amax
from fp4deploy.graph.copies import copied
from fp4deploy.models import ModelCard, load_weights, read_card
from fp4deploy.models.checkpoint import network_of
from fp4deploy.qat.computed import rest_tensors, torch_class
from fp4deploy.qat.plan import layer_plan
from fp4deploy.qat.prepare import prepare, quantized_layers, unquantized
from fp4deploy.rest import FP16, Rest, rest_of

AMAX = ".input_amax"


def load_model(
    path: Path | str, device: str | torch.device = "cpu", model: str | None = None, rest: str | Rest | None = None
) -> tuple[nn.Module, ModelCard]:
    """Build the network that the checkpoint's card describes, with its weights as deployed, in evaluation mode.

    Args:
        model: the model spec, such as "net.py:build". A checkpoint of a network in your own code is loaded only where
            you name that code again.
        rest: another precision of the rest than the card's, which the card that is returned has.

    Raises:
        InputError: not a checkpoint, another model's weights, an uncalibrated activation, a value that the precision of
            the rest cannot hold.
        UnavailableError: the library of the network is not installed.

    >>> model, card = load_model(checkpoint)
    >>> card.precision, card.recipe, model.training
    ('nvfp4', 'nvfp4_qat', False)
    """
    path = Path(path)
    card = read_card(path)
    card = replace(card, rest=rest_of(rest or card).name)
    network = network_of(path, card, model)
    if card.precision == "nvfp4":
        prepare_as(network, card)
        _prepare_as_written(network, card, path)
    load_weights(network, path)
    idle = _uncalibrated(network, card)
    if idle:
        raise InputError(
            f"{path}: the activations of {len(idle)} layers were never calibrated (first {idle[0]}). "
            "Train it with: fp4deploy train --models nvfp4"
        )
    round_to_deployed(network, rest_of(card))
    return network.to(device).eval(), card


def _uncalibrated(network: nn.Module, card: ModelCard) -> list[str]:
    """The layers that have seen no data; those that the network never calls need none.

    Such layers, an auxiliary head or a deep stage of an encoder that the decoder leaves out, stay in the checkpoint.
    """
    layers = quantized_layers(network)
    idle = {name for name, layer in layers.items() if layer.input_amax is not None and not layer.input_amax > 0}
    called: dict[str, None] = {}
    if idle:
        plain = unquantized(copied(network)).eval()
        for name in idle:
            plain.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.update({name: None}))
        with torch.inference_mode():
            plain(torch.zeros(1, *card.input_shape))
    return list(called)


def prepare_as(model: nn.Module, card: ModelCard) -> nn.Module:
    """`prepare` a model, in place, by the recipe and the choice of layers that its card names."""
    image = torch.empty(2, *card.input_shape, device="meta")
    recipe = card.recipe or "nvfp4_qat"
    return prepare(model, recipe, card.include, card.exclude, example_inputs=image, **card.formats)


def _prepare_as_written(model: nn.Module, card: ModelCard, path: Path) -> None:
    """Quantise the layers that the file has scales of, where it was written by another rule of first and last layers.

    Before 0.2 these were the first and the last layer in the order of registration.
    """
    with safe_open(path, framework="pt") as file:
        written = {name.removesuffix(AMAX) for name in file.keys() if name.endswith(AMAX)}  # noqa: SIM118
    planned = {name for name, layer in quantized_layers(model).items() if layer.is_static}
    if card.include is not None or not written or written == planned:
        return
    registered = [name for name, layer in model.named_modules() if torch_class(layer) is not None]
    ends = {plan.name for plan in layer_plan(model, card.recipe) if plan.reason.startswith(("first", "output"))}
    if written - planned - ends or planned - written - {registered[0], registered[-1]}:
        return
    recipe = card.recipe or "nvfp4_qat"
    prepare(model, recipe, lambda name, _: name in written, example_inputs=None, **card.formats)


def deployed(model: nn.Module, rest: Rest = FP16) -> nn.Module:
    """A copy of `model` on the CPU, in evaluation mode, with its weights as deployed (see `round_to_deployed`).

    Raises:
        InputError: a parameter is beyond the range of the rest, naming it.
    """
    rounded = copied(model).cpu().float().eval()
    round_to_deployed(rounded, rest)
    return rounded


@torch.no_grad()
def round_to_deployed(model: nn.Module, rest: Rest = FP16) -> None:
    """Round, in place, what an engine keeps in `rest` to its values, and every static amax to what its scale gives
    back.

    Layers that share a parameter and hold it in other forms get one each.

    Raises:
        InputError: a parameter is beyond the range of the rest, naming it.
    """
    _untie(model)
    for name, tensor in rest_tensors(model, rest):
        masked = not isinstance(tensor, nn.Parameter)  # a buffer may hold -Inf
        rest.require(name, tensor[tensor.isfinite()] if masked else tensor)
        once = tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]  # of what is expanded
        once.copy_(once.to(rest.dtype))
    for layer in quantized_layers(model).values():
        if layer.input_amax is not None:
            layer.input_amax.requires_grad_(False)
            if layer.recipe.activation is not None and not layer.recipe.activation.in_eight_bits:
                layer.input_amax.copy_(deployed_amax(layer.input_amax))


def _untie(model: nn.Module) -> None:
    """Give layers that share a parameter, but not what a file holds of it, parameters of their own, in place.

    A quantised layer has codes and scales, an unquantised one the weight in FP16, a transposed convolution that in
    another order; and a captured graph knows each layer by the names of its parameters.
    """
    forms: dict[int, int | str] = {}  # module -> its own form, or that of its kind
    for layer in model.modules():
        forms.setdefault(id(layer), "transposed" if isinstance(layer, nn.modules.conv._ConvTransposeNd) else "plain")
    for layer in quantized_layers(model).values():
        forms.update(dict.fromkeys(map(id, layer.modules()), id(layer)))
    first: dict[int, int | str] = {}  # parameter -> the form that keeps it
    others: dict[tuple[int, int | str], nn.Parameter] = {}
    for module in model.modules():
        form = forms[id(module)]
        for name, parameter in module._parameters.items():
            if parameter is None or first.setdefault(id(parameter), form) == form:
                continue
            own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            module._parameters[name] = others.setdefault((id(parameter), form), own)
