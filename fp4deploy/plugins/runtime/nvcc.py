"""Compiling CUDA C++ with nvcc: source -> cubin for one GPU architecture, cached on disk.

nvcc is called directly, although `pycuda.compiler.compile` exists. That one needs pycuda and therefore a driver, while
CI compiles for every architecture on machines without a GPU; it runs the preprocessor on each call, to find out whether
a header changed; and it writes its cache in place, so that a concurrent process can read half a file. pycuda only
launches (`fp4deploy.plugins.runtime.launch`).

**One cubin per variant.** Element type, rounding and layout are macros, not arguments: a kernel without branches
keeps its block of 16 elements in registers. A cubin is machine code for exactly one architecture, so that the driver
compiles nothing at start. From compute capability 9.0 on the target ends with "a" (`fp4deploy.architecture`).

**Flags.** `-fmad=false`: a contracted a*b+c rounds once where the numerics contract rounds twice, and bytes would
differ. `-lineinfo` lets profilers name source lines and costs nothing at run time. No fast-math: divisions are IEEE.

**Cache.** `kernels/<target>/<source>-<key>.cubin` in the folder of `runtime.cache`. The key is a hash of the source,
all headers, the macros, the flags, and nvcc's version and environment.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from fp4deploy.errors import InputError, UnavailableError, suggest
from fp4deploy.plugins.runtime.cache import cache_folder, keep_entry, key, one_process, read_entry
from fp4deploy.system import children

SOURCES = tuple(sorted(Path(__file__).resolve().parents[1].glob("*/cuda")))  # of frames, gemm, losses, quantize
HEADERS = (".cuh", ".h", ".hpp")
FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-lineinfo")
ALTERING = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")  # variables that change what nvcc compiles
TOOLKIT = "/usr/local/cuda"
INSTALL_NVCC = "install the CUDA toolkit, or: pip install nvidia-cuda-nvcc nvidia-cuda-cccl"

Macros: TypeAlias = Mapping[str, "str | int | None"]
_log = logging.getLogger(__name__)


class KernelError(UnavailableError):
    """A CUDA kernel does not compile, load or launch here."""


class LaunchError(KernelError):
    """A CUDA kernel was not loaded or launched this time, and may be another time: a capture, no memory left.

    Or the folders of compiled kernels lack this variant, and may have another.
    """


def find_nvcc() -> Path | None:
    """The CUDA compiler of CUDA_HOME or CUDA_PATH, else on PATH, else in /usr/local/cuda, else in pip's packages."""
    homes = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    pip = importlib.util.find_spec("nvidia")
    packages = [Path(root) for root in (pip.submodule_search_locations or [])] if pip else []
    wheels = [str(folder) for package in packages for folder in sorted(package.glob("*/bin"))]
    folders = [*homes, *os.environ.get("PATH", os.defpath).split(os.pathsep), f"{TOOLKIT}/bin", *wheels]
    found = shutil.which("nvcc", path=os.pathsep.join(filter(os.path.isabs, folders)))  # never ./nvcc
    return Path(found) if found else None


@lru_cache
def nvcc_version(nvcc: Path) -> str:
    """What `nvcc --version` prints, the part from "release" on: "release 13.0, V13.0.88 Build cuda_13.0...".

    Raises:
        UnavailableError: the program does not run.
    """
    try:
        done = children.run([nvcc, "--version"])
    except OSError as error:
        raise UnavailableError(f"{nvcc} does not run ({error}); {INSTALL_NVCC}.") from error
    if done.status:
        raise UnavailableError(f"{nvcc} does not run (exit status {done.status}); {INSTALL_NVCC}.")
    printed = done.output
    return " ".join(printed[max(printed.find("release"), 0) :].split())


def release(nvcc: Path) -> str:
    """ "13.0.88" of `nvcc_version`."""
    found = re.search(r"V([\d.]+)", nvcc_version(nvcc))
    return found.group(1) if found else "0"


@lru_cache
def supported(nvcc: Path, arch: str) -> bool:
    """True if this nvcc supports a target; its list has no suffixes."""
    printed = children.run([nvcc, "--list-gpu-code"]).output.split()
    return not printed or arch.rstrip("a") in printed


