"""Progress on stderr: on a terminal a bar with the time left, in a log a line every 15 seconds, later every minute.

A piece of work says how much of it is done, or begins a phase whose length is not known; the time goes on in both, so
that nothing looks hung. With `--quiet` nothing is printed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from fp4deploy.system.terminal import console, is_quiet

Phase = Callable[[str, int, int | None], None]  # what is done, how much of it, and of how much, where that is known
SECONDS, MAX_SECONDS = 15.0, 60.0  # between two lines of a log


class Bar:
    """Progress of one piece of work; its methods are the callbacks of the functions that do it."""

    def __init__(self, text: str, then: str, screen: Console) -> None:
        said = TextColumn("{task.description}", markup=False)  # it has names of files and phases
        columns = (SpinnerColumn(), said, BarColumn(), TimeElapsedColumn(), Left())
        self.display = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
        self.task = self.display.add_task(text, total=None, since=0.0)
        self.then = then

    def advance(self, done: int, of: int) -> None:
        """So much of all is done; after the last one the phase `then` begins, where there is one."""
        if done >= of and self.then:
            self.phase(self.then)
        else:
            self.phase(self._state().description, done, of)

    def phase(self, text: str, done: int = 0, of: int | None = None) -> None:
        """As `advance`, of the phase `text`; a new one begins the bar again. of: None where not known."""
        task = self._state()
        if text != task.description:
            task.fields["since"] = task.elapsed or 0.0
        task.total, task.finished_time = of, None  # Rich's own methods cannot take a total away
        self.display.update(self.task, description=text, completed=done)

    def line(self) -> str:
        """The state as one line of a log."""
        return f"  {self._state().description}: {int(self._state().elapsed or 0)} s  {Left().render(self._state())}"

    def _state(self) -> Task:
        return self.display.tasks[0]


class Left(ProgressColumn):
    """ "12/40  ETA 0:01:05", or how much is done where the length of the work is not known."""

    def render(self, task: Task) -> Text:
        """The text of a task."""
        done = int(task.completed)
        if task.total is None:
            return Text(str(done) if done else "")
        of, seconds = int(task.total), (task.elapsed or 0.0) - task.fields["since"]
        left = f"  ETA {timedelta(seconds=round(seconds * (of - done) / done))}" if done else ""
        return Text(f"{done}/{of}{left}")


@contextmanager
def progress(text: str, then: str = "") -> Iterator[Bar]:
    """Show the progress of the block: `text`, until its `Bar` is told more.

    then: the phase that begins when all is done, such as the computation of scores.
    """
    screen = console(quiet=is_quiet())
    bar = Bar(text, then, screen)
    with bar.display, logged(bar.line, screen):
        yield bar


@contextmanager
def logged(line: Callable[[], str], screen: Console) -> Iterator[None]:
    """Print `line()` now and then while the block runs, unless the screen is a terminal, which shows a bar."""
    if screen.is_terminal or screen.quiet:
        yield
        return
    ended, start = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not ended.wait(min(MAX_SECONDS, max(SECONDS, (time.monotonic() - start) / 10))):
            screen.print(line().rstrip(), soft_wrap=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
