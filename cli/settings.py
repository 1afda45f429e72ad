"""Shared by train and run: their common options, flags to settings, names to models, the data a run trains on."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4deploy.errors import InputError, UnavailableError, suggest
from fp4deploy.runs import DEFAULT_MODELS, MODELS, Run, create_run, hold, require_new

from . import completion
from .console import note, shown

if TYPE_CHECKING:
    from fp4deploy.train import Config

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


def use_device(value: str | None) -> str | None:
    """Let torch see the device of `--device` and no other, here (torch is not imported yet) and in children.

    Raises:
        InputError: it is no device.
        UnavailableError: it is a GPU, and there is none of that number.
    """
    if value is None:
        return None
    if not _DEVICE.fullmatch(value):
        raise InputError(f"--device is '{value}'; it takes cpu, cuda, or one GPU such as cuda:1.")
    _, _, number = value.partition(":")
    if value == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return value
    if number:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = number if seen is None else (seen.split(",") + [""] * int(number))[int(number)]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError(f"--device is {value}, and torch sees no such GPU here. What it sees: fp4deploy doctor")
    return value


DataOption = Annotated[Path | None, typer.Option("--data", help="Dataset folder.", show_default="generated shapes")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Network: unet:0.5, smp:Unet/resnet34, torchvision:NAME, monai:NAME, timm:NAME, nnunet:FOLDER, "
        "net.py:factory.",
        show_default="unet",
    ),
]
NamedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="The checkpoint's network; needed for one in your own code.", show_default="as the file says"
    ),
]
REST_HELP = "Precision of all that is not quantised"
REST_DEFAULT = "as the checkpoint says, fp16"
RestOption = Annotated[
    Literal["fp16", "bf16", "fp32"] | None,
    typer.Option("--rest", help=f"{REST_HELP}.", show_default=REST_DEFAULT),
]
ExportedRestOption = Annotated[
    Literal["auto", "fp16", "bf16", "fp32"] | None,
    typer.Option(
        "--rest",
        help=f"{REST_HELP}; auto: fp16, with fp32 for modules that leave its range on --data, bf16 where layers do.",
        show_default=REST_DEFAULT,
    ),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network", help="The checkpoint's network; needed for one in your own code.", show_default="as the file says"
    ),
]


def _compile(value: bool) -> bool:
    """Here and in children; as where FP4DEPLOY_COMPILE=off was set."""
    if not value:
        os.environ["FP4DEPLOY_COMPILE"] = "off"
    return value


CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="On a GPU compile packed networks where that is faster: up to 90 s once for each size.",
        callback=_compile,
    ),
]
JsonOutOption = Annotated[
    str | None,
    typer.Option("--json", help="Write the results as JSON; alone or with - on stdout.", show_default="no JSON"),
]
MODELS_HELP = f"Any of {', '.join(MODELS)}, in order."
DEFAULT = ",".join(DEFAULT_MODELS)
ModelsOption = Annotated[str, typer.Option("--models", help=MODELS_HELP, autocompletion=completion.models)]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML settings.", show_default="built in")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Setting such as train.lr=1e-3; repeatable. All: fp4deploy settings.",
        show_default="none",
        autocompletion=completion.settings,
    ),
]


@dataclass(frozen=True)
class SettingOptions:
    """Options that are settings, and where others come from."""

    data: DataOption = None
    task: Annotated[
        Literal["semantic", "instance", "detection", "classification"] | None,
        typer.Option(
            "--task",
            help="Segment classes (semantic) or objects (instance), find boxes (detection), name images "
            "(classification).",
            show_default="semantic",
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="Quantisation recipe.", show_default="nvfp4_qat", autocompletion=completion.recipes
        ),
    ] = None
    classes: Annotated[
        str | None,
        typer.Option(
            "--classes", help="Classes to learn: a,b,c.", show_default="all", autocompletion=completion.classes
        ),
    ] = None
    config: ConfigOption = None
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", min=1, help="Epochs of fp16; train.epochs.", show_default="14"),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Images a step and process; train.batch_size.", show_default="8"),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            "--size", help="Model input, HxW, or DxHxW of volumes; data.height, data.width.", show_default="96x96"
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="cpu, cuda, or one GPU: cuda:1.",
            show_default="cuda where there is one",
            callback=use_device,
        ),
    ] = None
    sets: SetOption = None
    model: ModelOption = None


@dataclass(frozen=True)
class TrainingOptions(SettingOptions):
    """What commands take that train into a run."""

    out: Annotated[Path | None, typer.Option("--out", help="Run folder to create.", show_default="runs/<time>")] = None
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help=MODELS_HELP,
            show_default=f"{DEFAULT}; with --resume those the run was asked for",
            autocompletion=completion.models,
        ),
    ] = None
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Do not start NVFP4 from the FP16 checkpoint.")
    ] = False
    telemetry_every: Annotated[
        int | None,
        typer.Option(
            "--telemetry-every",
            min=0,
            help="Steps between two samples of every layer's statistics; 0: none.",
            show_default="200",
        ),
    ] = None
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            "--tracker",
            help="tensorboard, wandb or mlflow, in addition to telemetry.jsonl; repeatable.",
            show_default="jsonl",
        ),
    ] = None
    init: Annotated[
        Path | None,
        typer.Option(
            "--init", help="Initial weights: .safetensors, or .pth of tensors.", show_default="random weights"
        ),
    ] = None


FLAGS = {
    "model": "model.spec", "init": "model.init", "data": "data.root", "task": "task", "recipe": "recipe",
    "epochs": "train.epochs", "batch_size": "train.batch_size", "telemetry_every": "telemetry.every",
}  # fmt: skip
GENERATED = "data"  # folder inside the run
SHAPES = {"train": 400, "val": 100, "size": 96, "seed": 0}  # scenes and pixels


def parse_models(text: str) -> tuple[str, ...]:
    """Split a list such as "fp16,nvfp4" and check the names.

    Raises:
        InputError: a name is unknown or repeated, or there is none.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in MODELS:
            raise InputError(f"Unknown model '{name}'.{suggest(name, MODELS)} Valid models: {', '.join(MODELS)}.")
    if not names or len(set(names)) != len(names):
        raise InputError(f"--models takes a comma-separated list of distinct models out of: {', '.join(MODELS)}.")
    return names


