"""`fp4deploy quantize`: an FP16 checkpoint to an NVFP4 one on a few images, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.errors import InputError
from fp4deploy.runs import latest_run

from ...console import done, note, shown
from ...settings import NamedModelOption, expect

MOST_IMAGES = 256


def quantize(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="FP16 checkpoint.", show_default="fp16 of the latest run")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Dataset folder.", show_default="what the run was trained on")
    ] = None,
    method: Annotated[
        str, typer.Option("--method", help="amax, percentile, mse, 4/6, sweep, gptq, adaround or brecq.")
    ] = "gptq",
    correction: Annotated[str, typer.Option("--correction", help="none, bias, norm or both.")] = "norm",
    activations: Annotated[
        str | None,
        typer.Option("--activations", help="amax, percentile or mse.", show_default="as the method has it"),
    ] = None,
    images: Annotated[
        int, typer.Option("--images", min=1, max=MOST_IMAGES, help="Images of the training split to calibrate on.")
    ] = 64,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of one forward pass.")] = 4,
    iterations: Annotated[
        int, typer.Option("--iterations", min=1, help="Training steps of a unit (adaround, brecq).")
    ] = 400,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Layers to quantise, a pattern; repeatable.", show_default="the default choice"),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Layers to keep, a pattern; repeatable.", show_default="none")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings with quant.include, as of search.", show_default="none")
    ] = None,
    digits: Annotated[
        bool, typer.Option("--digits", help="Let the first layer read a multi-term FP4 encoding of the image (unet).")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of everything drawn.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Checkpoint to write.", show_default="nvfp4-METHOD.safetensors beside the source"),
    ] = None,
    model: NamedModelOption = None,
) -> None:
    """Write an NVFP4 checkpoint that export, bench and predict take like a trained one."""
    expect(model)
    import torch

    from fp4deploy import provenance
    from fp4deploy.bench.locate import data_of
    from fp4deploy.ptq.checkpoint import calibration_images, quantize_checkpoint
    from fp4deploy.ptq.methods import find_method

    find_method(method)
    if config is not None:
        include, exclude = _layers(config, include, exclude)
    source = checkpoint or _latest()
    if source.suffix != ".safetensors":
        raise InputError(f"quantize takes a checkpoint (.safetensors), not {source}. Write one with: fp4deploy train")
    target = out or source.with_name(f"nvfp4-{method.replace('/', 'o')}.safetensors")
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError(f"--out is the FP16 checkpoint {source} itself, which would be lost. Give another file.")
    where = data or data_of(source)
    result = quantize_checkpoint(
        source,
        calibration_images(source, where, images, batch),
        target,
        method,
        device="cuda" if torch.cuda.is_available() else "cpu",
        digits=digits,
        correction=correction,
        activations=activations,
        iterations=iterations,
        include=tuple(include) if include else None,
        exclude=tuple(exclude) if exclude else None,
        seed=seed,
        say=note,
    )
    provenance.record("quantize", target, [source, where])
    done(
        f"{shown(target)} ({method}, correction {correction}, {result.images} images, {result.seconds:.1f} s)",
        checkpoint=str(target),
        method=method,
        correction=correction,
        images=result.images,
        seconds=round(result.seconds, 3),
    )
    note("Compare it with: fp4deploy bench --engine FILE --baseline fp16; export it with: fp4deploy export FILE")


def _layers(
    config: Path, include: list[str] | None, exclude: list[str] | None
) -> tuple[list[str] | None, list[str] | None]:
    """The choice of layers in a settings file."""
    from fp4deploy.train import load_config

    if include or exclude:
        raise InputError("--config brings its own choice of layers: leave out --include and --exclude.")
    chosen = load_config(config, []).quant
    if chosen.include is None and chosen.exclude is None:
        raise InputError(f"{config} chooses no layers: it has neither quant.include nor quant.exclude.")
    return chosen.include, chosen.exclude


def _latest() -> Path:
    run = latest_run()
    path = run.checkpoint("fp16")
    if not path.is_file():
        raise InputError(f"{shown(run.path)} has no FP16 checkpoint. Train one with: fp4deploy train --models fp16")
    note(f"Taking {shown(path)}.")
    return path
