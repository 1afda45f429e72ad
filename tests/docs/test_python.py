"""Python that the pages show runs as it stands there, the blocks of a page one after another, and passes mypy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fp4deploy", "cli", "tools/emulator/fp4deploy_emulator")  # as pyproject.toml; one process reads torch once
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("index.md", "your-data.md", "your-model.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    if page.name == "README.md":
        assert (tmp_path / "my_net.nvfp4.onnx").is_file(), "the example ends with a file"


@pytest.mark.nightly  # `make check` runs it
@pytest.mark.timeout(900)
def test_the_package_and_python_of_the_pages_pass_a_type_checker(tmp_path: Path) -> None:
    pages = [*PAGES, *(ROOT / "docs" / f"{name}.md" for name in ("instances", "numerics", "packed", "predict"))]
    for page in pages:
        text = "\n\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))
        options = "# mypy: allow-untyped-defs, check-untyped-defs\n"
        (tmp_path / f"{page.stem.replace('-', '_')}_page.py").write_text(options + text)
    call = [sys.executable, "-m", "mypy", *PACKAGES, *map(str, tmp_path.glob("*.py"))]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
