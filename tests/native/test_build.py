"""The library as users build it: CMake, the package, the commands of the documentation, and valgrind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fp4deploy.packed import PackedFile
from tests.native.builds import ROOT, run

PAGE = ROOT.parent / "docs" / "native.md"
MAX_BYTES = 1 << 20
CONSUMER = """cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES C)
find_package(fp4deploy 0.2 REQUIRED)
add_executable(consumer {source})
target_link_libraries(consumer PRIVATE fp4deploy::fp4deploy)
"""

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None, reason="no CMake or no C++ compiler"
)


def shown(first: str) -> list[str]:
    """The lines of the page's block that begins with a word."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    return next(block for block in blocks if block.startswith(first)).splitlines()


def shell(command: str, folder: Path) -> None:
    environment = {**os.environ, "CMAKE_BUILD_TYPE": "None"}  # quick to compile: no -O, no -g
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    assert "warning" not in done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the page's commands were run, up to the compiled example."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "native").symlink_to(ROOT)
    for command in (*shown("cmake"), shown("cc")[0]):
        shell(command, folder)
    return folder


@pytest.mark.nightly
def test_the_library_is_small_and_exports_its_interface_alone(built: Path) -> None:
    library = built / "install" / "lib" / "libfp4deploy.so"
    shell(f"strip -o small.so {library}", built)
    assert (built / "small.so").stat().st_size < MAX_BYTES
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in listed.splitlines()}
    header = (ROOT / "include" / "fp4deploy.h").read_text(encoding="utf-8")
    assert exported == set(re.findall(r"FP4D_API [^;]*?(fp4d_\w+)\(", header))
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed


def test_the_example_and_the_package(built: Path, driver: Path, unet: PackedFile, bundle: Path, tmp_path: Path) -> None:
    """The page's program, and one that finds the package; on the recording driver every class is number 1."""
    words = shown("cc")[1].split()
    image, mask = built / words[3], built / words[4]
    image.write_bytes(b"P6\n32 32\n255\n" + bytes(3 * 32 * 32))
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER.format(source=ROOT / "examples" / "segment.c"), encoding="utf-8")
    shell(f"cmake -S . -B out -DCMAKE_PREFIX_PATH={built / 'install'} && cmake --build out", tmp_path)
    for program in (built / words[0], tmp_path / "out" / "consumer"):
        mask.unlink(missing_ok=True)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
        command = [str(word) for word in (program, unet.path, bundle, image, mask)]
        done = subprocess.run(command, cwd=built, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert mask.read_bytes() == b"P5\n32 32\n255\n" + b"\1" * 32 * 32
        assert done.stdout == "road                 100.0 %\n"
    status, _, err = run([built / words[0], unet.path, unet.path, image, mask], driver)
    assert (status, err.count("\n")) == (1, 1), err
    assert run([built / words[0]])[0] == 2


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind")
def test_valgrind(built: Path, driver: Path, unet: PackedFile, bundle: Path) -> None:
    image = built / "small.ppm"
    image.write_bytes(b"P6\n32 32\n255\n" + bytes(3 * 32 * 32))
    lost = "definite,indirect,possible"  # what is reachable is the loader's: the driver stays loaded
    checked = ["valgrind", "-q", "--leak-check=full", f"--show-leak-kinds={lost}", f"--errors-for-leak-kinds={lost}"]
    program = [*checked, "--error-exitcode=9", "./segment", unet.path, bundle, image, built / "mask.pgm"]
    words = [str(word) for word in program]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    done = subprocess.run(words, cwd=built, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
