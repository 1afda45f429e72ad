"""Checkpoint, or module in memory -> verified ONNX files.

Trace, quantise, check, decompose, compare the decomposed graph with torch on real images, and only then write, each
file under a temporary name first: no file exists that was not compared (except with `verify=False`).
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import onnx
from torch import nn

from fp4deploy import provenance
from fp4deploy.about import ABOUT_KEY, about
from fp4deploy.errors import InputError
from fp4deploy.export.onnx.boxes import with_boxes
from fp4deploy.export.onnx.canonical import rest_of_file
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import Dynamic, export_graph
from fp4deploy.export.onnx.layers import note_largest, planned_layers
from fp4deploy.export.verify.exported import batches_of
from fp4deploy.export.verify.outputs import (
    Agreement,
    check_request,
    require_agreement,
    require_same_boxes,
    rest_for,
    validation_images,
    verify_decomposed,
)
from fp4deploy.export.verify.sizes import require_open_sizes
from fp4deploy.graph.capture import Inputs, of_batch
from fp4deploy.graph.nested import flat_inputs, taking_flat_inputs
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.card import ModelCard
from fp4deploy.models.meaning import Outputs, known_outputs
from fp4deploy.precisions import PRECISIONS
from fp4deploy.qat import deployed, load_model, quantized_layers
from fp4deploy.qat.experts import PRECISION as EXPERTS
from fp4deploy.qat.ranges import automatic_rest
from fp4deploy.rest import AUTO
from fp4deploy.system.files import file_digest, write_whole

QUANTIZED = (*PRECISIONS, EXPERTS)


@dataclass(frozen=True)
class ExportResult:
    """What `export_onnx` or `export_checkpoint` wrote.

    path, portable_path: the canonical file and the decomposed one (None where none was asked for).
    card: None of a module that was exported without one.
    size_bytes: of the canonical file. fp4_layers: how many layers it holds in FP4.
    verification: how far ONNX Runtime and torch agree; None where nothing was verified.
    unused_layers: quantised layers that the network never calls in evaluation, such as an auxiliary head. Training and
        checkpoints keep them, the file has nothing of them.
    """

    path: Path
    portable_path: Path | None
    card: ModelCard | None
    size_bytes: int
    fp4_layers: int
    verification: Agreement | None
    unused_layers: tuple[str, ...] = ()

    @property
    def agreement(self) -> float | None:
        """Share of pixels on which ONNX Runtime and torch agree, 0..1; None where nothing was verified."""
        return self.verification.share if self.verification else None


def portable_name(path: Path) -> Path:
    """The path of the decomposed graph of a canonical file: unet.onnx -> unet.portable.onnx."""
    return path.with_suffix(f".portable{path.suffix}")


_Export = TypeVar("_Export", bound=Callable[..., ExportResult])


def _modules_only(function: _Export) -> _Export:
    """`export_onnx` took a checkpoint's path as well, and called `portable` of a module `with_portable`."""

    @functools.wraps(function)
    def export(model: nn.Module | Path | str, *arguments: Any, **options: Any) -> ExportResult:
        checkpoint = not isinstance(model, nn.Module)
        if checkpoint or "with_portable" in options:
            now = "export_checkpoint(checkpoint, path)" if checkpoint else "portable=True"
            warnings.warn(f"This call of export_onnx is of an older version: write {now}.", DeprecationWarning, 2)
        if "with_portable" in options:
            options["portable"] = options.pop("with_portable")
        if not checkpoint:
            return function(model, *arguments, **options)
        return export_checkpoint(cast("Path | str", model), *arguments, **options)

    return cast(_Export, export)


def export_checkpoint(
    checkpoint: Path | str,
    out: Path | str,
    portable: bool = False,
    data: Path | str | None = None,
    images: int = 16,
    verify: bool = True,
    size: tuple[int, ...] | None = None,
    dynamic_size: bool = False,
    rest: str | None = None,
    batch: int | None = None,
) -> ExportResult:
    """Export a checkpoint to canonical ONNX, verified against torch on real images before anything is written.

    Args:
        checkpoint: a .safetensors file that `fp4deploy train` wrote.
        out: the .onnx file; an existing one is replaced.
        portable: also write the decomposed graph for plain ONNX Runtime, as NAME.portable.onnx in the same folder; that
            of a detector also decodes the boxes (`onnx.boxes`).
        data: dataset whose validation split is used to verify.
        images: how many of its images.
        verify: False writes without comparing.
        size: height and width of the graph's images in pixels, or depth, height and width of volumes; by default those
            of the training. It is verified at it.
        dynamic_size: leave height and width open; the file is then verified at two other sizes, too (`verify.sizes`).
        rest: what is neither FP4 nor FP8: "fp16", "bf16" or "fp32" (`fp4deploy.rest`), or "auto": by the ranges that
            are seen (`qat.ranges.automatic_rest`); None: as the card says.
        batch: the only number of images that the file takes; None: any.

    Raises:
        GateError: ONNX Runtime and torch disagree by more than FP4 explains (see `verify`).
        InputError: not a checkpoint of this project, an uncalibrated layer, no data to verify on, an unwritable target.

    >>> result = export_checkpoint(checkpoint, folder / "unet.onnx", verify=False)
    >>> result.path.name, result.fp4_layers
    ('unet.onnx', 21)
    """
    checkpoint, out, data = Path(checkpoint), Path(out), None if data is None else Path(data)
    check_request(checkpoint, out, ".onnx", data, images, verify)
    chosen = None if rest is None else rest_for(rest, checkpoint, data, images)
    model, card = load_model(checkpoint, rest=chosen)
    if size is not None:
        card = card.resized(size)
    if dynamic_size and card.volume is not None:
        raise InputError("--dynamic-size leaves height and width of images open; a network of volumes has one size.")
    canonical = export_graph(model, card.input_shape, card, dynamic_size, chosen, batch=batch)
    _describe(canonical, card, checkpoint)
    decomposed = to_portable(canonical) if portable or verify else None
    verification = None
    if verify and data is not None and decomposed is not None:
        samples = [of_batch(each, batch) for each in validation_images(data, card, images)]
        meanings = known_outputs(card)
        verification = verify_decomposed(model, decomposed, samples, meanings=meanings, card=card)
        require_agreement(verification, str(checkpoint))
        if dynamic_size:
            require_open_sizes(model, decomposed, samples[0], str(checkpoint), meanings, batch=batch)
    if portable and decomposed is not None and isinstance(card.head, DetectionHead):
        decomposed = with_boxes(decomposed, card.head, (card.height, card.width))
        if verify and data is not None:
            boxed = (of_batch(each, batch) for each in validation_images(data, card, images))
            require_same_boxes(decomposed, card, boxed)
    written = _write_all(model, canonical, decomposed if portable else None, out, card, verification)
    for path in filter(None, (written.path, written.portable_path)):
        provenance.record("export", path, [checkpoint])
    return written


