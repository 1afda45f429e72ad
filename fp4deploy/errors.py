"""The error tree: every error a user can cause carries the exit code the command line ends with.

| class | exit | meaning |
|---|---|---|
| `GateError` | 1 | the work ran, and a gate (accuracy, strict precision, verification) failed |
| `InputError` | 2 | wrong usage or input: a file, a value, a name |
| `UnavailableError` | 3 | right input, but this machine cannot do it (no GPU, library missing) |

A message is one short paragraph: the cause, the valid values, the next command.
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable

LONGEST_MESSAGE = 3000  # characters
# Control characters but tab and newline, marks and overrides of the text direction, line separators, lone surrogates.
_INVISIBLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Text in which characters that act on a terminal are escapes, as in Python's literals.

    >>> printable("a\x1b[31mred")
    'a\\x1b[31mred'
    """
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of what an exception says, up to `most` characters; its class if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:most]


def named_cause(error: BaseException, most: int = 200) -> str:
    """The class of an exception and the first line of what it says: "RuntimeError: no such size"."""
    return f"{type(error).__name__}: {first_line(error, most)}" if str(error).strip() else type(error).__name__


class Fp4DeployError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns.

    A message may quote a file: characters that act on a terminal are escaped, and the middle of a long one is cut.
    """

    exit_code = 2

    def __init__(self, message: object = "") -> None:
        text = printable(str(message))
        half = LONGEST_MESSAGE // 2
        super().__init__(text if len(text) <= LONGEST_MESSAGE else f"{text[:half]} ... {text[-half:]}")


class GateError(Fp4DeployError):
    """A gate failed: accuracy dropped, a layer fell back, an export does not match its model."""

    exit_code = 1


class InputError(Fp4DeployError):
    """Wrong usage or input."""

    exit_code = 2


class UnavailableError(Fp4DeployError):
    """This machine cannot do it: hardware or a library is missing."""

    exit_code = 3


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end. The command line exits with 128 + number.

    number: the signal.
    resume: the command that goes on from what was saved; "" where there is none.
    """

    def __init__(self, number: int, resume: str = "") -> None:
        super().__init__(number, resume)
        self.number, self.resume = number, resume

    def __str__(self) -> str:
        name = signal.Signals(self.number).name
        return f"ended by {name}; resume with: {self.resume}" if self.resume else f"ended by {name}"


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest of `valid`, or "" where none is near.

    >>> suggest("nvfp4_qta", ["nvfp4_qat", "tetrajet"])
    " Did you mean 'nvfp4_qat'?"
    """
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


def counted(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
