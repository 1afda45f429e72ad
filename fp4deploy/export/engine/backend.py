"""What TensorRT and TensorRT-RTX have in common, as data."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine.adapter import FLAGS
from fp4deploy.requirements import LIBRARIES


@dataclass(frozen=True)
class Backend:
    """One engine library.

    `arches` are the `--arch` values, `fp4_arches` those with FP4 tensor cores, `package` the module to import.
    `configure(trt, config, arch)` aims the build at an architecture and raises UnavailableError where this
    machine cannot; `layers(trt, plan, messages)` gives (text of the engine layers, evidence).
    `times_kernels`: the builder measures kernels on the GPU, and keeps the times in a timing cache.
    `options`: the keys of `adapter.FLAGS` that it offers.
    `plugins(trt, arch, onnx)` makes the plugins of an ONNX file known to the library, where it takes any.
    """

    name: str
    title: str
    package: str
    arches: tuple[str, ...]
    fp4_arches: tuple[str, ...]
    default_arch: Callable[[], str]
    configure: Callable[[Any, Any, str], None]
    layers: Callable[[Any, bytes, list[str]], tuple[str, str]]
    plugins: Callable[[Any, str, Path], None] | None = None
    times_kernels: bool = False
    options: tuple[str, ...] = tuple(FLAGS)

    @property
    def install(self) -> str:
        """The command that installs it."""
        return LIBRARIES[self.package].install

    def require_installed(self) -> None:
        """Look for the library without loading it.

        Raises:
            UnavailableError: it is not installed.
        """
        if importlib.util.find_spec(self.package) is None:
            raise UnavailableError(f"{self.title} is not installed. Install it with: {self.install}")

    def add_plugins(self, trt: object, arch: str, onnx: Path) -> None:
        """Make the plugins of an ONNX file known to the library.

        Raises:
            InputError: it takes none, or there are no kernels for the architecture.
            UnavailableError: a kernel does not compile here, or the library is too old.
        """
        if self.plugins is None:
            raise InputError(f"{self.title} takes no plugins.")
        self.plugins(trt, arch, onnx)

    def load(self) -> object:
        """Import the library.

        Raises:
            UnavailableError: it is not installed, or its shared libraries do not load.
        """
        try:
            return importlib.import_module(self.package)
        except (ImportError, OSError) as error:
            raise UnavailableError(
                f"{self.title} cannot be loaded ({error}). Install it with: {self.install}"
            ) from None
