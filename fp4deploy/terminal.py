"""Text for a terminal: names are printed literally, and Rich is created in one way.

Names of classes, layers and files come from data sets and model files. One with Rich's markup ("[/x]") would end the
command with an error of Rich, one with an escape sequence would colour, clear or retitle the terminal of whoever lists
it, and one with direction marks would read as another name.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Control characters but tab and newline, marks and overrides of the text direction, line separators, lone surrogates.
_INVISIBLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


QUIET = "FP4DEPLOY_QUIET"  # set to 1 by --quiet; child processes inherit it


def is_quiet() -> bool:
    """Whether progress and remarks are left out; results and errors are printed as ever."""
    return os.environ.get(QUIET) == "1"


def printable(text: str) -> str:
    r"""Text in which characters that act on a terminal are escapes, as in Python's literals.

    >>> printable("a\x1b[31mred")
    'a\\x1b[31mred'
    """
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def console(stream: TextIO | None = None, **options: Any) -> Console:
    """A Rich console that prints strings literally, without markup; styled text is given as `rich.text.Text`.

    stream: None for stderr, whatever it is when something is printed.
    """
    from rich.console import Console
    from rich.text import Text

    class Literal(Console):
        def render_str(self, text: str, **rest: Any) -> Text:
            return super().render_str(printable(text), **{**rest, "markup": False, "emoji": False})

        def render(self, renderable: Any, options: Any = None) -> Any:
            """Also text that did not come through `render_str`, such as `Text(name)` in a table."""
            for segment in super().render(renderable, options):
                shown = segment.text if segment.control else printable(segment.text)
                yield segment if shown == segment.text else segment._replace(text=shown)

    where: dict[str, Any] = {"stderr": True} if stream is None else {"file": stream}
    return Literal(**where, highlight=False, **options)
