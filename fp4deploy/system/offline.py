"""A block of code that may not use the network: building a network that a file describes.

Libraries of networks download weights by many ways (requests, urllib, torch.hub, huggingface_hub, some with the user's
token), and some classes do so by default. Python raises an audit event before a name is looked up or a socket is
connected, whichever library asks; within the block and in its thread, that is an error. huggingface_hub has a transfer
library of its own outside Python and is told by its own switch, so that it takes what is in its cache and asks nobody.

Source: PEP 578, "Python Runtime Audit Hooks".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import local

EVENTS = frozenset(
    f"socket.{call}" for call in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "connect", "sendto", "sendmsg")
)
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_HUB = "huggingface_hub.constants"
_block = local()


@contextmanager
def offline(what: str) -> Iterator[None]:
    """Let this thread reach no other machine within the block.

    Args:
        what: begins the message of the error that a library gets, "timm:resnet18".

    Raises:
        ConnectionError: something in the block tries to, and does not handle the error.
    """
    _watch()
    outer, kept = getattr(_block, "what", None), {name: os.environ.get(name) for name in SWITCHES}
    hub = sys.modules.get(_HUB)
    switched = getattr(hub, "HF_HUB_OFFLINE", None)
    os.environ.update(dict.fromkeys(SWITCHES, "1"))
    if hub is not None:
        hub.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    _block.what = what
    try:
        yield
    finally:
        _block.what = outer
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        imported = sys.modules.get(_HUB)
        if imported is not None:  # imported inside, it read the switch
            usual = (kept[name] or "" for name in SWITCHES)
            on = any(value.upper() in ("1", "ON", "YES", "TRUE") for value in usual)
            imported.HF_HUB_OFFLINE = on if hub is None else switched  # type: ignore[attr-defined]


@cache
def _watch() -> None:
    """Add the hook, once: Python has no way to remove one."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    what = getattr(_block, "what", None)
    if what is None or event not in EVENTS:
        return
    if event == "socket.connect" and isinstance(arguments[1], str | bytes):
        return  # a socket of this machine's file system
    raise ConnectionError(f"{what} tries to reach another machine, and a network is built of what is on this one")
