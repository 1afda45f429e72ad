"""Where programs, shared libraries, headers and settings are looked up: not in the current folder.

An empty entry of such a list means the current folder, and `PATH=$PATH:$UNSET` makes one: a program `gcc`, a library or
a header beside a downloaded model would be taken.

Libraries start Python themselves: to learn what the CPU can do, torch.compile calls `python -c`, which imports from the
current folder first. PYTHONSAFEPATH says that it must not, from Python 3.11 on.

matplotlib reads a file `matplotlibrc` of the current folder before that of the user, when it is imported. It can make
the import fail, and figures call LaTeX. There is no option against it, and other libraries import
matplotlib on their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar

Environment = TypeVar("Environment", bound=MutableMapping[str, str])
LISTS = (
    "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "PYTHONPATH",
)  # fmt: skip


def keep_absolute(environment: Environment) -> Environment:
    """Remove relative and empty entries from the lists of an environment, in place; it is returned.

    >>> keep_absolute({"PATH": os.pathsep.join(["/bin", "", ".", "/usr/bin"]), "CPATH": "."})
    {'PATH': '/bin:/usr/bin'}
    """
    for name in LISTS:
        if name in environment:
            kept = [folder for folder in environment[name].split(os.pathsep) if os.path.isabs(folder)]
            if kept:
                environment[name] = os.pathsep.join(kept)
            else:
                del environment[name]
    return environment


def keep_python_safe(environment: Environment) -> Environment:
    """Let no Python that is started with an environment import from the current folder; in place, it is returned.

    Python 3.10 has no such variable: torch.compile is told to believe the CPU's flags, without asking another Python.

    >>> keep_python_safe({})["PYTHONSAFEPATH"]
    '1'
    """
    environment["PYTHONSAFEPATH"] = "1"
    if sys.version_info < (3, 11):
        environment.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    return environment


class _Matplotlib(MetaPathFinder):
    """Finds matplotlib, whose `os.path.exists` knows no file `matplotlibrc` while it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name == "matplotlib" else None
        if spec is not None and spec.loader is not None:
            _import_without_local_settings(spec)
        return spec


def _import_without_local_settings(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute, exists = loader.exec_module, os.path.exists

    def exec_module(module: ModuleType) -> None:
        os.path.exists = lambda path: path != "matplotlibrc" and exists(path)
        try:
            execute(module)
        finally:
            os.path.exists = exists

    loader.exec_module = exec_module


def ignore_local_settings() -> None:
    """Let this process import matplotlib without the settings in the current folder."""
    if not any(isinstance(finder, _Matplotlib) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Matplotlib())
