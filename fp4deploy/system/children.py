"""Child processes: what they import, when they end, and their temporary folders.

**Imports.** A file `dataclasses.py` beside a downloaded model must not be executed. `python -m` and `python -c` put the
current folder first on the path, and so does an empty entry in PYTHONPATH. Children are started in Python's isolated
mode (`-I`, which every supported version has; `-P` exists from 3.11 on) and get the parent's path of modules without
the current folder (`import_path`). multiprocessing starts its processes by `python -c`: `isolated_start` adds the
option there. Programs are looked up in absolute folders only, and their own lists of folders have no others
(`search_path`): nvcc looks for the host compiler, and that for its headers.

**End.** A child that outlives its parent keeps a GPU, writes into a run that is being resumed, and leaves its files.
There are two mechanisms, because `kill -9` gives the parent no chance to act:

| child | how it learns of its parent's end |
|---|---|
| program (`start`, `run`) | `supervisor.py` starts it, and reads a pipe whose other end only the parent has |
| worker of multiprocessing (`end_with_parent`) | a thread reads the pipe that multiprocessing has for this |

The supervisor also ends everything that the child has started, by its process group. PR_SET_PDEATHSIG alone would not:
it exists on Linux only, is not inherited, and is sent when the parent's *thread* ends.

**Files.** `owned_folder` is a temporary folder with a lock that its process holds. The next call removes the folders
whose lock is free: their processes are dead.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import spawn, util
from pathlib import Path
from typing import IO

from fp4deploy.system.search_path import ignore_local_settings, keep_absolute

PREFIX = "fp4deploy-"  # of temporary folders
LOCK = ".fp4deploy.lock"  # inside of them
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_PACKAGE = str(Path(__file__).resolve().parents[2])
_CALL = """
import importlib, json, sys
module, function, arguments, sys.path[:] = json.loads(sys.argv[1])
sys.exit(getattr(importlib.import_module(module), function)(*arguments))
"""
_starting = threading.RLock()


def import_path() -> list[str]:
    """This process's path of modules without relative folders and the current one; that of this package is last."""
    here = ""
    with suppress(FileNotFoundError):  # the current folder was removed
        here = os.path.realpath(os.getcwd())
    kept = [folder for folder in sys.path if os.path.isabs(folder) and os.path.realpath(folder) != here]
    return list(dict.fromkeys([*kept, _PACKAGE]))


def python_call(module: str, function: str, *arguments: object) -> list[str]:
    """The command that calls a function in an isolated Python, with JSON values; its result is the exit status."""
    return [sys.executable, "-I", "-c", _CALL, json.dumps([module, function, arguments, import_path()])]


@contextmanager
def start(
    command: Sequence[str | Path],
    output: IO[bytes] | int = subprocess.DEVNULL,
    error: IO[bytes] | int = subprocess.STDOUT,
    temporary: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program without input; it and all that it started end with the block, or with this process.

    temporary: as of `run`.

    Raises:
        OSError: there is no such program, or it cannot be started.
    """
    settings = keep_absolute(dict(os.environ))
    if temporary is not None:
        settings |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    program = shutil.which(command[0], path=settings.get("PATH", os.defpath))
    if program is None:
        raise FileNotFoundError(2, "there is no such program", str(command[0]))
    whole = [os.path.abspath(program), *map(str, command[1:])]
    if os.name == "nt":
        with subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=output, stderr=error, env=settings) as process:
            try:
                yield process
            finally:
                process.kill()
        return
    watched, held = os.pipe()
    try:
        supervised = [sys.executable, "-I", "-S", str(_SUPERVISOR), *whole]
        try:
            process = subprocess.Popen(
                supervised, stdin=watched, stdout=output, stderr=error, env=settings, start_new_session=True
            )
        finally:
            os.close(watched)
        try:
            yield process
        finally:
            os.close(held)
            held = -1
            process.wait()
    finally:
        if held >= 0:
            os.close(held)


@dataclass(frozen=True)
class Finished:
    """What a program printed, and its exit status, negative for a signal."""

    status: int
    output: str
    error: str


def run(command: Sequence[str | Path], temporary: Path | None = None) -> Finished:
    """Run a program to its end, or kill it on Ctrl-C.

    temporary: the folder for its temporary files, which some programs give names that can be foreseen.

    Raises:
        OSError: it cannot be started.
    """
    with start(command, subprocess.PIPE, subprocess.PIPE, temporary) as process:
        output, error = process.communicate()
    return Finished(process.returncode, output.decode(errors="replace"), error.decode(errors="replace"))


@contextmanager
def isolated_start() -> Iterator[None]:
    """Processes that multiprocessing starts inside are isolated: spawned ones, fork servers, resource trackers.

    multiprocessing has no option for it. It asks `_args_from_interpreter_flags` for the options of an interpreter and
    `get_preparation_data` for its path of modules, and both are replaced meanwhile.
    """
    with _starting:
        options, preparation = util._args_from_interpreter_flags, spawn.get_preparation_data  # type: ignore[attr-defined]

        def prepared(name: str) -> dict[str, object]:
            return {**preparation(name), "sys_path": import_path()}

        util._args_from_interpreter_flags = lambda: list(dict.fromkeys([*options(), "-I"]))  # type: ignore[attr-defined]
        spawn.get_preparation_data = prepared
        try:
            yield
        finally:
            util._args_from_interpreter_flags = options  # type: ignore[attr-defined]
            spawn.get_preparation_data = preparation


def end_with_parent(group: bool = False) -> None:
    """In a worker of multiprocessing: end at once where the parent ends, however it ended.

    It also imports matplotlib as its parent does.

    group: lead a process group of its own, so that its children end with it, and Ctrl-C on the terminal does not reach
        it.
    """
    ignore_local_settings()
    group = group and hasattr(os, "setpgrp")  # Windows has none
    if group:
        os.setpgrp()
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        if group:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end with parent").start()


@contextmanager
def owned_folder() -> Iterator[Path]:
    """A temporary folder; removed at the end or, where this process is killed, by the next one that needs one."""
    remove_orphans(Path(tempfile.gettempdir()))
    folder, lock = _make_owned()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_orphans(root: Path) -> None:
    """Remove the folders of `owned_folder` in `root` that belong to this user and whose processes are dead."""
    if os.name == "nt":
        return
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)  # not there: no folder of ours
                try:
                    if _lock(lock):
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _make_owned() -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        if os.name == "nt":
            return folder, None
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            if _lock(lock) and os.fstat(lock).st_nlink:
                return folder, lock
        except OSError:  # a file system without locks; without the file nobody takes the folder for an orphan
            (folder / LOCK).unlink(missing_ok=True)
            return folder, lock
        os.close(lock)  # another process took the folder for an orphan before it was locked


def _lock(descriptor: int) -> bool:
    """Lock a file; False where another process has."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