def compile_cubin(source: str | Path, arch: str, macros: Macros | None = None) -> bytes:
    """Machine code of a source for one architecture, from the cache or from nvcc.

    Args:
        source: the name of a file in a folder `fp4deploy/plugins/*/cuda`, or the absolute path of another one, which
            may include the headers of these folders.
        arch: nvcc's target, such as "sm_90a" (`Architecture.nvcc_target`).
        macros: `{"NAME": value}` becomes -DNAME=value; None gives -DNAME, True and False are 1 and 0.

    Raises:
        InputError: there is no such source, or a macro is malformed.
        UnavailableError: there is no nvcc.
        KernelError: nvcc refuses the source; the message is nvcc's.
    """
    return _compiled(source, arch, macros, "cubin")


def compile_ptx(source: str | Path, arch: str, macros: Macros | None = None) -> str:
    """PTX of a source, with the options of `compile_cubin`, which has the arguments and errors."""
    return _compiled(source, arch, macros, "ptx").decode()


def _compiled(source: str | Path, arch: str, macros: Macros | None, form: str) -> bytes:
    path = source_path(source)
    nvcc = find_nvcc()
    if nvcc is None:
        raise UnavailableError(f"{path.name} cannot be compiled: nvcc is missing; {INSTALL_NVCC}.")
    number = arch.removeprefix("sm_")
    code = arch if form == "cubin" else f"compute_{number}"
    options = [*FLAGS, *_definitions(macros), f"-gencode=arch=compute_{number},code={code}"]
    entry = cache_folder() / "kernels" / arch / f"{path.stem}-{_key(path, options, nvcc)}.{form}"
    cubin = read_entry(entry)
    if cubin is None:
        with one_process(entry):
            cubin = read_entry(entry)
            if cubin is None:
                cubin = _run(nvcc, path, options, arch, macros, form)
                keep_entry(entry, cubin)
    return cubin


def source_path(source: str | Path) -> Path:
    """The file of a source: in the folder of the kernels, or as the path says.

    Raises:
        InputError: there is no such file.
    """
    for folder in SOURCES:
        if (path := folder / source).is_file():
            return path
    names = sorted(file.name for file in sources())
    raise InputError(
        f"There is no CUDA source {source}.{suggest(Path(source).name, names)} Valid: {', '.join(names) or 'none'}."
    )


def sources() -> list[Path]:
    """Every CUDA source of the package."""
    return [file for folder in SOURCES for file in sorted(folder.glob("*.cu"))]


def include_options(folder: Path | None = None) -> list[str]:
    """-I of the folders whose headers a source may include: its own first."""
    return [option for path in dict.fromkeys((*([folder] if folder else []), *SOURCES)) for option in ("-I", str(path))]


def describe(path: Path, macros: Macros | None) -> str:
    """How messages name a variant: "fake_quant.cu (DTYPE=half BLOCK=16)"."""
    return f"{path.name} ({' '.join(text[2:] for text in _definitions(macros)) or 'no macros'})"


def _definitions(macros: Macros | None) -> list[str]:
    options = []
    for name, value in sorted((macros or {}).items()):
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"'{name}' is not a macro name: letters, digits and '_' are valid.")
        if isinstance(value, float):
            raise InputError(f"The macro {name} is a float ({value}); give text or an integer, floats as arguments.")
        text = str(int(value)) if isinstance(value, bool) else str(value)
        # nvcc splits -D at commas that are not escaped.
        options.append(f"-D{name}" if value is None else f"-D{name}={text}".replace(",", r"\,"))
    return options


def _key(path: Path, options: list[str], nvcc: Path) -> str:
    """Of everything that decides the cubin: compiler, its environment, options, source and headers."""
    environment = [os.environ.get(name, "") for name in ALTERING]
    return key([nvcc_version(nvcc), *environment, *options, *source_parts(path)])


def source_parts(path: Path) -> list[bytes | str]:
    """Names and contents of a source and of all headers that it may include."""
    folders = {path.parent, *SOURCES}
    headers = sorted(file for folder in folders for file in folder.glob("*") if file.suffix in HEADERS)
    return [part for file in (path, *headers) for part in (file.name, file.read_bytes())]


def _run(nvcc: Path, path: Path, options: list[str], arch: str, macros: Macros | None, form: str) -> bytes:
    _log.info("compiling %s for %s", describe(path, macros), arch)
    with children.owned_folder() as folder:
        out = folder / f"kernel.{form}"
        command = [
            str(nvcc),
            f"--{form}",
            *options,
            *include_options(path.parent),
            "-o",
            str(out),
            str(path),
        ]
        done = children.run(command, temporary=folder)
        if done.status != 0 or not out.is_file():
            said = (done.error + done.output).strip() or f"exit status {done.status}, and no message"
            raise KernelError(f"{describe(path, macros)} does not compile for {arch}. nvcc says:\n{said[:6000]}")
        return out.read_bytes()
