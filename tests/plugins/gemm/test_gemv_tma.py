"""`gemv_tma.cu` without a GPU: its own source run by C++ threads, with `host_sm90.hpp` for TMA and mbarriers.

Tests everything but speed: the ring and the parities of its mbarriers, what is copied from where, multicast in a
cluster, tails of N and K, decoding, and that the sums do not depend on the order in which copies complete.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch

from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.gemm.gemv import BOX, SCALE_BOX, WIDE, variant
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.runtime import nvcc as compiler
from fp4deploy.plugins.runtime.nvcc import source_path
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

pytestmark = pytest.mark.skipif(compiler.find_nvcc() is None, reason=f"no nvcc here; {compiler.INSTALL_NVCC}")

HALF, BFLOAT = torch.float16, torch.bfloat16
LIMITS = {HALF: 1e-3, BFLOAT: 4e-3}
NAMES = ("x", "codes", "scales", "amax", "bias", "out")
STANDARD = "algorithm array atomic barrier chrono cmath condition_variable cstdint cstdio cstdlib cstring fstream"
STANDARD += " functional memory mutex random string thread type_traits vector cuda_bf16.h cuda_fp16.h"
RUN = """
int run(char** words) {  // folder, m, n, k, range, relu, grid
    void* read[6];
    const char* names[6] = {"x", "codes", "scales", "amax", "bias", "out"};
    size_t sizes[6];
    for (int i = 0; i < 6; ++i) {
        std::ifstream file(std::string(words[0]) + "/" + names[i], std::ios::binary | std::ios::ate);
        sizes[i] = file ? (size_t)file.tellg() : 0;
        read[i] = sizes[i] ? aligned_alloc(16, (sizes[i] + 15) / 16 * 16) : nullptr;
        if (sizes[i]) file.seekg(0).read((char*)read[i], sizes[i]);
    }
    for (int i = 0; i < 3; ++i) firsts[i] = (const uint8_t*)read[i], lasts[i] = firsts[i] + sizes[i];
    ring_end = BARRIERS_AT;
    static_assert(THREADS == ALL && 32 * CONSUMER_WARPS == CONSUMER_THREADS && BARRIERS_AT + 16 * STAGES == TAKEN);
    const int m = std::stoi(words[1]), n = std::stoi(words[2]), k = std::stoi(words[3]);
    const TensorMap codes{{0, (uint64_t)k / 2, (uint64_t)n, CODES_BOX, OUTPUTS, ADJACENT}};
    const TensorMap scales{{1, (uint64_t)k / 16, (uint64_t)n, SCALES_BOX, OUTPUTS, 1}};
    run_grid(std::stoi(words[6]), CLUSTER, [=] {
        gemv_tma(codes, scales, (const DTYPE*)read[0], (const float*)read[3], (const float*)read[4],
                      (DTYPE*)read[5], m, n, k, std::stof(words[4]), std::stoi(words[5]));
    });
    std::ofstream(std::string(words[0]) + "/out", std::ios::binary).write((char*)read[5], sizes[5]);
    return 0;
}
"""
SUBSTITUTES = {  # in the source of the kernel, each once
    "extern __shared__ __align__(1024) uint8_t shared[];": "uint8_t* shared = here->memory;",
    '#include "sm90.cuh"': "",
    '#include "decode.cuh"': "",
}


def program_text(numbers: Iterable[int]) -> str:
    """The kernel's source and its host once for each case, with the macros of the case, in a namespace of its own."""
    kernel = source_path("gemv_tma.cu").read_text()
    for text, other in SUBSTITUTES.items():
        assert kernel.count(text) == 1
        kernel = kernel.replace(text, other)
    kernel = kernel.replace('extern "C" ', "")  # one name in every namespace
    host, decode = Path(__file__).with_name("host_sm90.hpp").read_text(), source_path("decode.cuh").read_text()
    lines = [f"#include <{name}>" for name in STANDARD.split()]
    for number in numbers:
        m, n, k, dtype, gpu = CASES[number]
        chosen = variant(m, n, k, *gpu)
        boxes = {"CODES_BOX": BOX, "SCALES_BOX": SCALE_BOX, "ADJACENT": WIDE // BOX}
        macros = {"DTYPE": CUDA_TYPES[dtype], "TAKEN": chosen.shared, **boxes, **chosen.macros}
        lines += [line for name, value in macros.items() for line in (f"#undef {name}", f"#define {name} {value}")]
        lines += [f"namespace case_{number} {{", host, decode, kernel, RUN, "}"]
    lines.append(
        "int main(int, char** words) {  // number of the case, words of `run`\n switch (std::stoi(words[1])) {"
    )
    lines += [f"case {number}: return case_{number}::run(words + 2);" for number in numbers]
    return "\n".join([*lines, "} return 1; }"]).replace("#pragma once", "")


@cache
def program(folder: Path) -> Path:
    """All cases in one program: most of the compiler's time goes into the headers of the standard library."""
    nvcc = compiler.find_nvcc()
    assert nvcc is not None
    (folder / "main.cpp").write_text(program_text(range(len(CASES))))
    command = [str(nvcc), "-std=c++20", "-O1", "--cudart", "none", "-Xcompiler", "-pthread,-w"]
    command += ["-o", str(folder / "kernel"), str(folder / "main.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "barrier: No such file" in done.stderr:
        pytest.skip("this C++ compiler has no std::barrier")
    assert done.returncode == 0, done.stderr
    return folder / "kernel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the program."""
    return tmp_path_factory.mktemp("gemv")


def gemv(
    program: Path, folder: Path, case: int, x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None, relu: bool
) -> torch.Tensor:
    """relu(x w^T + bias) by the kernel's source, in a process of its own, which undefined behaviour ends."""
    out = torch.full((len(x), weight.shape[0]), float("nan"), dtype=x.dtype)
    for name, part in zip(NAMES, (x, weight.codes, weight.scales, weight.amax, bias, out), strict=True):
        content = b"" if part is None else part.reshape(-1).view(torch.uint8).numpy().tobytes()
        (folder / name).write_bytes(content)
    m, n, k, _, gpu = CASES[case]
    words = [case, folder, m, n, k, E2M1_MAX * weight.e4m3_max, int(relu), variant(m, n, k, *gpu).grid(n)]
    ended = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return torch.frombuffer(bytearray((folder / "out").read_bytes()), dtype=x.dtype).view(out.shape)


H200, SM120 = (132, 232_448, 90), (188, 101_376, 120)
FEW = (2, *H200[1:])  # so few multiprocessors that small weights form clusters too
CASES = [
    (1, 72, 1024 + 256, BFLOAT, FEW),
    (1, 24, 6656 + 256, HALF, H200),
    (2, 1, 256, BFLOAT, H200),
    (5, 136, 512 + 256, HALF, FEW),
    (8, 72, 1024 + 256, BFLOAT, FEW),
    (9, 40, 1024 + 256, BFLOAT, H200),
    (13, 72, 1024 + 256, HALF, FEW),
    (16, 36, 3584 + 256, BFLOAT, (1, *H200[1:])),
    (16, 72, 1536 + 256, HALF, (2, *SM120[1:])),
    (8, 40, 2560 + 256, HALF, (2, *SM120[1:])),
    (11, 24, 1536 + 256, BFLOAT, (1, *SM120[1:])),
]


@pytest.mark.variants  # four seconds of a compiler, which the emulator does without
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case][:3]))
def test_near_float64_and_the_same_bytes_twice(folder: Path, case: int, tmp_path: Path) -> None:
    m, n, k, dtype, _ = CASES[case]
    random = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=random).to(dtype)
    bias, relu = (torch.randn(n, generator=random), True) if case % 2 else (None, False)
    weight = quantize_nvfp4(torch.randn(n, k, generator=random))
    run = program(folder)
    found = gemv(run, tmp_path, case, x, weight, bias, relu)
    expected = matmul_reference(x, weight, bias, relu, torch.float64, accumulate=torch.float64)
    assert isinstance(expected, torch.Tensor)
    assert float((found.double() - expected).norm()) <= LIMITS[dtype] * float(expected.norm())
    weight.scales.view(torch.uint8)[n // 2, -1] = 0x7F
    poisoned = gemv(run, tmp_path, case, x, weight, bias, relu)
    assert poisoned[:, n // 2].isnan().all()
    assert torch.equal(torch.where(torch.arange(n) == n // 2, found, poisoned), found)


def test_cases_cover_all_macros() -> None:
    chosen = [variant(m, n, k, *gpu) for m, n, k, _, gpu in CASES]
    every = {"ROWS": {1, 8, 16}, "CONSUMERS": {1, 2, 3}, "OUTPUTS": {16, 32, 64}, "CLUSTER": {1, 2}}
    for name, values in every.items():
        assert {each.macros[name] for each in chosen} >= values
        plain = {each.macros[name] for each in chosen[::2]}, {each.macros[name] for each in chosen[1::2]}
        assert name == "CONSUMERS" or plain == (values, values), "with and without bias and ReLU"
    around = [
        each for each, (_, _, k, *_) in zip(chosen, CASES, strict=True) if each.macros["STAGES"] < k // (2 * WIDE)
    ]
    assert {each.macros["CLUSTER"] for each in around} == {1, 2}, "the ring is filled more than once"
