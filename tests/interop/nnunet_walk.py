"""The commands of docs/nnunet.md, as they stand there, in order."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "nnunet.md"
RAW = "nnUNet_raw/Dataset004_Hippocampus"  # the page's $RAW and $FP32
FP32 = "nnUNet_results/Dataset004_Hippocampus/nnUNetTrainer__nnUNetPlans__3d_fullres"
OUT = "hippocampus_nvfp4"
ASSIGNMENT = re.compile(r"export (\w+)=(.*)")
PYTHON = re.compile(r'\$\(python -c "([^"]*)"\)')


def lines() -> list[str]:
    """Every line of the page's blocks of commands, those that are continued in one, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    found = "\n".join(text for language, text in blocks if not language).replace("\\\n", " ").splitlines()
    return [line for line in (line.split(" #")[0].strip() for line in found) if line]


def commands() -> Iterator[list[str]]:
    """The words of every command; what the page exports is exported on the way."""
    for line in lines():
        value = ASSIGNMENT.fullmatch(line)
        if value:
            os.environ[value[1]] = PYTHON.sub(lambda found: _printed(found[1]), os.path.expandvars(value[2]))
        else:
            yield shlex.split(os.path.expandvars(line))


def _printed(code: str) -> str:
    """What a line of Python prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    return said.getvalue().strip()
