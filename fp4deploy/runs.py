"""Run folders: where training, export, build and bench find each other's files.

    runs/NAME/
      config.yaml                     resolved configuration
      models.json                     the models it was asked to train, which --resume continues
      commands.jsonl                  what was called, when, on what machine
      <model>/best.safetensors        checkpoint with the best validation mIoU
      <model>/metrics.jsonl           one line an epoch
      <model>/telemetry.jsonl         statistics of every layer, one line a snapshot
      <model>/state/                  everything an exact resume needs
      plots/heatmaps/<model>/         of the telemetry; plots/kurtosis/<model>/ of the study
      export/my_net.nvfp4.onnx        of the NVFP4 model of the network my_net; and my_net.fp16.onnx (`naming`)
      export/my_net.nvfp4.fp4         the same, packed
      engines/my_net.nvfp4.sm120.plan for a GPU; and its ledger, my_net.nvfp4.sm120.ledger.json
      bench.jsonl                     what bench measured; provenance.jsonl: what was made of which
      report.{json,md,html}
      .lock                           held by the process that trains, and naming it

A run never overwrites another, and every file is written under a temporary name and renamed, so that a full disk or
Ctrl-C leaves the previous version whole.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4deploy.errors import InputError
from fp4deploy.naming import NETWORK, built_name, model_stem, network_name, stems
from fp4deploy.system.files import write_whole

if TYPE_CHECKING:
    from filelock import BaseFileLock

MODELS = ("fp16", "nvfp4", "fp16_control", "nvfp4_ptq")
DEFAULT_MODELS = ("fp16", "nvfp4")  # trained by default
RUNS = Path("runs")
LOCK = ".lock"
OUTLIVING = 30  # seconds; torch's loader workers look for their parent every 5
_held: set[str] = set()


class Run:
    """The folder of one run; only names paths, creates nothing by itself."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.models_path = self.path / "models.json"
        self.export_dir = self.path / "export"
        self.engine_dir = self.path / "engines"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def model_dir(self, model: str) -> Path:
        """Folder of one trained model."""
        return self.path / model

    def checkpoint(self, model: str) -> Path:
        """Best checkpoint of one trained model (it may not exist yet)."""
        return self.model_dir(model) / "best.safetensors"

    def network(self) -> str:
        """What files call the network (`naming.network_name`)."""
        from fp4deploy.system.schema import read_yaml

        with suppress(InputError, TypeError, KeyError):
            return network_name(str(read_yaml(self.config_path)["model"]["spec"]))
        return NETWORK

    def stem(self, model: str) -> str:
        """File stem of what is written of one trained model."""
        return self.stems(model)[0]

    def stems(self, model: str) -> tuple[str, str]:
        """File stems that are read: of `stem`, and of older runs."""
        return stems(model, self.network())

    def exported(self, model: str, suffix: str = ".onnx") -> Path:
        """Where a model is exported to; suffix: ".onnx" or ".fp4"."""
        return self.export_dir / f"{self.stem(model)}{suffix}"

    def engine(self, model: str, arch: str) -> Path:
        """Where the engine of a model for a GPU is built."""
        return self.engine_dir / built_name(self.exported(model), arch)

    def engines(self, model: str) -> list[Path]:
        """The engines that a model has."""
        own = self.stems(model)
        return [path for path in sorted(self.engine_dir.glob("*.plan")) if model_stem(path) in own]

    def models(self) -> list[str]:
        """Names of the models that have a checkpoint, FP16 first."""
        return [model for model in MODELS if self.checkpoint(model).is_file()]

    def asked_models(self) -> tuple[str, ...]:
        """The models that trainings into this run were asked for, in their order; () where none has been noted.

        Raises:
            InputError: what was noted cannot be read.
        """
        if not self.models_path.is_file():
            return ()
        from fp4deploy.system.schema import read_json, validated

        try:
            names = validated(list[str], read_json(self.models_path), "models")
        except InputError as error:
            raise InputError(
                f"{self.models_path} is no list of models: {error} Remove it, and name --models."
            ) from None
        return tuple(name for name in names if name in MODELS)

    def ask_models(self, models: Iterable[str]) -> None:
        """Note that `models` are to be trained, after those requested before.

        Raises:
            InputError: the disk is full or the folder cannot be written.
        """
        write_whole(self.models_path, json.dumps(list(dict.fromkeys((*self.asked_models(), *models)))) + "\n")


def processes() -> int:
    """How many processes a launcher such as torchrun started together.

    Raises:
        InputError: its variable is no number.
    """
    return _launched("WORLD_SIZE", "1")


def is_first_process() -> bool:
    """Whether this process is alone, or the one of several that writes files and speaks.

    Raises:
        InputError: the launcher's variable is no number.
    """
    return _launched("RANK", "0") == 0


