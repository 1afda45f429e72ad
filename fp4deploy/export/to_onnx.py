"""Checkpoint -> verified ONNX files.

Trace, quantise, check, decompose, compare the decomposed graph with torch on real images, and only then write, each
file under a temporary name first: no file exists that was not compared (except with `verify=False`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import onnx
from torch import nn

from fp4deploy import provenance
from fp4deploy.about import ABOUT_KEY, about
from fp4deploy.errors import InputError
from fp4deploy.export.onnx.boxes import with_boxes
from fp4deploy.export.onnx.canonical import rest_of_file
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
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
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.card import ModelCard
from fp4deploy.models.meaning import Outputs, known_outputs
from fp4deploy.qat import deployed, load_model, quantized_layers
from fp4deploy.qat.ranges import automatic_rest
from fp4deploy.rest import AUTO
from fp4deploy.system.files import atomic_write, file_digest

QUANTIZED = ("FP4", "FP4 weights", "FP8")  # precisions of layers


@dataclass(frozen=True)
class ExportResult:
    """What `export_onnx` wrote.

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


@overload
def export_onnx(
    checkpoint: Path | str,
    out: Path | str,
    portable: bool = False,
    data: Path | str | None = None,
    images: int = 16,
    verify: bool = True,
    size: tuple[int, ...] | None = None,
    dynamic_size: bool = False,
    *,
    rest: str | None = None,
    batch: int | None = None,
) -> ExportResult: ...


@overload
def export_onnx(
    checkpoint: nn.Module,
    out: Inputs,
    portable: Path | str,
    data: Inputs | Iterable[Inputs] | None = None,
    images: int = 16,
    verify: bool = True,
    size: None = None,
    dynamic_size: bool = False,
    card: ModelCard | None = None,
    with_portable: bool = False,
    outputs: Outputs = None,
    rest: str | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    batch: int | None = None,
) -> ExportResult: ...