def parse_size(text: str | None, option: str = "--size") -> tuple[int, int] | None:
    """Height and width of "HxW", or of "N" for a square, in pixels; `option` begins the messages.

    Raises:
        InputError: as of `parse_axes`.
    """
    found = parse_axes(text, option, volumes=False)
    return None if found is None else (found[0], found[1])


def parse_axes(text: str | None, option: str = "--size", volumes: bool = True) -> tuple[int, ...] | None:
    """`parse_size`, or with `volumes` depth, height and width of "DxHxW".

    Raises:
        InputError: the text is not of that form, or a side is beyond the limit.

    >>> parse_size("352x480"), parse_size("96")
    ((352, 480), (96, 96))
    """
    if text is None:
        return None
    from fp4deploy.models.volumes import MAX_PIXELS

    numbers = text.lower().split("x")
    axes = (1, 2, 3) if volumes else (1, 2)
    whole = all(re.fullmatch("[0-9]{1,5}", number) and int(number) > 0 for number in numbers)
    if len(numbers) not in axes or not whole:
        more = "; of volumes DEPTHxHEIGHTxWIDTH, such as 32x48x32" if volumes else ""
        raise InputError(
            f"{option} takes HEIGHTxWIDTH in pixels, such as 352x480, or one number for a square{more}, not "
            f"'{text[:60]}'."
        )
    if max(map(int, numbers)) > MAX_PIXELS:
        raise InputError(f"{option} is {text}, and a side has at most {MAX_PIXELS} pixels.")
    return tuple(map(int, numbers if len(numbers) > 1 else numbers * 2))


