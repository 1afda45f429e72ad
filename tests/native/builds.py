"""The C library and what tests run on it, compiled once a session; nothing here needs CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "native"
HERE = Path(__file__).parent
VERSION = '-DFP4D_VERSION="test"'
# Half of the compiler's time goes into checks of every pointer for what cannot be here or ends the program anyway: no
# pointer is cast to a type of another alignment, nothing is virtual (`test_library` reads the sources), and
# AddressSanitizer reports an access by a null pointer.
LEFT_OUT = "-fno-sanitize=null,alignment,vptr"
SANITIZERS = ("-fsanitize=address,undefined", LEFT_OUT, "-fno-sanitize-recover=undefined")


def compiler() -> str | None:
    """The C++ compiler, where there is one."""
    return shutil.which("g++")


def compiled(*command: str | Path) -> None:
    """Run a compiler; what it says is the assertion."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


def harness(folder: Path, sanitized: bool) -> Path:
    """`harness.c` with the library's sources in one translation unit, optionally with sanitizers."""
    options = SANITIZERS if sanitized else ()
    sources = sorted((ROOT / "src").glob("*.cpp"))
    whole, one = folder / "whole.cpp", folder / "harness"
    whole.write_text("".join(f'#include "{source}"\n' for source in sources), encoding="utf-8")
    include = ("-I", ROOT / "include", "-g1", *options)
    compiled("gcc", "-Wall", "-Wextra", "-Werror", *include, "-c", HERE / "harness.c", "-o", folder / "harness.o")
    compiled("g++", "-std=c++17", *include, VERSION, whole, folder / "harness.o", "-ldl", "-o", one)
    return one


def library(folder: Path) -> Path:
    """libfp4deploy.so, quick to compile."""
    whole, out = folder / "whole.cpp", folder / "libfp4deploy.so"
    whole.write_text(
        "".join(f'#include "{source}"\n' for source in sorted((ROOT / "src").glob("*.cpp"))), encoding="utf-8"
    )
    compiled("g++", "-std=c++17", "-shared", "-fPIC", "-I", ROOT / "include", VERSION, whole, "-ldl", "-o", out)
    return out


def recording_driver(folder: Path) -> Path:
    """A folder with `recording_driver.c` as libcuda.so.1, for LD_LIBRARY_PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    compiled(
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        HERE / "recording_driver.c",
        "-o",
        folder / "libcuda.so.1",
    )
    return folder


def run(
    program: Sequence[str | Path], driver: Path | None = None, given: str = "", **variables: str
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a program, on the recording driver or on none."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment |= {"LD_LIBRARY_PATH": str(driver)} if driver else {}
    words = [str(word) for word in program]
    done = subprocess.run(
        words, input=given, capture_output=True, text=True, errors="replace", env=environment | variables, check=False
    )
    return done.returncode, done.stdout, done.stderr
