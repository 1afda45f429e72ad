"""Files that are whole or absent, and their digests.

A reader never sees half a file: what is written goes to a temporary place in the same folder and is renamed at the end,
which is atomic on one file system. A full disk, Ctrl-C or `kill -9` leaves the previous version.

**Durability.** A rename may reach the disk before the content that it names; after a loss of power the file would be
there and empty. The content is synchronised (fsync) before the rename, the folder's list of names after it.

**Others who can write to the folder.** The temporary place is a folder of mode 0700 with a random name: `mkdir` fails
where anything exists, also a symbolic link, so that nobody can prepare a link for the writer to follow. The file inside
is created by the caller as any other, with the permissions of the umask.

**Folders that are replaced.** `replace_folder` puts a list of digests into the folder that it writes, and replaces only
a folder that holds what its list says and nothing else: what somebody added or changed is never removed.

**Killed writers.** A writer holds a lock on its temporary folder, which the system gives back when it dies. The first
write of another process to the same place removes the folders that are not locked.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fp4deploy.errors import InputError

try:
    import fcntl
except ImportError:  # Windows: what killed processes leave stays
    fcntl = None  # type: ignore[assignment]

MAX_DIGESTED = 64 << 30  # bytes
MANIFEST = ".fp4deploy.sha256"  # in a folder of `replace_folder`, as sha256sum writes it
MAX_MANIFEST = 1 << 20  # bytes
TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.partial")

_tidied: set[Path] = set()  # folders that this process has looked through


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path of the same name; rename it to `path` on success, remove it on any failure.

    The caller makes the temporary path a file, or a folder where `path` is an empty folder or does not exist.

    Raises:
        InputError: the disk is full, the folder cannot be written, or `path` is a device or pipe; `path` keeps its
            previous content. `__cause__` is the `OSError`, if there is one.
    """
    path = Path(path)
    _refuse_device(path)
    private: Path | None = None
    lock: int | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_of_killed(path.parent)
        private, lock = _private_folder(path.parent)
        temporary = private / path.name
        yield temporary
        _synchronise(temporary)
        if temporary.is_dir() and path.is_dir():
            path.rmdir()  # Windows renames no folder onto another one
        os.replace(temporary, path)
        _synchronise_entry(path.parent)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file by `atomic_write`; text in UTF-8."""
    with atomic_write(path) as temporary:
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        else:
            temporary.write_text(content, encoding="utf-8")


def write_json(path: Path, document: object) -> None:
    """Write JSON for people, two spaces a level, by `atomic_write`; NaN and Inf are refused."""
    write_whole(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """`atomic_write` of a folder, which the caller fills; it may replace one that this function wrote.

    Raises:
        InputError: as `require_own_folder` and `atomic_write`; `path` keeps its previous content.
    """
    require_own_folder(path)
    old = path.with_name(f".{path.name}.{os.urandom(8).hex()}.old")
    try:
        with atomic_write(path) as temporary:
            temporary.mkdir()
            yield temporary
            lines = [f"{file_digest(temporary / name)}  {name}\n" for name in _contents(temporary)]
            (temporary / MANIFEST).write_text("".join(lines), encoding="utf-8", newline="")
            _synchronise(temporary)
            require_own_folder(path)
            if path.exists():
                path.rename(old)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def require_own_folder(path: Path) -> None:
    """Refuse to replace anything but an empty folder, and one that `replace_folder` wrote and nobody has changed.

    Raises:
        InputError: `path` is something else; the message names what would be lost.
    """
    foreign = _foreign(path)
    if foreign is not None:
        raise InputError(
            f"{path} is in the way: {foreign}, and only what fp4deploy wrote is ever replaced. Move it away, or choose "
            "another place with --out."
        )


def _foreign(path: Path) -> str | None:
    """What is in a folder's place that `replace_folder` did not write, as a clause; None where nothing is."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        return "it is no folder"
    try:
        names = _contents(path) if path.is_dir() else []
        listed = _listed(path / MANIFEST)
        for name in names:
            if listed is None:
                return f"it holds {name}, and no list of what fp4deploy wrote"
            if name not in listed:
                return f"fp4deploy did not write its {name}"
            if (path / name).is_symlink() or file_digest(path / name) != listed[name]:
                return f"its {name} was changed"
    except (OSError, InputError) as error:
        return f"it cannot be read ({error})"
    return None


