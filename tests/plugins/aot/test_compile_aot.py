"""Ahead-of-time (AOT) compilation with Triton: instructions, registers, files, diagnostics. No GPU is needed.

Compilation runs in the workers of `aot.build`, because other tests import kernels for Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError
from fp4deploy.plugins.aot import build as aot_build
from fp4deploy.plugins.aot import compile as aot_compile
from fp4deploy.plugins.aot import diagnose, store
from fp4deploy.plugins.aot.build import BuildResult
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.runtime import cubin
from tests.plugins.aot.aot_cases import BLOCK_TRITON, KERNELS, SCALE, environment, product
from tests.processes import plant

pytestmark = pytest.mark.skipif(aot_compile.triton_version() is None, reason="Triton is missing: pip install triton")

FP4 = tuple(arch for arch in store.TARGETS if Architecture.parse(arch).number >= 100)
TENSOR_MEMORY = tuple(arch for arch in FP4 if Architecture.parse(arch).tensor_memory)
DECODED = product(False, bn=64, bk=32)
NATIVE = {arch: product(True, bm=128 if arch in TENSOR_MEMORY else 64, bn=64) for arch in FP4}
TRAP = product(True, bm=64, bn=32)
CROWDED = product(False, 128, 128, 16, warps=1)
BROKEN = Launch(f"{KERNELS}:scale_kernel", SCALE.arguments, (("BLOCK", 1000),))
GENERATIONS = ("sm_80", "sm_89"), ("sm_90",), ("sm_100", "sm_103"), ("sm_120", "sm_121")
FIRST = [generation[0] for generation in GENERATIONS]  # what Triton makes of GEMMs for the others: `make nightly`
GEMMS = [*((DECODED, arch) for arch in store.TARGETS), *((launch, arch) for arch, launch in NATIVE.items())]
REQUESTED = [
    *((SCALE, arch) for arch in store.TARGETS),
    *((launch, arch) for launch, arch in GEMMS if arch in FIRST),
    (TRAP, "sm_100"),
    (CROWDED, "sm_80"),
    (BROKEN, "sm_90"),
]
ODD_BLOCKS = ("sm_90", "sm_120")
Results = dict[tuple[Launch, str], BuildResult]
Compile = Callable[[list[tuple[Launch, str]]], Results]


@pytest.fixture(scope="session")
def compile_all(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile in fresh processes, into a cache of the tests."""
    cache = tmp_path_factory.mktemp("cache")

    def run(requested: list[tuple[Launch, str]]) -> Results:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FP4DEPLOY_CACHE", str(cache))
            patch.delenv("FP4DEPLOY_KERNEL_PATH", raising=False)
            done = dict(aot_build.build(requested, jobs=2))
        return {requested[index]: each for index, each in done.items()}

    return run


@pytest.fixture(scope="session")
def results(compile_all: Compile) -> Results:
    """Of the kernels that several tests look at: the workers import Triton once."""
    return compile_all([*REQUESTED, *((odd_blocks(arch), arch) for arch in ODD_BLOCKS)])


@pytest.fixture(scope="session")
def gemms(compile_all: Compile, results: Results, request: pytest.FixtureRequest) -> Results:
    """GEMMs for the first architecture of each generation, and where they are tested for all."""
    mine = [item for item in request.session.items if item.path == Path(__file__)]
    every = any(item.get_closest_marker("nightly") for item in mine)
    return results | compile_all([each for each in GEMMS if each not in results]) if every else results


def of_every(architectures: Iterable[str]) -> list[Any]:
    return [pytest.param(arch, marks=() if arch in FIRST else pytest.mark.nightly) for arch in architectures]


def refused(each: BuildResult) -> bool:
    """Refused because this Triton is too old for the architecture: an error, which is not a silent fallback."""
    why = aot_compile.too_old(each.arch, bool(dict(each.launch.constants).get("NATIVE")))
    return bool(why) and f"does not compile for {each.arch}: {why}" in each.failure


