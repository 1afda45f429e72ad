"""Compile many kernels for many architectures, in parallel processes.

Workers are started by "spawn", so that kernels which this process imported for Triton's interpreter are not inherited.
They import nothing from the current folder and end with this process (`fp4deploy.system.children`).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.aot import diagnose, store
from fp4deploy.plugins.aot.compile import INSTALL_TRITON, compile_launch, compiler_version, triton_version
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.aot.store import Compiled
from fp4deploy.plugins.runtime.cache import write_entry
from fp4deploy.plugins.runtime.nvcc import KernelError
from fp4deploy.system.children import end_with_parent, isolated_start
from fp4deploy.system.processors import cores

# Of one core for one kernel, means on an AMD EPYC: of 48 with Triton 3.7.1, of 11 with nvcc 13.0.
SECONDS = {"triton": 1.0, "nvcc": 2.3}


@dataclass(frozen=True)
class BuildResult:
    """One kernel for one architecture: `compiled`, or None and the compiler's reason in `failure`."""

    launch: Launch
    arch: str
    compiled: Compiled | None
    failure: str = ""

    def diagnostics(self) -> list[str]:
        """What is wrong with it, see `aot.diagnose`; empty where nothing is."""
        return diagnose.diagnostics(self.compiled) if self.compiled is not None else [self.failure]

    def as_json(self) -> dict[str, object]:
        """All but the machine code, as JSON values."""
        about: dict[str, Any] = {"kernel": self.launch.kernel, "compiler": self.launch.compiler, "arch": self.arch}
        about |= {"constants": dict(self.launch.constants)}
        about |= {"num_warps": self.launch.num_warps, "num_stages": self.launch.num_stages}
        if self.compiled is not None:
            names = ("instructions", "registers", "spills", "shared", "sources")
            about |= {name: getattr(self.compiled, name) for name in names}
            about |= {self.launch.compiler: self.compiled.triton, "bytes": len(self.compiled.cubin)}
        return {**about, "complaints": self.diagnostics()}  # the key that `kernels --json` has had from the start


def require_triton() -> None:
    """Find out before anything is prepared.

    Raises:
        UnavailableError: Triton is missing.
    """
    if triton_version() is None:
        raise UnavailableError(f"Triton is missing, and it compiles the kernels: {INSTALL_TRITON}  (Linux).")


def already(requested: Iterable[tuple[Launch, str]]) -> list[bool]:
    """Of each kernel variant, whether there is a file of it: read instead of compiled, unless it is damaged."""
    shipped, own = store.shipped_folders(), store.own_folder()

    def found(launch: Launch, arch: str) -> bool:
        version = compiler_version(launch) or "*"
        names = [(folder, store.file_name(launch, arch, "*")) for folder in shipped]
        return any(any(folder.glob(name)) for folder, name in [*names, (own, store.file_name(launch, arch, version))])

    return [found(launch, store.supported(arch).triton_name) for launch, arch in requested]


def build(
    requested: Iterable[tuple[Launch, str]], jobs: int | None = None, out: Path | None = None
) -> Iterator[tuple[int, BuildResult]]:
    """Compile kernels into the cache, and into a folder if one is given; results come as they are finished.

    Args:
        requested: kernel variants, each with an architecture.
        jobs: processes (default: one for each CPU core).
        out: a folder for FP4DEPLOY_KERNEL_PATH.

    Yields:
        The position in `requested` and the result.

    Raises:
        UnavailableError: Triton is missing.
        InputError: the folder cannot be written.
        KernelError: a worker died.
    """
    require_triton()
    todo = [(launch, store.supported(arch).triton_name) for launch, arch in requested]
    workers = max(1, min(jobs or cores(), len(todo)))
    context = multiprocessing.get_context("spawn")
    with isolated_start():
        executor = ProcessPoolExecutor(workers, context, end_with_parent)
    with executor as pool:
        with (
            isolated_start(),
            _without("TRITON_INTERPRET"),
        ):  # `submit` starts the workers, and they inherit the variables
            tasks = {pool.submit(build_one, launch, arch): index for index, (launch, arch) in enumerate(todo)}
        try:
            for task in as_completed(tasks):
                result = task.result()
                if out is not None and result.compiled is not None:
                    _save(result.compiled, result.launch, out)
                yield tasks[task], result
        except BrokenProcessPool as error:
            raise KernelError(
                "Triton's compiler aborted, and its process with it. --jobs 1 shows for which kernel."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def build_one(launch: Launch, arch: str) -> BuildResult:
    """Compile one kernel; what Triton prints about a failure becomes part of the reason."""
    with _stderr() as lines:
        try:
            return BuildResult(launch, arch, compile_launch(launch, arch))
        except KernelError as error:
            reason = str(error).partition("\n")[0]
    errors = [line.strip() for line in lines if "error:" in line or "Assertion" in line]
    return BuildResult(launch, arch, None, " ".join([reason, *errors[:2]]))


@contextmanager
def _without(name: str) -> Iterator[None]:
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def _save(compiled: Compiled, launch: Launch, folder: Path) -> None:
    write_entry(folder / store.file_name(launch, compiled.arch, compiled.triton), store.pack(compiled))


@contextmanager
def _stderr() -> Iterator[list[str]]:
    """Collect what the C++ part of the compiler writes to stderr, which Python's sys.stderr does not see."""
    lines: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
