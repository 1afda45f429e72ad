"""Run a program that ends with the process that asked for it: `python -I -S supervisor.py COMMAND...`.

COMMAND leads a process group with everything that it starts (nvcc starts four compilers). Standard input is a pipe
whose other end the parent holds and never writes to: it ends when the parent closes it or is dead, however that
happened, and then the group is killed. On Linux COMMAND also has PR_SET_PDEATHSIG, for a supervisor that is killed
itself.

What COMMAND has left running is killed when it ends. The exit status is that of COMMAND; where a signal ended it, the
same signal ends the supervisor. Only the standard library is imported, and little of it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a batch system signals every process; the parent decides


def main(command: list[str]) -> None:
    """Run `command` until it ends, or until standard input does."""
    ended, note = os.pipe()
    os.set_blocking(note, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note)
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, supervisor)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # the child does the same; whoever is first
        os.setpgid(child, child)
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if 0 in ready:
            with suppress(OSError):
                os.killpg(child, signal.SIGKILL)
        pid, status = os.waitpid(child, 0 if 0 in ready else os.WNOHANG)
        if pid:
            with suppress(OSError):  # what it has left running
                os.killpg(child, signal.SIGKILL)
            _end_as(status)
        os.read(ended, 64)


def _become(command: list[str], supervisor: int) -> None:
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # Python handles or ignores these
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(1)
        os.execv(command[0], command)
    finally:
        os._exit(127)


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has written its own core, if any
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
