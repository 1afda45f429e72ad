"""The precision of an artefact in a few words: what its layers are quantised to, and of an engine what multiplies."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from fp4deploy.bench.runtimes.onnx_file import weights
from fp4deploy.export.ledger.ledger import Ledger
from fp4deploy.export.ledger.shares import in_words
from fp4deploy.export.onnx.layers import layers_of, planned_layers
from fp4deploy.models.card import ModelCard
from fp4deploy.precisions import PRECISIONS
from fp4deploy.rest import Rest

TITLES = dict(zip(PRECISIONS, ("NVFP4", *PRECISIONS[1:]), strict=True))
OF_CARDS = {"nvfp4": "NVFP4", "fp16": "FP16"}


def of_layers(precisions: Iterable[str]) -> str:
    """ "NVFP4", "FP8", or "NVFP4, FP8" of what single layers request; "" where none is quantised.

    >>> of_layers(["FP16", "FP8", "FP4", "FP4"])
    'NVFP4, FP8'
    """
    found = set(precisions)
    return ", ".join(title for name, title in TITLES.items() if name in found)


def of_rest(rest: Rest, on_gpu: bool) -> str:
    """Of a network that is not quantised.

    >>> from fp4deploy.rest import FP16
    >>> of_rest(FP16, True), of_rest(FP16, False)
    ('FP16', 'FP16 (run in FP32)')
    """
    return rest.label if on_gpu or rest.name == "fp32" else f"{rest.label} (run in FP32)"


def of_onnx(model: onnx.ModelProto, card: ModelCard | None) -> str:
    """Of an ONNX file, by its list of layers; without that by its card; of another tool, by its weights."""
    planned = planned_layers(model)
    if planned:
        return of_layers(each.get("precision", "") for each in planned.values())
    if card is not None:
        return of_layers(["FP4"] if card.precision == "nvfp4" else [])
    found = of_layers(each.precision for each in layers_of(model))
    return found or of_layers([weights(model)])  # ModelOpt's FP8 quantisers are operators of TensorRT


def of_engine(ledger: Ledger | None, card: str) -> str:
    """Of an engine, the shares of the multiply-accumulates by its ledger; without that the precision of its card."""
    return in_words(ledger.shares()) if ledger is not None and ledger.shares() else OF_CARDS.get(card, card)
