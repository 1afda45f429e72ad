"""The same work in several threads that begin at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)` in a thread each; back when all have ended."""
    start = threading.Barrier(count)

    def begin(at: int) -> None:
        start.wait()
        work(at)

    threads = [threading.Thread(target=begin, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
