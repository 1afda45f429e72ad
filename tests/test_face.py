"""`import fp4deploy as fd`: cheap, complete, and every public name with an example that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch

import fp4deploy as fd
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from tests.export.lowering.engine_graphs import CanonicalGraph
from tests.shallow import levels

STUB = Path(fd.__file__).with_suffix(".pyi")
CONTRACT = (
    *("quantize_nvfp4", "quantize_mxfp4", "FourOverSix", "prepare", "restore", "calibrate", "layer_plan", "RECIPES"),
    *("load_model", "export_onnx", "pack", "build_engine", "open_runtime", "FP4WeightCache"),
    *("fp4_quantize", "fp4_linear", "fp4_cached_linear", "fp4_matmul", "fp4_conv2d"),
)


def _homes() -> dict[str, str]:
    """Public name -> module that defines it, as the stub says."""
    imports = [node for node in ast.parse(STUB.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"fp4deploy.{node.module}" for node in imports for alias in node.names}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """What examples may use: `folder`, an empty folder, and `checkpoint`, an untrained NVFP4 UNet."""
    with levels(5):
        folder = tmp_path_factory.mktemp("face")
        torch.manual_seed(0)
        model = build_unet(4, 0.125)
        fd.prepare(model)
        fd.calibrate(model, [torch.randn(2, 3, 32, 32)])
        card = ModelCard("nvfp4", 0.125, ("a", "b", "c", "d"), 32, 32, (0.5,) * 3, (0.2,) * 3, False, "nvfp4_qat")
        save_checkpoint(folder / "best.safetensors", model, card)
        yield {"folder": folder, "checkpoint": folder / "best.safetensors", "fd": fd}


def test_importing_the_package_loads_no_framework() -> None:
    heavy = ("torch", "numpy", "onnx", "onnxruntime", "tensorrt", "triton", "matplotlib", "pydantic")
    code = f"import sys, fp4deploy; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_contract_is_complete() -> None:
    homes = _homes()
    assert set(CONTRACT) <= set(homes)
    assert set(fd.__all__) == set(homes) <= set(dir(fd))
    for name, home in homes.items():
        assert getattr(fd, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="quantise_nvfp4"):
        _ = fd.quantise_nvfp4


@pytest.mark.parametrize("name", sorted(set(_homes()) - {"RECIPES"}))
def test_examples_of_public_names(name: str, context: dict[str, object]) -> None:
    if isinstance(getattr(fd, name), type) and issubclass(getattr(fd, name), Exception):
        assert getattr(fd, name).__doc__
        return
    if name == "build_engine":
        if importlib.util.find_spec("tensorrt_rtx") is None:
            pytest.skip("TensorRT-RTX is not installed (pip install tensorrt-rtx)")
        graph = CanonicalGraph()  # smaller than a UNet
        onnx.save(graph.model(graph.conv("conv", graph.image(16, 16), 32)), context["folder"] / "unet.onnx")
    value = getattr(fd, name)
    variables = {**vars(importlib.import_module(value.__module__)), **context}
    (test,) = (found for found in doctest.DocTestFinder(recurse=False).find(value, name, globs=variables))
    assert test.examples, f"the docstring of {name} has no example"
    _run(test)


def _modules() -> list[str]:
    """Those with examples."""
    root = Path(fd.__file__).parent
    files = [(path, path.relative_to(root)) for path in sorted(root.rglob("*.py"))]
    files += [(path, path.relative_to(root.parent)) for path in sorted((root.parent / "cli").rglob("*.py"))]
    named = {".".join(name.with_suffix("").parts): path for path, name in files}
    return [
        name.removesuffix(".__init__") for name, path in named.items() if ">>> " in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", _modules())
def test_examples_of_modules(name: str) -> None:
    public = {f"{home}.{each}" for each, home in _homes().items()}  # which have more to use
    tests = doctest.DocTestFinder().find(importlib.import_module(f"fp4deploy.{name}"))
    for test in tests:
        if test.name not in public:
            _run(test)


def _run(test: doctest.DocTest) -> None:
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(
        test, out=report.append
    )
    assert result.failed == 0, "".join(report)