@_modules_only
def export_onnx(
    model: nn.Module,
    example: Inputs,
    path: Path | str,
    data: Inputs | Iterable[Inputs] | None = None,
    *,
    portable: bool = False,
    verify: bool = True,
    dynamic_size: bool = False,
    dynamic: Dynamic | None = None,
    batch: int | None = None,
    card: ModelCard | None = None,
    outputs: Outputs = None,
    rest: str | None = None,
) -> ExportResult:
    """Export a module to canonical ONNX, verified against torch before anything is written; arguments in the order of
    torch.onnx.export. A checkpoint's file is exported by `export_checkpoint`.

    Args:
        model: prepared and calibrated, or plain.
        example: an input [N, C, H, W], or several as a tuple or a dict by the names of the forward's arguments.
        path: the .onnx file; an existing one is replaced.
        data: inputs to verify on, one batch or several; by default the example.
        portable, verify, dynamic_size, rest: as of `export_checkpoint`.
        dynamic: more open axes with their names, as {"input_ids": {1: "L"}, "attention_mask": {1: "L"}}; the file is
            then verified at two other sizes, too.
        batch: the only number of samples that the file takes; None: any.
        card: stored in the file.
        outputs: what the outputs are, as of `verify`; by default as the card says.

    Raises:
        GateError: ONNX Runtime and torch disagree by more than FP4 explains (see `verify`).
        InputError: an uncalibrated layer, an unwritable target, a module that cannot be traced.

    >>> model = fd.prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1)))
    >>> import torch
    >>> batch = torch.randn(2, 3, 16, 16)
    >>> fd.calibrate(model, batch)
    >>> fd.export_onnx(model, batch, folder / "own.onnx").fp4_layers
    1
    """
    out = Path(path)
    if out.suffix != ".onnx":
        raise InputError(f"{out} should end in .onnx.")
    name, meanings = type(model).__name__, known_outputs(card, said=outputs)
    model, example = taking_flat_inputs(model, example), flat_inputs(example)
    chosen = automatic_rest(model, batches_of(example if data is None else data, 0)) if rest == AUTO else rest
    canonical = export_graph(model, example, card, dynamic_size, chosen, dynamic, batch)
    _describe(canonical, card, None)
    verification, decomposed = None, to_portable(canonical) if portable or verify else None
    if verify and decomposed is not None:
        samples = batches_of(example if data is None else data, len(canonical.graph.input))
        samples = [of_batch(each, batch) for each in samples]
        reference = deployed(model, rest_of_file(canonical))
        verification = verify_decomposed(reference, decomposed, samples, meanings=meanings, card=card)
        require_agreement(verification, name)
        if dynamic_size or dynamic:
            require_open_sizes(reference, decomposed, samples[0], name, meanings, dynamic, batch)
    return _write_all(model, canonical, decomposed if portable else None, out, card, verification)


def _describe(model: onnx.ModelProto, card: ModelCard | None, checkpoint: Path | None) -> None:
    """Note in a file which version made it of which checkpoint, and the colours of its classes."""
    found = about(card, file_digest(checkpoint) if checkpoint is not None else None)
    model.metadata_props.add(key=ABOUT_KEY, value=json.dumps(found))


def _write_all(
    model: nn.Module,
    canonical: onnx.ModelProto,
    decomposed: onnx.ModelProto | None,
    out: Path,
    card: ModelCard | None,
    verification: Agreement | None,
) -> ExportResult:
    for each in (canonical, decomposed):
        if each is not None and verification is not None:
            note_largest(each, verification.ranges)
    size_bytes = _write(canonical, out)
    if decomposed is not None:
        _write(decomposed, portable_name(out))
    held = {name for name, plan in planned_layers(canonical).items() if plan["precision"] in QUANTIZED}
    return ExportResult(
        path=out,
        portable_path=portable_name(out) if decomposed is not None else None,
        card=card,
        size_bytes=size_bytes,
        fp4_layers=len(held),
        verification=verification,
        unused_layers=tuple(name for name in quantized_layers(model) if name not in held),
    )


def _write(model: onnx.ModelProto, path: Path) -> int:
    """Write deterministic bytes; their number."""
    content = model.SerializeToString(deterministic=True)
    write_whole(path, content)
    return len(content)
