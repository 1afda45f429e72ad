"""Checkpoint -> verified ONNX files.

Trace, quantise, check, decompose, compare the decomposed graph with torch on real images, and only then write, each
file under a temporary name first: no file exists that was not compared (except with `verify=False`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.verify.outputs import (
    Agreement,
    check_request,
    require_agreement,
    validation_images,
    verify_decomposed,
)
from fp4deploy.files import atomic_write
from fp4deploy.models.card import ModelCard
from fp4deploy.qat import load_model, quantized_layers


@dataclass(frozen=True)
class ExportResult:
    """What `export_onnx` wrote.

    path, portable_path: the canonical file and the decomposed one (None where none was asked for).
    size_bytes: of the canonical file. fp4_layers: how many layers it holds in FP4.
    verification: how far ONNX Runtime and torch agree; None where nothing was verified.
    """

    path: Path
    portable_path: Path | None
    card: ModelCard
    size_bytes: int
    fp4_layers: int
    verification: Agreement | None

    @property
    def agreement(self) -> float | None:
        """Share of pixels on which ONNX Runtime and torch agree, 0..1; None where nothing was verified."""
        return self.verification.share if self.verification else None


def portable_name(path: Path) -> Path:
    """The path of the decomposed graph of a canonical file: unet.onnx -> unet.portable.onnx."""
    return path.with_suffix(f".portable{path.suffix}")


def export_onnx(
    checkpoint: Path,
    out: Path,
    portable: bool = False,
    data: Path | None = None,
    images: int = 16,
    verify: bool = True,
    size: tuple[int, int] | None = None,
    dynamic_size: bool = False,
) -> ExportResult:
    """Export a checkpoint to canonical ONNX, verified against torch on real images before anything is written.

    Args:
        checkpoint: a .safetensors file that `fp4deploy train` wrote.
        out: the .onnx file; an existing one is replaced.
        portable: also write the decomposed graph for plain ONNX Runtime, as NAME.portable.onnx in the same folder.
        data: dataset whose validation split is used to verify.
        images: how many of its images.
        verify: False writes without comparing.
        size: height and width of the graph's images in pixels; by default those of the training. It is verified at it.
        dynamic_size: leave height and width open; `size` is then the size that is verified.

    Raises:
        GateError: ONNX Runtime and torch disagree by more than FP4 explains (see `verify`).
        InputError: not a checkpoint of this project, an uncalibrated layer, no data to verify on, an unwritable target.

    >>> result = export_onnx(checkpoint, folder / "unet.onnx", verify=False)
    >>> result.path.name, result.fp4_layers
    ('unet.onnx', 21)
    """
    out = Path(out)
    check_request(Path(checkpoint), out, ".onnx", data, images, verify)
    model, card = load_model(Path(checkpoint))
    if size is not None:
        card = replace(card, height=size[0], width=size[1])
    canonical = export_graph(model, (3, card.height, card.width), card, dynamic_size)
    decomposed = to_portable(canonical) if portable or verify else None
    verification = None
    if verify and data is not None and decomposed is not None:
        verification = verify_decomposed(model, decomposed, validation_images(Path(data), card, images), head=card.head)
        require_agreement(verification, str(checkpoint))
    size_bytes = _write(canonical, out)
    if portable and decomposed is not None:
        _write(decomposed, portable_name(out))
    return ExportResult(
        path=out,
        portable_path=portable_name(out) if portable else None,
        card=card,
        size_bytes=size_bytes,
        fp4_layers=len(quantized_layers(model)),
        verification=verification,
    )


def _write(model: onnx.ModelProto, path: Path) -> int:
    """Write deterministic bytes; their number."""
    content = model.SerializeToString(deterministic=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return len(content)
