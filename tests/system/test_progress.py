"""Progress: a bar with the time left on a terminal, lines in a log, nothing with --quiet."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from fp4deploy.system import progress as shown
from fp4deploy.system.progress import Bar, progress
from fp4deploy.system.terminal import QUIET


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 120 columns."""
    text = io.StringIO()
    monkeypatch.setattr(shown, "console", lambda **options: Console(file=text, force_terminal=True, width=120))
    return text


@pytest.fixture
def bar() -> Iterator[Bar]:
    with progress("images", then="scores") as found:
        yield found


def drawn(terminal: io.StringIO, bar: Bar) -> str:
    """What the bar shows now."""
    terminal.truncate(0)
    bar.display.refresh()
    return terminal.getvalue()


def test_a_bar_says_how_much_is_done_and_the_time_left(terminal: io.StringIO, bar: Bar) -> None:
    assert "images" in drawn(terminal, bar)
    bar.display.tasks[0].start_time -= 30  # type: ignore[operator]
    bar.advance(3, 12)
    assert "3/12  ETA 0:01:30" in drawn(terminal, bar)
    bar.advance(12, 12)
    text = drawn(terminal, bar)
    assert "scores" in text
    assert "0:00:30" in text  # since the beginning
    assert "12" not in text


def test_names_are_printed_literally(terminal: io.StringIO, bar: Bar) -> None:
    bar.phase("tactics of [/x] [red]", 1, 2)
    assert "tactics of [/x] [red]" in drawn(terminal, bar)


def test_a_phase_has_a_time_of_its_own(terminal: io.StringIO, bar: Bar) -> None:
    bar.phase("layers", 0, 2)
    bar.display.tasks[0].start_time -= 60  # type: ignore[operator]
    bar.phase("layers", 1, 2)
    assert "1/2  ETA 0:01:00" in drawn(terminal, bar)
    bar.phase("placements", 0, 10)
    assert "0/10" in drawn(terminal, bar)
    bar.display.tasks[0].start_time -= 10  # type: ignore[operator]
    bar.phase("placements", 5, 10)
    text = drawn(terminal, bar)
    assert "5/10  ETA 0:00:10" in text
    assert "0:01:10" in text


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shown, "SECONDS", 0.01)
    with progress("images") as bar:
        bar.advance(1, 4)
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("  images: 0 s  1/4  ETA 0:00:0") for line in lines)
    with progress("tracing"):
        time.sleep(0.1)
    assert capsys.readouterr().err.splitlines()[0] == "  tracing: 0 s"


def test_quiet_work_prints_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shown, "SECONDS", 0.01)
    monkeypatch.setenv(QUIET, "1")
    with progress("images") as bar:
        bar.advance(1, 2)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
