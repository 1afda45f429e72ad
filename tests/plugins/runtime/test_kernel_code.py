"""Blackwell's FP4 conversion: machine code for it, and the codes that it gives.

Hardware that converts to E2M1 is not needed: its codes are compared through the definition that CUDA's own header gives
of the instruction for the host.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fp4deploy import formats
from fp4deploy.plugins.runtime import nvcc as compiler
from fp4deploy.plugins.runtime.nvcc import include_options

pytestmark = pytest.mark.skipif(compiler.find_nvcc() is None, reason=f"no nvcc here; {compiler.INSTALL_NVCC}")

# quantize_tensor with 16-byte loads and FP4 conversion.
PACKING = dict.fromkeys(("FORMAT", "SQUARED", "FAST", "HADAMARD", "ROWS", "STOCHASTIC", "IN_RANGE", "INNER", "BIG"), 0)
PACKING |= {"E": 448, "PACKED": 1, "LINEAR": 1}


def nvcc() -> Path:
    found = compiler.find_nvcc()
    assert found is not None
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}{done.stdout}"
    return done.stderr + done.stdout


def disassembler() -> str | None:
    """nvdisasm next to nvcc, on PATH or in pip's packages."""
    pip = importlib.util.find_spec("nvidia")
    packages = [Path(root) for root in (pip.submodule_search_locations or [])] if pip else []
    wheels = [str(folder) for package in packages for folder in package.glob("*/bin")]
    folders = [str(nvcc().parent), os.environ.get("PATH", os.defpath), f"{compiler.TOOLKIT}/bin", *wheels]
    return shutil.which("nvdisasm", path=os.pathsep.join(folders))


@pytest.mark.parametrize(("arch", "converts"), [("sm_90a", False), ("sm_100a", True), ("sm_120a", True)])
def test_machine_code(arch: str, converts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembler keeps what the intermediate code has."""
    program = disassembler()
    if program is None:
        pytest.skip("no nvdisasm next to nvcc, on PATH or in pip's packages")
    if not compiler.supported(nvcc(), arch):
        pytest.skip(f"this nvcc does not know {arch}")
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    cubin = tmp_path / "kernels.cubin"
    cubin.write_bytes(compiler.compile_cubin("quantize.cu", arch, {"DTYPE": "float", **PACKING}))
    machine_code = run([program, str(cubin)])
    assert re.search(r"LDG\.E\.(\w+\.)*128", machine_code)
    assert ("F2FP.SATFINITE.E2M1.F32" in machine_code) == converts


HOST = """
#include "fp4.cuh"
#if __has_include(<cuda_fp4.h>)
#include <cuda_fp4.h>

extern "C" void encode(const float* u, long long groups, uint32_t* ours, uint32_t* instructions) {
    for (long long g = 0; g < groups; ++g, u += 8) {
        ours[g] = fp4::encode_eight(u);
        instructions[g] = 0u;
        for (int i = 0; i < 8; i += 2) {
            uint32_t pair = __nv_cvt_float2_to_fp4x2(float2{u[i] + 0.f, u[i + 1] + 0.f}, __NV_E2M1, cudaRoundNearest);
            instructions[g] |= pair << (4 * i);
        }
    }
}
#endif
"""


def test_codes_of_the_conversion_as_cuda_defines_it(tmp_path: Path) -> None:
    """Every bfloat16 number and the floats next to it: all binades, all ties, both zeros."""
    source, library = tmp_path / "encode.cpp", tmp_path / "encode.so"
    source.write_text(HOST)
    options = ["-std=c++17", "-O2", "-Xcompiler", "-fPIC,-ffp-contract=off", "-shared", "--cudart", "none"]
    run([str(nvcc()), *options, *include_options(), "-o", str(library), str(source)])
    loaded = ctypes.CDLL(str(library))
    if not hasattr(loaded, "encode"):
        pytest.skip("this toolkit has no cuda_fp4.h (12.8 and later have)")
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    u = torch.cat([numbers - 1, numbers, numbers + 1]).view(torch.float32)
    u = torch.where(u.isnan(), 0.0, u)
    codes = torch.empty(2, len(u) // 8, dtype=torch.int32)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (u, codes[0], codes[1])]
    loaded.encode(pointers[0], ctypes.c_longlong(len(u) // 8), *pointers[1:])
    expected = formats.pack_codes(formats.encode_e2m1(u)).view(torch.int32)
    assert torch.equal(codes[0], expected)
    assert torch.equal(codes[1], expected)
