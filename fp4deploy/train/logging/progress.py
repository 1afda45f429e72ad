"""Progress of a training on stderr: a bar with an ETA on a terminal; in a log a line an epoch, more in long ones."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp4deploy.system.progress import logged
from fp4deploy.system.terminal import console, is_quiet


class Display:
    """Progress of one model's training; a context manager."""

    def __init__(
        self, model: str, epochs: int, steps: int, done: int = 0, running: int = 1, quiet: bool = False
    ) -> None:
        """`done` of `steps` steps are done, `running` is the first epoch to train; `quiet` prints nothing."""
        self.model, self.epochs, self.running, self.begun = model, epochs, running, done
        quiet = quiet or is_quiet()
        self.console = console(soft_wrap=True, quiet=quiet)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task(model, total=steps, completed=done, loss="")
        self.log = logged(self.line, self.console)
        self.validation = self.bar.add_task(f"{model} validation", visible=False, start=False, loss="")

    def __enter__(self) -> Display:
        self.bar.start()
        self.log.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.log.__exit__(kind, error, trace)
        self.bar.stop()

    def line(self) -> str:
        """Where the training is, as a line of a log."""
        training, validation = self.bar.tasks
        parts = [self.model, f"step {training.completed:.0f}/{training.total:.0f}", training.fields["loss"]]
        if validation.visible:
            parts += [f"validation {validation.completed:.0f}/{validation.total:.0f}", validation.fields["loss"]]
        return "  " + "  ".join(part for part in (*parts, self._left()) if part)

    def _left(self) -> str:
        """Time until the last step, by the steps since this process began, validations among them."""
        training = self.bar.tasks[0]
        done, left = training.completed - self.begun, (training.total or 0) - training.completed
        if not done or not left:
            return ""
        return f"ETA {timedelta(seconds=round((training.elapsed or 0) * left / done))}"

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text)

    def step(self, done: int, loss: float | None) -> None:
        """`done` training steps are done; `loss` is the epoch's mean up to here."""
        self.bar.update(self.task, completed=done, loss=f"epoch {self.running}/{self.epochs}  loss {_shown(loss)}")

    def validated(self, batches: int, of: int) -> None:
        """`batches` of the validation are done; after the last one the scores are computed, COCO AP slowly."""
        if batches == 1:
            self.bar.reset(self.validation, total=of, completed=1, visible=True, loss="")
        self.bar.update(self.validation, completed=batches, loss="computing scores" if batches == of else "")

    def epoch(self, number: int, loss: float | None, score: str | None, seconds: float) -> None:
        """One epoch is done; `score` as a person reads it, None where it was not measured."""
        self.running = number + 1
        self.bar.update(self.validation, visible=False)
        parts = [self.model, f"epoch {number}/{self.epochs}", f"loss {_shown(loss)}", score, f"{seconds:.1f} s"]
        self.say("  ".join(part for part in parts if part))


def _shown(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