def _contents(folder: Path) -> list[str]:
    """All files and links below a folder by their relative names; not its list, nor what Python compiled of them."""
    found = []
    for root, folders, files in os.walk(folder, onerror=_raise):
        here = Path(root)
        if "__pycache__" in folders and all(each.suffix == ".pyc" for each in (here / "__pycache__").iterdir()):
            folders.remove("__pycache__")
        links = [name for name in folders if (here / name).is_symlink()]
        found += [(here / name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(name for name in found if name != MANIFEST)


def _raise(error: OSError) -> None:
    raise error


def _listed(manifest: Path) -> dict[str, str] | None:
    """Digests by name; None where there is no list."""
    if manifest.is_symlink() or not manifest.is_file() or manifest.stat().st_size > MAX_MANIFEST:
        return None
    lines = manifest.read_bytes().decode("utf-8", "replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def require_writable(*paths: Path | None) -> None:
    """Before minutes of work: each of these files or folders can be written. Leaves nothing; None is skipped.

    Raises:
        InputError: as `atomic_write` would later.
    """
    for path in paths:
        if path is None:
            continue
        _refuse_device(path)
        try:
            if path.is_dir():
                probe, lock = _private_folder(path)
            else:
                parents = (each for each in path.absolute().parents if each.exists())
                probe, lock = _private_folder(next(parents))
        except OSError as error:
            raise _unwritten(path, error) from error
        shutil.rmtree(probe, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _refuse_device(path: Path) -> None:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{path} is a device or a pipe, and would be replaced by a file. Give the name of a file.")


def _unwritten(path: Path, error: OSError) -> InputError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, None)  # None: a writer's own error, whose text says it
    advice = "free some space or choose another place" if full else "choose another place"
    return InputError(f"{path} could not be written: {error.strerror or error}. Nothing was replaced; {advice}.")


def _private_folder(parent: Path) -> tuple[Path, int | None]:
    """A new temporary folder, and a descriptor that holds its lock, None where the system has none."""
    while True:
        private = parent / f".{os.urandom(8).hex()}.partial"
        private.mkdir(mode=0o700)
        lock = _locked(private, wait=True)
        if private.exists():
            return private, lock
        if lock is not None:  # another process removed it before it was locked
            os.close(lock)


def _remove_of_killed(folder: Path) -> None:
    """Remove the temporary folders of writers that have died."""
    if fcntl is None or folder in _tidied:
        return
    _tidied.add(folder)
    with suppress(OSError):  # others remove theirs meanwhile
        for path in folder.iterdir():
            if TEMPORARY.fullmatch(path.name) and (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path, wait: bool = False) -> int | None:
    """A descriptor of the folder that holds its lock; None where another process has it, or there are no locks."""
    if fcntl is None:
        return None
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _synchronise(path: Path) -> None:
    """Wait until the content of a file, or of every file below a folder, is on the disk."""
    if not path.is_dir():
        access = os.O_RDWR if os.name == "nt" else os.O_RDONLY  # Windows synchronises what is open for writing
        descriptor = os.open(path, access | getattr(os, "O_NOFOLLOW", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return
    for each in path.iterdir():
        _synchronise(each)
    _synchronise_entry(path)


def _synchronise_entry(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems synchronise no folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 over byte strings; each is preceded by its length, so that no boundary between two can move."""
    import hashlib

    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


def file_digest(path: Path) -> str:
    """Hexadecimal SHA-256 of a regular file.

    Raises:
        InputError: it is missing, a folder, device or pipe, cannot be read, or is larger than `MAX_DIGESTED` or than
            its size says (a file of /proc may never end).
    """
    import hashlib

    digest = hashlib.sha256()
    try:
        if not path.is_file():
            raise InputError(f"{path} is no file.")
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            if left > MAX_DIGESTED:
                raise InputError(f"{path} is larger than {MAX_DIGESTED >> 30} GiB.")
            while chunk := file.read(min(1 << 20, left + 1)):
                digest.update(chunk)
                left -= len(chunk)
                if left < 0:
                    raise InputError(f"{path} is longer than its size says.")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Append one line of JSON and synchronise it, so that a crash loses nothing; NaN becomes null, which JSON has.

    A last line without its newline, which a killed process leaves, stays a line of its own.

    Raises:
        InputError: the disk is full, the folder cannot be written, or `path` is a device or pipe.
    """
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        with path.open("ab+") as file:
            cut = file.seek(0, os.SEEK_END) > 0 and _last_byte(file) != b"\n"
            file.write(b"\n" * cut + json.dumps(clean, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"{path} could not be written: {error.strerror}. Free some space or choose another place."
        ) from error


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
