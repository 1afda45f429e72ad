"""The methods by name: how activations get their scales, weights their codes, and what is corrected afterwards.

| method | activations | weights |
|---|---|---|
| amax | amax | nearest, block scale from the block's amax (`formats.nvfp4`) |
| percentile | percentile 99.99 | nearest |
| mse | smallest squared error | block scale with the smallest squared error (`grid`) |
| 4/6 | amax | block maps its amax to 6 or 4 (`formats.four_over_six`) |
| sweep | amax | block scale with the smallest error of the layer's output, e H e^T (`grid`) |
| gptq | amax | scales of `sweep`, errors compensated column by column (`gptq`) |
| adaround | amax | scales of `sweep`, roundings learned layer by layer (`reconstruct`) |
| faar | amax | the same, layer by layer and then all roundings together on the network's output (`reconstruct`) |
| brecq | amax | scales of `sweep`, roundings learned block by block (`reconstruct`) |
| fp8 | amax | FP8: nearest, one scale an output channel (`formats.fp8`) |
| int8 | amax | INT8: nearest, one scale an output channel (`formats.int8`) |
| w4a8 | of each block | MXFP4: nearest (`formats.mxfp4`); activations MXFP8 (`formats.mxfp8`) |

Layers that are to be in one of these three in another method are quantised as by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp4deploy.errors import InputError, suggest
from fp4deploy.precisions import LAYER_FORMATS

NEAREST = "nvfp4_qat"
LEARNED = ("layer", "network", "block")  # learned roundings, by what is compared
FREE_SCALES = "nvfp4_4o6_weight_qat"  # the recipe whose fixed points they are, see `grid`


@dataclass(frozen=True)
class Method:
    """activations: of `activations.CHOICES`; weights: "nearest", "mse", "sweep", "gptq" or one of `LEARNED`."""

    name: str
    activations: str
    weights: str
    recipe: str
    source: str

    @property
    def uses_inputs(self) -> bool:
        """The weights depend on what the layers read."""
        return self.weights in ("sweep", "gptq", *LEARNED)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("amax", "amax", "nearest", NEAREST, "NVIDIA, Pretraining Large Language Models with NVFP4, 2025"),
        Method("percentile", "percentile", "nearest", NEAREST, "McKinstry et al., 2019"),
        Method(
            "mse",
            "mse",
            "mse",
            FREE_SCALES,
            "Banner et al., 2019 (activations); Lin and Wan, ScaleSweep, 2026 (weights)",
        ),
        Method("4/6", "amax", "nearest", FREE_SCALES, "Cook et al., Four Over Six, 2025"),
        Method(
            "sweep",
            "amax",
            "sweep",
            FREE_SCALES,
            "Lin and Wan, ScaleSweep, 2026, weighted by the Hessian of Frantar et al., 2023",
        ),
        Method("gptq", "amax", "gptq", FREE_SCALES, "Frantar et al., GPTQ, 2023"),
        Method("adaround", "amax", "layer", FREE_SCALES, "Nagel et al., Up or Down?, 2020"),
        Method("faar", "amax", "network", FREE_SCALES, "Li et al., FAAR, 2026"),
        Method("brecq", "amax", "block", FREE_SCALES, "Li et al., BRECQ, 2021"),
        *(Method(name, "amax", "nearest", f"{name}_qat", form.source) for name, form in LAYER_FORMATS.items()),
    )
}


def find_method(name: str) -> Method:
    """The method of a name.

    Raises:
        InputError: there is none of that name.

    >>> find_method("gptq").recipe
    'nvfp4_4o6_weight_qat'
    """
    if name not in METHODS:
        raise InputError(f"--method is '{name}'.{suggest(name, METHODS)} Valid: {', '.join(METHODS)}.")
    return METHODS[name]
