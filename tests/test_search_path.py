"""Settings of libraries are not read from the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

IMPORT = """
from fp4deploy.search_path import ignore_local_settings
ignore_local_settings()
import matplotlib
"""


def test_matplotlib_reads_no_settings_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_bytes(b"\xff\xfe")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    for code, status in ((IMPORT, 0), ("import matplotlib", 1)):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False)
        assert done.returncode == status
