"""A sweep on a Ray cluster: one of a single machine, started and stopped by the test."""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fp4deploy.data import generate_shapes
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.experiments.sweep.cluster import ray_workers
from fp4deploy.experiments.sweep.run import run_sweep
from fp4deploy.experiments.sweep.spec import Sweep, load_sweep
from fp4deploy.experiments.sweep.variant import LOG
from fp4deploy.runs import Run

pytestmark = pytest.mark.usefixtures("whole_unets")  # workers know nothing of tests
FILE = """
set: {model.scale: 0.125, data.height: 32, data.width: 32, train.epochs: 1, train.finetune_epochs: 1,
      train.batch_size: 4, data.root: ROOT}
seeds: [0, 1]
variants: {control: {model: fp16_control}}
"""


def die(run: Run) -> None:
    """Called in the process of a run: kill it where it is the first."""
    if run.path.parts[-2:] == ("fp16", "seed0"):
        os.kill(os.getpid(), signal.SIGKILL)


def sweep_of(folder: Path) -> Sweep:
    generate_shapes(folder / "data", train=4, val=2, size=32, seed=0)
    file = folder / "mine.yaml"
    file.write_text(FILE.replace("ROOT", json.dumps(str(folder / "data"))))
    return load_sweep(file)


@pytest.mark.slow
def test_runs_on_a_cluster_and_one_that_is_lost(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[distributed]' -c constraints.txt")
    sweep, said = sweep_of(tmp_path), list[str]()
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        first = run_sweep(sweep, tmp_path / "out", say=said.append, started=die, address="auto")
        assert first["variants"]["fp16"]["runs"]["0"]["status"] == "failed"
        assert "WorkerCrashedError" in first["variants"]["fp16"]["runs"]["0"]["error"]
        assert {row["runs"]["1"]["status"] for row in first["variants"].values()} == {"done"}
        second = run_sweep(sweep, tmp_path / "out", say=said.append, jobs=1, address="auto")
    finally:
        ray.shutdown()
    assert {run["status"] for row in second["variants"].values() for run in row["runs"].values()} == {"done"}
    assert "control, seed 1: starting" in said
    assert sum("control, seed 1: done, mIoU" in text for text in said) == 1
    assert "epoch 1/1" in (Run(tmp_path / "out" / "control" / "seed1").path / LOG).read_text()


def test_rays_workers_do_not_import_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = list[Path]()
    stand_in = types.SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **_: where.append(Path.cwd()),
        cluster_resources=lambda: {"CPU": 1},
        remote=lambda **_: lambda function: function,
    )
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.chdir(tmp_path)
    assert len(ray_workers("auto", None, sweep_of(tmp_path), tmp_path / "out")) == 1
    assert where == [Path("/")]  # ray.init puts this folder on the workers' sys.path
    assert Path.cwd() == tmp_path


def test_without_ray_the_message_names_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # what an import finds where there is none
    with pytest.raises(UnavailableError, match=r"pip install -e '.\[distributed\]' .*, or leave out --address"):
        ray_workers("auto", None, sweep, tmp_path)


def test_no_cluster_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[distributed]' -c constraints.txt")

    def refused(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", refused)
    with pytest.raises(InputError, match="No Ray cluster answers at auto .*ray start --head"):
        ray_workers("auto", 2, sweep_of(tmp_path), tmp_path)
