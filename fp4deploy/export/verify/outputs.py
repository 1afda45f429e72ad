"""The gate between torch and ONNX: the decomposed graph must give outputs that mean what torch's mean.

Both run on the same real validation images, torch with the weights as deployed (`qat.load_model`), and each output is
compared in what it means (`models.meaning`): the class of every pixel or token, values, objects, boxes. At most 0.1 %
of them may differ (`agreement`).

FP16 models and small NVFP4 models pass at once (a UNet of scale 0.25 at 96 x 96: 0.005 % differ). A large NVFP4 model
differs from itself by more than that as soon as a sum is accumulated in another order, because FP4 amplifies last-bit
differences. Where the end-to-end comparison fails, the gate therefore compares layer by layer with reference inputs
(`layerwise`): at most 0.1 % of the pixels, and of each layer's quantised elements, may differ, or in a layer of fewer
than 16,000 elements those of one block. An export error that touches more than that is reported with the name of the
first layer that reads it.

What is small, such as a map of 768 pixels, differs in more than that by one unit, and pixels of equal values that are
normalised differ in all. Where no more than 5 % differ, torch therefore tells what last bits decide (`last_bits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

from fp4deploy.data import VAL
from fp4deploy.data.sample import spread
from fp4deploy.detection import decode_boxes
from fp4deploy.detection.decode import in_image, iou
from fp4deploy.errors import GateError, InputError
from fp4deploy.export.onnx.canonical import rest_of_file
from fp4deploy.export.onnx.session import verifying_session
from fp4deploy.export.verify.agreement import (
    REQUIRED_AGREEMENT,
    Comparison,
    OutputAgreement,
    compare_outputs,
    described,
    largest_difference,
    unsettled,
)
from fp4deploy.export.verify.flat import flat_difference
from fp4deploy.export.verify.last_bits import MOST, movements
from fp4deploy.export.verify.layerwise import LayerwiseAgreement, compare_layerwise
from fp4deploy.export.verify.tensors import call, feed, floats
from fp4deploy.graph.capture import Inputs, of_batch
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.card import ModelCard
from fp4deploy.models.checkpoint import read_card, read_signed
from fp4deploy.models.meaning import UNKNOWN, OutputMeanings
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.qat.ranges import Ranges, automatic_rest
from fp4deploy.rest import AUTO, FP32, Rest, rest_of
from fp4deploy.tasks import images_for, task_of

NOTHING_WRITTEN = "Nothing was written; to write the file all the same, export with --no-verify."
ALLOWED_ELEMENTS = 0.001  # of a layer's quantised input, with reference inputs


@dataclass(frozen=True, repr=False)
class Agreement(Comparison):
    """How far ONNX Runtime and torch agree.

    largest: the largest absolute difference of two values.
    layerwise: the comparison with reference inputs; None where the end-to-end comparison passed.
    """

    largest: float
    layerwise: LayerwiseAgreement | None = None

    @property
    def passed_with_references(self) -> bool:
        """Whether nothing but FP4 is left that explains a difference."""
        return self.layerwise is not None and not self.place

    @property
    def place(self) -> str:
        return "" if self.layerwise is None else _explain(self.layerwise) or ""

    def sentence(self) -> str:
        text = super().sentence()
        if self.layerwise is None:
            return text
        layers = f"on {100 * self.layerwise.share:.3f} % with reference inputs per layer"
        if undecided := sum(each.undecided for each in self.layerwise.outputs):
            layers += f" ({undecided} where last bits of float32 decide)"
        return f"{text} end to end, where FP4 amplifies last bits, and {layers}"


def compare_with_torch(
    model: nn.Module,
    portable: onnx.ModelProto,
    images: Iterable[Inputs],
    meanings: OutputMeanings = UNKNOWN,
    last_bits: bool = False,
) -> Agreement:
    """Run both on `images` (float32 [N, C, H, W] each, or several inputs) and compare what their outputs mean.

    last_bits: count what these decide about apart.
    """
    session = verifying_session(portable)
    names = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]
    count, largest = 0, 0.0
    found: tuple[OutputAgreement, ...] = ()
    rest = rest_of_file(portable)
    ranges = Ranges(model, rest)

    @torch.no_grad()
    def run(batch: Inputs) -> list[torch.Tensor]:
        return [floats(each) for each in call(model, batch, rest)]

    for batch in images:
        fed = feed(batch, names)
        with ranges:
            expected = run(batch)
        given = [floats(torch.from_numpy(each)) for each in session.run(None, fed)[: len(expected)]]
        count += len(fed[names[0]])
        own, moved = outputs[: len(expected)], None
        if last_bits:
            moved = movements(model, run, batch, expected, partial(unsettled, expected))
        found = compare_outputs(expected, given, own, meanings, found, moved)
        largest = float(np.maximum(largest, largest_difference(expected, given)))
    return Agreement(count, found, largest, ranges=ranges.largest, rest=rest)


def verify_decomposed(
    model: nn.Module,
    portable: onnx.ModelProto,
    images: Iterable[Inputs],
    enough: float = REQUIRED_AGREEMENT,
    meanings: OutputMeanings = UNKNOWN,
    card: ModelCard | None = None,
    flat: bool = True,
) -> Agreement:
    """Compare end to end; where that fails and the model is quantised, layer by layer too. Then on flat images.

    card: of the model, whose mean and standard deviation say what black and white are; flat: compare these, too.
    """
    kept = list(images)
    agreement = compare_with_torch(model, portable, kept, meanings)
    if not all(each.reaches(enough) for each in agreement.outputs) and quantized_layers(model):
        agreement = replace(agreement, layerwise=_layer_by_layer(model, portable, kept, meanings))
    by_layer = agreement.layerwise is not None and not agreement.layerwise.unmatched
    if not (agreement.passed or by_layer) and all(each.is_near for each in agreement.outputs):
        settled = compare_with_torch(model, portable, kept, meanings, last_bits=True)
        agreement = replace(agreement, outputs=settled.outputs)
    if not (agreement.passed and flat):
        return agreement
    return replace(agreement, flat=_flat_difference(model, portable, kept[0], card, meanings))


def _layer_by_layer(
    model: nn.Module,
    portable: onnx.ModelProto,
    images: list[Inputs],
    meanings: OutputMeanings,
    most: float = MOST,
) -> LayerwiseAgreement:
    """The comparison with reference inputs; where little enough differs, once more without what last bits decide."""
    found = compare_layerwise(model, portable, images, meanings)
    near = found.worst <= most and all(each.is_near for each in found.outputs)
    if _explain(found) is None or found.unmatched or not near:
        return found
    return compare_layerwise(model, portable, images, meanings, last_bits=most)


def _flat_difference(
    model: nn.Module, portable: onnx.ModelProto, batch: Inputs, card: ModelCard | None, meanings: OutputMeanings
) -> str:
    session = verifying_session(portable)
    names = [value.name for value in session.get_inputs()]
    first = session.get_inputs()[0].shape
    fixed = first[0] if first and isinstance(first[0], int) else None  # the only batch that the file takes

    def of_torch(inputs: Inputs) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [floats(each) for each in call(model, of_batch(inputs, fixed), rest_of_file(portable))]

    def of_file(inputs: Inputs) -> list[torch.Tensor]:
        fed = feed(of_batch(inputs, fixed), names)
        return [floats(torch.from_numpy(each)) for each in session.run(None, fed)]

    def by_layer(inputs: Inputs) -> bool:
        return _explain(_layer_by_layer(model, portable, [of_batch(inputs, fixed)], meanings, most=1.0)) is None

    return flat_difference(model, of_torch, of_file, batch, card, by_layer)


def require_agreement(agreement: Agreement, name: str) -> None:
    """Pass a model only if torch and ONNX Runtime agree.

    Raises:
        GateError: more than 0.1 % of an output differs and FP4 alone does not explain it, an output is not finite, or
            nothing was compared.
    """
    if agreement.passed:
        return
    cause = described([each for each in agreement.outputs if not each.passed], OutputAgreement.difference)
    if agreement.pixels:
        cause += f" ({agreement.images} images; values differ by up to {agreement.largest:.3g})"
    if agreement.flat:
        cause = agreement.flat
    if beyond := agreement.rest.beyond(agreement.ranges):
        raise GateError(f"{name}: {beyond} {NOTHING_WRITTEN}")
    if agreement.layerwise is not None:
        cause += f"; {agreement.place or 'layer by layer they agree'}"
    raise GateError(
        f"{name}: ONNX Runtime and torch disagree: {cause}. At most {100 * (1 - REQUIRED_AGREEMENT):g} % may differ. "
        f"{NOTHING_WRITTEN}"
    )


def require_same_boxes(portable: onnx.ModelProto, card: ModelCard, images: Iterable[torch.Tensor]) -> None:
    """Pass a file that decodes boxes only if they are those that `detection.decode_boxes` reads from its raw output.

    Raises:
        GateError: more than 1 % of the boxes have no match of the same class and score with an IoU of 0.99.
    """
    assert isinstance(card.head, DetectionHead)
    session, size = verifying_session(portable), (card.height, card.width)
    (name,) = (value.name for value in session.get_inputs())
    count = unmatched = 0
    for batch in images:
        raw, _, boxes, classes, scores = session.run(None, {name: batch[:1].numpy()})
        expected = decode_boxes(torch.from_numpy(raw[0]), card.head, size, size)
        given = in_image((boxes, classes, scores), card.head, size, size)
        same = (iou(expected.boxes, given.boxes) > 0.99) & (expected.classes[:, None] == given.classes)
        same &= np.abs(expected.scores[:, None] - given.scores) < 1e-4
        count += len(expected) + len(given)
        unmatched += int((~same.any(1)).sum() + (~same.any(0)).sum())
    if unmatched > 0.01 * count:
        raise GateError(
            f"{unmatched} of {count} boxes that the ONNX file decodes differ from those that torch decodes."
        )


def _explain(found: LayerwiseAgreement) -> str | None:
    """The error that amplified rounding does not explain; None where there is none."""
    if found.unmatched:
        return (
            "they cannot be compared layer by layer, because torch does not run these layers as often as the graph "
            f"reads their quantised inputs: {', '.join(found.unmatched)}"
        )
    for layer, share in found.layers.items():
        if share > ALLOWED_ELEMENTS and found.blocks[layer] > 1:
            origin = " and ".join(found.sources[layer]) or "the input image"
            return (
                f"the first layer to differ is {layer}, in {100 * share:.3g} % of its quantised input, which is "
                f"computed from {origin}"
            )
    wrong = [each for each in found.outputs if not each.passed]
    if wrong or not found.outputs:
        return f"after the last quantised layer {described(wrong, OutputAgreement.difference)} differ"
    return None


def check_request(checkpoint: Path, out: Path, suffix: str, data: Path | None, images: int, verify: bool) -> None:
    """Refuse an export that could not be verified or written, before anything is loaded.

    Raises:
        InputError: a target with another suffix, nothing to verify on, no images, or a corrupt checkpoint.
    """
    if out.suffix != suffix:
        raise InputError(f"{out} should end in {suffix}.")
    if verify and data is None:
        read_card(checkpoint)  # nobody should look for data to learn afterwards that the file is corrupt
        read_signed(checkpoint)
        raise InputError(
            f"Exporting {checkpoint} needs real images to verify the file on, and no data was given. "
            "Give --data DIR, a dataset or a folder of images."
        )
    if images < 1:
        raise InputError(f"At least one image is needed to verify an export, not {images}.")


def rest_for(rest: str, checkpoint: Path, data: Path | None, images: int) -> Rest:
    """The precision of the rest that a name asks for; `auto` by what a checkpoint reaches on validation images.

    Raises:
        InputError: another name; or `auto` without data.
    """
    if rest != AUTO:
        return rest_of(rest)
    if data is None:
        raise InputError("--rest auto measures the network's ranges on images. Give --data DIR.")
    model, card = load_model(checkpoint, rest=FP32)
    return automatic_rest(model, validation_images(data, card, images))


def validation_images(data: Path, card: ModelCard, count: int) -> Iterator[torch.Tensor]:
    """`count` validation images, spread evenly over the set, each float32 [1, *input_shape], prepared as the card says.

    Raises:
        InputError: there are no validation images at `data`, nor is it a plain folder of images.
    """
    task, dataset = task_of(card), images_for(card, data, VAL)
    if not len(dataset):
        raise InputError(f"{data} has no validation images to verify the export on. Give another --data.")
    transform = task.transform(card.size, card.mean, card.std)
    for index in spread(len(dataset), count):
        yield transform(dataset.load(index))[0][None]
