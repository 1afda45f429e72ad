"""The modules of `fp4deploy.system` are imported by every command, so that none may import torch."""

from __future__ import annotations

import subprocess
import sys

IMPORT = """
import importlib, pkgutil, sys
import fp4deploy.system
for module in pkgutil.iter_modules(fp4deploy.system.__path__, "fp4deploy.system."):
    importlib.import_module(module.name)
sys.exit("torch" in sys.modules)
"""


def test_no_module_imports_torch() -> None:
    assert subprocess.run([sys.executable, "-c", IMPORT], check=False).returncode == 0
