"""Files that are whole or absent, and their digests.

A reader never sees half a file: what is written goes to a temporary name in the same folder and is renamed at the end,
which is atomic on one file system. A full disk or Ctrl-C leaves the previous version.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp4deploy.errors import InputError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` on success, remove it on any failure.

    The caller makes the temporary path a file, or a folder where `path` is an empty folder or does not exist. Its name
    is random, because threads write at once, and processes in containers on one shared disk can have equal numbers.

    Raises:
        InputError: the disk is full or the folder cannot be written; `path` keeps its previous content. `__cause__` is
            the `OSError`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_dir() and path.is_dir():
            path.rmdir()  # Windows renames no folder onto another one
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"{path} could not be written: {error.strerror or error}. Nothing was replaced; "
            "free some space or choose another place."
        ) from error
    finally:
        with suppress(OSError):
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 over byte strings; each is preceded by its length, so that no boundary between two can move."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()
