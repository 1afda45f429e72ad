"""Ctrl-C that waits for the end of a step.

An exception in the middle of an optimiser step would leave half of the weights updated. The first Ctrl-C is only noted,
and the loop asks at points where the state is whole; the second one interrupts at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

NOTE = b"\nStopping after this step and saving; press Ctrl-C again to stop at once.\n"


class Interrupt:
    """Context manager; `requested` turns True with the first Ctrl-C inside it."""

    def __init__(self) -> None:
        self.requested = False
        self._process = os.getpid()
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader's worker, forked with this handler: the main process decides
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, NOTE)  # not print: a signal may arrive inside one


class Pause(Exception):
    """Raised by the loop at a point where its state can be saved."""
