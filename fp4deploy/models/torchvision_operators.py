"""torchvision beside a torch that its compiled operators do not load in, such as a CPU build of torch.

The wheel of the public package index is built for CUDA. Its shared library does not load beside a torch without CUDA,
and `import torchvision` then stops at "operator torchvision::nms does not exist", because it registers functions for
operators that nobody has declared. Segmentation networks use none of them. So the operators are declared without an
implementation, and the import succeeds; whoever calls one gets torchvision's own error.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

OPERATORS = (
    "nms", "qnms", "deform_conv2d", "_deform_conv2d_backward", "qroi_align", "roi_align", "_roi_align_backward",
    "roi_pool", "_roi_pool_backward", "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward",
)  # fmt: skip


def declare_operators() -> None:
    """Let `import torchvision` succeed where only its compiled operators are missing; else nothing changes."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
        return
    except Exception as error:  # a shared library that does not load raises what it likes
        if "operator torchvision::" not in str(error):
            return
    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    global _library  # its declarations end with it
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        _library.define(f"{operator}(...) -> ...")


_library: object = None