def settings(options: SettingOptions) -> Config:
    """Read the configuration; options are settings like any `--set` (quoted, as values are YAML), and later ones win.

    Raises:
        InputError: listing every wrong setting at once.
    """
    from fp4deploy.models.spec import name_model
    from fp4deploy.train import load_config

    values: dict[str, object] = {key: getattr(options, name, None) for name, key in FLAGS.items()}
    pixels = parse_axes(options.size)
    if options.classes is not None:
        values["data.classes"] = [name.strip() for name in options.classes.split(",") if name.strip()]
    if isinstance(options, TrainingOptions):
        if options.tracker:
            values["telemetry.trackers"] = list(dict.fromkeys(["jsonl", *options.tracker]))
        if options.from_scratch:
            values["train.from_scratch"] = True
    if pixels is not None:
        keys = ("data.depth", "data.height", "data.width")[-len(pixels) :]
        values |= zip(keys, pixels, strict=True)
    given = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items() if value is not None]
    given += options.sets or []
    for text in named_models(given):
        name_model(text)
    return load_config(options.config, given)


def require_used(epochs: int | None, config: Config, models: tuple[str, ...]) -> None:
    """Refuse --epochs where none of these models trains for `train.epochs`.

    Raises:
        InputError: all of them are fine-tuned, which `train.finetune_epochs` counts.
    """
    if epochs is not None and "fp16" not in models and not config.train.from_scratch:
        raise InputError(
            f"--epochs counts those of fp16, and only {', '.join(models)} is trained. For its fine-tuning: "
            f"--set train.finetune_epochs={epochs}"
        )


def named_models(sets: list[str]) -> tuple[str, ...]:
    """The model that the user names on the command line, whose code may be imported; a settings file names none."""
    texts = [text.partition("=")[2].strip("\"' ") for text in sets if text.startswith("model.spec=")]
    return tuple(texts[-1:])


def expect(model: str | None, option: str = "--model") -> None:
    """What `--model` of a command that reads checkpoints means, or its option of another name: `expect_model`."""
    from fp4deploy.models.spec import expect_model

    expect_model(model, option)


@contextmanager
def new_run(config: Config, out: Path | None) -> Iterator[tuple[Run, Config]]:
    """Create a run's folder and hold it; where the configuration names no data, generate shapes into it.

    A run that fails before it has anything worth keeping is removed.

    Raises:
        InputError: the folder exists, is in use, or cannot be written.
    """
    from fp4deploy.train.distributed import from_first

    with ExitStack() as stack:
        run = Run(from_first(partial(_make_run, config, out, stack)))
        if config.data.root is None:
            folder = str(run.path / GENERATED)
            config = config.model_copy(update={"data": config.data.model_copy(update={"root": folder})})
        yield run, config


def _make_run(config: Config, out: Path | None, stack: ExitStack) -> Path:
    from fp4deploy.bench.commands import record

    existed = out is not None and out.is_dir()
    run = create_run(out)
    stack.enter_context(hold(run.path))
    require_new(run.path)  # another process may have used it before it was held
    stack.enter_context(tidy_on_failure(run, existed))
    note(f"Run folder: {shown(run.path)}")
    record(run)
    if config.data.root is None:
        generate(run.path / GENERATED)
    return run.path


def generate(folder: Path) -> None:
    """Write the shapes that training uses when it is given no data."""
    from fp4deploy.data import generate_shapes
    from fp4deploy.system.progress import progress

    note(f"No --data given: generating {SHAPES['train']} training and {SHAPES['val']} validation scenes of shapes.")
    with progress("drawing scenes"):
        generate_shapes(folder, **SHAPES)


@contextmanager
def tidy_on_failure(run: Run, existed: bool) -> Iterator[None]:
    """Remove a run that fails before it holds anything worth keeping; the folder too, unless it existed before."""
    try:
        yield
    except BaseException as error:
        resumable = isinstance(error, KeyboardInterrupt) and run.config_path.is_file()
        if not resumable and not any(run.path.glob("*/*.safetensors")) and not any(run.path.glob("*/state/*")):
            for path in run.path.iterdir() if existed else [run.path]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        raise
