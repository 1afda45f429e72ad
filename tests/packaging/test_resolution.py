"""The pins of constraints.txt resolve from the public package index, on every supported Python, with every extra, and
those of the emulator.

A development machine may have indexes, wheels or builds of its own, on which a pin works that nobody else can install.
So uv resolves here with all local configuration off: no configuration file, no further index, no folder of wheels. Only
a mirror that stands in for the public index (pip's `index-url`) is kept.

Each supported Python is resolved with all extras at once: if that has a solution, so has every smaller set of
requirements, because leaving requirements out takes none of them away. Where it has none, each extra is resolved alone,
so that the failure names the extra and the pin. That asks the network for a minute: `make nightly` does. `make test`
compares ranges with pins."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
EMULATOR: dict[str, Any] = tomllib.loads((ROOT / "tools" / "emulator" / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {**EXTRAS, EMULATOR["name"]: [line for line in EMULATOR["dependencies"] if line != PROJECT["name"]]}
"""Of each extra, and of the other distribution in this repository."""
PYTHONS = re.findall(r"Python :: (3\.\d+)\b", "\n".join(PROJECT["classifiers"]))
PLATFORM = "x86_64-manylinux_2_28"
UNREACHABLE = re.compile(
    r"failed to fetch|error sending request|client error \(connect\)|dns error|timed? ?out", re.IGNORECASE
)
IMPOSSIBLE = "impossible"
NOT_PINNED = {"tensorrt", "setuptools"}
"""Direct dependencies without a pin: no test installs the full TensorRT; setuptools builds, on what is installed."""


@dataclass(frozen=True)
class Resolution:
    """What uv answered: the pins it chose, one a line, or why there is no solution."""

    ok: bool
    text: str


def mirror() -> dict[str, str]:
    """pip's main index and certificate where they are set, as uv's environment; further indexes are left out."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    found = dict(re.findall(r"^(?:global|install|:env:)\.(index-url|cert)='(.*)'$", listed, re.MULTILINE))
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    return {names[key]: value for key, value in found.items()}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """This process's environment without what configures pip and uv, but for the cache and the mirror."""
    kept = {"UV_CACHE_DIR", "UV_HTTP_TIMEOUT"}
    own = {key: value for key, value in os.environ.items() if key in kept or not key.startswith(("PIP_", "UV_"))}
    return own | mirror()