@pytest.mark.parametrize("arch", store.TARGETS)
def test_every_architecture(results: Results, arch: str) -> None:
    if refused(results[SCALE, arch]):
        pytest.skip(f"Triton {aot_compile.triton_version()} does not know {arch}")
    compiled = results[SCALE, arch].compiled
    assert compiled is not None, results[SCALE, arch].failure
    assert compiled.cubin[:4] == b"\x7fELF"
    assert (compiled.name, compiled.num_warps, compiled.shared) == ("scale_kernel", 4, 0)
    assert (compiled.parameters, compiled.divisible) == (("*fp32", "*fp32", "i32", "fp32"), (0, 1))
    assert cubin.target(compiled.ptx).rstrip("a") == arch
    # The two last are the pointers to scratch memory; n is a parameter although nothing says that it is not 1.
    assert cubin.entry_point(compiled.ptx) == ("scale_kernel", ("u64", "u64", "u32", "f32", "u64", "u64"))
    assert compiled.instructions == ()
    assert (0 < compiled.registers < 64, compiled.spills) == (True, 0)


@pytest.mark.parametrize("arch", of_every(store.TARGETS))
def test_gemms_of_decoded_operands(gemms: Results, arch: str) -> None:
    each = gemms[DECODED, arch]
    if refused(each):
        pytest.skip(f"Triton {aot_compile.triton_version()} does not know {arch}")
    assert each.compiled is not None, each.failure
    instruction = "tcgen05.mma kind::f16" if arch in TENSOR_MEMORY else "mma.sync m16n8k16 f16"
    assert each.compiled.instructions == ("wgmma.mma_async m64n64k16 f16" if arch == "sm_90" else instruction,)
    assert each.diagnostics() == []


@pytest.mark.parametrize("arch", of_every(FP4))
def test_native_gemms(gemms: Results, arch: str) -> None:
    each = gemms[NATIVE[arch], arch]
    if refused(each):
        pytest.skip(f"Triton {aot_compile.triton_version()} has no FP4 GEMM for {arch}")
    assert each.compiled is not None, each.failure
    assert all(cubin.NATIVE in name for name in each.compiled.instructions)
    assert each.compiled.instructions
    assert each.diagnostics() == []
    assert f"{cubin.NATIVE}.block_scale" in each.compiled.ptx
    expected = "tcgen05.mma" if arch in TENSOR_MEMORY else "mma.sync"
    assert all(name.startswith(expected) for name in each.compiled.instructions)


def test_the_silent_fallback_is_caught(results: Results) -> None:
    """A tile of 64 rows has no FP4 instruction on sm_100: Triton multiplies in FP16, or (3.6) raises an error."""
    each = results[TRAP, "sm_100"]
    diagnostics = " ".join(each.diagnostics())
    if each.compiled is not None:
        assert "asked for kind::mxf4nvf4 and got tcgen05.mma kind::f16" in diagnostics
    else:
        assert "does not compile for sm_100" in diagnostics


def test_spills_are_caught(results: Results) -> None:
    each = results[CROWDED, "sm_80"]
    assert each.compiled is not None
    assert each.compiled.spills > 1000
    assert f"{each.compiled.spills} bytes a thread spilled" in each.diagnostics()
    few = dataclasses.replace(each.compiled, spills=diagnose.MAX_SPILLS)
    assert diagnose.diagnostics(few) == []
    more = dataclasses.replace(few, spills=diagnose.MAX_SPILLS_UNEVEN)
    assert len(diagnose.diagnostics(more)) == 1
    odd = dataclasses.replace(CROWDED, constants=(*CROWDED.constants, ("EVEN", False)))
    assert diagnose.diagnostics(dataclasses.replace(more, launch=store.description(odd))) == []


def odd_blocks(arch: str) -> Launch:
    """A 3x3 convolution of channels that are an odd number of blocks."""
    facts = {("KH", 3), ("TWO", False), ("UP", False), ("QUANTIZE", False), ("BIAS", True), ("BF16", False)}
    return next(
        launch
        for launch, found in variants()
        if found == arch and "CB" not in launch.divisible and facts <= set(launch.constants)
    )


@pytest.mark.parametrize("arch", ODD_BLOCKS)
def test_pixels_of_eight_bytes_are_loaded_whole(results: Results, arch: str) -> None:
    """Channels that are an odd number of blocks: scales may be read byte by byte, codes not."""
    each = results[odd_blocks(arch), arch]
    assert each.compiled is not None, each.failure
    assert len(re.findall(r"ld\.global\S*\.b8\b", each.compiled.ptx)) <= 16
    assert each.diagnostics() == []


