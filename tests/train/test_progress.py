"""The bar on a terminal: training and validation are phases of their own; a log gets one line an epoch."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from fp4deploy.train.logging import progress
from fp4deploy.train.logging.progress import Display


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 120 columns."""
    text = io.StringIO()
    monkeypatch.setattr(
        progress, "console", lambda **options: Console(file=text, force_terminal=True, width=120, soft_wrap=True)
    )
    return text


def test_validation_is_a_phase_of_its_own(screen: io.StringIO) -> None:
    with Display("fp16", epochs=2, steps=4) as display:
        display.step(2, 0.5)
        tasks = display.bar.tasks
        assert [task.visible for task in tasks] == [True, False]
        display.validated(1, 3)
        assert (tasks[1].visible, tasks[1].completed, tasks[1].total) == (True, 1, 3)
        display.bar.refresh()
        assert "fp16 validation" in screen.getvalue()
        display.validated(3, 3)
        assert tasks[1].fields["loss"] == "computing scores"
        display.epoch(1, 0.5, "mIoU 0.5", 1.0)
        assert not tasks[1].visible
        display.validated(1, 3)
        assert (tasks[1].visible, tasks[1].completed) == (True, 1)
    assert "epoch 1/2" in screen.getvalue()


def test_a_log_gets_lines_in_a_long_epoch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fp4deploy.system.progress.SECONDS", 0.01)
    with Display("fp16", epochs=2, steps=4) as display:
        display.step(2, 0.5)
        time.sleep(0.1)
        assert capsys.readouterr().err.splitlines()[0] == "  fp16  step 2/4  epoch 1/2  loss 0.5000  ETA 0:00:00"
        display.validated(1, 3)
        time.sleep(0.1)
        assert capsys.readouterr().err.splitlines()[-1].endswith("loss 0.5000  validation 1/3  ETA 0:00:00")


@pytest.mark.parametrize("quiet", [True, False])
def test_a_quiet_display_prints_nothing(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with Display("fp16", epochs=1, steps=1, quiet=quiet) as display:
        display.validated(1, 1)
        display.epoch(1, 0.5, None, 1.0)
    assert (capsys.readouterr().err == "") == quiet


def test_the_time_left_is_by_the_steps_of_this_process() -> None:
    """Of 8 steps 4 were done before it began, 1 since: 3 more take three times as long."""
    display = Display("fp16", epochs=2, steps=8, done=4, quiet=True)
    display.step(5, 0.5)
    display.bar.tasks[0].start_time = display.bar.get_time() - 60
    assert display.line().endswith("ETA 0:03:00")
    display.step(8, 0.5)
    assert "ETA" not in display.line()
