"""The C++ examples as their first lines compile them: against headers that a machine has, and the libraries of wheels.

The wheels have no headers: `make headers` puts those of other packages in build/headers, or CPLUS_INCLUDE_PATH names
the folders of onnxruntime_cxx_api.h, and of NvInfer.h and cuda_runtime_api.h.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from fp4deploy.predict.predictor import load
from fp4deploy.runs import Run
from tests.native.builds import ROOT, compiled, compiler, run

EXAMPLES = ROOT / "examples"
HEADERS = ROOT.parent / "build" / "headers"


def _toolkit() -> Path | None:
    """CUDA's folder: that of nvcc, or the usual one."""
    nvcc = shutil.which("nvcc")
    folders = [*([Path(nvcc).resolve().parents[1]] if nvcc else []), Path("/usr/local/cuda")]
    return next((each for each in folders if (each / "include" / "cuda_runtime_api.h").is_file()), None)


def _includes() -> Iterator[str | Path]:
    toolkit = _toolkit()
    for folder in (HEADERS / "onnxruntime", HEADERS / "tensorrt", *([toolkit / "include"] if toolkit else [])):
        if folder.is_dir():
            yield from ("-I", folder)


def _needs(*headers: str) -> list[str | Path]:
    """The options that find these headers."""
    if (program := compiler()) is None:
        pytest.skip("no C++ compiler")
    options = list(_includes())
    for header in headers:
        source = f"#if !__has_include(<{header}>)\n#error absent\n#endif\n"
        command = [program, *map(str, options), "-x", "c++", "-fsyntax-only", "-"]
        if subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode:
            pytest.skip(f"{header} is not among the headers of this machine: make headers")
    return options


def test_the_example_of_onnx_runtime_gives_the_classes_of_python(untrained: Run, tmp_path: Path) -> None:
    options = _needs("onnxruntime_cxx_api.h")
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    program, model = tmp_path / "segment-ort", untrained.export_dir / "unet.fp16.portable.onnx"
    source = EXAMPLES / "onnxruntime.cpp"
    compiled("g++", "-std=c++17", *options, source, library, f"-Wl,-rpath,{library.parent}", "-o", program)
    predictor = load(model)
    image = np.random.default_rng(0).integers(0, 256, (*predictor.card.size, 3), np.uint8)
    Image.fromarray(image).save(tmp_path / "photo.ppm")
    (tmp_path / library.name).symlink_to(library)
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)  # what the program asks for
    status, _, said = run([program, model, tmp_path / "photo.ppm", tmp_path / "mask.pgm"], driver=tmp_path)
    assert status == 0, said
    mask = np.asarray(Image.open(tmp_path / "mask.pgm"))
    assert (mask == predictor.predict(image).mask).mean() > 0.999


def test_the_example_of_tensorrt_compiles_and_links(tmp_path: Path) -> None:
    """To the wheel of the lean runtime. No plan is read: the headers are of TensorRT 10, and 11 has other classes."""
    options = _needs("NvInfer.h", "cuda_runtime_api.h")
    found, toolkit = importlib.util.find_spec("tensorrt_lean_libs"), _toolkit()
    places = [Path(folder) for folder in (found.submodule_search_locations or [] if found else [])]
    lean = next((each for folder in places for each in folder.glob("libnvinfer_lean.so.*")), None)
    cudart = next(toolkit.glob("lib64/libcudart.so*"), None) if toolkit else None
    program, source = tmp_path / "segment-trt", EXAMPLES / "tensorrt.cpp"
    if lean is None or cudart is None:
        compiled("g++", "-std=c++17", *options, "-c", source, "-o", program)
        pytest.skip("compiled, not linked: the lean TensorRT or CUDA's runtime library is missing")
    compiled("g++", "-std=c++17", *options, source, lean, cudart, "-o", program)
    assert run([program], driver=lean.parent)[0] == 1  # it says how it is called