def test_registers_and_spills_are_those_of_cuobjdump(results: Results, tmp_path: Path) -> None:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton has no cuobjdump")
    for index, each in enumerate(results.values()):
        if each.compiled is None:
            continue
        file = tmp_path / f"{index}.cubin"
        file.write_bytes(each.compiled.cubin)
        said = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
        assert f"REG:{each.compiled.registers} STACK:{each.compiled.spills} " in said, (each.arch, each.launch)


def test_results_are_json_values(results: Results) -> None:
    facts = json.loads(json.dumps(results[DECODED, "sm_90"].as_json()))
    assert facts["instructions"] == ["wgmma.mma_async m64n64k16 f16"]
    assert facts["constants"]["BM"] == 128
    assert facts["complaints"] == []


def test_a_folder_for_deployment(results: Results, tmp_path: Path) -> None:
    """What `build` writes is all that a process without Triton needs."""
    cache, out = tmp_path / "cache", tmp_path / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP4DEPLOY_CACHE", str(cache))
        patch.delenv("FP4DEPLOY_KERNEL_PATH", raising=False)
        ((_, each),) = aot_build.build([(SCALE, "sm90")], jobs=1, out=out)
    assert each.compiled == results[SCALE, "sm_90"].compiled
    shutil.rmtree(cache)
    script = BLOCK_TRITON + (
        "from aot_cases import SCALE\n"
        "from fp4deploy.plugins.aot import compile as aot_compile\n"
        "found = aot_compile.compile_launch(SCALE, 'sm_90')\n"
        "print(aot_compile.triton_version(), found.name, len(found.cubin), found.registers)\n"
        "try: aot_compile.compile_launch(SCALE, 'sm_120')\n"
        "except aot_compile.KernelError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(cache, out), timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert each.compiled is not None
    assert first == f"None scale_kernel {len(each.compiled.cubin)} {each.compiled.registers}"
    assert f"{KERNELS}:scale_kernel is not compiled for sm_120, and Triton is missing" in second
    assert "fp4deploy kernels --arch sm120 --out DIR; then set FP4DEPLOY_KERNEL_PATH=DIR" in second
    assert "It is there for sm_90; a cubin runs on its own architecture only." in second
    assert str(out) in second


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    script = (
        "from aot_cases import SCALE\n"
        "from fp4deploy.plugins.aot import compile as aot_compile\n"
        "inner, runs = aot_compile._compile, []\n"
        "aot_compile._compile = lambda *a: (runs.append(1), __import__('time').sleep(2), inner(*a))[2]\n"
        "print(len(aot_compile.compile_launch(SCALE, 'sm_90').cubin), len(runs))\n"
    )
    kept = {name: value for name, value in environment(tmp_path).items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert said[0][0] == said[1][0]
    assert sorted(runs for _, runs in said) == ["0", "1"]
    suffixes = [path.suffix for path in (tmp_path / "triton" / "sm_90").iterdir()]
    assert sorted(suffixes) == [".kernel", ".lock"]


def test_what_triton_refuses_says_why(results: Results, compile_all: Compile) -> None:
    each = results[BROKEN, "sm_90"]
    assert each.compiled is None
    assert "scale_kernel does not compile for sm_90" in each.failure
    with pytest.raises(InputError) as error:
        compile_all([(Launch(f"{KERNELS}:scale_kernel", SCALE.arguments[::-1], SCALE.constants), "sm_90")])
    assert "scale_kernel takes x, out, n, factor, BLOCK" in str(error.value)
    with pytest.raises(InputError) as error:
        aot_build.build_one(Launch(f"{KERNELS}:no_kernel", SCALE.arguments, SCALE.constants), "sm_90")
    assert "There is no kernel no_kernel" in str(error.value)


def test_shared_memory_beyond_the_gpu_is_caught(results: Results) -> None:
    compiled = results[DECODED, "sm_120"].compiled
    assert compiled is not None
    crowded = dataclasses.replace(compiled, shared=99 * 1024 + 1)
    assert diagnose.diagnostics(crowded) == ["101377 bytes of shared memory, and 101376 is the most"]
    assert diagnose.diagnostics(dataclasses.replace(compiled, shared=99 * 1024)) == []


def test_settings_that_alter_the_code_are_not_kept(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(plant(tmp_path / "planted", mark))  # its workers import nothing from here, either
        patch.setenv("PYTHONPATH", str(tmp_path / "planted"))
        patch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "cache"))
        patch.setenv("PTXAS_OPTIONS", "--opt-level=1")
        ((_, each),) = aot_build.build([(SCALE, "sm_90")], jobs=1)
    assert not mark.exists(), mark.read_text()
    assert each.compiled is not None
    assert not any(path.suffix == ".kernel" for path in tmp_path.rglob("*"))


@cache
def variants() -> list[tuple[Launch, str]]:
    from fp4deploy.plugins.gemm.triton.variants import all_variants

    return [(launch, arch) for arch in store.TARGETS for launch in all_variants(arch)]


def failures(found: Iterable[BuildResult]) -> list[str]:
    return [
        f"{each.arch} {each.launch.kernel} {dict(each.launch.constants)}: {each.diagnostics()}"
        for each in found
        if each.diagnostics() and not refused(each)
    ]


def representatives() -> list[list[tuple[Launch, str]]]:
    """The first and the largest tile of each kernel, native and decoded, for each architecture."""
    chosen: dict[tuple[str, str, object], list[tuple[Launch, str]]] = {}
    for launch, arch in variants():
        chosen.setdefault((arch, launch.kernel, dict(launch.constants).get("NATIVE")), []).append((launch, arch))
    return [[group[0], group[-1]] for group in chosen.values()]


def kind(launch: Launch) -> tuple[str, object]:
    return launch.kernel, dict(launch.constants).get("NATIVE")


def sample() -> list[tuple[Launch, str]]:
    """For each generation every kernel, each for another architecture; its first and its largest tile in turn."""
    found: list[tuple[Launch, str]] = []
    for generation in GENERATIONS:
        pairs = [pair for pair in representatives() if pair[0][1] in generation]
        for number, which in enumerate(dict.fromkeys(kind(pair[0][0]) for pair in pairs)):
            arch = generation[number % len(generation)]
            tile = sum(kind(launch) == which for launch, _ in found) % 2
            found.append(next(pair[tile] for pair in pairs if (kind(pair[0][0]), pair[0][1]) == (which, arch)))
    return found


@pytest.mark.nightly
def test_every_kind_of_kernel_compiles_without_diagnostics(compile_all: Compile) -> None:
    pairs, requested = representatives(), sample()
    for tile in (0, 1):
        assert {kind(pair[tile][0]) for pair in pairs if pair[tile] in requested} == {
            kind(pair[0][0]) for pair in pairs
        }
    assert failures(compile_all(requested).values()) == []


@pytest.mark.variants
def test_both_tiles_of_every_kind_of_kernel_compile() -> None:
    """Into the cache, from which the emulator's tests take them."""
    requested = list(dict.fromkeys(each for pair in representatives() for each in pair))
    assert failures(each for _, each in aot_build.build(requested, jobs=2)) == []


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif("FP4DEPLOY_TEST_ALL_KERNELS" not in os.environ, reason="hours; set FP4DEPLOY_TEST_ALL_KERNELS=1")
def test_every_variant_compiles_without_diagnostics(compile_all: Compile) -> None:
    assert failures(compile_all(variants()).values()) == []


def test_the_command_without_triton(tmp_path: Path) -> None:
    code = BLOCK_TRITON + (
        "import importlib.util\n"
        "name = 'fp4deploy.cli.main' if importlib.util.find_spec('fp4deploy.cli') else 'cli.main'\n"
        "sys.argv = ['fp4deploy', 'kernels', '--arch', 'sm120']\n"
        "importlib.import_module(name).main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(tmp_path), timeout=120
    )
    assert done.returncode == 3, done.stderr
    assert "Triton is missing, and it compiles the kernels: pip install triton" in done.stderr
    assert done.stdout == ""
