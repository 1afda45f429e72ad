"""The C++ examples as their first lines compile them: against headers that a machine has, and the libraries of wheels.

No wheel has the headers: CPLUS_INCLUDE_PATH names the folders of onnxruntime_cxx_api.h (the archive or the NuGet
package of ONNX Runtime), and of NvInfer.h and cuda_runtime_api.h (the archive of TensorRT, CUDA).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from fp4deploy.predict.predictor import load
from fp4deploy.runs import Run
from tests.native.builds import ROOT, compiled, compiler, run

EXAMPLES = ROOT / "examples"


def _needs(*headers: str) -> None:
    if (program := compiler()) is None:
        pytest.skip("no C++ compiler")
    for header in headers:
        source = f"#if !__has_include(<{header}>)\n#error absent\n#endif\n"
        found = subprocess.run(
            [program, "-x", "c++", "-fsyntax-only", "-"], input=source, text=True, capture_output=True
        )
        if found.returncode:
            pytest.skip(f"{header} is not among the headers of this machine: name its folder in CPLUS_INCLUDE_PATH")


def test_the_example_of_onnx_runtime_gives_the_classes_of_python(untrained: Run, tmp_path: Path) -> None:
    _needs("onnxruntime_cxx_api.h")
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    program, model = tmp_path / "segment-ort", untrained.export_dir / "unet.fp16.portable.onnx"
    compiled("g++", "-std=c++17", EXAMPLES / "onnxruntime.cpp", library, f"-Wl,-rpath,{library.parent}", "-o", program)
    predictor = load(model)
    image = np.random.default_rng(0).integers(0, 256, (*predictor.card.size, 3), np.uint8)
    Image.fromarray(image).save(tmp_path / "photo.ppm")
    (tmp_path / library.name).symlink_to(library)
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)  # what the program asks for
    status, _, said = run([program, model, tmp_path / "photo.ppm", tmp_path / "mask.pgm"], driver=tmp_path)
    assert status == 0, said
    mask = np.asarray(Image.open(tmp_path / "mask.pgm"))
    assert (mask == predictor.predict(image).mask).mean() > 0.999


def test_the_example_of_tensorrt_compiles(tmp_path: Path) -> None:
    """As far as an object: the wheels have no library to link that a machine without a GPU could run."""
    _needs("NvInfer.h", "cuda_runtime_api.h")
    compiled("g++", "-std=c++17", "-c", EXAMPLES / "tensorrt.cpp", "-o", tmp_path / "tensorrt.o")
