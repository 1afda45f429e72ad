"""Every command of docs/nnunet.md, one after another, on generated volumes; nnU-Net's own by their entry points."""

from __future__ import annotations

import functools
import json
import multiprocessing.dummy
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from fp4deploy.requirements import NNUNET
from tests.interop import nnunet_folder
from tests.interop.nnunet_walk import OUT, commands

ABSENT = NNUNET.why_missing()
pytestmark = [
    pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT)),
    pytest.mark.nightly,  # a minute of tracing; what the commands do is tested in test_nnunet.py
    pytest.mark.timeout(900),
]
CPU = ["-device", "cpu"]
SMALL = {  # what the small form of a command has beside the page's arguments
    "nnUNetv2_train": CPU,
    "nnUNetv2_predict_from_modelfolder": CPU,
    "fp4deploy quantize": ["--method", "amax", "--correction", "none", "--images", "2"],
}


def then_set(begin: Callable[..., None], values: dict[str, Any]) -> Callable[..., None]:
    """An `__init__` after which an object has these attributes; nnU-Net's read their own signature."""

    @functools.wraps(begin)
    def begun(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        vars(self).update(values)

    return begun


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The raw data set that the page has, of three small volumes; one step of training; threads for processes."""
    from nnunetv2.experiment_planning.experiment_planners import default_experiment_planner as planning
    from nnunetv2.inference import data_iterators
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as training

    raw = nnunet_folder.write_raw(tmp_path / "nnUNet_raw", 5, (16, 20, 16)).rename(
        tmp_path / "nnUNet_raw" / "Dataset004_Hippocampus"
    )
    described = nnunet_folder.DATASET | {"numTraining": 5}
    (raw / "dataset.json").write_text(json.dumps(described))
    for part in ("images", "labels"):
        (raw / f"{part}Ts").mkdir()
        for path in (raw / f"{part}Tr").glob("case_000*"):
            shutil.copy(path, raw / f"{part}Ts")
    for name in ("raw", "preprocessed", "results"):
        monkeypatch.setenv(f"nnUNet_{name}", f"nnUNet_{name}")
    monkeypatch.setattr(training, "get_allowed_n_proc_DA", lambda: 0)
    monkeypatch.setenv("nnUNet_compile", "f")
    threads = SimpleNamespace(Pool=multiprocessing.dummy.Pool, Process=threading.Thread)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: threads)
    monkeypatch.setattr(data_iterators, "Manager", multiprocessing.dummy.Manager)
    short = {"num_epochs": 1, "num_iterations_per_epoch": 1, "num_val_iterations_per_epoch": 1}
    few = (1,) * 8
    narrow = {"UNet_base_num_features": 16, "UNet_max_features_3d": 16}
    narrow |= {f"UNet_blocks_per_stage_{part}": few for part in ("encoder", "decoder")}
    for kind, values in ((training.nnUNetTrainer, short), (planning.ExperimentPlanner, narrow)):
        monkeypatch.setattr(kind, "__init__", then_set(kind.__init__, values))
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    yield raw
    os.environ.clear()
    os.environ.update(before)


def test_every_command_of_the_page(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, *arguments in commands():
        arguments += SMALL.get(" ".join([name, *arguments[:1]]), SMALL.get(name, []))
        if name == "fp4deploy":
            said = CliRunner().invoke(app, arguments, prog_name="fp4deploy")
            assert said.exit_code == 0, said.stderr
        else:
            (entry,) = entry_points(group="console_scripts", name=name)
            monkeypatch.setattr(sys, "argv", [name, *arguments])
            entry.load()()
    segmented = {path.name for path in Path("fp16").glob("*.nii.gz")}
    assert segmented
    for form in ("nvfp4", "torch", "qat"):
        assert {path.name for path in Path(form).glob("*.nii.gz")} == segmented
    for form in ("fp16", "nvfp4"):
        summary = json.loads(Path(form, "summary.json").read_text())
        assert set(summary["mean"]) == {"1", "2"}
    assert Path(OUT, "fold_0", "network.portable.onnx").is_file()