def export_onnx(
    checkpoint: Any,
    out: Any,
    portable: Any = False,
    data: Any = None,
    images: int = 16,
    verify: bool = True,
    size: tuple[int, ...] | None = None,
    dynamic_size: bool = False,
    card: ModelCard | None = None,
    with_portable: bool = False,
    outputs: Outputs = None,
    rest: str | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    batch: int | None = None,
) -> ExportResult:
    """Export a checkpoint, or a module in memory, to canonical ONNX, verified against torch before anything is written.

    There are two forms, as there are two things to export:

        export_onnx(checkpoint, out, portable=False, data=folder)      of a file that `fp4deploy train` wrote
        export_onnx(model, example_input, path)                        of any module, in the order of torch.onnx.export

    Args:
        checkpoint: a .safetensors file that `fp4deploy train` wrote; or a module, prepared and calibrated or plain.
        out: the .onnx file; an existing one is replaced. Of a module: an example input [N, C, H, W], or several as a
            tuple or a dict by the names of its arguments.
        portable: also write the decomposed graph for plain ONNX Runtime, as NAME.portable.onnx in the same folder; that
            of a detector also decodes the boxes (`onnx.boxes`). Of a
            module: the .onnx file (and `with_portable` for the other one).
        data: dataset whose validation split is used to verify. Of a module: inputs to verify on, one batch or several;
            by default the example input.
        images: how many of the dataset's images.
        verify: False writes without comparing.
        size: height and width of the graph's images in pixels, or depth, height and width of volumes; by default those
            of the training. It is verified at it.
        dynamic_size: leave height and width open; the file is then verified at two other sizes, too (`verify.sizes`).
        card: of a module, stored in the file.
        outputs: of a module: what its outputs are, as of `verify`; by default as the card says.
        rest: what is neither FP4 nor FP8: "fp16", "bf16" or "fp32" (`fp4deploy.rest`), or "auto": by the ranges that
            are seen (`qat.ranges.automatic_rest`); None: as the card says.
        dynamic: of a module: more open axes with their names, as {"input_ids": {1: "L"}, "attention_mask": {1: "L"}};
            the file is then verified at two other sizes, too.
        batch: the only number of samples that the file takes; None: any.

    Raises:
        GateError: ONNX Runtime and torch disagree by more than FP4 explains (see `verify`).
        InputError: not a checkpoint of this project, an uncalibrated layer, no data to verify on, an unwritable target,
            a module that cannot be traced.

    >>> result = export_onnx(checkpoint, folder / "unet.onnx", verify=False)
    >>> result.path.name, result.fp4_layers
    ('unet.onnx', 21)
    >>> model = fd.prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1)))
    >>> import torch
    >>> batch = torch.randn(2, 3, 16, 16)
    >>> fd.calibrate(model, batch)
    >>> fd.export_onnx(model, batch, folder / "own.onnx").fp4_layers
    1
    """
    if isinstance(checkpoint, nn.Module):
        given: dict[str, Any] = {
            "card": card,
            "portable": with_portable,
            "dynamic_size": dynamic_size,
            "outputs": outputs,
        }
        given |= {"rest": rest, "dynamic": dynamic, "batch": batch}
        return _export_module(checkpoint, out, Path(portable), data, verify, **given)
    checkpoint, out = Path(checkpoint), Path(out)
    check_request(checkpoint, out, ".onnx", data, images, verify)
    chosen = None if rest is None else rest_for(rest, checkpoint, None if data is None else Path(data), images)
    model, found = load_model(checkpoint, rest=chosen)
    if size is not None:
        found = found.resized(size)
    if dynamic_size and found.volume is not None:
        raise InputError("--dynamic-size leaves height and width of images open; a network of volumes has one size.")
    canonical = export_graph(model, found.input_shape, found, dynamic_size, chosen, batch=batch)
    _describe(canonical, found, checkpoint)
    decomposed = to_portable(canonical) if portable or verify else None
    verification = None
    if verify and data is not None and decomposed is not None:
        samples = [of_batch(each, batch) for each in validation_images(Path(data), found, images)]
        meanings = known_outputs(found)
        verification = verify_decomposed(model, decomposed, samples, meanings=meanings, card=found)
        require_agreement(verification, str(checkpoint))
        if dynamic_size:
            require_open_sizes(model, decomposed, samples[0], str(checkpoint), meanings, batch=batch)
    if portable and decomposed is not None and isinstance(found.head, DetectionHead):
        decomposed = with_boxes(decomposed, found.head, (found.height, found.width))
        if verify and data is not None:
            boxed = (of_batch(each, batch) for each in validation_images(Path(data), found, images))
            require_same_boxes(decomposed, found, boxed)
    written = _write_all(model, canonical, decomposed if portable else None, out, found, verification)
    for path in filter(None, (written.path, written.portable_path)):
        provenance.record("export", path, [checkpoint])
    return written


def _export_module(
    model: nn.Module, example: Inputs, out: Path, inputs: Any, verify: bool, **options: Any
) -> ExportResult:
    if out.suffix != ".onnx":
        raise InputError(f"{out} should end in .onnx.")
    card, portable = options["card"], options["portable"]
    meanings = known_outputs(card, said=options["outputs"])
    rest = options["rest"]
    if rest == AUTO:
        rest = automatic_rest(model, batches_of(example if inputs is None else inputs, 0))
    form = {name: options[name] for name in ("dynamic", "batch")}
    canonical = export_graph(model, example, card, options["dynamic_size"], rest, **form)
    _describe(canonical, card, None)
    verification, decomposed = None, to_portable(canonical) if portable or verify else None
    if verify and decomposed is not None:
        samples = batches_of(example if inputs is None else inputs, len(canonical.graph.input))
        samples = [of_batch(each, options["batch"]) for each in samples]
        reference = deployed(model, rest_of_file(canonical))
        verification = verify_decomposed(reference, decomposed, samples, meanings=meanings, card=card)
        require_agreement(verification, type(model).__name__)
        if options["dynamic_size"] or options["dynamic"]:
            require_open_sizes(reference, decomposed, samples[0], type(model).__name__, meanings, **form)
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
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return len(content)
