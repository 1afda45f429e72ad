"""The code that nvcc generates: everything in registers, 16-byte loads, Blackwell\'s FP4 conversion.

This is about speed: a local array that is not kept in registers, or a load taken apart, still gives the right bytes,
and no other test would show it. Compiled for the two architectures that matter most; `test_compile.py` does all.

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
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fp4deploy import formats
from fp4deploy.plugins.runtime import nvcc as compiler
from fp4deploy.plugins.runtime.nvcc import FLAGS, include_options, source_path, sources

pytestmark = pytest.mark.skipif(compiler.find_nvcc() is None, reason=f"no nvcc here; {compiler.INSTALL_NVCC}")

ARCHITECTURES = ("sm_90a", "sm_100a")
REPORT = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SPILLED = 4  # bytes: one register, around the call of a rare path
STACK = 8  # bytes: what a called function returns by reference; a local array takes 32 or more
ENTRY = re.compile(r"\.entry (\w+)\(.*?^}", re.DOTALL | re.MULTILINE)
WIDE = re.compile(r"ld\.(?:volatile\.)?global[.\w]*\.v4\.[bfsu]32")
CONVERSION = "cvt.rn.satfinite.e2m1x2.f32"


@dataclass(frozen=True)
class Variant:
    """A source, its macros, the kernels with 16-byte loads, and whether `quantize_tensor` converts in hardware."""

    source: str
    macros: dict[str, str | int]
    wide: tuple[str, ...] = ()
    converts: bool = False

    def __str__(self) -> str:
        return f"{self.source} {' '.join(f'{name}={value}' for name, value in self.macros.items() if value != 0)}"


def along(*wide: str, converts: bool = False, **macros: str | int) -> Variant:
    names = (
        "FORMAT",
        "SQUARED",
        "FAST",
        "HADAMARD",
        "ROWS",
        "STOCHASTIC",
        "PACKED",
        "IN_RANGE",
        "INNER",
        "LINEAR",
        "BIG",
    )
    all_macros = {"DTYPE": "__nv_bfloat16", "E": 448} | dict.fromkeys(names, 0) | macros
    return Variant("quantize.cu", all_macros, wide, converts)


def blocks(source: str, *wide: str, **macros: str | int) -> Variant:
    names = ("FORMAT", "SQUARED", "FAST", "STOCHASTIC", "PACKED", "IN_RANGE")
    return Variant(source, {"DTYPE": "__nv_bfloat16", "E": 256} | dict.fromkeys(names, 0) | macros, wide)


def chain(source: str, *wide: str) -> Variant:
    return Variant(source, {"DTYPE": "__half", "QUANTIZE": 1}, wide)


TENSOR = "quantize_tensor"
PACKING = along(TENSOR, PACKED=1, LINEAR=1, DTYPE="float", converts=True)
VARIANTS = [
    PACKING,
    along("fake_quantize_rows", TENSOR, LINEAR=1, IN_RANGE=1, VECTORS=2),
    along("fake_quantize_rows", LINEAR=1, FORMAT=2, DTYPE="float", VECTORS=4),
    along("fake_quantize_rows", LINEAR=1, IN_RANGE=1, VECTORS=2, MEASURE=1),
    along(INNER=2, IN_RANGE=1, DTYPE="__half", PAIR="__half2"),
    along(INNER=2, IN_RANGE=1, DTYPE="__half", PAIR="__half2", MEASURE=1),
    along(INNER=2, FORMAT=1, E=256, SQUARED=1, IN_RANGE=1, DTYPE="float"),
    along(TENSOR, LINEAR=1, FORMAT=1, E=256, FAST=1, ROWS=1, PACKED=1, converts=True),
    along(TENSOR, LINEAR=1, HADAMARD=1, STOCHASTIC=1, PACKED=2, BIG=1),
    along(INNER=2, FORMAT=3, HADAMARD=1, STOCHASTIC=1, DTYPE="__half"),
    along(INNER=2, FORMAT=2, PACKED=2, converts=True),
    blocks("pack_rows_4o6.cu", "pack_rows_4o6", SQUARED=1),
    blocks("pack_rows.cu", "pack_rows", DTYPE="__half"),
    blocks("quantize_tile.cu", FORMAT=1, IN_RANGE=1),
    blocks("quantize_tile.cu", STOCHASTIC=1, PACKED=1, DTYPE="float"),
    Variant("amax.cu", {"DTYPE": "__nv_bfloat16"}, ("finite_amax",)),
    chain("concat.cu", "concat", "separate"),
    chain("group_norm.cu", "moments", "apply", "sums", "gradient"),
    Variant("norm_pack.cu", {"DTYPE": "__half"}, ("norm_pack", "norm_pool_pack")),
    chain("pool.cu", "pool", "pool_gradient"),
    chain("track_amax.cu", "track_amax", "previous_amax"),
    chain("weights.cu"),
    Variant("gemv_tma.cu", {"DTYPE": "__half", "ROWS": 1, "STAGES": 9}),
    Variant("gemv_tma.cu", {"DTYPE": "__nv_bfloat16", "ROWS": 8, "CLUSTER": 2}),
    Variant("gemv_tma.cu", {"DTYPE": "__half", "ROWS": 16, "CLUSTER": 2}),
    Variant("gemv_tma.cu", {"DTYPE": "__nv_bfloat16", "ROWS": 16, "CLUSTER": 2}),
    Variant("gemv_tma.cu", {"DTYPE": "__half", "ROWS": 16, "OUTPUTS": 32, "CONSUMERS": 1, "STAGES": 3}),
]


def test_every_source_is_here() -> None:
    assert {variant.source for variant in VARIANTS} == {path.name for path in sources()}


def nvcc() -> Path:
    found = compiler.find_nvcc()
    assert found is not None
    return found


def known_architectures() -> list[str]:
    known = [arch for arch in ARCHITECTURES if compiler.supported(nvcc(), arch)]
    if not known:
        pytest.skip(f"this nvcc knows none of {', '.join(ARCHITECTURES)}")
    return known


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}{done.stdout}"
    return done.stderr + done.stdout


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_registers_and_wide_loads(variant: Variant, tmp_path: Path) -> None:
    known = known_architectures()
    definitions = [f"-D{name}={value}" for name, value in variant.macros.items()]
    targets = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in known]
    outputs = ["--keep", "--keep-dir", str(tmp_path), "-fatbin", "-o", str(tmp_path / "kernels.fatbin")]
    command = [str(nvcc()), *FLAGS, "-Xptxas", "-v", "--threads", "2", *targets, *definitions, *outputs]
    report = REPORT.findall(run([*command, str(source_path(variant.source))]))
    for arch in known:
        kernels = intermediate_code(tmp_path, arch)
        assert [name for name in variant.wide if not WIDE.search(kernels[name])] == [], arch
        assert (CONVERSION in kernels.get(TENSOR, "")) == (variant.converts and arch != "sm_90a"), arch
    assert len(report) >= len(kernels) * len(known)
    assert max(int(spilled) for _, *both in report for spilled in both) <= SPILLED
    assert max(int(stack) for stack, *_ in report) <= STACK


def intermediate_code(folder: Path, arch: str) -> dict[str, str]:
    """Kernel -> PTX, of the files that nvcc kept; a single architecture is not in their names."""
    found = [*folder.glob(f"*{arch[3:]}.ptx"), *folder.glob("*.ptx")]
    return {match[1]: match[0] for match in ENTRY.finditer(found[0].read_text())}


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
    cubin.write_bytes(compiler.compile_cubin("quantize.cu", arch, PACKING.macros))
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
