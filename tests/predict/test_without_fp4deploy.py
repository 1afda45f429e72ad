"""The script of docs/predict.md segments an image with numpy, onnxruntime and pillow alone."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement
from PIL import Image

from fp4deploy.data.palette import png_palette
from fp4deploy.predict.predictor import load
from fp4deploy.runs import Run
from tests.predict.pointwise import photo

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predict.md"
NEEDED = ("numpy", "onnxruntime", "pillow")


def environment(folder: Path) -> Path:
    """A folder of links to the three packages and what they require, as `pip install` of them leaves it."""
    wanted, seen = list(NEEDED), set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        installed = distribution(name)
        requirements = (Requirement(text) for text in installed.requires or ())
        wanted += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
        for first in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / first).exists():
                (folder / first).symlink_to(Path(str(installed.locate_file(first))).resolve())
    return folder


def test_the_script_of_the_page(untrained: Run, tmp_path: Path) -> None:
    (code,) = re.findall(r'```python title="segment.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.strip().splitlines()) <= 30
    (tmp_path / "segment.py").write_text(code)
    (tmp_path / "site").mkdir()
    start = f"import runpy, sys; sys.path.append({str(environment(tmp_path / 'site'))!r}); sys.argv = sys.argv[1:]; "
    alone = [sys.executable, "-I", "-S", "-c"]  # no site-packages, nothing from the folder or the environment
    for absent in ("fp4deploy", "torch", "onnx"):
        assert (
            subprocess.run([*alone, f"{start}import {absent}", "-"], capture_output=True, check=False).returncode == 1
        )
    Image.fromarray(photo(45, 61)).save(tmp_path / "photo.png")
    model = untrained.export_dir / "unet.nvfp4.portable.onnx"
    script = start + "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [*alone, script, "segment.py", str(model), "photo.png", "mask.png"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    mask = Image.open(tmp_path / "mask.png")
    found, palette = np.asarray(mask), mask.getpalette() or []
    expected = load(model).predict(tmp_path / "photo.png")
    assert (found == expected.mask).mean() > 0.98  # pillow and torch enlarge edges differently
    assert palette[:21] == png_palette(expected.palette)[:21]
    shown = dict(line.split(": ") for line in result.stdout.splitlines())
    assert list(shown) == [expected.class_names[number] for number in np.unique(found)]
