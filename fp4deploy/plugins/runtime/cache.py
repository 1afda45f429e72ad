"""Files that can be made again: where they lie, how they stay whole, and who makes them.

`FP4DEPLOY_CACHE`, else `$XDG_CACHE_HOME/fp4deploy`, else `~/.cache/fp4deploy`. An entry ends with the SHA-256 of its
content; whatever is cut off or changed counts as missing and is made again. A finished file is renamed into place, so
that readers need no lock; processes that need the same entry wait for the first (training starts one for each GPU).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """Folder of everything that can be made again: FP4DEPLOY_CACHE, else the XDG cache folder's `fp4deploy`."""
    if chosen := os.environ.get("FP4DEPLOY_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "fp4deploy"


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 over byte strings; each is preceded by its length, so that a boundary cannot move."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


def read_entry(entry: Path) -> bytes | None:
    """The content of an entry; None where it is missing, cut off or changed."""
    try:
        whole = entry.read_bytes()
    except OSError:
        return None
    content, digest = whole[:-_DIGEST], whole[-_DIGEST:]
    return content if content and hashlib.sha256(content).digest() == digest else None


def write_entry(entry: Path, content: bytes) -> None:
    """Write beside the entry and rename.

    The temporary name is random: processes in containers on one shared home folder can have equal process numbers.

    Raises:
        OSError: the folder cannot be written.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = entry.with_name(f".{entry.name}.{secrets.token_hex(8)}.partial")
    try:
        temporary.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(temporary, entry)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def keep_entry(entry: Path, content: bytes) -> None:
    """`write_entry` into the cache; a cache that cannot be written is a warning, because only time is lost."""
    try:
        write_entry(entry, content)
    except OSError as error:
        warnings.warn(
            f"{entry} could not be written ({error.strerror or error}): every process compiles the kernels again. "
            "Set FP4DEPLOY_CACHE to a folder that can be written.",
            stacklevel=3,
        )


@contextmanager
def one_process(entry: Path) -> Iterator[None]:
    """Let one process at a time make an entry. Where locks do not work each makes it: slower, and still right."""
    lock = None
    with suppress(ImportError, OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        import fcntl  # not on Windows

        lock = entry.with_suffix(".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()
