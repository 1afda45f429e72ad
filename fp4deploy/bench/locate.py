"""Finding what the user means: an artefact by its bare name, the run a file belongs to, the data a run was made of."""

from __future__ import annotations

from pathlib import Path

from fp4deploy.bench.hub import from_hub, is_of_hub
from fp4deploy.bench.runtimes.open import RUNTIMES
from fp4deploy.errors import InputError, suggest
from fp4deploy.naming import model_stem
from fp4deploy.runs import RUNS, Run, latest_run, run_of


def run_artifacts(run: Run) -> dict[str, Path]:
    """Every artefact of a run by file name, checkpoints as "fp16.safetensors"; canonical ONNX before portable."""
    found = {f"{model}.safetensors": run.checkpoint(model) for model in run.models()}
    for folder, pattern in ((run.export_dir, "*.onnx"), (run.export_dir, "*.fp4"), (run.engine_dir, "*.plan")):
        found |= {path.name: path for path in sorted(folder.glob(pattern)) if not path.name.startswith(".")}
    return found


def find_artifact(name: Path) -> Path:
    """Return `name` where it is a file, or one of the hub (`hub`), else the latest run's artefact of that name, with or
    without its network's.

    "my_net.nvfp4.onnx" and "nvfp4.onnx" are the same file of a run of my_net, "fp16" is the checkpoint of a model.

    Raises:
        InputError: neither exists; the message lists what the latest run has.
    """
    if is_of_hub(name):
        return from_hub(name)
    if name.is_file():
        return name
    if name.is_dir():
        raise InputError(f"{name} is a folder; give a file: {', '.join(RUNTIMES)}.")
    if name.suffix not in ("", *RUNTIMES) or name.name != str(name):
        raise _missing(name)
    found = _of_latest_run(name.name) or _of_latest_run(f"{name.name}.safetensors")
    if found is None:
        raise _missing(name)
    return found


def or_of_latest_run(name: Path) -> Path:
    """`name`, or where nothing has that name the latest run's artefact of that name, if there is one."""
    if is_of_hub(name):
        return from_hub(name)
    if name.exists() or name.name != str(name):
        return name
    return _of_latest_run(name.name) or name


def _of_latest_run(name: str) -> Path | None:
    try:
        run = latest_run()
        artifacts = run_artifacts(run)
        return artifacts.get(name) or artifacts.get(f"{run.network()}.{name}")
    except InputError:
        return None


def _missing(name: Path) -> InputError:
    """There is no such artefact: what is near that name, here and in the latest run, and what would make it."""
    suffixes = f"Taken are {', '.join(RUNTIMES)} files, by path or by their name in the latest run"
    near = suggest(name.name, _artifacts_in(name.parent))
    try:
        run = latest_run()
    except InputError:
        return InputError(f"There is no file {name}.{near} {suffixes}, and there is no run under {RUNS}/.")
    artifacts = run_artifacts(run)
    if not artifacts:
        return InputError(f"There is no file {name}.{near} {suffixes}, and {run.path} has no artefacts yet.")
    near = near or suggest(name.name, [*artifacts, *(Path(each).stem for each in artifacts)])
    return InputError(
        f"There is no file {name}.{near} {run.path} has: {', '.join(artifacts)}. {_next_command(name, run)}"
    )


def _artifacts_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.suffix in RUNTIMES]
    except OSError:
        return []


def _next_command(name: Path, run: Run) -> str:
    """What would make an artefact of this name from what the run has."""
    if name.suffix == ".fp4":
        return "Pack the models with: fp4deploy export --format packed"
    if name.suffix == ".safetensors" or name.suffix not in RUNTIMES:
        return "Name one of these, or the path of a file."
    if name.suffix != ".onnx" and any(run.export_dir.glob("*.onnx")):
        return "Make an engine with: fp4deploy build"
    built = ", then build an engine with: fp4deploy build" if name.suffix == ".plan" else ""
    return f"Export the models with: fp4deploy export{built}"


def model_of(path: Path, run: Run | None) -> str | None:
    """Name of the model an artefact was made of, by where it lies in its run; None outside one."""
    if run is None:
        return None
    path = Path(path).resolve()
    stem = model_stem(path)  # not "my_net.fp16.nvfp4", which `quantize` made of my_net.fp16.onnx
    for model in run.models():
        if path == run.checkpoint(model).resolve() or stem in run.stems(model):
            return model
    return None


def data_of(path: Path) -> Path:
    """The dataset of the run that holds `path`, or of the latest run.

    Raises:
        InputError: there is no run to take it from, or its data is gone.
    """
    from fp4deploy.train import load_config

    try:
        run = run_of(path) or latest_run()
    except InputError:
        raise InputError(f"{path} belongs to no run, so give the data to measure on: --data DIR") from None
    root_of_data = load_config(run.config_path, []).data.root
    for data in (root_of_data, run.path / "data"):
        if data is not None and Path(data).is_dir():
            return Path(data)
    raise InputError(f"The data of {run.path} is not there any more ({root_of_data}). Give it with: --data DIR")
