"""The files that are frozen byte for byte, written from fixed weights, and their SHA-256.

| file | what is hashed |
|---|---|
| checkpoint | all bytes; its tensors are multiples of 1/256, no training |
| `.fp4`, weight file | all bytes but the version of fp4deploy and the digest over it (`frozen.without_version`) |
| canonical and portable ONNX | all bytes but the version of fp4deploy in their metadata |

ONNX files depend on torch's exporter as well: their bytes are compared only where the versions of the libraries are the
recorded ones. The constants of quantised layers (codes, block scales, global scales) are compared in any case.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from fp4deploy import __version__
from fp4deploy.about import ABOUT_KEY
from fp4deploy.export import to_portable
from tests.contract import fixed_models
from tests.contract.fixed_models import sha256
from tests.contract.frozen import Facts, without_version
from tests.contract.invoke import must

LIBRARIES = ("torch", "onnx", "onnx-ir", "onnxscript")
QUANTISED = (".codes", ".scales", ".global_scale")


def versions() -> dict[str, str]:
    """Of the libraries that write ONNX."""
    return {name: version(name).partition("+")[0] for name in LIBRARIES}


def write_all(folder: Path) -> Path:
    """Write every frozen file into a folder."""
    for name, recipe in (("nvfp4", fixed_models.RECIPE), ("fp16", None)):
        fixed_models.checkpoint(folder / f"{name}.safetensors", recipe)
    export: tuple[Any, ...] = ("export", "nvfp4.safetensors", "--no-verify", "--out")
    must(*export, "nvfp4.onnx", "--portable", folder=folder)
    must(*export, "nvfp4.fp4", "--format", "packed", folder=folder)
    must("export", "fp16.safetensors", "--no-verify", "--out", "fp16.onnx", folder=folder)
    must("export", "fp16.safetensors", "--no-verify", "--out", "fp16.fp4", "--format", "packed", folder=folder)
    graph = fixed_models.layers_graph()
    (folder / "layers.onnx").write_bytes(graph.SerializeToString(deterministic=True))
    (folder / "layers.portable.onnx").write_bytes(to_portable(graph).SerializeToString(deterministic=True))
    for name, cache in fixed_models.weight_caches().items():
        cache.save(folder / f"{name}.weight")
    return folder


def digests(folder: Path) -> Facts:
    """{"versions", "files": name -> SHA-256, "onnx": name -> SHA-256 of each part}."""
    files: Facts = {}
    graphs: Facts = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        if path.suffix == ".onnx":
            model = onnx.load_from_string(content)
            _forget_version(model)
            plain = model.SerializeToString(deterministic=True)
            graphs[path.name] = {"bytes": sha256(plain), **_parts(model)}
        elif path.suffix in (".fp4", ".weight"):
            files[path.name] = sha256(without_version(content, __version__))
        elif path.suffix == ".safetensors":
            files[path.name] = sha256(content)
    return {"versions": versions(), "files": files, "onnx": graphs}


def _forget_version(model: onnx.ModelProto) -> None:
    """Take the version of fp4deploy out of the metadata."""
    for entry in model.metadata_props:
        if entry.key == ABOUT_KEY:
            about = json.loads(entry.value)
            assert about.pop("version") == __version__
            entry.value = json.dumps(about)


def _parts(model: onnx.ModelProto) -> Facts:
    """Parts of a graph by themselves, so that a difference says where it lies."""
    graph = model.graph
    constants = {each.name: each.SerializeToString(deterministic=True) for each in graph.initializer}
    chosen = {name: content for name, content in constants.items() if name.endswith(QUANTISED)}
    nodes = (f"{each.op_type} {each.name} {list(each.input)} {list(each.output)}" for each in graph.node)
    metadata = (f"{each.key}={each.value}" for each in model.metadata_props)
    return {
        "quantised constants": _together(f"{name}:{sha256(chosen[name])}" for name in sorted(chosen)),
        "constants": _together(f"{name}:{sha256(content)}" for name, content in constants.items()),
        "nodes": _together(nodes),
        "metadata": _together(sorted(metadata)),
    }


def _together(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