def resolve(requirements: str, environment: dict[str, str], *options: str) -> Resolution:
    """Resolve a requirements file given as text; nothing is installed, and of most packages only metadata is read."""
    uv = [sys.executable, "-m", "uv", "--no-config", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    answer = subprocess.run(
        [*uv, *options, "-"], input=requirements, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    return Resolution(answer.returncode == 0, answer.stdout if answer.returncode == 0 else answer.stderr)


def required(*names: str) -> str:
    return "\n".join([*PROJECT["dependencies"], *itertools.chain.from_iterable(REQUIREMENTS[name] for name in names)])


def for_python(version: str) -> tuple[str, ...]:
    return ("--python-version", version, "--python-platform", PLATFORM, "--constraint", str(ROOT / "constraints.txt"))


@pytest.fixture(scope="module")
def resolutions(environment: dict[str, str]) -> dict[str, Resolution]:
    """Everything at once for each Python. They wait for the network at the same time."""
    probe = resolve("packaging", environment)
    if not probe.ok and UNREACHABLE.search(probe.text):
        pytest.skip(f"no package index can be reached: {probe.text.strip()[:300]}")
    work = {version: (required(*REQUIREMENTS), *for_python(version)) for version in PYTHONS}
    work[IMPOSSIBLE] = (f"torch=={pins('3.12')['torch']}\ntriton==3.9.0", *for_python("3.12")[:4])
    with ThreadPoolExecutor(len(work)) as pool:
        answers = pool.map(lambda each: resolve(each[0], environment, *each[1:]), work.values())
        return dict(zip(work, answers, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("version", PYTHONS)
def test_every_extra_resolves(version: str, resolutions: dict[str, Resolution], environment: dict[str, str]) -> None:
    together = resolutions[version]
    if together.ok:
        return
    work = {name or "no extra": required(*([name] if name else [])) for name in ("", *REQUIREMENTS)}
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda text: resolve(text, environment, *for_python(version)), work.values())
        failed = [f"{name}: {answer.text}" for name, answer in zip(work, answers, strict=True) if not answer.ok]
    why = "\n".join(failed) or f"each extra alone resolves, all together do not: {together.text}"
    pytest.fail(f"Python {version}, {PLATFORM}\n{why}")


@pytest.mark.nightly
@pytest.mark.parametrize("version", PYTHONS)
def test_what_is_pinned_is_what_is_chosen(version: str, resolutions: dict[str, Resolution]) -> None:
    """A pin whose marker leaves this Python out, or whose name is misspelt, would be ignored without a word."""
    if not resolutions[version].ok:
        pytest.skip("there is no resolution; test_every_extra_resolves says why")
    chosen = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", resolutions[version].text, re.MULTILINE)}
    assert set(pins(version)) <= chosen
    assert {canonicalize_name(Requirement(line).name) for line in required(*REQUIREMENTS).splitlines()} <= chosen


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("platform", "extras"),
    [
        ("aarch64-manylinux_2_35", ("triton", "video", "coco", "mlflow", EMULATOR["name"], "modelopt")),
        ("x86_64-pc-windows-msvc", ("ort-rtx", "video", "coco", "mlflow", EMULATOR["name"], "modelopt")),
    ],
)
def test_other_platforms_have_wheels(
    platform: str, extras: tuple[str, ...], environment: dict[str, str], resolutions: dict[str, Resolution]
) -> None:
    """What docs/platforms.md says: wheels for the core, these extras and the libraries of TensorRT-RTX."""
    if not resolutions["3.12"].ok:
        pytest.skip("there is no resolution; test_every_extra_resolves says why")
    engine = "\n".join(f"tensorrt-rtx-cu13-{part}" for part in ("libs", "bindings"))
    options = ("--only-binary", ":all:", "--python-platform", platform, "--python-version", "3.12")
    answer = resolve(f"{required(*extras)}\n{engine}", environment, *options, "--constraint", "constraints.txt")
    assert answer.ok, answer.text


@pytest.mark.nightly
def test_an_impossible_pin_is_noticed(resolutions: dict[str, Resolution]) -> None:
    """torch's Linux build requires one version of triton; another one has no solution."""
    answer = resolutions[IMPOSSIBLE]
    assert not answer.ok
    assert not UNREACHABLE.search(answer.text)
    assert "triton" in answer.text


def pins(version: str) -> dict[str, str]:
    """Name -> version of constraints.txt on one Python (Linux); a second pin of one name is an error."""
    marker = {**default_environment(), "python_version": version, "python_full_version": f"{version}.0"}
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{line} pins no version"
        if pin.marker is None or pin.marker.evaluate({key: str(value) for key, value in marker.items()}):
            name = canonicalize_name(pin.name)
            assert name not in found, f"{name} is pinned twice for Python {version}"
            found[name] = str(pin.specifier)[2:]
    return found


@pytest.mark.parametrize("version", PYTHONS)
def test_every_direct_dependency_has_one_pin_inside_its_range(version: str) -> None:
    pinned = pins(version)
    for line in required(*REQUIREMENTS).splitlines():
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name not in NOT_PINNED:
            assert name in pinned, f"{name} has no pin for Python {version}"
            assert requirement.specifier.contains(pinned[name]), f"{line} leaves out the pin {pinned[name]}"


def test_supported_pythons_are_said_once() -> None:
    assert PYTHONS[0] == "3.10"
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert len(PYTHONS) >= 4


def test_pre_commit_runs_the_ruff_that_is_pinned() -> None:
    """Two versions of a formatter undo each other's work."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    found = re.search(r"ruff-pre-commit\n\s+rev: v([\d.]+)\n", text)
    assert found is not None
    assert found[1] == pins(PYTHONS[-1])["ruff"]
