"""What CI runs exists, and the job with all libraries accepts no test that skips for want of one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

BOTH = """
import os, pytest
found = []
for needed in ("", "1"):
    os.environ["FP4DEPLOY_NEED_LIBRARIES"] = needed
    found.append(int(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", ".", "."])))
print(found)
"""


def workflow(name: str) -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="the sdist has no .github")
def test_ci_makes_targets_of_the_makefile() -> None:
    matrix = workflow("test")["jobs"]["make"]["strategy"]["matrix"]
    targets = {*matrix["target"], *(each["target"] for each in matrix["include"])}
    pythons = {each["python"] for each in matrix["include"] if each["target"] == "test"}
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"test", "libraries", "docs", "rehearsal"} <= targets
    assert all(re.search(rf"^([a-z]+ )*{target}( [a-z]+)*:", makefile, re.MULTILINE) for target in targets)
    assert "make release" in [step.get("run") for step in workflow("release")["jobs"]["build"]["steps"]]
    listed = re.search(r"^LIBRARY_TESTS := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    assert listed is not None
    assert all(list(ROOT.glob(path)) for path in listed[1].replace("\\", " ").split())


@pytest.mark.nightly
def test_a_skip_for_want_of_a_library_fails_where_it_must_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_makereport\n")
    reason = "ray is not installed: pip install -e '.[distributed]'"
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_it():\n    pytest.skip({reason!r})\n")
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", BOTH], cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 1]", done.stdout + done.stderr
