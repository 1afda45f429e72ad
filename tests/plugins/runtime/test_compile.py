"""Every kernel source compiles for every architecture, with the macros and the signatures that the operators use.

No GPU: nvcc alone. It keeps the PTX, in which entry points and their parameters are listed, and reports stack and
spills.

The sources tell architectures apart by 8.6, 8.9 and 10.0 alone (a test reads them), so that three architectures have
all the code there is, and SM100 to SM121 compile the same lines. A second of nvcc for each variant and architecture is
minutes in all, so that `make nightly` takes variants in which every value of every macro of a source occurs: one of
each source for a Blackwell GPU and for SM80 or SM90 in turn, the others for one of these. Most of that second goes
into CUDA's headers: the variants of an architecture are one source there (`joined`), each in a namespace.
`make emulate` compiles files as they are, every variant for SM90, SM100 and SM120, those of `make nightly` for SM80,
and one of each source for the other architectures. `make test` compiles what the emulator executes.
One of each source shows that the PTX for SM100 to SM103, SM120 and SM121 differs in the name of the target alone, so
that of the other variants the PTX for SM100 is assembled for SM120.

Speed is tested too: a local array that is not kept in registers, or a load taken apart, still gives the right bytes,
and no other test would show it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from fp4deploy.plugins.runtime import nvcc
from fp4deploy_emulator import instructions  # noqa: F401  registers what `machine` executes
from fp4deploy_emulator.machine import compiled
from fp4deploy_emulator.ptx import parse
from tests.plugins.runtime.launch_variants import BESIDES, Variant, capability, launched

# nvcc 13.0 is the first for sm_110, 13.4 for sm_107.
BLACKWELL = ("sm_100a", "sm_120a", "sm_103a", "sm_121a", "sm_110a", "sm_107a")
MAIN, OTHERS = ("sm_80", "sm_90a", *BLACKWELL[:2]), BLACKWELL[2:]
ONE_CODE = {"100a", "103a", "120a", "121a"}  # for 11.0 nvcc orders some instructions in another way
CONVERSION = "cvt.rn.satfinite.e2m1x2.f32"
CONVERTING = ("quantize_tensor", "quantize_row_scaled", "norm_pack", "norm_pool_pack", "pointwise_pack")
# Kernels whose loads are of 16 bytes; of `quantize.cu` with LINEAR those of every kernel.
WIDE = {"pack_rows", "pack_rows_4o6", "finite_amax", "concat", "separate", "moments", "apply", "sums", "gradient"}
WIDE |= {"norm_pack", "norm_pool_pack", "pointwise_pack", "pool", "pool_gradient", "track_amax", "previous_amax"}
WIDE |= {"normalized", "pooled", "joined"}
WIDE_LOAD = re.compile(r"ld\.(?:volatile\.)?global[.\w]*\.v4\.[bfsu]32|cp\.async\.cg\.shared\.global [^;]*, 16,")
REPORT = re.compile(
    r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
SPILLED = 4  # bytes: one register, around the call of a rare path
STACK = 8  # bytes: what a called function returns by reference; a local array takes 32 or more
TARGET = re.compile(r"^\.target .*$", re.MULTILINE)
INCLUDE = re.compile(r'#include (?:<([\w.]+)>|"([\w.]+)")')
MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
HEADERS = {"__half": "cuda_fp16.h", "__nv_bfloat": "cuda_bf16.h", r"\bu?int\d+_t": "cstdint"}
ENTRY = re.compile(r"\.entry (\w+)\s*\((.*?)\)(.*?)^}", re.DOTALL | re.MULTILINE)
PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w+)(?: \.ptr \.align \d+)? \w+(\[\d+\])?")
# What a letter of a launch signature (see `runtime.launch`) is in PTX.
LETTERS = {"P": "u64", "q": "u64", "i": "u32", "f": "f32", "128s": "b8[128]"}
NVCC = nvcc.find_nvcc()
VARIANTS = launched()
FIRST = list({variant.source: variant for variant in reversed(VARIANTS)}.values())

pytestmark = pytest.mark.skipif(NVCC is None, reason=f"no nvcc here; {nvcc.INSTALL_NVCC}")


def known(requested: tuple[str, ...], variant: Variant | None = None) -> list[str]:
    """The architectures that this nvcc has, and that a variant is launched on."""
    assert NVCC is not None
    found = [arch for arch in requested if nvcc.supported(NVCC, arch)]
    return [arch for arch in found if variant is None or variant.runs_on(arch)]


def macros(variant: Variant) -> set[tuple[str, str, object]]:
    """The values of macros that a variant compiles."""
    return {(variant.source, *macro) for macro in variant.macros}


def chosen() -> list[Variant]:
    """One variant of each source, and the fewest others (found greedily) for the values of macros that these lack."""
    found = list(FIRST)
    lacking = set().union(*map(macros, VARIANTS)) - set().union(*map(macros, FIRST))
    while lacking:
        found.append(max(VARIANTS, key=lambda variant: len(lacking & macros(variant))))
        lacking -= macros(found[-1])
    return found


CHOSEN = chosen()


def sample(variant: Variant) -> list[str]:
    """The architectures of a variant in the short run."""
    number = CHOSEN.index(variant)
    blackwell = known(BLACKWELL, variant)
    other = [blackwell[number // 2 % len(blackwell)]] if blackwell else []
    older = known(("sm_80", "sm_90a"), variant)
    older = [older[number // 2 % len(older)]] if older else []
    if variant in FIRST:
        return [*older, *other]
    return (other if number % 2 else []) or older


@dataclass(frozen=True)
class Code:
    """What nvcc made of the joined variants of an architecture: PTX, and the report of ptxas."""

    entries: dict[str, re.Match[str]]
    report: dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def joined_code(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Code]:
    @lru_cache
    def compiled_for(arch: str) -> Code:
        folder = tmp_path_factory.mktemp(arch)
        source = folder / "kernels.cu"
        source.write_text(joined([variant for variant in CHOSEN if arch in sample(variant)]))
        said = run_nvcc(source, [arch], [], folder)
        entries = {found[1]: found for found in ENTRY.finditer((folder / "kernels.ptx").read_text())}
        return Code(entries, {name: tuple(map(int, found)) for name, *found in REPORT.findall(said)})

    return compiled_for


@pytest.mark.nightly
@pytest.mark.parametrize("variant", CHOSEN, ids=str)
def test_every_value_of_a_macro_compiles(variant: Variant, joined_code: Callable[[str], Code]) -> None:
    if not sample(variant):
        pytest.skip("this nvcc knows none of the architectures")
    for arch in sample(variant):
        code = joined_code(arch)
        for name, signature in variant.entries:
            start = f"_ZN{len(space(variant))}{space(variant)}{len(name)}{name}E"
            (entry,) = (entry for each, entry in code.entries.items() if each.startswith(start))
            check_entry(name, entry, signature, dict(variant.macros), capability(arch) >= 100)
        check_report([found for name, found in code.report.items() if space(variant) in name], len(variant.entries))


def space(variant: Variant) -> str:
    """The namespace of a variant; no name is the beginning of another."""
    return f"variant{CHOSEN.index(variant)}_"


def joined(variants: list[Variant]) -> str:
    """Variants as one source: CUDA's headers once, then each variant with its macros in a namespace."""
    texts = {path.name: path.read_text() for folder in nvcc.SOURCES for path in folder.glob("*.cu*")}
    system = sorted({found for text in texts.values() for found, _ in INCLUDE.findall(text) if found})
    names = {name for text in texts.values() for name in MACRO.findall(text)}
    names |= {name for variant in variants for name, _ in variant.macros}
    lines = [f"#include <{name}>" for name in system]
    for variant in variants:
        lines += [f"#undef {name}" for name in sorted(names)]
        options = nvcc._definitions(dict(variant.macros))
        lines += ["#define " + option.removeprefix("-D").replace("=", " ", 1) for option in options]
        lines += [f"namespace {space(variant)} {{", *included(variant.source, texts, set()), "}"]
    return "\n".join(lines).replace('extern "C" ', "")


