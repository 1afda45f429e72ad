"""Compiled kernels as files: everything a launch needs, so that the machine that runs them needs no compiler.

    sm_120/conv2d_kernel-<key>-triton3.6.0.kernel = header (a line of JSON), PTX (zlib), cubin, SHA-256 of all before
    sm_120/block_scaled_conv-<key>-nvcc13.0.88.kernel, of a kernel in CUDA C++, in the same form

**Key.** SHA-256 over every source file in the kernel's folder (of CUDA C++ the source and all headers), the description
of the launch, and the architecture. The compiler's version is in the file name but not in the key: where the compiler
is installed, the entry of that version is used; where it is not, any version. Changed sources give another key, so that
an old binary is never launched by new code.

**Checks.** A file counts only if its digest is right, every field of the header lies within its limits, the machine
code is the kernel, architecture and block that the header names, and the header names the launch that is looked for: a
file under another's name is ignored. What is not checked is what the machine code does: a kernel runs with all rights
of a GPU process, so take folders from those you trust.

**Search order.** First the folders of `FP4DEPLOY_KERNEL_PATH` (separated as PATH is), which are only read: folders that
were shipped with a model or in a container. Then `triton/` in the cache (`fp4deploy.plugins.runtime.cache`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import warnings
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from fp4deploy.architecture import HARDWARE, Architecture
from fp4deploy.errors import InputError
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.runtime.cache import cache_folder, key, read_entry
from fp4deploy.plugins.runtime.cubin import require_code
from fp4deploy.plugins.runtime.nvcc import FLAGS, source_parts, source_path
from fp4deploy.system.files import digest_of
from fp4deploy.system.schema import Count, Name, parse_json, validated

PACKAGE = "fp4deploy.plugins.gemm.triton"
SUPPORTED = tuple(HARDWARE)
TARGETS = tuple(arch.triton_name for arch, found in HARDWARE.items() if found.by_default)
SUFFIX = ".kernel"
MAX_SHARED = 227 << 10  # bytes a block can have, on any GPU so far
MAX_PTX = 16 << 20
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture.

    name: name of the entry point.
    parameters: Triton types of the runtime arguments, without the two scratch pointers that follow them in Triton's.
    divisible: positions of the arguments that must be multiples of 16.
    shared: bytes of dynamic shared memory.
    num_warps: warps to launch; a warp-specialised kernel has more than were requested.
    registers, spills: registers a thread, and bytes of registers that are spilled to local memory.
    instructions: kinds of matrix instructions in the PTX, see `cubin.matrix_instructions`.
    arch: architecture in Triton's form, "sm_120".
    triton: version of Triton, or of nvcc where that compiled it.
    sources: digest of the source files.
    launch: `description` of the launch.
    """

    cubin: bytes = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,199}$")]
    parameters: Annotated[tuple[Annotated[str, Field(pattern=r"^\*?[a-z]\w{1,15}$")], ...], Field(max_length=256)]
    divisible: Annotated[tuple[Annotated[Count, Field(lt=256)], ...], Field(max_length=256)]
    shared: Annotated[Count, Field(le=MAX_SHARED)]
    num_warps: Annotated[Count, Field(ge=1, le=32)]
    registers: Annotated[Count, Field(le=255)]
    spills: Annotated[Count, Field(lt=1 << 32)]
    instructions: Annotated[tuple[Name, ...], Field(max_length=256)]
    arch: str
    triton: Name
    sources: Name
    launch: Annotated[str, Field(max_length=100_000)]

    def header(self) -> dict[str, Any]:
        """Everything but PTX and machine code, as JSON values."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("cubin", "ptx")
        }


def pack(compiled: Compiled) -> bytes:
    """The content of a file, without the digest that `cache.write_entry` appends."""
    ptx = zlib.compress(compiled.ptx.encode())
    header = {"format": _FORMAT, "ptx_bytes": len(ptx), **compiled.header()}
    return json.dumps(header, sort_keys=True).encode() + b"\n" + ptx + compiled.cubin


def unpack(content: bytes) -> Compiled | None:
    """What `pack` wrote, checked as the module says; None for anything else."""
    head, _, rest = content.partition(b"\n")
    try:
        header = validated(dict[str, Any], parse_json(head.decode(), "the header"), "the header")
        if header.pop("format") != _FORMAT:
            return None
        size = header.pop("ptx_bytes")
        if type(size) is not int or not 0 <= size <= len(rest):
            return None
        ptx = _inflated(rest[:size]).decode()
        found = validated(Compiled, {**header, "cubin": rest[size:], "ptx": ptx}, "the header")
        arch = Architecture.parse(found.arch, SUPPORTED)
        if found.arch != arch.triton_name or any(place >= len(found.parameters) for place in found.divisible):
            return None
        require_code(found.cubin, found.name, arch.number, found.num_warps)
    except (InputError, ValueError, KeyError, zlib.error):
        return None
    return found


def _inflated(compressed: bytes) -> bytes:
    """Decompress at most `MAX_PTX` bytes; ValueError where there are more, or where the end is missing."""
    inflate = zlib.decompressobj()
    found = inflate.decompress(compressed, MAX_PTX)
    if not inflate.eof:
        raise ValueError("too long, or cut short")
    return found


def supported(text: str) -> Architecture:
    """The architecture in any form that `Architecture.find` reads, if Triton kernels can be compiled for it.

    Raises:
        InputError: they cannot.
    """
    return Architecture.parse(text, SUPPORTED)


def module_name(launch: Launch) -> str:
    """The module of a launch's kernel: "conv" is in the package of the kernels, a name with a dot is absolute.

    Raises:
        InputError: the launch names no function.
    """
    module, _, function = launch.kernel.partition(":")
    if not module or not function.isidentifier():
        raise InputError(f"The kernel '{launch.kernel}' is not of the form 'module:function'.")
    return module if "." in module else f"{PACKAGE}.{module}"


def source_digest(launch: Launch) -> str:
    """SHA-256 of a generated source, or of all Python files in the kernel's folder, found without importing the kernel.

    Of a kernel in CUDA C++: of its source, all headers and nvcc's options.

    Raises:
        InputError: there is no such module or source.
    """
    if launch.source:
        return digest_of([launch.source.encode()])
    if launch.compiler == "nvcc":
        parts = (*FLAGS, *source_parts(source_path(launch.kernel.partition(":")[0])))
        return digest_of(part.encode() if isinstance(part, str) else part for part in parts)
    name = module_name(launch)
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        raise InputError(f"There is no module {name}, which the kernel '{launch.kernel}' would be in.")
    return _digest_of_folder(Path(found.origin).parent)


@lru_cache
def _digest_of_folder(folder: Path) -> str:
    """Read once a process: Python does not import changed sources again either."""
    parts: list[bytes] = []
    for file in sorted(folder.glob("*.py")):
        parts += [file.name.encode(), file.read_bytes().replace(b"\r\n", b"\n")]
    return digest_of(parts)


def description(launch: Launch) -> str:
    """A launch as one line of JSON, equal on every machine."""
    about = dataclasses.asdict(launch)
    for name in ("source", "shared"):
        if not about[name]:
            del about[name]  # keys of earlier versions stay
    return json.dumps(about, sort_keys=True)


def file_name(launch: Launch, arch: str, version: str) -> str:
    """Name of an entry inside a folder of kernels; `version`, of the compiler, may be "*"."""
    inputs = key([source_digest(launch), description(launch), arch])
    return f"{arch}/{launch.kernel.partition(':')[2]}-{inputs}-{launch.compiler}{version}{SUFFIX}"


def shipped_folders() -> list[Path]:
    """The folders of FP4DEPLOY_KERNEL_PATH."""
    return [Path(part).expanduser() for part in os.environ.get("FP4DEPLOY_KERNEL_PATH", "").split(os.pathsep) if part]


def own_folder() -> Path:
    """Where this machine keeps what it compiles."""
    return cache_folder() / "triton"


def find(launch: Launch, arch: str, folders: list[Path], version: str | None = None) -> Compiled | None:
    """The kernel from the first folder that has it, of one version of its compiler or (None) of the newest there is."""
    for folder in folders:
        for file in sorted(folder.glob(file_name(launch, arch, version or "*")), key=_version, reverse=True):
            content = read_entry(file)
            compiled = unpack(content) if content is not None else None
            if compiled is not None and _is_of(compiled, launch, arch):
                return compiled
            if folder != own_folder():
                warnings.warn(
                    f"{file} is damaged, of another kernel or written by another version of fp4deploy; it is ignored.",
                    stacklevel=2,
                )
    return None


def _is_of(compiled: Compiled, launch: Launch, arch: str) -> bool:
    """Whether a file holds this launch: its name alone says so only while nobody renames it."""
    wanted = (launch.kernel.partition(":")[2], arch, source_digest(launch), description(launch))
    return (compiled.name, compiled.arch, compiled.sources, compiled.launch) == wanted


def architectures(launch: Launch, folders: list[Path]) -> list[str]:
    """For which architectures the folders have this kernel."""
    names = [arch.triton_name for arch in SUPPORTED]
    return [arch for arch in names if any(any(folder.glob(file_name(launch, arch, "*"))) for folder in folders)]


def any_kernel(arch: str, folders: list[Path], pattern: str = "*-triton*") -> bool:
    """True if a folder has some kernel for an architecture, by default one of Triton's."""
    return any(next((folder / arch).glob(f"{pattern}{SUFFIX}"), None) is not None for folder in folders)


def _version(file: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", file.stem.rpartition("-")[2])))
