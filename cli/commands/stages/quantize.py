"""`fp4deploy quantize`: an FP16 checkpoint, or a plain ONNX file, to NVFP4 on a few images, without training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4deploy.errors import InputError
from fp4deploy.precisions import LAYER_FORMATS
from fp4deploy.runs import latest_run

from ...artifacts import next_commands
from ...console import done, note, shown
from ...settings import NamedModelOption, RestOption, expect, parse_size
from . import nnunet
from .engine_formats import ArchOption, ForOption, layers_in_fp8, target_of
from .quantize_onnx import change_of, meanings, of_onnx, rgb

Layers = dict[str, tuple[str, ...]]  # option -> its patterns, of those that are given

PATTERNS = {
    "include": ("Layers to quantise", "the default choice"),
    "exclude": ("Layers to keep", "none"),
    **{name: (f"Quantised layers that are {name.upper()}", "none") for name in LAYER_FORMATS},
}
LayerOptions = dataclasses.make_dataclass(
    "LayerOptions",
    [
        (
            name,
            Annotated[
                list[str] | None,
                typer.Option(f"--{name}", help=f"{which}, a pattern; repeatable.", show_default=usual),
            ],
            None,
        )
        for name, (which, usual) in PATTERNS.items()
    ],
    frozen=True,
)

MAX_IMAGES = 256


def quantize(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="FP16 checkpoint, .onnx file, results folder of nnU-Net, or with --model a state dict of PyTorch.",
            show_default="fp16 of the latest run",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Dataset, a folder of images without labels, or nnU-Net's raw data set.",
            show_default="what the run was trained on",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help=f"amax, percentile, mse, 4/6, sweep, gptq, adaround, faar, brecq, {', '.join(LAYER_FORMATS)}.",
        ),
    ] = "gptq",
    correction: Annotated[str, typer.Option("--correction", help="none, bias, norm or both.")] = "norm",
    activations: Annotated[
        str | None,
        typer.Option("--activations", help="amax, percentile or mse.", show_default="as the method has it"),
    ] = None,
    images: Annotated[
        int, typer.Option("--images", min=1, max=MAX_IMAGES, help="Images of the training split to calibrate on.")
    ] = 64,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of one forward pass.")] = 4,
    iterations: Annotated[
        int, typer.Option("--iterations", min=1, help="Training steps of a unit (adaround, faar, brecq).")
    ] = 400,
    named: LayerOptions = LayerOptions(),  # type: ignore[valid-type]  # noqa: B008  which is frozen
    fp16_macs: Annotated[
        float,
        typer.Option(
            "--fp16-macs",
            min=0,
            max=1,
            help="Share of the multiply-accumulates that stays in FP16: the layers that lose most in FP4, measured.",
        ),
    ] = 0.0,
    fp8_macs: Annotated[
        float, typer.Option("--fp8-macs", min=0, max=1, help="Likewise, of layers that are FP8; after --fp16-macs.")
    ] = 0.0,
    fp4_macs: Annotated[
        float,
        typer.Option(
            "--fp4-macs",
            min=0,
            max=0.999,
            help="Least share of all of them that stays in FP4; alone, FP8 may have the rest.",
        ),
    ] = 0.0,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings with quant.include, as of search.", show_default="none")
    ] = None,
    digits: Annotated[
        bool, typer.Option("--digits", help="Let the first layer read a multi-term FP4 encoding of the image (unet).")
    ] = False,
    rest: RestOption = None,
    compare: Annotated[
        int,
        typer.Option(
            "--compare",
            min=0,
            max=MAX_IMAGES,
            help="Validation images on which the result is compared with the checkpoint; 0: it is not.",
        ),
    ] = 32,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of everything drawn.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File to write; of nnU-Net the folder.",
            show_default="beside the source nvfp4-METHOD.safetensors; of NAME.pth NAME.nvfp4-METHOD.safetensors, of "
            "NAME.onnx NAME.nvfp4.onnx",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="HxW in pixels, of a state dict, or an .onnx file that leaves it open.",
            show_default="that of the images, at most 512; the file's own",
        ),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option("--mean", help="R,G,B that an .onnx file or state dict expects.", show_default="ImageNet's"),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option("--std", help="R,G,B that an .onnx file or state dict expects.", show_default="ImageNet's"),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option("--classes", help="Names of a state dict's classes: a,b,c.", show_default="the dataset's"),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="model.args.NAME=VALUE of a state dict's network; repeatable.", show_default="none"),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--outputs",
            help="What the outputs of an .onnx file are: classes, classes:AXIS, values or values:BOUND, or "
            "NAME=classes of one; repeatable.",
            show_default="classes and values",
        ),
    ] = None,
    fold: nnunet.FoldOption = None,
    model: NamedModelOption = None,
    engine: ForOption = None,
    arch: ArchOption = None,
) -> None:
    """Write an NVFP4 checkpoint that export, bench and predict take like a trained one; of ONNX the canonical file."""
    expect(model)
    aim = target_of(engine, arch)
    settings = {"correction": correction, "activations": activations, "iterations": iterations, "seed": seed}
    layers = {name: tuple(patterns) for name, patterns in vars(named).items() if patterns}
    if aim is not None and checkpoint is not None and (checkpoint.is_dir() or checkpoint.suffix == ".onnx"):
        raise InputError("--for is for checkpoints. A folder of nnU-Net takes --fp8; an .onnx file has its own layers.")
    of_checkpoints = checkpoint is None or not (nnunet.is_folder(checkpoint) or checkpoint.suffix == ".onnx")
    if (fp16_macs or fp8_macs or fp4_macs) and not of_checkpoints:
        raise InputError(
            "--fp16-macs, --fp8-macs and --fp4-macs are for checkpoints. Name layers with --exclude and --fp8."
        )
    if checkpoint is not None and nnunet.is_folder(checkpoint):
        if config is not None or digits or any(each is not None for each in (size, mean, std, outputs)):
            raise InputError(
                "--config, --digits, --size, --mean, --std and --outputs are not for a folder of nnU-Net, which says "
                "what its networks read; it takes --include, --exclude, --fp8 and the like, and --fold."
            )
        given: dict[str, Any] = {name: layers.pop(name, None) for name in ("include", "exclude")}
        given |= {"formats": layers, "rest": rest, "batch": batch, **settings}
        nnunet.quantize(checkpoint, fold, data, out, method=method, patches=images, **given)
        return
    if fold:
        raise InputError("--fold is for a results folder of nnU-Net.")
    if checkpoint is not None and checkpoint.suffix == ".onnx":
        if config is not None or digits or rest is not None:
            raise InputError(
                "--config, --digits and --rest are for checkpoints; an .onnx file takes --include and --exclude."
            )
        chosen = settings | layers | {"outputs": meanings(outputs)}
        of_onnx(checkpoint, data, out, method, images, batch, parse_size(size), (mean, std), compare, chosen)
        return
    if outputs is not None:
        raise InputError("--outputs is for .onnx files: the output of a checkpoint is a map of classes.")
    import torch

    from fp4deploy import provenance
    from fp4deploy.bench.locate import data_of
    from fp4deploy.models.state_dict import is_state_dict
    from fp4deploy.ptq.checkpoint import calibration_images, quantize_checkpoint
    from fp4deploy.ptq.methods import find_method
    from fp4deploy.system.files import require_writable
    from fp4deploy.system.progress import progress

    find_method(method)
    if config is not None:
        layers = _layers(config, bool(layers))
    source = checkpoint or _latest()
    if is_state_dict(source):
        source = _of_state_dict(source, model, sets, data, size, (mean, std), classes)
    elif any(each is not None for each in (size, mean, std, classes, sets)):
        raise InputError(
            "--size, --mean, --std, --classes and --set are for .onnx files and state dicts of PyTorch: a checkpoint "
            "of fp4deploy says them itself."
        )
    if source.suffix != ".safetensors":
        raise InputError(
            f"quantize takes a checkpoint (.safetensors), an ONNX file (.onnx) or a state dict of PyTorch (.pth), not "
            f"{source}. Write one with: fp4deploy train"
        )
    target = out or beside(source, method)
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError(f"--out is the FP16 checkpoint {source} itself, which would be lost. Give another file.")
    require_writable(target)
    where = data or data_of(source)
    if aim is not None:
        layers["fp8"] = _in_fp8(source, aim, layers, find_method(method).recipe, digits, rest)
    with progress("reading images") as bar:
        result = quantize_checkpoint(
            source,
            calibration_images(source, where, images, batch),
            target,
            method,
            device="cuda" if torch.cuda.is_available() else "cpu",
            digits=digits,
            rest=rest,
            target=aim,
            say=note,
            progress=bar.phase,
            fp16_macs=fp16_macs,
            fp8_macs=fp8_macs,
            fp4_macs=fp4_macs,
            **settings,
            **layers,
        )
    provenance.record("quantize", target, [source, where])
    change = change_of(source, target, where, compare)
    done(
        f"{shown(target)} ({method}, correction {correction}, {result.images} images, {result.seconds:.1f} s)",
        **({"change": dataclasses.asdict(change)} if change else {}),
        checkpoint=str(target),
        method=method,
        correction=correction,
        images=result.images,
        seconds=round(result.seconds, 3),
    )
    if change is not None:
        note(f"{shown(target)}: {change.sentence(shown(source))}")
    note(next_commands(target, source, where, model, given=data is not None))


def _in_fp8(source: Path, target: str, layers: Layers, recipe: str, digits: bool, rest: str | None) -> tuple[str, ...]:
    """The layers of a checkpoint that are to be FP8 for an engine."""
    from fp4deploy.models import read_card
    from fp4deploy.ptq.checkpoint import quantized_card
    from fp4deploy.rest import rest_of

    if "fp8" in layers:
        raise InputError("--for chooses the layers in FP8, and --fp8 or --config names some. Leave out one of them.")
    card = read_card(source)
    card = dataclasses.replace(card, digits=digits or card.digits, rest=rest_of(rest or card).name)
    return layers_in_fp8(quantized_card(card, recipe, **layers), target)


def _of_state_dict(
    source: Path,
    model: str | None,
    sets: list[str] | None,
    data: Path | None,
    size: str | None,
    normalisation: tuple[str | None, str | None],
    classes: str | None,
) -> Path:
    """The FP16 checkpoint NAME.fp16.safetensors of a state dict, written beside it."""
    from fp4deploy import provenance
    from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, PhotoDataset, are_photos, open_dataset, usual_size
    from fp4deploy.models.spec import parse_spec
    from fp4deploy.models.state_dict import ADVICE, checkpoint_of, is_checkpoint_of
    from fp4deploy.system.files import require_writable
    from fp4deploy.train import load_config

    if not source.is_file():
        raise InputError(f"There is no file {source} with weights.")
    if model is None:
        raise InputError(f"{source} holds weights alone. {ADVICE}")
    if data is None:
        raise InputError(f"{source} does not say what its images are. Give a dataset or a folder of images: --data DIR")
    chosen = load_config(None, sets or []).model
    images = PhotoDataset(data) if are_photos(data) or not data.is_dir() else open_dataset(data, "train")
    pixels = parse_size(size) or usual_size(images)
    target = source.with_name(f"{source.stem.removesuffix('.fp16')}.fp16.safetensors")
    if target.exists() and not is_checkpoint_of(target, source):
        raise InputError(f"{target} would be replaced, and was not made of {source.name}. Give it another name.")
    require_writable(target)
    mean, std = (rgb(text, usual) for text, usual in zip(normalisation, (IMAGE_MEAN, IMAGE_STD), strict=True))
    names = tuple(name.strip() for name in classes.split(",") if name.strip()) if classes else images.class_names
    spec = parse_spec(model, chosen.args, chosen.output)
    said = checkpoint_of(source, spec, target, pixels, mean, std, names, images.background and not classes)
    provenance.record("quantize", target, [source])
    note(said)
    taken = [f"images of {pixels[0]}x{pixels[1]} (HxW{'' if size else '; another: --size'})"]
    taken += [] if any(normalisation) else ["ImageNet's mean and standard deviation (others: --mean, --std)"]
    note(f"{shown(target)} is its FP16 checkpoint: {', '.join(taken)}.")
    return target


def beside(source: Path, method: str) -> Path:
    """The file that is written without --out.

    >>> str(beside(Path("fp16.safetensors"), "4/6")), str(beside(Path("net.fp16.safetensors"), "4/6"))
    ('nvfp4-4o6.safetensors', 'net.nvfp4-4o6.safetensors')
    """
    network, dot, precision = source.stem.rpartition(".")
    prefix = f"{network}{dot}" if precision == "fp16" else ""
    return source.with_name(f"{prefix}nvfp4-{method.replace('/', 'o')}.safetensors")


def _layers(config: Path, given: bool) -> Layers:
    """The choice of layers in a settings file."""
    from fp4deploy.train import load_config

    if given:
        raise InputError(f"--config brings its own choice of layers: leave out --{', --'.join(PATTERNS)}.")
    chosen = load_config(config, []).quant.selections
    if not chosen:
        raise InputError(f"{config} chooses no layers: it has none of quant.{', quant.'.join(PATTERNS)}.")
    return {name: tuple(patterns) for name, patterns in chosen.items() if patterns}


def _latest() -> Path:
    run = latest_run()
    path = run.checkpoint("fp16")
    if not path.is_file():
        raise InputError(f"{shown(run.path)} has no FP16 checkpoint. Train one with: fp4deploy train --models fp16")
    note(f"Taking {shown(path)}.")
    return path
