"""torchvision imports beside a torch that its compiled operators do not load in, whoever imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BY_PROGRAM = "import fp4deploy, timm; print(timm.torchvision.__spec__.loader.get_filename(), timm.torchvision.count)"
BY_FILE = """
from fp4deploy.models.build import build_model
from fp4deploy.models.spec import parse_spec
print(type(build_model(parse_spec("net.py:build"), 4)).__name__)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Fails as the wheel for CUDA does beside a torch without it; a library and a user's file import it."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "count = globals().get('count', 0) + 1\nfrom . import fakes\n"
    )
    fakes = "import torch\n@torch.library.register_fake('torchvision::nms')\ndef fake(*_): ...\n"
    (tmp_path / "torchvision" / "fakes.py").write_text(fakes)
    (tmp_path / "timm.py").write_text("import torchvision\n")
    (tmp_path / "net.py").write_text(
        "import timm, torch\ndef build(classes):\n    return torch.nn.Conv2d(3, classes, 1)\n"
    )
    return tmp_path


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    own = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"}
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, env=own)


@pytest.mark.variants
def test_torchvision_imports_without_its_compiled_operators(stand_in: Path) -> None:
    assert "operator torchvision::nms does not exist" in run("import timm", stand_in).stderr
    done = run(BY_PROGRAM, stand_in)
    assert done.stdout.split() == [str(stand_in / "torchvision" / "__init__.py"), "2"], done.stderr


def test_a_file_of_the_users_may_import_it(stand_in: Path) -> None:
    done = run(BY_FILE, stand_in)
    assert done.stdout.split() == ["Conv2d"], done.stderr


def test_another_error_is_torchvisions_own(stand_in: Path) -> None:
    (stand_in / "torchvision" / "fakes.py").write_text("raise RuntimeError('another error')\n")
    assert "RuntimeError: another error" in run(BY_PROGRAM, stand_in).stderr