def _launched(variable: str, alone: str) -> int:
    text = os.environ.get(variable, alone)
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InputError(f"The environment variable {variable} is '{text}'; a launcher such as torchrun sets a number.")
    return int(text)


def create_run(out: Path | None = None, *, root: Path = RUNS) -> Run:
    """Create the folder of a new run: `out`, or `root`/<time>.

    Raises:
        InputError: `out` exists and is not an empty folder, or the folder cannot be made.
    """
    try:
        if out is None:
            return Run(_create_default(root))
        out = Path(out)
        require_new(out)
        out.mkdir(parents=True, exist_ok=True)
        return Run(out)
    except OSError as error:
        raise InputError(
            f"{error.filename or out or root} cannot be made: {error.strerror}. Choose another place with --out."
        ) from error


def _create_default(root: Path) -> Path:
    """A folder that no other process has: the one whose mkdir fails takes the next name."""
    root.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = root / (stamp if number == 1 else f"{stamp}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def require_new(out: Path) -> None:
    """Refuse a folder in which there is anything but the lock of a run that failed.

    Raises:
        InputError: there is.
    """
    if out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir())):
        raise InputError(
            f"{out} exists already, and a run never overwrites another. "
            "Give another --out, or continue that run with --resume."
        )


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep other processes from training into a folder; the first process of several holds it for all.

    The lock is on the file `.lock`, which says who has it. The system releases it with the last process that has the
    file open: after `kill -9` workers of the data loader may have it for some seconds more, which are waited for. A
    process may hold a folder twice.

    Raises:
        InputError: another process holds it, or it cannot be written.
    """
    key = os.path.realpath(folder)
    if key in _held or not is_first_process():
        yield
        return
    from filelock import FileLock

    lock = FileLock(Path(folder) / LOCK, timeout=0, thread_local=False)
    _acquire(Path(folder), lock)
    _held.add(key)
    try:
        yield
    finally:
        _held.discard(key)
        lock.release()


def _acquire(folder: Path, lock: BaseFileLock) -> None:
    from filelock import Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            if not _owner_is_dead(folder / LOCK):
                raise
            lock.acquire(timeout=OUTLIVING)
        _note_owner(folder / LOCK)
    except Timeout:
        owner = _owner(folder / LOCK)
        who = f"process {owner['pid']} on {owner['host']} ({owner['command']})" if owner else "another process"
        raise InputError(f"{folder} is in use by {who}. Wait until that ends, or choose another --out.") from None
    except NotImplementedError:
        return  # a file system without locks
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise InputError(
                f"{folder} cannot be written: {error.strerror or error}. Choose another place with --out."
            ) from error


def _note_owner(file: Path) -> None:
    about = {"pid": os.getpid(), "host": _host(), "command": shlex.join(sys.argv)[:200]}
    with suppress(OSError):
        descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as opened:
            opened.write(json.dumps(about) + "\n")


def _owner(file: Path) -> dict[str, Any] | None:
    from fp4deploy.system.schema import read_json, validated

    with suppress(InputError):
        found = validated(dict[str, Any], read_json(file), file)
        if type(found.get("pid")) is int and all(isinstance(found.get(key), str) for key in ("host", "command")):
            return {key: found[key] if key == "pid" else found[key][:200] for key in ("pid", "host", "command")}
    return None


def _owner_is_dead(file: Path) -> bool:
    owner = _owner(file)
    if owner is None or owner["host"] != _host() or os.name == "nt":
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, TypeError, OverflowError):
        return False
    return False


def open_run(path: Path) -> Run:
    """Open an existing run.

    Raises:
        InputError: `path` is not the folder of a run.
    """
    run = Run(Path(path))
    if not run.config_path.is_file():
        raise InputError(f"{path} is not a run: it holds no config.yaml. Train one with: fp4deploy train")
    return run


def run_of(path: Path) -> Run | None:
    """The run whose folder holds `path`, or None."""
    for folder in Path(path).resolve().parents:
        if (folder / "config.yaml").is_file():
            return open_run(folder)
    return None


def latest_run(root: Path = RUNS) -> Run:
    """Open the run whose configuration was written last.

    Raises:
        InputError: there is no run under `root`.
    """
    written: dict[Path, int] = {}
    for config in root.glob("*/config.yaml"):
        with suppress(FileNotFoundError):  # removed since it was listed
            if config.is_file():  # not a link to nothing
                written[config] = config.stat().st_mtime_ns
    if not written:
        raise InputError(f"There is no run under {root}/ yet. Train one with: fp4deploy train")
    return Run(sorted(written, key=written.__getitem__)[-1].parent)


def _host() -> str:
    import socket  # not for `--help`

    return socket.gethostname()