def included(name: str, texts: dict[str, str], seen: set[str]) -> Iterator[str]:
    """The lines of a file, those of our headers in the place where they are included first."""
    seen.add(name)
    yield f'#line 1 "{name}"'
    for number, line in enumerate(texts[name].splitlines(), 1):
        found = INCLUDE.match(line)
        if found and found[2] and found[2] not in seen:
            yield from included(found[2], texts, seen)
            yield f'#line {number + 1} "{name}"'
        else:
            yield "" if found or line == "#pragma once" else line


@pytest.mark.parametrize("variant", FIRST, ids=lambda variant: variant.source)
def test_sources_include_the_headers_they_need(variant: Variant) -> None:
    """Which a joined source does not show."""
    texts = {path.name: path.read_text() for folder in nvcc.SOURCES for path in folder.glob("*.cu*")}
    names: set[str] = set()
    lines = [
        *included(variant.source, texts, names),
        *(str(each) for each in VARIANTS if each.source == variant.source),
    ]
    headers = {header for name in names for header, _ in INCLUDE.findall(texts[name])}
    assert headers >= {header for pattern, header in HEADERS.items() if re.search(pattern, "\n".join(lines))}


@pytest.mark.variants
@pytest.mark.parametrize("variant", [*VARIANTS, *BESIDES], ids=str)
def test_every_variant_compiles_for_every_architecture(variant: Variant, tmp_path: Path) -> None:
    targets = [arch for arch in known(MAIN, variant) if arch != "sm_80" or variant in CHOSEN]
    compile_for(targets, variant, tmp_path, shared=variant not in FIRST)
    require_emulated(tmp_path)


