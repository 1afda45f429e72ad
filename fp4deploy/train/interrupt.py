"""Signals that wait for the end of a step: Ctrl-C, SIGTERM of a batch system, SIGHUP of a closed terminal.

An exception in the middle of an optimiser step would leave half of the weights updated. The first signal is only noted,
and the loop asks at points where the state is whole; the same signal again interrupts at once. Another one does not: a
batch system may send several, and to every process, of which each passes its own on to its children.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from fp4deploy.errors import Interrupted

NOTE = b"\nStopping after this step and saving; press Ctrl-C again to stop at once.\n"
SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Interrupt:
    """Context manager; `requested` turns True with the first signal inside it, whose number is in `number`."""

    def __init__(self) -> None:
        self.requested = False
        self.number: int = signal.SIGINT
        self._seen: set[int] = set()
        self._process = os.getpid()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: another language's handler
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def note(self, number: int) -> None:
        """Take over a signal that another process of this training has received; 0 is none."""
        if number and not self.requested:
            self.requested, self.number = True, number

    def error(self) -> KeyboardInterrupt:
        """What the loop raises when it has saved its state."""
        return KeyboardInterrupt() if self.number == signal.SIGINT else Interrupted(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader's worker, forked with this handler: the main process decides
            return
        if number in self._seen:
            raise self.error()
        self._seen.add(number)
        if self.requested:
            return
        self.note(number)
        with suppress(OSError):  # the terminal may be what has gone
            os.write(2, NOTE)  # not print: a signal may arrive inside one


class Pause(Exception):
    """Raised by the loop at a point where its state can be saved."""
