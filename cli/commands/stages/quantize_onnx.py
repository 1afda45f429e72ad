"""`quantize` of a plain ONNX file: options, and the canonical NVFP4 file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4deploy.errors import Fp4DeployError, InputError

from ...console import done, note, shown, typed

if TYPE_CHECKING:
    from fp4deploy.bench.change import Change


def of_onnx(
    source: Path,
    data: Path | None,
    out: Path | None,
    method: str,
    images: int,
    batch: int,
    size: tuple[int, int] | None,
    normalisation: tuple[str | None, str | None],
    compared: int,
    settings: dict[str, Any],
) -> None:
    """A plain ONNX file of any tool to the canonical NVFP4 file."""
    import torch

    from fp4deploy import provenance
    from fp4deploy.data import IMAGE_MEAN, IMAGE_STD
    from fp4deploy.interop.onnx_network import read_network
    from fp4deploy.interop.quantize_onnx import classes_of, folder_images, image_size, quantize_onnx
    from fp4deploy.ptq.methods import find_method
    from fp4deploy.system.files import require_writable
    from fp4deploy.system.progress import progress

    find_method(method)
    target = out or source.with_name(f"{source.stem}.nvfp4.onnx")
    if target.suffix != ".onnx" or (target.exists() and source.exists() and target.samefile(source)):
        raise InputError(f"--out {target} should be an .onnx file, and another one than the source.")
    require_writable(target)
    if data is None:
        raise InputError(f"{source} does not say what its images are. Give a dataset or a folder of images: --data DIR")
    mean, std = (rgb(text, usual) for text, usual in zip(normalisation, (IMAGE_MEAN, IMAGE_STD), strict=True))
    pixels = image_size(read_network(source), size, source)
    with progress("reading images") as bar:
        batches = folder_images(data, images, pixels, mean, std, batch)
        names, background = classes_of(data)
        bar.phase("comparing with the file")
        found = quantize_onnx(
            source,
            batches,
            target,
            method,
            mean=mean,
            std=std,
            class_names=names,
            background=background,
            device="cuda" if torch.cuda.is_available() else "cpu",
            say=note,
            progress=bar.phase,
            **settings,
        )
    provenance.record("quantize", target, [source, data])
    exported = found.export
    change = change_of(source, target, data, compared if exported.card else 0)
    agreed = f", {exported.verification.sentence()}" if exported.verification else ""
    done(
        f"{shown(target)} ({method}, {exported.fp4_layers} layers quantised, {found.quantized.images} images, "
        f"{exported.size_bytes / 1e6:.2f} MB){agreed}",
        onnx=str(target),
        method=method,
        layers=exported.fp4_layers,
        images=found.quantized.images,
        difference=found.difference,
        sqnr_db=found.sqnr,
        **({"change": dataclasses.asdict(change)} if change else {}),
        seconds=round(found.quantized.seconds, 3),
    )
    signal = ", ".join(f"{name} {decibels:.1f} dB" for name, decibels in found.sqnr.items())
    note(f"As read it differs from the file by {found.difference:.1e}; signal to error of NVFP4: {signal}.")
    if change is not None:
        note(f"{shown(target)}: {change.sentence(shown(source))}")
    if exported.card is None:
        note("Its output is no map of classes, so bench and predict cannot score it; audit, inspect and build can.")
    made = typed(target)
    note(f"Build an engine with: fp4deploy build {made}; what it multiplies in FP4: fp4deploy check {made}")


def change_of(source: Path, target: Path, data: Path, images: int) -> Change | None:
    """What quantising changed on so many images; None for 0 images, and with a note where data or machine cannot
    say it: the result is written by then."""
    from fp4deploy.bench.change import measure_change
    from fp4deploy.system.progress import progress

    if not images:
        return None
    try:
        with progress("comparing with the source") as bar:
            return measure_change(source, target, data, images, bar.advance)
    except Fp4DeployError as error:
        note(f"{shown(target)} was not compared with its source: {error}")
        return None


def meanings(given: list[str] | None) -> str | dict[str, str] | None:
    """What --outputs says: a word for all outputs, or words by the names of outputs."""
    if not given:
        return None
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    named = dict(each.rpartition("=")[::2] for each in given)
    if "" in named or len(named) < len(given):
        raise InputError("--outputs is one word for all outputs, or once NAME=WORD for each: --outputs depth=values")
    return named


def rgb(text: str | None, usual: tuple[float, float, float]) -> tuple[float, float, float]:
    """Three numbers, as of a model card."""
    if text is None:
        return usual
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"'{text}' is not R,G,B. Give three numbers in units of [0, 1], such as 0.485,0.456,0.406."
        ) from None
    return red, green, blue
