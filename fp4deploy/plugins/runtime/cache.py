"""The cache of compiled kernels: where it is, how its entries stay whole, and which process compiles.

`FP4DEPLOY_CACHE`, else the user's cache folder (platformdirs): on Linux `$XDG_CACHE_HOME/fp4deploy`, else
`~/.cache/fp4deploy`. Everything in it can be compiled again.

    kernels/<nvcc target>/<source>-<key>.cubin                            CUDA C++, see `runtime.nvcc`
    triton/<architecture>/<kernel>-<key>-<compiler><version>.kernel       compiled ahead of time, see `aot.store`
    inductor/                                                torch.compile's own, see `keep_compiled_private`

**Keys.** `key` is a SHA-256 over everything that decides the machine code. A changed source or option gives another
name, so that no entry ever has to be invalidated.

**Trust.** An entry is machine code that will run. The folder is made with mode 0700, and one that another user owns or
can write to is not used. Locks do not follow symbolic links.

**Entries** end with the SHA-256 of their content: one that is truncated or damaged counts as missing. A finished file
is renamed into place, so that readers need no lock. Processes that need the same entry wait for the first one
(training starts one for each GPU).
"""

from __future__ import annotations

import atexit
import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from fp4deploy.errors import InputError
from fp4deploy.system.children import owned_folder
from fp4deploy.system.files import digest_of, write_whole

_DIGEST = hashlib.sha256().digest_size
MAX_UNUSED_DAYS = 30
_LONGEST_WAIT = 600  # seconds; on a disk whose locks never free each process compiles for itself


def cache_folder() -> Path:
    """The folder of everything that can be compiled again; made where it does not exist.

    Raises:
        InputError: FP4DEPLOY_CACHE begins with the home folder of a user who has none.
    """
    chosen = os.environ.get("FP4DEPLOY_CACHE")
    folder = _chosen(chosen) if chosen else _default()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not chosen and os.name != "nt" and folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)  # an older version made it by the umask
    why = _untrusted(folder)
    if why:
        warnings.warn(
            f"The kernel cache {folder} is not used, because {why}: whoever can write to it decides what runs on the "
            "GPU. Kernels are compiled for this process alone. Set FP4DEPLOY_CACHE to a folder of your own, of mode "
            "0700.",
            stacklevel=2,
        )
        return _of_this_process()
    return folder


def keep_compiled_private() -> None:
    """Let torch.compile keep what it compiles in this cache, unless TORCHINDUCTOR_CACHE_DIR says where.

    Its cache has shared libraries and pickles, which are loaded. By default it is in the temporary folder, under a name
    that another user can take first, and its owner is not looked at.

    Raises:
        InputError: as `cache_folder`.
    """
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    usual = os.path.join(tempfile.gettempdir(), "torchinductor_")  # torch sets the variable itself where it is not set
    if not chosen or chosen.startswith(usual):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "inductor")


def _chosen(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"FP4DEPLOY_CACHE is {text}, and {error} Give an absolute path.") from None


def _default() -> Path:
    import platformdirs

    with suppress(RuntimeError):  # a user without a home folder
        folder = platformdirs.user_cache_path("fp4deploy", appauthor=False)
        if folder.is_absolute():
            return folder
    return Path(tempfile.gettempdir()) / f"fp4deploy-cache-{os.getuid()}"


def _untrusted(folder: Path) -> str:
    """Why others could have put something into a folder; empty where only this user and root can."""
    if os.name == "nt":
        return ""
    try:
        found = folder.stat()
    except OSError:
        return ""
    if found.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    return "others can write to it" if found.st_mode & 0o022 else ""


@lru_cache
def _of_this_process() -> Path:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(owned_folder())


def key(parts: Iterable[bytes | str]) -> str:
    """The part of an entry's name that stands for its inputs: 160 bits of a SHA-256, in hexadecimal."""
    return digest_of(part.encode() if isinstance(part, str) else part for part in parts)[:40]


def read_entry(entry: Path) -> bytes | None:
    """The content of an entry; None where it is missing, truncated or damaged."""
    try:
        whole = entry.read_bytes()
    except OSError:
        return None
    content, digest = whole[:-_DIGEST], whole[-_DIGEST:]
    return content if content and hashlib.sha256(content).digest() == digest else None


def write_entry(entry: Path, content: bytes) -> None:
    """Write an entry and its digest.

    Raises:
        InputError: the folder cannot be written.
    """
    write_whole(entry, content + hashlib.sha256(content).digest())


def keep_entry(entry: Path, content: bytes) -> None:
    """`write_entry` into the cache; a cache that cannot be written is a warning, because only time is lost."""
    try:
        write_entry(entry, content)
    except InputError as error:
        warnings.warn(
            f"The kernel cache cannot be written, and every process compiles the kernels again: {error} "
            "Set FP4DEPLOY_CACHE to a folder that can be written.",
            stacklevel=3,
        )


def remove_unused(*names: str) -> None:
    """Delete files of these folders of the cache that nobody has read or written for `MAX_UNUSED_DAYS`.

    A network compiled by Inductor takes some 140 MB there; what is deleted by mistake is compiled again.
    """
    oldest = time.time() - MAX_UNUSED_DAYS * 86400
    for path in (path for name in names for path in (cache_folder() / name).rglob("*")):
        with suppress(OSError):  # another process may delete it, too
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) and max(found.st_atime, found.st_mtime) < oldest:
                path.unlink()


@contextmanager
def one_process(entry: Path) -> Iterator[None]:
    """Let one process at a time make an entry. Where locks do not work each makes it: slower, and still right."""
    from filelock import FileLock

    lock = FileLock(entry.with_suffix(".lock"), timeout=_LONGEST_WAIT)
    with suppress(OSError, NotImplementedError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
