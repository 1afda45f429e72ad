"""What the command line shares with the system: signals, output streams, encodings.

**Signals.** SIGTERM (Slurm, Kubernetes, `docker stop`) and SIGHUP (a closed terminal) do what Ctrl-C does: they raise
an exception, and a training saves its state first (`train.interrupt`). What is ignored stays ignored, as under `nohup`.

**Output.** A command writes its results to files first and prints afterwards, and a stream that breaks does not end it:
what cannot be printed is dropped. Where the reader has gone (`fp4deploy check unet | head`), that is no error; a full
disk behind stdout is one, after the work is done.

**Encodings.** A terminal that cannot show a character gets an equivalent in ASCII or an escape, never an exception.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from fp4deploy.errors import InputError, Interrupted

READABLE = "fp4deploy.readable"  # name of the error handler for characters that an encoding lacks
EQUIVALENT = {
    "–": "-", "—": "-", "−": "-", "→": "->", "×": "x", "±": "+-", "…": "...", "·": ".", "²": "^2", "≥": ">=",
    "≤": "<=", "’": "'", "“": '"', "”": '"', "•": "*", "µ": "u", "━": "-", "╸": "-", "╺": "-",
}  # fmt: skip
READER_GONE = (errno.EPIPE, errno.ESHUTDOWN, errno.EBADF)
REFUSALS = tuple(
    getattr(errno, name)
    for name in ("ENAMETOOLONG", "EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENOTEMPTY", "ELOOP",
                 "ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "EINVAL", "ESTALE", "EMFILE", "ENFILE", "ENXIO", "ENODEV")
    if hasattr(errno, name)
)  # fmt: skip
LONGEST_NAME = 200  # characters of a path in a message


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Interrupted` where they would end the process."""
    named = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
    ending = [number for number in named if number is not None and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, _raise)
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Replace stdout and stderr by streams that last until the end of the command.

    Raises:
        InputError: after the block, where stdout could not be written for another reason than a reader that has gone.
    """
    _open_closed_descriptors()
    codecs.register_error(READABLE, _readable)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
        sys.stdout, sys.stderr = before
    failure = raw.failure if isinstance(raw, LastingFile) else None
    if failure is not None and failure.errno not in READER_GONE:
        raise InputError(
            f"What was printed is not complete: {failure.strerror}. Files that were to be written are; "
            "free some space where stdout goes, or print less."
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was refused: by Python, the system, or torch, whose CPU allocator raises a RuntimeError."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    torch = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    return torch or isinstance(error, MemoryError)


def refused_by_system(error: Exception) -> str | None:
    """One sentence for an error of the operating system about a file: a name that is too long, no permission, a full
    disk; None for other errors. Readers and writers have their own messages: this is for what looks at a path before.
    """
    if not isinstance(error, OSError) or error.errno is None or error.errno not in REFUSALS:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME // 2]}...{name[-LONGEST_NAME // 2 :]}"
    return f"{name + ': ' if name else ''}{error.strerror or os.strerror(error.errno)}. Give another file or folder."


class LastingFile(io.FileIO):
    """A file descriptor whose first failed write is kept in `failure`; what follows is dropped.

    A terminal that was closed answers EIO, as a broken disk does.
    """

    failure: OSError | None = None

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.terminal = stat.S_ISCHR(os.fstat(descriptor).st_mode)  # isatty is False of one that was closed

    def write(self, data: Any, /) -> int:
        """Write bytes; how many of them."""
        if self.failure is None:
            try:
                return super().write(data)
            except BlockingIOError:
                raise
            except OSError as error:
                closed = self.terminal and error.errno == errno.EIO
                self.failure = OSError(errno.EPIPE, error.strerror) if closed else error
        return len(data)


def _lasting(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed before Python started
        return open(os.devnull, "w", encoding="utf-8", errors=READABLE)
    try:
        raw = LastingFile(stream.fileno())
    except (OSError, ValueError):  # no file: somebody has replaced the stream
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors=READABLE,
        line_buffering=raw.isatty() or stream is sys.stderr,
    )


def _open_closed_descriptors() -> None:
    """Give 0, 1 and 2 to /dev/null where they are closed; else the next file that is opened would be stdout."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _readable(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(EQUIVALENT.get(each) or each.encode("unicode_escape").decode() for each in text), error.end
