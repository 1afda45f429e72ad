"""Lists of folders in the environment: where programs, shared libraries and headers are looked up.

An empty entry of such a list means the current folder, and `PATH=$PATH:$UNSET` makes one: a program `gcc`, a library or
a header beside a downloaded model would be taken.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TypeVar

Environment = TypeVar("Environment", bound=MutableMapping[str, str])
LISTS = (
    "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "PYTHONPATH",
)  # fmt: skip


def keep_absolute(environment: Environment) -> Environment:
    """Remove relative and empty entries from the lists of an environment, in place; it is returned.

    >>> keep_absolute({"PATH": os.pathsep.join(["/bin", "", ".", "/usr/bin"]), "CPATH": "."})
    {'PATH': '/bin:/usr/bin'}
    """
    for name in LISTS:
        if name in environment:
            kept = [folder for folder in environment[name].split(os.pathsep) if os.path.isabs(folder)]
            if kept:
                environment[name] = os.pathsep.join(kept)
            else:
                del environment[name]
    return environment
