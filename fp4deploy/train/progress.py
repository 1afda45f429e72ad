"""What a person watching sees: a bar with ETA on a terminal, one line an epoch in a log. All on stderr."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """Progress of one model's training; a context manager."""

    def __init__(self, model: str, epochs: int, steps: int, done: int = 0) -> None:
        self.model, self.epochs = model, epochs
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task(model, total=steps, completed=done, loss="")

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """A remark on a line of its own."""
        self.console.print(text, markup=False)

    def step(self, loss: float) -> None:
        """One training step is done."""
        self.bar.update(self.task, advance=1, loss=f"loss {loss:.3f}")

    def epoch(self, number: int, loss: float, miou: float | None, seconds: float) -> None:
        """One epoch is done."""
        score = f"  mIoU {100 * miou:.2f}" if miou is not None else ""
        self.say(f"{self.model}  epoch {number}/{self.epochs}  loss {loss:.4f}{score}  {seconds:.1f} s")
