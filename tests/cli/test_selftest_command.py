"""`fp4deploy selftest`: exit codes and files. The checks themselves are tested in tests/selftest."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from fp4deploy.errors import GateError, UnavailableError
from fp4deploy.selftest import run
from fp4deploy.selftest.run import self_test
from tests.cli.command_line import Invoke
from tests.selftest.test_run import check


@pytest.mark.parametrize(("outcome", "code"), [(None, 0), (UnavailableError("no GPU"), 0), (GateError("3 differ"), 1)])
def test_exit_codes(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, outcome: Exception | None, code: int) -> None:
    monkeypatch.setattr(run, "self_test", functools.partial(self_test, checks=[check(outcome)]))
    done = invoke("selftest")
    assert done.exit_code == code, done.stderr
    assert Path("selftest.json").is_file()
    assert Path("selftest.html").is_file()
    assert "group: a claim" in done.stdout
    assert ("1 of 1 checks failed: a claim. Please attach selftest.json" in done.stderr) == (code == 1)


def test_the_gpu_that_was_asked_for(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("selftest", "--require-gpu")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "There is no CUDA GPU that torch can use" in done.stderr
    assert invoke("selftest", "--out", "here.txt").exit_code == 2
    assert not list(Path().iterdir())