@pytest.mark.variants
@pytest.mark.parametrize("variant", FIRST, ids=str)
def test_every_source_compiles_for_the_other_architectures(variant: Variant, tmp_path: Path) -> None:
    compile_for(known(OTHERS, variant), variant, tmp_path)
    require_emulated(tmp_path)


def test_the_sample_has_every_source_for_both_conversions_and_every_kind_of_architecture() -> None:
    taken = {(variant.source, arch) for variant in CHOSEN for arch in sample(variant)}
    for variant in FIRST:
        for kind in (("sm_80", "sm_90a"), BLACKWELL):
            assert not known(kind, variant) or {(variant.source, arch) for arch in kind} & taken, (variant, kind)
    assert {arch for _, arch in taken} >= set(known(("sm_80", "sm_90a")))


def test_no_source_tells_blackwell_gpus_apart() -> None:
    """Otherwise every variant has to be compiled for each of them."""
    files = [path for folder in nvcc.SOURCES for path in folder.glob("*.cu*")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert {int(found) for found in re.findall(r"__CUDA_ARCH__\s*[<>=!]+\s*(\d+)", text)} == {860, 890, 900, 1000}
    assert not re.search(r"__CUDA_ARCH_SPECIFIC__|__CUDA_ARCH_FEAT", text)


def compile_for(targets: list[str], variant: Variant, tmp_path: Path, shared: bool = False) -> None:
    """shared: of Blackwell GPUs the first is compiled, and its PTX assembled for the others."""
    if not targets:
        pytest.skip("this nvcc knows none of the architectures")
    blackwell = [arch for arch in targets if capability(arch) >= 100]
    assembled = blackwell[1:] if shared else []
    archs = [arch for arch in targets if arch not in assembled]
    said = run_nvcc(nvcc.source_path(variant.source), archs, nvcc._definitions(dict(variant.macros)), tmp_path)
    stem, count = Path(variant.source).stem, 0
    numbers = [arch.removeprefix("sm_") for arch in archs]
    for number in numbers:
        kept = f"{stem}.compute_{number}" if len(numbers) > 1 else stem  # nvcc names the target where there are several
        assert (tmp_path / f"{kept}.cubin").stat().st_size > 0
        entries = {found[1]: found for found in ENTRY.finditer((tmp_path / f"{kept}.ptx").read_text())}
        count += len(entries)
        for name, signature in variant.entries:
            check_entry(name, entries[name], signature, dict(variant.macros), capability(number) >= 100)
    require_one_code(tmp_path, stem, [number for number in numbers if number in ONE_CODE])
    for arch in assembled:
        said += assemble(tmp_path / f"{stem}.compute_{blackwell[0].removeprefix('sm_')}.ptx", arch)
        count += sum(len(ENTRY.findall(file.read_text())) for file in tmp_path.glob(f"*.{arch}.ptx"))
    check_report([tuple(map(int, found)) for _, *found in REPORT.findall(said)], count)


def run_nvcc(source: Path, archs: list[str], definitions: list[str], folder: Path) -> str:
    """Machine code and PTX in a folder; returns the report of ptxas."""
    numbers = [arch.removeprefix("sm_") for arch in archs]
    command = [
        str(NVCC),
        "-fatbin",
        "-Xptxas=-v",
        "--keep",
        f"--keep-dir={folder}",
        *nvcc.FLAGS,
        *nvcc.include_options(),
        *definitions,
        *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers),
        "-o",
        str(folder / "kernels.fatbin"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, f"{source.name} {definitions}\n{done.stderr}{done.stdout}"
    return done.stderr + done.stdout


def check_report(report: list[tuple[int, ...]], count: int) -> None:
    """Stack and spills of at least so many functions."""
    assert len(report) >= count
    assert max(spilled for _, *both in report for spilled in both) <= SPILLED
    assert max(stack for stack, *_ in report) <= STACK


def assemble(ptx: Path, arch: str) -> str:
    """Machine code of PTX for another architecture; returns the report of ptxas."""
    assert NVCC is not None
    other = ptx.with_suffix(f".{arch}.ptx")
    other.write_text(TARGET.sub(f".target {arch}", ptx.read_text()))
    command = [str(NVCC.with_name("ptxas")), "-v", f"-arch={arch}", "-o", str(other.with_suffix(".cubin")), str(other)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def require_one_code(folder: Path, stem: str, blackwell: list[str]) -> None:
    """The PTX of these Blackwell GPUs differs in the name of its target alone, so that running one runs all."""
    texts = [(folder / f"{stem}.compute_{number}.ptx").read_text() for number in blackwell if len(blackwell) > 1]
    assert len({TARGET.sub("", text) for text in texts}) <= 1


def require_emulated(folder: Path) -> None:
    """The emulator implements every instruction of every kernel that was compiled."""
    texts = {TARGET.sub("", file.read_text()) for file in folder.glob("*.ptx")}
    for text in texts:
        for entry in ENTRY.finditer(text):
            compiled(parse(text, entry[1]))


def check_entry(name: str, entry: re.Match[str], signature: str, macros: dict[str, str | int], blackwell: bool) -> None:
    """Parameters, 16-byte loads, and FP4 conversion by the hardware that has it."""
    _, parameters, body = entry.groups()
    expected = [LETTERS[letter] for letter in re.findall(r"\d*.", signature)]
    assert ["".join(found) for found in PARAMETER.findall(parameters)] == expected, name
    wide = name in WIDE or bool(macros.get("LINEAR"))
    assert not wide or WIDE_LOAD.search(body), name
    if name in CONVERTING:
        converts = blackwell and macros.get("PACKED", 1) in (1, 2) and not macros.get("STOCHASTIC")
        assert (CONVERSION in body) == converts, name


def test_every_source_is_launched() -> None:
    sources = {path.name for path in nvcc.sources()}
    assert {variant.source for variant in VARIANTS} == sources


@pytest.mark.nightly
def test_blackwell_converts_in_hardware(tmp_path: Path) -> None:
    """The instruction is in the code for 10.0 on, and the software in the code for others."""
    source = tmp_path / "codes.cu"
    source.write_text(
        '#include "fp4.cuh"\nextern "C" __global__ void codes(const float* u, uint32_t* out) {\n'
        "    *out = fp4::encode_eight(u);\n}\n"
    )
    for arch in known(MAIN + OTHERS):
        number = arch.removeprefix("sm_")
        target = f"-gencode=arch=compute_{number},code=compute_{number}"
        command = [str(NVCC), "-ptx", target, *nvcc.FLAGS, *nvcc.include_options(), "-o", "-", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(CONVERSION) == (4 if capability(arch) >= 100 else 0), arch
