"""The Dockerfiles install what exists: extras of the package, under its constraints. No image is built here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.test_resolution import EXTRAS, PYTHONS, ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_an_image_installs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "COPY . /fp4deploy" in text
    assert f"docker build -f docker/{path.name}" in text
    (constraint, extras) = re.findall(r"--constraint /fp4deploy/(\S+) \\\n\s+'/fp4deploy\[(.*)\]'", text)[0]
    assert (ROOT / constraint).is_file()
    assert set(extras.split(",")) <= set(EXTRAS)


def test_a_base_image_has_a_supported_python() -> None:
    (version,) = re.findall(r"^FROM python:(3\.\d+)-slim$", (ROOT / "docker" / "cpu.Dockerfile").read_text(), re.M)
    assert version in PYTHONS
