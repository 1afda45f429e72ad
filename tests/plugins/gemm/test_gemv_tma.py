"""`gemv_tma.cu` without a GPU: its own source run by C++ threads, with `host_sm90.hpp` for TMA and mbarriers.

Tests everything but speed: the ring and the parities of its mbarriers, what is copied from where, multicast in a
cluster, tails of N and K, decoding, and that the sums do not depend on the order in which copies complete.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.gemm.gemv import BOX, SCALE_BOX, WIDE, Variant, variant
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.runtime import nvcc as compiler
from fp4deploy.plugins.runtime.nvcc import source_path
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

pytestmark = pytest.mark.skipif(compiler.find_nvcc() is None, reason=f"no nvcc here; {compiler.INSTALL_NVCC}")

HALF, BFLOAT = torch.float16, torch.bfloat16
LIMITS = {HALF: 1e-3, BFLOAT: 4e-3}
SHARED = "extern __shared__ __align__(1024) uint8_t shared[];"
NAMES = ("x", "codes", "scales", "amax", "bias", "out")
MAIN = """
#include "gemv_tma.hpp"

#include <fstream>
#include <string>

int main(int, char** words) {  // folder, m, n, k, range, relu, grid
    void* read[6];
    const char* names[6] = {"x", "codes", "scales", "amax", "bias", "out"};
    size_t sizes[6];
    for (int i = 0; i < 6; ++i) {
        std::ifstream file(std::string(words[1]) + "/" + names[i], std::ios::binary | std::ios::ate);
        sizes[i] = file ? (size_t)file.tellg() : 0;
        read[i] = sizes[i] ? aligned_alloc(16, (sizes[i] + 15) / 16 * 16) : nullptr;
        if (sizes[i]) file.seekg(0).read((char*)read[i], sizes[i]);
    }
    for (int i = 0; i < 3; ++i) firsts[i] = (const uint8_t*)read[i], lasts[i] = firsts[i] + sizes[i];
    ring_end = BARRIERS_AT;
    static_assert(THREADS == ALL && 32 * CONSUMER_WARPS == CONSUMER_THREADS && BARRIERS_AT + 16 * STAGES == TAKEN);
    const int m = std::stoi(words[2]), n = std::stoi(words[3]), k = std::stoi(words[4]);
    const TensorMap codes{{0, (uint64_t)k / 2, (uint64_t)n, CODES_BOX, OUTPUTS, ADJACENT}};
    const TensorMap scales{{1, (uint64_t)k / 16, (uint64_t)n, SCALES_BOX, OUTPUTS, 1}};
    run_grid(std::stoi(words[7]), CLUSTER, [=] {
        gemv_tma(codes, scales, (const DTYPE*)read[0], (const float*)read[3], (const float*)read[4],
                      (DTYPE*)read[5], m, n, k, std::stof(words[5]), std::stoi(words[6]));
    });
    std::ofstream(std::string(words[1]) + "/out", std::ios::binary).write((char*)read[5], sizes[5]);
}
"""
Gemv = Callable[[torch.Tensor, Nvfp4Tensor, "torch.Tensor | None", bool], torch.Tensor]


def built(folder: Path, chosen: Variant, dtype: torch.dtype) -> Gemv:
    """relu(x w^T + bias) by the kernel's source, in a process of its own, which undefined behaviour ends."""
    nvcc = compiler.find_nvcc()
    assert nvcc is not None
    text = source_path("gemv_tma.cu").read_text()
    assert text.count(SHARED) == 1
    (folder / "gemv_tma.hpp").write_text(text.replace(SHARED, "uint8_t* shared = here->memory;"))
    (folder / "sm90.cuh").write_text(Path(__file__).with_name("host_sm90.hpp").read_text())
    (folder / "decode.cuh").write_text(source_path("decode.cuh").read_text())
    (folder / "main.cpp").write_text(MAIN)
    boxes = {"CODES_BOX": BOX, "SCALES_BOX": SCALE_BOX, "ADJACENT": WIDE // BOX}
    macros = {"DTYPE": CUDA_TYPES[dtype], "TAKEN": chosen.shared, **boxes, **chosen.macros}
    command = [str(nvcc), "-std=c++20", "-O1", "--cudart", "none", "-Xcompiler", "-pthread,-w"]
    command += [*compiler._definitions(macros), "-o", str(folder / "kernel"), str(folder / "main.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "barrier: No such file" in done.stderr:
        pytest.skip("this C++ compiler has no std::barrier")
    assert done.returncode == 0, done.stderr

    def call(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None, relu: bool) -> torch.Tensor:
        out = torch.full((len(x), weight.shape[0]), float("nan"), dtype=dtype)
        for name, part in zip(NAMES, (x, weight.codes, weight.scales, weight.amax, bias, out), strict=True):
            content = b"" if part is None else part.reshape(-1).view(torch.uint8).numpy().tobytes()
            (folder / name).write_bytes(content)
        span, grid = E2M1_MAX * weight.e4m3_max, chosen.grid(weight.shape[0])
        words = [str(folder), *map(str, (len(x), *weight.shape, span, int(relu), grid))]
        ended = subprocess.run([str(folder / "kernel"), *words], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return torch.frombuffer(bytearray((folder / "out").read_bytes()), dtype=dtype).view(out.shape)

    return call


H200, SM120 = (132, 232_448, 90), (188, 101_376, 120)
FEW = (2, 232_448, 90)  # so few multiprocessors that small weights form clusters too
CASES = [
    (1, 72, 8192 + 768, HALF, H200),
    (1, 200, 2048 + 256, BFLOAT, FEW),
    (2, 1, 256, BFLOAT, H200),
    (5, 200, 1024 + 256, HALF, FEW),
    (8, 136, 2048 + 256, BFLOAT, FEW),
    (9, 40, 3072 + 768, BFLOAT, H200),
    (13, 72, 4096 + 256, HALF, FEW),
    (16, 130, 4096 + 256, BFLOAT, FEW),
    (16, 72, 2048 + 768, HALF, (2, *SM120[1:])),
    (8, 136, 4096 + 768, HALF, (2, *SM120[1:])),
    (11, 24, 2048 + 256, BFLOAT, (1, *SM120[1:])),
]


@pytest.mark.parametrize(("m", "n", "k", "dtype", "gpu"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_near_float64_and_the_same_bytes_twice(
    m: int, n: int, k: int, dtype: torch.dtype, gpu: tuple[int, int, int], tmp_path: Path
) -> None:
    gemv = built(tmp_path, variant(m, n, k, *gpu), dtype)
    random = torch.Generator().manual_seed(m + n + k)
    x, bias = torch.randn(m, k, generator=random).to(dtype), torch.randn(n, generator=random)
    weight = quantize_nvfp4(torch.randn(n, k, generator=random))
    found = gemv(x, weight, bias, True)
    expected = matmul_reference(x, weight, bias, True, torch.float64, accumulate=torch.float64)
    assert isinstance(expected, torch.Tensor)
    assert float((found.double() - expected).norm()) <= LIMITS[dtype] * float(expected.norm())
    assert torch.equal(gemv(x, weight, bias, True), found)
    weight.scales.view(torch.uint8)[n // 2, -1] = 0x7F
    poisoned = gemv(x, weight, None, False)
    assert poisoned[:, n // 2].isnan().all()
    assert int(poisoned.isnan().sum()) == m


def test_cases_cover_all_macros() -> None:
    chosen = [variant(m, n, k, *gpu) for m, n, k, _, gpu in CASES]
    for name, values in {"ROWS": {1, 8, 16}, "CONSUMERS": {1, 3}, "OUTPUTS": {16, 32, 64}, "CLUSTER": {1, 2}}.items():
        assert {each.macros[name] for each in chosen} >= values
    assert any(each.macros["STAGES"] < k // (2 * WIDE) for each, (_, _, k, *_) in zip(chosen, CASES, strict=True))
