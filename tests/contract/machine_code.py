"""Machine code of every kernel variant, compared with what was recorded; no GPU.

    python -m tests.contract.machine_code --check [--only nvcc|triton] [--jobs 2]      minutes on two cores
    python -m tests.contract.machine_code --record [--only nvcc|triton] [--stride 37]  recorded/machine_code.json

A cubin as a whole changes with the folder it is compiled in and with the name of a file, a kernel or a macro: it holds
source paths, line tables and symbol names. What runs does not, so of each kernel these sections are hashed:

| section | holds |
|---|---|
| `.text.KERNEL` | instructions |
| `.nv.info.KERNEL` | parameters with offsets and sizes, registers, barriers: what the driver needs for a launch |
| `.nv.constant0.KERNEL` | parameter space (its size) |
| `.nv.shared.KERNEL` | static shared memory (its size) |
| other `.nv.constant*`, `.nv.global.init` | tables and literals of the module |

Variants have no lasting names, so digests are compared as multisets, one an architecture: each recorded digest must
be compiled again, more may be. The names in the file are for the reader of a failure. Another compiler gives other
code: digests are kept by the version of nvcc and of Triton, and a version without a record is not judged.

All nvcc variants are recorded. Triton has over two thousand, of about two seconds each; every 37th is recorded (prime,
so that the sample meets every combination of options), with `--stride 1` all of them. After a change of the list of
variants, record again from the commit before it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fp4deploy.plugins import compile_cubin
from tests.contract import internals

FILE = Path(__file__).parent / "recorded" / "machine_code.json"
NO_BYTES = 8  # section type SHT_NOBITS: a size and no content
Digests = dict[str, list[str]]  # architecture: "digest name", sorted


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of an ELF file's sections; for one without content, its size as text."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + index * size) for index in range(count)]
    for name_at, kind, _, _, start, length in heads:
        begin = heads[names][4] + name_at
        name = elf[begin : elf.index(b"\0", begin)].decode()
        yield name, str(length).encode() if kind == NO_BYTES else elf[start : start + length]


def kernels(cubin: bytes, more: str = "") -> dict[str, str]:
    """Kernel -> digest of its code; `more` is hashed as well."""
    found = dict(sections(cubin))
    tables = [
        hashlib.sha256(content).hexdigest()
        for name, content in found.items()
        if (name.startswith(".nv.constant") and name.count(".") == 2) or name.startswith(".nv.global.init")
    ]
    digests = {}
    for name in (name.removeprefix(".text.") for name in found if name.startswith(".text.")):
        parts = [found[f".text.{name}"], found.get(f".nv.info.{name}", b"")]
        sizes = (len(found.get(f".nv.constant0.{name}", b"")), found.get(f".nv.shared.{name}", b"").decode(), more)
        parts += [str(sizes).encode(), " ".join(sorted(tables)).encode()]
        whole = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
        digests[name] = whole.hexdigest()[:32]
    return digests


def nvcc_digests(variants: dict[str, list[tuple[str, dict[str, Any]]]], jobs: int) -> Digests:
    """Compile variants for architectures such as "sm_90a"."""

    def one(task: tuple[str, tuple[str, dict[str, Any]]]) -> tuple[str, list[str]]:
        arch, (source, macros) = task
        label = " ".join([source, *(f"{name}={value}" for name, value in sorted(macros.items()) if value != 0)])
        found = kernels(compile_cubin(source, arch, macros))
        return arch, [f"{digest} {name} of {label}" for name, digest in found.items()]

    digests: Digests = {arch: [] for arch in variants}
    tasks = [(arch, variant) for arch, some in variants.items() for variant in some]
    with ThreadPoolExecutor(jobs) as pool:
        for arch, lines in pool.map(one, tasks):
            digests[arch] += lines
    return {arch: sorted(lines) for arch, lines in digests.items()}


def triton_digests(launches: dict[str, list[Any]], jobs: int) -> Digests:
    """Compile launch descriptions for architectures such as "sm_90"."""
    compiled_launches = [(launch, arch) for arch, some in launches.items() for launch in some]
    digests: Digests = {arch: [] for arch in launches}
    for index, cubin, shared in internals.compile_triton(compiled_launches, jobs):
        launch, arch = compiled_launches[index]
        (digest,) = kernels(cubin, f"shared {shared}").values()
        digests[arch].append(f"{digest} {internals.triton_name(launch)}")
    return {arch: sorted(lines) for arch, lines in digests.items()}


def gone(before: list[str], now: list[str]) -> list[str]:
    """Recorded lines whose digest was not compiled again."""
    left = Counter(line.partition(" ")[0] for line in now)
    lines = []
    for line in before:
        digest = line.partition(" ")[0]
        if not left[digest]:
            lines.append(line)
        left[digest] -= left[digest] > 0
    return lines


def recorded() -> dict[str, Any]:
    """{"nvcc": {version: digests}, "triton": {version: {"stride", "digests"}}}."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return {"nvcc": {}, "triton": {}} | found


