"""Every kernel source compiles for every architecture, with the macros and the signatures that the operators use.

No GPU: nvcc alone. One call compiles a variant for several architectures and keeps the PTX, in which entry points and
their parameters are listed. The sources tell architectures apart by 8.6, 8.9 and 10.0 alone (a test reads them), so
that SM100 to SM121 compile the same lines: every variant is compiled for SM100 and SM120, and one variant of each
source for the others.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fp4deploy.plugins.runtime import nvcc
from tests.plugins.runtime.launch_variants import Variant, launched

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
# For one variant of each source; nvcc 13.0 is the first for sm_110, 13.4 for sm_107.
OTHERS = ("sm_103a", "sm_107a", "sm_110a", "sm_121a")
FROM_SM90 = ("gemv_tma.cu",)  # TMA, clusters, mbarriers with a transaction count
CONVERSION = "cvt.rn.satfinite.e2m1x2.f32"
# What a letter of a launch signature (see `runtime.launch`) is in PTX.
LETTERS = {"P": "u64", "q": "u64", "i": "u32", "f": "f32", "128s": "b8[128]"}
NVCC = nvcc.find_nvcc()
VARIANTS = launched()

pytestmark = pytest.mark.skipif(NVCC is None, reason=f"no nvcc here; {nvcc.INSTALL_NVCC}")


def known_architectures(requested: tuple[str, ...] = ARCHITECTURES) -> list[str]:
    assert NVCC is not None
    known = [arch for arch in requested if nvcc.supported(NVCC, arch)]
    if not known:
        pytest.skip(f"this nvcc ({nvcc.nvcc_version(NVCC)}) knows none of {', '.join(requested)}")
    return known


def entry_points(ptx: str) -> dict[str, str]:
    """Name -> parameter types, such as "u64 b8[128] f32"."""
    found = re.findall(r"\.entry (\w+)\s*\((.*?)\)", ptx, re.DOTALL)
    kind = re.compile(r"\.param (?:\.align \d+ )?\.(\w+)(?: \.ptr \.align \d+)? \w+(\[\d+\])?")
    return {name: " ".join(map("".join, kind.findall(parameters))) for name, parameters in found}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compiles_for_every_architecture(variant: Variant, tmp_path: Path) -> None:
    compile_for(
        [arch for arch in known_architectures() if arch != "sm_80" or variant.source not in FROM_SM90],
        variant,
        tmp_path,
    )


@pytest.mark.parametrize("variant", {variant.source: variant for variant in VARIANTS}.values(), ids=str)
def test_every_source_compiles_for_the_other_architectures(variant: Variant, tmp_path: Path) -> None:
    compile_for(known_architectures(OTHERS), variant, tmp_path)


def test_no_source_tells_blackwell_gpus_apart() -> None:
    """Otherwise every variant has to be compiled for each of them."""
    files = [path for folder in nvcc.SOURCES for path in folder.glob("*.cu*")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert {int(found) for found in re.findall(r"__CUDA_ARCH__\s*[<>=!]+\s*(\d+)", text)} == {860, 890, 1000}
    assert not re.search(r"__CUDA_ARCH_SPECIFIC__|__CUDA_ARCH_FEAT", text)


def compile_for(targets: list[str], variant: Variant, tmp_path: Path) -> None:
    numbers = [arch.removeprefix("sm_") for arch in targets]
    command = [
        str(NVCC),
        "-fatbin",
        "--threads=2",
        "--keep",
        f"--keep-dir={tmp_path}",
        *nvcc.FLAGS,
        *nvcc._definitions(dict(variant.macros)),
        *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers),
        "-o",
        str(tmp_path / "kernels.fatbin"),
        str(nvcc.source_path(variant.source)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, f"{variant}\n{done.stderr}{done.stdout}"
    stem = Path(variant.source).stem
    for number in numbers:
        kept = f"{stem}.compute_{number}" if len(numbers) > 1 else stem  # nvcc names the target where there are several
        assert (tmp_path / f"{kept}.cubin").stat().st_size > 0
        entries = entry_points((tmp_path / f"{kept}.ptx").read_text())
        for name, signature in variant.entries:
            expected = " ".join(LETTERS[letter] for letter in re.findall(r"\d*.", signature))
            assert entries.get(name) == expected, (name, signature, number)


def test_every_source_is_launched() -> None:
    sources = {path.name for path in nvcc.sources()}
    assert {variant.source for variant in VARIANTS} == sources


def test_blackwell_converts_in_hardware(tmp_path: Path) -> None:
    """The instruction is in the code for 10.0 on, and the software in the code for others."""
    source = tmp_path / "codes.cu"
    source.write_text(
        '#include "fp4.cuh"\nextern "C" __global__ void codes(const float* u, uint32_t* out) {\n'
        "    *out = fp4::encode_eight(u);\n}\n"
    )
    for arch in known_architectures(ARCHITECTURES + OTHERS):
        number = arch.removeprefix("sm_")
        target = f"-gencode=arch=compute_{number},code=compute_{number}"
        command = [str(NVCC), "-ptx", target, *nvcc.FLAGS, *nvcc.include_options(), "-o", "-", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(CONVERSION) == (4 if int(number.rstrip("a")) >= 100 else 0), arch
