"""Of the command line: what the callback of each option makes of values, and what it sets for children."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from fp4deploy.cli.main import app
from PIL import Image

from fp4deploy.models import build_unet, save_checkpoint
from tests.cli.test_main import commands
from tests.contract.results.arguments import picture
from tests.contract.results.of_files import CARD, dataset
from tests.contract.results.plain import Answer, plain

VALUES = (None, True, False, 0, 1, -1, 0.5, float("nan"), "x", "1,2", "a=1", "32x48", ["a"], ["a=1", "b=2"])


def called(command: Any, parameter: Any) -> list[Any]:
    found = []
    for value in VALUES:
        context = click.Context(command, info_name="x")
        with mock.patch.dict(os.environ, clear=False):
            before = dict(os.environ)
            try:
                answer = plain(parameter.callback(context, parameter, value))
            except Exception as error:
                answer = type(error).__name__
            changed = {key: each for key, each in os.environ.items() if before.get(key) != each}
        found.append([answer, changed] if changed else answer)
    return found


def callbacks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in commands(app).items():
        for parameter in command.params:
            if parameter.callback is not None and not parameter.is_eager:
                text = f"{parameter.name} {called(command, parameter)}"
                found.setdefault(text, []).append(name)
    return {text: sorted(names) for text, names in found.items()}


FP16 = "runs/r/fp16/best.safetensors"
CHANGING = re.compile(r"[0-9.]+ ?(s|ms)\b|[0-9a-f]{64}|\d{4}-\d\d-\d\dT[^\"\s]+")  # times and digests
OF_THE_MACHINE = ("device", "runtime", "backend", "environment", "latency_ms", "images_per_s", "created", "sha256", "at", "seconds",
                  "timed_runs", "size_bytes", "text", "bytes", "written_by", "pixels",
                  "evidence", "cores", "cpu")  # fmt: skip


def prepared(folder: Path) -> None:
    dataset(folder / "data")
    tree = dataset(folder / "damaged") / "annotations" / "instances_train2017.json"
    tree.write_text(tree.read_text().replace('"category_id": 3', '"category_id": 8'))
    (folder / FP16).parent.mkdir(parents=True)
    (folder / "runs" / "r" / "config.yaml").write_text("seed: 0\n")
    torch.manual_seed(0)
    save_checkpoint(folder / FP16, build_unet(3, 0.125), dataclasses.replace(CARD, height=32, width=32))
    layer = {
        "Name": "gemm_0",
        "LayerType": "gemm",
        "Inputs": [],
        "Outputs": [],
        "Constants": [],
        "TacticName": "t",
        "Metadata": "",
    }
    (folder / "layers.json").write_text(json.dumps({"Layers": [layer], "Bindings": ["x"]}))
    (folder / "in").mkdir()
    Image.fromarray(picture()).save(folder / "in" / "a.png")


def kept(value: Any) -> Any:
    """JSON without what is of this machine."""
    if isinstance(value, dict):
        return {key: kept(each) for key, each in value.items() if key not in OF_THE_MACHINE}
    if isinstance(value, float):
        return round(value, 2)  # a pixel of another class is no other answer
    return [kept(each) for each in value] if isinstance(value, list) else value


RESULTS: dict[str, Answer] = {"callbacks": lambda: [callbacks()]}
