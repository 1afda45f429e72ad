"""Precisions of quantised layers: the one table that recipes, cards, settings, options, methods and searches read.

A quantised layer is NVFP4 ("FP4" in plans and ledgers) unless patterns of names give it one of `LAYER_FORMATS`:
`prepare(model, fp8=[...])`, `quant.fp8`, `quantize --fp8`, and inside `formats={"fp8": [...]}`, handed on as one value.
An entry here is all that a precision needs to be trained and measured whose operands `qat.recipes.QuantSpec` can
describe; how its operands stand in ONNX and packed files, `export` and `packed` say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = {"nvfp4": 4.5 / 8, "mxfp4": 4.25 / 8, "mxfp8": 8.25 / 8, "fp8": 1.0, "int8": 1.0}  # with block scales


@dataclass(frozen=True)
class LayerFormat:
    """What a layer may be quantised to in place of NVFP4.

    activation, weight: arguments of `qat.recipes.QuantSpec`. source: of the format, for `ptq.methods`.
    """

    activation: Mapping[str, Any]
    weight: Mapping[str, Any]
    source: str

    @property
    def described(self) -> str:
        """ "FP8", or "MXFP4 weights and MXFP8 activations"."""
        weight, activation = (str(each["format"]).upper() for each in (self.weight, self.activation))
        return weight if weight == activation else f"{weight} weights and {activation} activations"


def _whole_tensors(form: str, source: str) -> LayerFormat:
    """Of a format without blocks: one tracked scale of the activation, one for each output channel of the weight."""
    return LayerFormat({"format": form, "scale": "static"}, {"format": form, "row_scaled": True}, source)


LAYER_FORMATS = {
    "fp8": _whole_tensors("fp8", "Micikevicius et al., FP8 Formats for Deep Learning, 2022"),
    "int8": _whole_tensors("int8", "Jacob et al., Integer-Arithmetic-Only Inference, 2018"),
    "w4a8": LayerFormat(  # of weights `floor` has the smaller error (docs/numerics.md)
        {"format": "mxfp8", "scale_rule": "ceil"},
        {"format": "mxfp4"},
        "Rouhani et al., Microscaling Data Formats, 2023",
    ),
}
LABELS = {  # of quantised layers, as plans and ledgers say: FP4, then those with smaller weights before others
    "nvfp4": "FP4",
    **{
        name: name.upper()
        for name in sorted(LAYER_FORMATS, key=lambda name: ELEMENT_BYTES[LAYER_FORMATS[name].weight["format"]])
    },
}
PRECISIONS = tuple(LABELS.values())
OF_ENGINES = ("FP4", "FP8", "INT8")  # that engines multiply both operands in


def with_formats(fields: Any) -> Any:
    """An object of a file with the fields that are named as formats in one field `formats`; null is none.

    >>> with_formats({"recipe": "nvfp4_qat", "fp8": ["head"], "int8": None})
    {'recipe': 'nvfp4_qat', 'formats': {'fp8': ['head']}}
    """
    if not isinstance(fields, dict):
        return fields
    if unknown := {**(fields.get("formats") or {})}.keys() - LAYER_FORMATS.keys():
        raise ValueError(f"formats has {', '.join(sorted(unknown))}, and layers may have {', '.join(LAYER_FORMATS)}")
    if "formats" in fields:
        return fields
    formats = {name: fields[name] for name in LAYER_FORMATS if fields.get(name) is not None}
    return {name: value for name, value in fields.items() if name not in LAYER_FORMATS} | {"formats": formats}


def shares_by_error(fp16: float, fp8: float, fp4: float) -> dict[str, float]:
    """Formats of layers that are chosen by their errors, and the most of the quantised work that each may have.

    With `fp4`, the least that stays in FP4, and neither of the others, FP8 may have all the rest.

    >>> shares_by_error(0.0, 0.0, 0.9)
    {'fp8': 1.0}
    """
    shares = {"fp16": fp16, "fp8": fp8 or float(bool(fp4 and not fp16))}
    return {form: share for form, share in shares.items() if share}
