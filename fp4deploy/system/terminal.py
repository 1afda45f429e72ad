"""Text for a terminal: names are printed literally, and Rich is created in one way.

Names of classes, layers and files come from data sets and model files. One with Rich's markup ("[/x]") would end the
command with an error of Rich, one with an escape sequence would colour, clear or retitle the terminal of whoever lists
it, and one with direction marks would read as another name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TextIO

from fp4deploy.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

QUIET = "FP4DEPLOY_QUIET"  # set to 1 by --quiet; child processes inherit it


def is_quiet() -> bool:
    """Whether progress and remarks are left out; results and errors are printed as ever."""
    return os.environ.get(QUIET) == "1"


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
