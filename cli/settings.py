"""Shared by train and run: their common options, flags to settings, names to models, the data a run trains on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4deploy.errors import InputError, suggest
from fp4deploy.runs import DEFAULT_MODELS, MODELS, Run, create_run, hold, require_new

from .console import note, shown

if TYPE_CHECKING:
    from fp4deploy.train import Config

DataOption = Annotated[Path | None, typer.Option("--data", help="Dataset folder.", show_default="generated shapes")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Network: unet:0.5, smp:Unet/resnet34, torchvision:NAME, monai:NAME, timm:NAME, net.py:factory.",
        show_default="unet",
    ),
]
NamedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="The checkpoint's network; needed for one in your own code.", show_default="as the file says"
    ),
]
InitOption = Annotated[
    Path | None,
    typer.Option("--init", help="Initial weights: .safetensors, or .pth of tensors.", show_default="random weights"),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Run folder to create.", show_default="runs/<time>")]
MODELS_HELP = f"Any of {', '.join(MODELS)}, in order."
DEFAULT = ",".join(DEFAULT_MODELS)
ModelsOption = Annotated[str, typer.Option("--models", help=MODELS_HELP)]
TaskOption = Annotated[
    Literal["semantic", "instance"] | None,
    typer.Option("--task", help="Segment classes (semantic) or objects (instance).", show_default="semantic"),
]
RecipeOption = Annotated[str | None, typer.Option("--recipe", help="Quantisation recipe.", show_default="nvfp4_qat")]
ClassesOption = Annotated[str | None, typer.Option("--classes", help="Classes to learn: a,b,c.", show_default="all")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML settings.", show_default="built in")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting such as train.epochs=20; repeatable.", show_default="none"),
]
EveryOption = Annotated[
    int | None,
    typer.Option(
        "--telemetry-every",
        min=0,
        help="Steps between two samples of every layer's statistics; 0: none.",
        show_default="200",
    ),
]
TrackerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker", help="tensorboard or wandb, in addition to telemetry.jsonl; repeatable.", show_default="jsonl"
    ),
]
ScratchOption = Annotated[bool, typer.Option("--from-scratch", help="Do not start NVFP4 from the FP16 checkpoint.")]

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


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Height and width of "HxW", in pixels.

    Raises:
        InputError: the text is not of that form.
    """
    if text is None:
        return None
    numbers = text.lower().split("x")
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise InputError(f"--size takes HEIGHTxWIDTH in pixels, such as 352x480, not '{text}'.")
    return int(numbers[0]), int(numbers[1])


def settings(
    config: Path | None,
    sets: list[str] | None,
    *,
    data: Path | None = None,
    classes: str | None = None,
    recipe: str | None = None,
    task: str | None = None,
    every: int | None = None,
    trackers: list[str] | None = None,
    model: str | None = None,
    init: Path | None = None,
) -> Config:
    """Read the configuration; flags are settings like any `--set` (quoted, as values are YAML), and later ones win.

    Raises:
        InputError: listing every wrong setting at once.
    """
    from fp4deploy.train import load_config

    flags = []
    if model is not None:
        flags.append(f"model.spec={json.dumps(model)}")
    if init is not None:
        flags.append(f"model.init={json.dumps(str(init))}")
    name_models([*flags, *(sets or [])])
    if data is not None:
        flags.append(f"data.root={json.dumps(str(data))}")
    if classes is not None:
        names = [name.strip() for name in classes.split(",") if name.strip()]
        flags.append(f"data.classes={json.dumps(names)}")
    if task is not None:
        flags.append(f"task={task}")
    if recipe is not None:
        flags.append(f"recipe={json.dumps(recipe)}")
    if every is not None:
        flags.append(f"telemetry.every={every}")
    if trackers:
        flags.append(f"telemetry.trackers={json.dumps(list(dict.fromkeys(['jsonl', *trackers])))}")
    return load_config(config, [*flags, *(sets or [])])


def name_models(sets: list[str]) -> None:
    """Let the models that the user names on the command line be imported; a settings file names none."""
    texts = [text.partition("=")[2].strip("\"' ") for text in sets if text.startswith("model.spec=")]
    if texts:
        from fp4deploy.models.spec import name_model

        name_model(texts[-1])


def expect(model: str | None) -> None:
    """What `--model` of a command that reads checkpoints means: `models.spec.expect_model`."""
    if model is not None:
        from fp4deploy.models.spec import expect_model

        expect_model(model)


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

    note(f"No --data given: generating {SHAPES['train']} training and {SHAPES['val']} validation scenes of shapes.")
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
