"""What was called is kept with its results; several processes of one training make one run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp4deploy.bench.commands import FILE, recorded
from fp4deploy.report.run_folder import read_run
from fp4deploy.runs import Run
from tests.cli.command_line import ENVIRONMENT, PACKAGE, Invoke
from tests.processes import fp4deploy
from tests.train.launch import rank_environments

SMALL = ("model.scale=0.125", "data.height=32", "data.width=32", "train.batch_size=4", "train.epochs=1")
SETS = tuple(
    part for setting in (*SMALL, "train.finetune_epochs=1", "telemetry.plots=false") for part in ("--set", setting)
)


def test_commands_and_machines_of_a_run(
    invoke: Invoke, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in (("--models", "fp16", "--out", "my run", *SETS), ("--out", "my run", "--resume")):
        arguments = ["train", "--data", str(shapes), *more]
        monkeypatch.setattr("sys.argv", ["/somewhere/bin/fp4deploy", *arguments])
        result = invoke(*arguments)
        assert result.exit_code == 0, result.stderr
    run = Run(tmp_path / "my run")
    first, second = recorded(run)
    assert first.command.startswith(f"fp4deploy train --data {shapes} --models fp16 --out 'my run' --set")
    assert second.command == f"fp4deploy train --data {shapes} --out 'my run' --resume"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(first.at))
    found = read_run(run)
    assert found.commands == [first.command, second.command]
    assert found.commands_recorded
    assert found.environment == second.environment
    page = tmp_path / "page.html"
    assert invoke("report", "my run", "--out", page).exit_code == 0
    text = page.read_text()
    assert "--out &#39;my run&#39; --resume" in text
    assert "was not recorded" not in text


UNTYPED = (
    '{"command": "x", "environment": {"gpus": [], "packages": {}, "cpu": "a", "cores": "<img>", "platform": "b", '
    '"python": "3"}}'
)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", '{"command": 3}', '{"command": "x", "environment": {}}', UNTYPED]
)
def test_a_damaged_line_is_left_out(tmp_path: Path, line: str) -> None:
    machine = {"gpus": [], "packages": {}, "cpu": "a", "cores": 1, "platform": "b", "python": "3"}
    good = {"at": "now", "command": "fp4deploy train", "environment": machine}
    (tmp_path / FILE).write_text(f"{line}\n{json.dumps(good)}\n")
    assert [found.model_dump(exclude_none=True) for found in recorded(Run(tmp_path))] == [good]
    (tmp_path / FILE).unlink()
    assert recorded(Run(tmp_path)) == []


def torchrun(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", PACKAGE]
    command = [*launch, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_two_processes_make_one_run(shapes: Path, tmp_path: Path) -> None:
    done = torchrun(tmp_path, "train", "--data", shapes, "--models", "fp16", *SETS)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert done.stderr.count("Run folder:") == 1
    assert done.stdout.count("fp16: best mIoU") == 1
    (entry,) = recorded(Run(folder))
    assert entry.command.startswith(f"torchrun --nproc-per-node 2 -m fp4deploy.cli train --data {shapes}")
    (line,) = (folder / "fp16" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2  # 16 images, 4 a process

    again = [
        fp4deploy(tmp_path, "train", "--data", shapes, "--models", "fp16", "--out", folder, *SETS, **environment)
        for environment in rank_environments(2)
    ]
    assert all(command.wait() for command in again)
    assert all(command.stderr.count("exists already") == 1 for command in again)  # each process says why it ends
    assert (folder / "fp16" / "best.safetensors").is_file()


@pytest.mark.slow
def test_a_chain_of_stages_is_one_process(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke("run", "--demo")
    assert result.exit_code == 2
    assert "fp4deploy run is one process" in result.stderr
