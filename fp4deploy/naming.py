"""What the files of a network are called: the network, the model of it, the GPU of an engine, the kind of file.

    my_net.nvfp4.onnx              canonical graph
    my_net.nvfp4.portable.onnx     the same in standard operators
    my_net.nvfp4.fp4               packed network
    my_net.nvfp4.sm120.plan        engine; beside it my_net.nvfp4.sm120.ledger.json

Runs made before 0.2 have unet.onnx and unet-fp16.onnx, whatever their network; they are still read.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath

NETWORK = "unet"  # where a configuration names none
_ADDED = re.compile(r"(\.portable|\.sm\d+[a-z]?)$")


def network_name(spec: str) -> str:
    """The network of a model spec: the file of "net.py:build", NAME of "smp:NAME", "unet" of "unet:0.5".

    >>> [network_name(spec) for spec in ("nets/my_net.py:build", "smp:Unet/resnet34", "unet:0.5")]
    ['my_net', 'Unet_resnet34', 'unet']
    """
    location, _, name = spec.rpartition(":")
    text = Path(location).stem if location.endswith(".py") else location if location == NETWORK else name
    return re.sub(r"\W+", "_", text)[:80] or NETWORK


def stems(model: str, network: str = NETWORK) -> tuple[str, str]:
    """Stems of the files of a model: as they are written, and as runs before 0.2 have them.

    >>> stems("fp16", "my_net")
    ('my_net.fp16', 'unet-fp16')
    """
    return f"{network}.{model}", NETWORK if model == "nvfp4" else f"{NETWORK}-{model}"


def model_stem(path: PurePath) -> str:
    """The stem without what names a form of the file or its GPU.

    >>> model_stem(PurePath("engines/my_net.nvfp4.sm120.plan")), model_stem(PurePath("unet-fp16.portable.onnx"))
    ('my_net.nvfp4', 'unet-fp16')
    """
    return _ADDED.sub("", path.stem)


def built_name(source: PurePath, arch: str, suffix: str = ".plan") -> str:
    """Name of what is built of a file for a GPU: an engine, or a packed network's bundle of kernels.

    >>> built_name(PurePath("my_net.nvfp4.onnx"), "sm120")
    'my_net.nvfp4.sm120.plan'
    """
    return f"{source.stem}.{arch}{suffix}"
