"""Two processes under torchrun: one set of files, the same result in both, validation counted once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp4deploy.data import EvalTransform, eval_loader, generate_shapes, open_dataset
from fp4deploy.metrics import SegmentationScore
from fp4deploy.models import build_unet, load_weights
from fp4deploy.runs import create_run

SCRIPT = """
import sys
from pathlib import Path
from fp4deploy.runs import Run
from fp4deploy.train import load_config, train_models
settings = ["model.scale=0.125", "data.height=32", "data.width=32", "train.batch_size=2"]
settings += ["train.epochs=1", "train.finetune_epochs=1", f"data.root={sys.argv[1]}"]
trained = train_models(load_config(None, settings), Run(Path(sys.argv[2])))
print({model: result.best_miou for model, result in trained.items()}, flush=True)
"""


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    data, run = tmp_path / "data", create_run(tmp_path / "run")
    generate_shapes(data, train=8, val=5, size=32, seed=0)  # 5: the last batch is not full
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launch, str(script), str(data), str(run.path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace("}{", "}\n{").split("\n")
    assert len({line for line in printed if line.startswith("{")}) == 1
    for model in ("fp16", "nvfp4"):
        lines = (run.model_dir(model) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [2]  # 8 images, 2 a process
    assert json.loads((run.model_dir("fp16") / "metrics.jsonl").read_text())["miou"] == pytest.approx(
        miou_alone(data, run.checkpoint("fp16")), abs=1e-6
    )


def miou_alone(data: Path, checkpoint: Path) -> float:
    """The same validation in this one process."""
    dataset = open_dataset(data, "val")
    model = build_unet(len(dataset.class_names), 0.125).eval()
    load_weights(model, checkpoint)
    score = SegmentationScore(len(dataset.class_names), dataset.class_names)
    with torch.inference_mode():
        for images, masks in eval_loader(dataset, EvalTransform(32, 32), batch_size=2):
            score.update(model(images).argmax(1), masks)
    return score.compute().miou
