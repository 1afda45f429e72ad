"""`verify`: does an exported file compute what the model in memory computes?

The model is compared **with its weights as deployed** (`qat.deployed`): whatever is not FP4 is rounded to FP16, or
what else the file has it in, and each static amax to what the file's global scale gives back. Those are the weights
that the file holds. The FP32 weights of the training are no reference for it: an engine never has them, and FP4
amplifies the difference, because an activation that moves by 2^-12 of its value now and then crosses a rounding
boundary of E2M1 and becomes another code. Compared with the unrounded model, a correct file would therefore seem wrong.

What rounding the weights costs in accuracy is another question, and a smaller one. It is answered by evaluating the
rounded model, which is what every runtime of `bench` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from fp4deploy.export.onnx.canonical import is_canonical, parse_onnx, rest_of_file
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.verify.outputs import Agreement, verify_decomposed
from fp4deploy.graph.capture import Inputs
from fp4deploy.graph.nested import flat_inputs, taking_flat_inputs
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.models.heads import Head
from fp4deploy.models.meaning import Outputs, known_outputs
from fp4deploy.qat.load import deployed


def verify(
    model: nn.Module,
    exported: Path | str | onnx.ModelProto,
    inputs: Inputs | Iterable[Inputs],
    head: Head | None = None,
    outputs: Outputs = None,
) -> Agreement:
    """Compare an ONNX file, run by ONNX Runtime, with the model that it was exported from.

    Each output is compared in what it means (`models.meaning`): as `outputs` or `head` says, else as the card in the
    file does. What nobody has described is compared by its largest value along the class axis and by all its values, to
    a hundredth of their range; whole numbers have to be equal. Where more than 0.1 % of an output differs end to end
    and the model is quantised, every layer is compared with reference inputs, so that FP4 amplifies nothing.

    Args:
        model: as it was exported; it is not changed.
        exported: a canonical or decomposed ONNX file, or one in memory.
        inputs: one batch, or several, of real inputs: a tensor [N, C, H, W]; a tuple or a dict of tensors for a model
            with several inputs.
        head: layout of the channels of an instance model.
        outputs: what the outputs are: "classes" (of a map of classes, by the rank), "classes:AXIS", "values", or
            "values:BOUND" with the share of the range that they may differ by. One word for all outputs, a list in
            their order, or a dict by their names in the file.

    Returns:
        The agreement; its `passed` says whether the file computes what the model computes, `sentence()` what was
        compared and how exactly. An output with NaN or Inf never passes.

    Raises:
        InputError: the file cannot be read or decomposed, a weight is beyond the range of its precision, or `outputs`
            does not fit the outputs.

    >>> model = fd.prepare(torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.Conv2d(32, 4, 1)), include="0")
    >>> images = torch.randn(2, 16, 8, 8)
    >>> fd.calibrate(model, images)
    >>> fd.verify(model, fd.export_graph(model, (16, 8, 8)), images).passed
    True
    """
    proto = exported if isinstance(exported, onnx.ModelProto) else parse_onnx(Path(exported))
    if not isinstance(inputs, torch.Tensor | Mapping | tuple):
        inputs = list(inputs)
    model = taking_flat_inputs(model, inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs)
    batches, meanings = batches_of(inputs, len(proto.graph.input)), known_outputs(_card(proto, exported), head, outputs)
    return verify_decomposed(deployed(model, rest_of_file(proto)), _portable(proto), batches, meanings=meanings)


def _card(proto: onnx.ModelProto, exported: object) -> ModelCard | None:
    text = next((each.value for each in proto.metadata_props if each.key == CARD_KEY), None)
    source = exported if isinstance(exported, Path | str) else "The card in the file"
    return ModelCard.from_json(text, source) if text is not None else None


def batches_of(inputs: Inputs | Iterable[Inputs], count: int) -> list[Inputs]:
    """One batch or several, on the CPU, floating point values as float32, for a model with `count` inputs.

    A tuple of as many tensors as there are inputs, more than one, is one batch.
    """
    single = isinstance(inputs, torch.Tensor | Mapping)
    if not single and count > 1 and isinstance(inputs, tuple) and all(isinstance(x, torch.Tensor) for x in inputs):
        single = len(inputs) == count
    batches: Any = [inputs] if single else inputs
    return [_on_cpu(flat_inputs(batch)) for batch in batches]


def _on_cpu(batch: Inputs) -> Inputs:
    if isinstance(batch, torch.Tensor):
        x = batch.detach().cpu()
        return x.float() if x.is_floating_point() else x
    if isinstance(batch, Mapping):
        return {name: _tensor(_on_cpu(x)) for name, x in batch.items()}
    return tuple(_tensor(_on_cpu(x)) for x in batch)


def _tensor(x: Inputs) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def _portable(model: onnx.ModelProto) -> onnx.ModelProto:
    return to_portable(model) if is_canonical(model) else model
