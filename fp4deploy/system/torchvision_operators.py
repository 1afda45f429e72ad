"""torchvision beside a torch that its compiled operators do not load in, such as a CPU build of torch.

The wheel of the public package index is built for CUDA. Its shared library does not load beside a torch without CUDA,
and `import torchvision` then stops at "operator torchvision::nms does not exist", because it registers functions for
operators that nobody has declared. Segmentation networks use none of them. So the operators are declared without an
implementation, and the import succeeds; whoever calls one gets torchvision's own error.

`import fp4deploy` arranges this for the first import of torchvision in the process, whoever makes it: a library that a
model spec names, a file of the user's, or the program that uses fp4deploy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OPERATORS = (
    "nms", "qnms", "deform_conv2d", "_deform_conv2d_backward", "qroi_align", "roi_align", "_roi_align_backward",
    "roi_pool", "_roi_pool_backward", "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward",
)  # fmt: skip


def declare_where_missing() -> None:
    """Let imports of torchvision succeed where only its compiled operators are missing; else nothing changes."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """torchvision's own loader, which is called again after its operators have been declared."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        try:
            self.own.exec_module(module)
        except Exception as error:  # a shared library that does not load raises what it likes
            if "operator torchvision::" not in str(error):
                raise
            _declare()
            self.own.exec_module(module)


def _declare() -> None:
    import torch

    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]
    global _library  # its declarations end with it
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        _library.define(f"{operator}(...) -> ...")


_library: object = None
