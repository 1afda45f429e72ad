"""What the API reference and the settings are made of."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import fp4deploy
from docs.tables.results import markdown


def settings() -> str:
    """Every key of `--set` and of a configuration file; `fp4deploy settings` prints the same."""
    from fp4deploy.train.config import Config, describe_settings

    def text(value: Any) -> str:
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    rows = [
        [f"`{setting.key}`", text(setting.default), setting.valid.replace("<", "&lt;"), setting.meaning]
        for setting in describe_settings(Config())
    ]
    return markdown(["setting", "default", "valid", "meaning"], rows, left=4)


SECTIONS = {
    "formats": "Formats",
    "qat": "Quantisation-aware training",
    "ptq": "Post-training quantisation",
    "export": "Export",
    "bench": "Runtimes",
    "models": "Generation with a cache",
    "predict": "Prediction",
    "plugins": "GEMM and convolution of packed tensors",
    "errors": "Errors",
}

RETURNED = (  # classes that public functions return
    *("formats.nvfp4.Nvfp4Tensor", "formats.mxfp4.Mxfp4Tensor", "ptq.quantize.Result"),
    *("export.to_onnx.ExportResult", "export.verify.outputs.Agreement", "export.to_packed.PackedResult"),
    *("export.engine.build.BuildResult", "export.ledger.ledger.Ledger", "export.ledger.ledger.LedgerRow"),
    *("bench.runtimes.open.OpenRuntime", "predict.predictor.Predictor", "predict.prediction.Prediction"),
    "models.generation.CachedDecoder",
)


def public_names() -> str:
    """The API reference: every name of `fp4deploy.__all__` and the classes that functions return, by section."""
    stub = ast.parse(Path(fp4deploy.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    paths = [*(homes[name] for name in sorted(fp4deploy.__all__, key=str.lower)), *RETURNED]
    parts = []
    for section, title in SECTIONS.items():
        own = [path for path in paths if path.startswith(f"{section}.")]
        rows = [[f"[`{path.rpartition('.')[2]}`](#fp4deploy.{path})", _about(path)] for path in own]
        parts += [f"## {title}", markdown(["name", "what it is"], rows, 2), *(f"::: fp4deploy.{path}" for path in own)]
    return "\n\n".join(parts)


def _about(path: str) -> str:
    """The first sentence of a docstring."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(f"fp4deploy.{module}"), name)
    if isinstance(value, dict):
        return f"One of {', '.join(f'`{key}`' for key in value)}, by name."
    text = str(inspect.getdoc(value))
    return re.split(r"(?<=[.])\s|\n\n", text)[0].replace("\n", " ").replace("|", "\\|")
