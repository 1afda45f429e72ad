"""The contracts of `lint-imports` leave no module out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
LAYERS = [each for each in CONTRACTS if each["type"] == "layers"]


@pytest.mark.parametrize("contract", LAYERS, ids=[each["name"] for each in LAYERS])
def test_every_module_of_a_container_has_a_layer(contract: dict[str, Any]) -> None:
    layers = {name.strip() for layer in contract["layers"] for name in layer.split("|")}
    for container in contract.get("containers", []):
        assert contract["exhaustive"] is True
        folder = ROOT.joinpath(*container.split("."))
        modules = {path.stem for path in folder.glob("*.py")} | {
            path.parent.name for path in folder.glob("*/__init__.py")
        }
        assert modules - {"__init__", "__main__"} <= layers


def test_the_packages_themselves_are_layers() -> None:
    containers = [name for each in LAYERS for name in each.get("containers", [])]
    assert "fp4deploy" in containers
    assert ["cli", "fp4deploy"] in [each["layers"] for each in LAYERS]
