"""What people install: the wheel that is built from the sdist, in an environment of its own, away from the checkout.

An editable install reads the checkout, so that it hides a package that is not in the wheel, or a kernel's source that
was never copied. The new environment sees this one's libraries through a path file; fp4deploy comes from the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from fp4deploy import __version__

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
TOGETHER = ("tests", "configs", "docs", "examples", "benchmarks", "tools")  # of the sdist, not of the wheel
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "build", ".*")


def sources(*folders: tuple[str, str]) -> set[str]:
    """Every file under the folders (by default fp4deploy/ and cli/), by the name it has when installed."""
    found = set()
    for folder, package in folders or (("fp4deploy", "fp4deploy"), ("cli", "fp4deploy/cli")):
        for file in (ROOT / folder).rglob("*"):
            name = file.relative_to(ROOT / folder)
            if file.is_file() and file.suffix != ".pyc" and not any(part.startswith(".") for part in name.parts):
                found.add(f"{package}/{name.as_posix()}")
    return found


def build(hook: str, folder: Path, out: Path) -> Path:
    """Call one hook of the build backend, as pip and uv do."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(out)], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without the checkout's leftovers: setuptools would take files from an old egg-info."""
    checkout = tmp_path_factory.mktemp("projects") / "fp4deploy"
    checkout.mkdir()
    for name in ("fp4deploy", "cli", *TOGETHER):
        shutil.copytree(ROOT / name, checkout / name, ignore=NOT_SHIPPED)
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, checkout)
    return checkout


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, out = tmp_path_factory.mktemp("unpacked"), tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return build("build_wheel", unpacked, out)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an environment's commands; fp4deploy is installed there, and not editable."""
    return environment(wheel, tmp_path_factory.mktemp("environment"))


def environment(wheel: Path, folder: Path) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    commands = folder / "bin"
    uv = [sys.executable, "-m", "uv", "--no-config", "pip", "install", "--quiet", "--offline", "--no-deps"]
    done = subprocess.run([*uv, "--python", str(commands / "python"), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    return commands


def run(command: Path, *arguments: str, folder: Path) -> str:
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([command, *arguments], cwd=folder, env=own, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an environment's commands, with an editable install of `checkout`; beside that is script.py."""
    folder = tmp_path_factory.mktemp("editable")
    script = checkout.with_name("script.py")
    script.write_text("import fp4deploy as fd\nprint(fd.__version__)\nfd.open_runtime(3)\n")
    return environment(build("build_editable", checkout, folder), folder / "environment")


@pytest.mark.nightly
def test_an_editable_install_is_found_beside_a_clone_of_the_same_name(
    editable: Path, checkout: Path, tmp_path: Path
) -> None:
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    call = [editable / "python", checkout.with_name("script.py")]
    done = subprocess.run(call, env=own, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{__version__}\n", done.stderr
    assert run(editable / "fp4deploy", "--version", folder=tmp_path) == f"fp4deploy {__version__}\n"


@pytest.mark.nightly
def test_a_type_checker_finds_an_editable_install(editable: Path, checkout: Path, tmp_path: Path) -> None:
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    script, python = checkout.with_name("script.py"), editable / "python"
    call = [sys.executable, "-m", "mypy", "--python-executable", python, "--follow-imports=silent", script]
    found = subprocess.run(call, env=own, cwd=tmp_path, capture_output=True, text=True)
    assert 'script.py:3: error: Argument 1 to "open_runtime" has incompatible type' in found.stdout


def test_the_wheel_has_every_source_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    shipped = {name for name in names if ".dist-info/" not in name}
    assert sources() - shipped == set(), "not in the wheel: see package-data in pyproject.toml and setup.py"
    assert shipped - sources() == set()
    assert "fp4deploy/py.typed" in shipped
    assert {"fp4deploy/cli/main.py", "fp4deploy/plugins/quantize/cuda/fp4.cuh"} <= shipped
    assert f"fp4deploy-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_sdist_can_be_built_and_pinned_from(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE", "CHANGELOG.md"} <= names


def test_the_sdist_can_be_tested(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    present = {path for folder in TOGETHER for path in files_of(folder)}
    assert present <= names
    assert {"Makefile", "mkdocs.yml", "SECURITY.md", "tests/conftest.py"} <= names


def files_of(folder: str) -> set[str]:
    """Every file below a folder of the checkout, without caches."""
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
    made = {"__pycache__", "build", ".DS_Store"}  # by Python, by pip, by a file browser
    return {
        path.as_posix()
        for path in found
        if made.isdisjoint(path.parts) and not any(part.endswith((".pyc", ".egg-info")) for part in path.parts)
    }


def test_the_wheel_of_the_emulator(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tools" / "emulator", tmp_path / "emulator", ignore=NOT_SHIPPED)
    wheel = build("build_wheel", tmp_path / "emulator", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert shipped == sources(("tools/emulator/fp4deploy_emulator", "fp4deploy_emulator"))
    assert wheel.name == f"fp4deploy_emulator-{__version__}-py3-none-any.whl", "both have the same version"


def test_the_version_has_one_home(wheel: Path) -> None:
    assert wheel.name == f"fp4deploy-{__version__}-py3-none-any.whl"
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.nightly
def test_the_commands_run(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "fp4deploy", "--version", folder=tmp_path) == f"fp4deploy {__version__}\n"
    assert "doctor" in run(installed / "fp4deploy", "--help", folder=tmp_path)


@pytest.mark.nightly
def test_a_tensor_is_quantised_and_the_doctor_answers(installed: Path, tmp_path: Path) -> None:
    """The values 0 to 15 in one block: amax 15, so that E2M1's 6 is 15 and the smallest step 1.25."""
    program = (
        "import fp4deploy, sys, torch\n"
        "from fp4deploy.formats import quantize_nvfp4\n"
        "q = quantize_nvfp4(torch.arange(16.0))\n"
        "print(fp4deploy.__file__, tuple(q.codes.shape), float(q.amax), float(q.dequantize(torch.float32)[-1]))\n"
        "from fp4deploy.cli.main import main\n"
        "sys.argv = ['fp4deploy', 'doctor']\n"
        "main()\n"
    )
    first, _, doctor = run(installed / "python", "-c", program, folder=tmp_path).partition("\n")
    file, answer = first.split(maxsplit=1)
    assert Path(file).is_relative_to(installed.parent)
    assert answer == "(8,) 15.0 15.0"
    assert "torch" in doctor
