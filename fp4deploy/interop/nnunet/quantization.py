"""What plans.json says of a quantised network, and the network that is built so.

nnU-Net rebuilds a network for prediction by a static method of its trainer, which sees the plans and no checkpoint. So
the recipe and the names of the quantised layers stand in the plans, under the configuration:

    "3d_fullres": {..., "fp4deploy": {"recipe": "nvfp4_qat", "layers": ["encoder.stages.0.0.convs.1.conv", ...]}}

One plan is that of all folds. Layers are named one by one: another rule of first and last layers, in a later version,
does not change a folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models.nnunet.folder import PLANS, Fold, ResultsFolder, read_fold
from fp4deploy.models.nnunet.network import build_network, load_fold
from fp4deploy.precisions import LAYER_FORMATS, with_formats
from fp4deploy.qat.plan import LayerPlan, layer_plan
from fp4deploy.qat.prepare import prepare
from fp4deploy.qat.recipes import find_recipe
from fp4deploy.qat.selection import Selection
from fp4deploy.rest import RestName
from fp4deploy.system.schema import Name, validated

KEY = "fp4deploy"
AGAIN = "Quantise the folder again with: fp4deploy quantize FOLDER --data RAW --out OUT"


@dataclass(frozen=True)
class Quantization:
    """recipe: as of `qat.prepare`. layers: names of the quantised ones; formats: of those in others. rest: of the rest.

    In the plans each format is a field of its own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    recipe: Name
    layers: Annotated[tuple[Name, ...], Field(min_length=1, max_length=2000)]
    formats: dict[Name, Annotated[tuple[Name, ...], Field(max_length=2000)]] = field(default_factory=dict, hash=False)
    rest: RestName = "fp16"

    def of_plans(self, plans: Mapping[str, Any], configuration: str) -> dict[str, Any]:
        """A copy of `plans` whose configuration says this."""
        said = dataclasses.asdict(self)
        said |= {"fp8": ()} | said.pop("formats")  # which older versions ask for
        values = {**plans["configurations"][configuration], KEY: said}
        return {**plans, "configurations": {**plans["configurations"], configuration: values}}


def quantization_of(values: Mapping[str, object], where: object) -> Quantization | None:
    """What the configuration of a plan says; None: its network is not quantised.

    Raises:
        InputError: it says something that is no quantisation.
    """
    said = values.get(KEY)
    return None if said is None else validated(Quantization, with_formats(said), f"{where}: {KEY}", AGAIN)


def plan_network(
    network: nn.Module,
    patch: torch.Tensor,
    recipe: str,
    include: Selection = None,
    exclude: Selection = None,
    rest: RestName = "fp16",
    **formats: Selection,
) -> Quantization:
    """Which layers of a network of nnU-Net are quantised by a recipe; its heads of deep supervision stay as they are.

    Args:
        patch: what it takes, [N, C, *patch size], on any device.
        include, exclude, formats: as of `qat.prepare`.

    Raises:
        InputError: as of `qat.layer_plan`, or no layer is left.
    """
    plans = plan_layers(network, patch, recipe, include, exclude, **formats)
    chosen = [plan for plan in plans if plan.precision != "FP16"]
    if not chosen:
        reasons = "; ".join(f"{plan.name}: {plan.reason}" for plan in plans[:3])
        raise InputError(f"Every layer of this network stays in FP16 ({reasons}). Name layers with: --include PATTERN")
    others = {form: tuple(plan.name for plan in chosen if plan.precision == form.upper()) for form in LAYER_FORMATS}
    others = {form: names for form, names in others.items() if names and form.upper() != find_recipe(recipe).precision}
    return Quantization(recipe, tuple(plan.name for plan in chosen), others, rest)


def plan_layers(
    network: nn.Module,
    patch: torch.Tensor,
    recipe: str,
    include: Selection = None,
    exclude: Selection = None,
    **formats: Selection,
) -> list[LayerPlan]:
    """`qat.layer_plan` of a network of nnU-Net, all of whose heads are outputs."""
    with _all_heads(network):
        return layer_plan(network, recipe, include, exclude, example_inputs=patch, **formats)


def prepare_as(network: nn.Module, quantization: Quantization) -> nn.Module:
    """`qat.prepare` exactly these layers, in place.

    Raises:
        InputError: the network has no such layer.
    """
    return prepare(network, quantization.recipe, quantization.layers, example_inputs=None, **quantization.formats)


def load_network(folder: ResultsFolder, fold: Fold | str) -> tuple[nn.Module, Quantization | None]:
    """The network of a fold with its weights, in evaluation mode, prepared as the plans say, and what they say.

    Raises:
        InputError: as of `read_fold`, `build_network` and `load_fold`.
    """
    fold = read_fold(folder.path, fold, folder.checkpoint) if isinstance(fold, str) else fold
    quantization = quantization_of(folder.values, folder.path / PLANS)
    network = build_network(folder)
    if quantization is not None:
        prepare_as(network, quantization)
    return load_fold(network, fold, folder).eval(), quantization


@contextmanager
def _all_heads(network: nn.Module) -> Iterator[None]:
    """With deep supervision, every head gives an output of the network."""
    decoder: Any = network.get_submodule("decoder")
    before = decoder.deep_supervision
    decoder.deep_supervision = True
    try:
        yield
    finally:
        decoder.deep_supervision = before
