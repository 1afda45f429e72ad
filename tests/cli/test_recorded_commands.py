"""What was called is kept with its results; several processes of one training make one run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from torch.distributed import run

from fp4deploy.bench.commands import FILE, recorded
from fp4deploy.report.run_folder import read_run
from fp4deploy.runs import Run
from tests.cli.command_line import Invoke
from tests.processes import fp4deploy
from tests.train.launch import rank_environments, start

SMALL = ("model.scale=0.125", "data.height=32", "data.width=32", "train.batch_size=4", "train.epochs=1")
SETS = tuple(
    part for setting in (*SMALL, "train.finetune_epochs=1", "telemetry.every=0") for part in ("--set", setting)
)


def test_commands_and_machines_of_a_run(
    invoke: Invoke, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in (("--models", "fp16", "--out", "my run", *SETS), ("--out", "my run", "--resume")):
        arguments = ["train", "--data", str(shapes), *more]
        monkeypatch.setattr("sys.argv", ["/somewhere/bin/fp4deploy", *arguments])
        result = invoke(*arguments)
        assert result.exit_code == 0, result.stderr
    trained = Run(tmp_path / "my run")
    first, second = recorded(trained)
    assert first.command.startswith(f"fp4deploy train --data {shapes} --models fp16 --out 'my run' --set")
    assert second.command == f"fp4deploy train --data {shapes} --out 'my run' --resume"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(first.at))
    found = read_run(trained)
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


def torchrun(script: Path) -> None:
    """In a process of its own: what `torchrun --nproc-per-node 2` does."""
    os.chdir(script.parent)
    run.main(["--standalone", "--nproc-per-node", "2", str(script)])


def test_torchrun_sets_the_variables_that_tests_set(tmp_path: Path) -> None:
    """Those of `rank_environments`, with which two processes train here: a child of torchrun imports torch anew."""
    script = tmp_path / "child.py"
    script.write_text("import json, os\nopen(os.environ['RANK'], 'w').write(json.dumps({**os.environ}))\n")
    launcher = start(torchrun, script)
    launcher.join(60)
    assert launcher.exitcode == 0
    for rank, expected in enumerate(rank_environments(2)):
        found = json.loads((tmp_path / str(rank)).read_text())
        fixed = expected.keys() - {"MASTER_ADDR", "MASTER_PORT"}
        assert found.keys() >= expected.keys()
        assert {name: found[name] for name in fixed} == {name: expected[name] for name in fixed}
        assert found["GROUP_WORLD_SIZE"] == "1"


@pytest.mark.slow
def test_two_processes_make_one_run(shapes: Path, tmp_path: Path) -> None:
    arguments = ("train", "--data", shapes, "--models", "fp16", *SETS)
    both = [fp4deploy(tmp_path, *arguments, **environment) for environment in rank_environments(2)]
    assert [command.wait() for command in both] == [0, 0], [command.stderr for command in both]
    (folder,) = (tmp_path / "runs").iterdir()
    assert [command.stderr.count("Run folder:") for command in both] == [1, 0]
    assert [command.stdout.count("fp16: best mIoU") for command in both] == [1, 0]
    (entry,) = recorded(Run(folder))
    assert entry.command.startswith(f"torchrun --nproc-per-node 2 -m fp4deploy.cli train --data {shapes}")
    (line,) = (folder / "fp16" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1  # 8 images, 4 a process

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
