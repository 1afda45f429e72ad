"""Where a file comes from and how its classes are drawn, as JSON in every file that is made of a checkpoint.

| file | where |
|---|---|
| ONNX | the metadata entry `fp4deploy.about` |
| `.fp4` | the key `about` of the metadata entry `fp4deploy.packed`, as text |
| ledger of an engine | the key `about` |

For people and for programs without fp4deploy: nothing here reads it to decide anything.
"""

from __future__ import annotations

from typing import Any

from fp4deploy import __version__
from fp4deploy.data.palette import colours
from fp4deploy.models.card import ModelCard

ABOUT_KEY = "fp4deploy.about"


def about(card: ModelCard | None, checkpoint_sha256: str | None) -> dict[str, Any]:
    """Version of this package, SHA-256 of the checkpoint, colours of the classes; what is not known is left out.

    >>> sorted(about(None, "0" * 64))
    ['checkpoint_sha256', 'version']
    """
    found: dict[str, Any] = {"version": __version__}
    if checkpoint_sha256 is not None:
        found["checkpoint_sha256"] = checkpoint_sha256
    if card is not None:
        found["palette"] = [colour and list(colour) for colour in colours(card.class_names, card.background)]
    return found
