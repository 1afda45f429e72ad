"""The script of docs/predict.md segments an image with numpy, onnxruntime and pillow alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fp4deploy.data.palette import png_palette
from fp4deploy.predict.predictor import load
from fp4deploy.runs import Run
from tests.predict.pointwise import photo

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predict.md"
ALLOWED = """
import importlib.abc, runpy, sys
class Forbidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fp4deploy", "torch", "onnx"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Forbidden())
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_the_script_of_the_page(untrained: Run, tmp_path: Path) -> None:
    (code,) = re.findall(r'```python title="segment.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.strip().splitlines()) <= 30
    (tmp_path / "segment.py").write_text(code)
    (tmp_path / "run.py").write_text(ALLOWED)
    Image.fromarray(photo(45, 61)).save(tmp_path / "photo.png")
    model = untrained.export_dir / "unet.portable.onnx"
    command = [sys.executable, "run.py", "segment.py", str(model), "photo.png", "mask.png"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    mask = Image.open(tmp_path / "mask.png")
    found, palette = np.asarray(mask), mask.getpalette() or []
    expected = load(model).predict(tmp_path / "photo.png")
    assert (found == expected.mask).mean() > 0.98  # pillow and torch enlarge edges differently
    assert palette[:21] == png_palette(expected.palette)[:21]
    shown = dict(line.split(": ") for line in result.stdout.splitlines())
    assert list(shown) == [expected.class_names[number] for number in np.unique(found)]