def compiled_by_nvcc(jobs: int) -> tuple[str, Digests]:
    """Version of nvcc, and the digests of all variants.

    Raises:
        SystemExit: there is no nvcc.
    """
    program = internals.nvcc()
    if program is None:
        raise SystemExit("There is no nvcc here.")
    known = [arch for arch in internals.CAPABILITIES.values() if internals.supported(program, arch)]
    return internals.nvcc_version(program), nvcc_digests({arch: internals.cuda_variants(arch) for arch in known}, jobs)


def compiled_by_triton(jobs: int, stride: int) -> tuple[str, Digests]:
    """Version of Triton, and the digests of every so-manieth variant.

    Raises:
        SystemExit: there is no Triton.
    """
    version = internals.triton_version()
    if version is None:
        raise SystemExit("There is no Triton here.")
    return version, triton_digests({arch: some_launches(arch, stride) for arch in internals.CAPABILITIES}, jobs)


def some_launches(arch: str, stride: int) -> list[Any]:
    """Every stride-th Triton variant of an architecture."""
    return internals.triton_variants(arch)[::stride]


def record(only: str | None, jobs: int, stride: int) -> None:
    """Write what the compilers here make; records of other versions stay."""
    content = recorded()
    if only != "triton":
        version, digests = compiled_by_nvcc(jobs)
        content["nvcc"][version] = digests
    if only != "nvcc":
        version, digests = compiled_by_triton(jobs, stride)
        content["triton"][version] = {"stride": stride, "digests": digests}
    FILE.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def check(only: str | None, jobs: int) -> int:
    """Print every recorded kernel that is not compiled any more; how many those are."""
    content, lost = recorded(), 0
    for kind in ("nvcc", "triton"):
        if only not in (None, kind):
            continue
        version = internals.triton_version() if kind == "triton" else internals.nvcc_version(internals.nvcc() or Path())
        before = content[kind].get(version)
        if before is None:
            print(f"{kind} {version}: not recorded, so not compared (recorded: {', '.join(content[kind])})")
            continue
        if kind == "triton":
            digests, before = compiled_by_triton(jobs, before["stride"])[1], before["digests"]
        else:
            digests = compiled_by_nvcc(jobs)[1]
        for arch, lines in before.items():
            missing = gone(lines, digests.get(arch, []))
            lost += len(missing)
            print(f"{kind} {version} {arch}: {len(lines) - len(missing)} of {len(lines)} kernels are as recorded")
            print("".join(f"  changed or gone: {line}\n" for line in missing), end="")
    return lost


def main() -> None:
    """Parse the command line; exit 1 where machine code changed."""
    parser = argparse.ArgumentParser(description="Machine code of every kernel variant against its record.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with the record; exit 1 where code changed")
    action.add_argument("--record", action="store_true", help="write the record")
    parser.add_argument("--only", choices=("nvcc", "triton"), help="one compiler")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument("--stride", type=int, default=37, help="record every so-manieth Triton variant")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, internals.empty_cache(Path(folder)):
        if given.record:
            record(given.only, given.jobs, given.stride)
        elif check(given.only, given.jobs):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
