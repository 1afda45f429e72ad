"""Settings of libraries are not read from the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp4deploy.system.search_path import keep_python_safe

IMPORT = """
from fp4deploy.system.search_path import ignore_local_settings
ignore_local_settings()
import matplotlib
"""


def test_matplotlib_reads_no_settings_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_bytes(b"\xff\xfe")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    for code, status in ((IMPORT, 0), ("import matplotlib", 1)):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False)
        assert done.returncode == status


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of Python 3.11")
def test_a_python_that_a_library_starts_imports_nothing_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "ctypes.py").write_text("raise SystemExit(7)")
    probe = [sys.executable, "-S", "-c", "import ctypes"]  # as torch.compile does
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    for environment, status in ((plain, 7), (keep_python_safe(dict(plain)), 0)):
        assert subprocess.run(probe, cwd=tmp_path, env=environment, check=False).returncode == status


def test_python_310_asks_no_other_python_what_the_cpu_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep_python_safe({}).keys() >= {"PYTHONSAFEPATH"}
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    assert keep_python_safe({}) == {"PYTHONSAFEPATH": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    own = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
    assert keep_python_safe(own)["TORCHINDUCTOR_VEC_ISA_OK"] == "0"
