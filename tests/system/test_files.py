"""Files are whole or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fp4deploy.errors import InputError
from fp4deploy.system import files
from fp4deploy.system.files import (
    MANIFEST,
    append_line,
    atomic_write,
    digest_of,
    file_digest,
    replace_folder,
    require_writable,
    write_json,
    write_whole,
)
from fp4deploy.system.schema import whole_lines


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with atomic_write(target) as temporary:
        temporary.write_text("old")
    with pytest.raises(InputError, match="No space left"), atomic_write(target) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(KeyboardInterrupt), atomic_write(target) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_written_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    with pytest.raises(InputError, match="No space left"), atomic_write(target) as temporary:
        temporary.mkdir()
        (temporary / "file").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(target.parent.iterdir()) == []
    target.mkdir()
    with atomic_write(target) as temporary:
        temporary.mkdir()
        (temporary / "file").write_text("whole")
    assert [path.name for path in target.parent.rglob("*")] == ["folder", "file"]
    with pytest.raises(InputError, match="not empty"), atomic_write(target) as temporary:
        temporary.mkdir()
    assert (target / "file").read_text() == "whole"


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with atomic_write(target) as first:
        first.write_text("first")
        with atomic_write(target) as second:
            second.write_text("second")
        assert target.read_text() == "second"
    assert target.read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_a_place_that_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    require_writable(tmp_path / "file", tmp_path / "not" / "yet" / "there" / "file", tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("old")
    require_writable(tmp_path / "file")
    for path in (tmp_path / "file" / "below", tmp_path / "file" / "a" / "b"):
        with pytest.raises(InputError, match=f"{path} could not be written: .*replaced; choose another place"):
            require_writable(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="device or a pipe"):
        require_writable(tmp_path / "pipe")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe"}


def test_the_temporary_place_is_private_and_cannot_be_foreseen(tmp_path: Path) -> None:
    places = []
    for _ in range(3):
        with atomic_write(tmp_path / "file") as temporary:
            places.append(temporary.parent)
            assert (temporary.name, temporary.parent.parent) == ("file", tmp_path)
            assert stat.S_IMODE(temporary.parent.stat().st_mode) == 0o700
            temporary.write_text("new")
    assert len(set(places)) == 3


def test_a_link_at_the_temporary_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    monkeypatch.setattr("os.urandom", bytes)  # zeros
    (tmp_path / f".{bytes(8).hex()}.partial").symlink_to(victim)
    with pytest.raises(InputError, match="File exists"), atomic_write(tmp_path / "file") as temporary:
        temporary.write_text("written through the link")
    assert (victim / "file").read_text() == "kept"


def test_a_link_at_the_target_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "file").symlink_to("victim")
    with atomic_write(tmp_path / "file") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "victim").read_text() == "kept"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_those_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        with atomic_write(tmp_path / "file") as temporary:
            temporary.write_text("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, order = tmp_path / "folder", list[str]()
    replace = os.replace

    def synchronised(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def renamed(source: Path, destination: Path) -> None:
        order.append("renamed")
        replace(source, destination)

    monkeypatch.setattr("os.fsync", synchronised)
    monkeypatch.setattr("os.replace", renamed)
    with atomic_write(target) as temporary:
        temporary.mkdir()
        (temporary / "content").write_text("whole")
    assert order == ["content", "folder", "renamed", tmp_path.name]


WRITER = """
import sys, time
from pathlib import Path
from fp4deploy.system.files import atomic_write
with atomic_write(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(os.name == "nt", reason="folders are locked on POSIX alone")
def test_the_next_write_removes_what_a_killed_process_was_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, own = tmp_path / "file", tmp_path / ".mine.partial"
    own.mkdir()
    (tmp_path / f".{16 * '0'}.partial").symlink_to(own)
    others = sorted(tmp_path.iterdir())
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        (half,) = (path for path in tmp_path.iterdir() if path not in others)
        for alive in (True, False):
            if not alive:
                writer.kill()
                writer.wait()
            monkeypatch.setattr(files, "_tidied", set())
            with atomic_write(target) as temporary:
                temporary.write_text("whole")
            assert half.exists() == alive
        assert sorted(tmp_path.iterdir()) == sorted([*others, target])
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.skipif(os.name == "nt", reason="folders are locked on POSIX alone")
def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took it for that of a killed one."""
    removed, locked = list[Path](), files._locked

    def late(folder: Path, wait: bool = False) -> int | None:
        if not removed:
            removed.append(folder)
            folder.rmdir()
        return locked(folder, wait)

    monkeypatch.setattr(files, "_locked", late)
    with atomic_write(tmp_path / "file") as temporary:
        assert temporary.parent != removed[0]
        temporary.write_text("whole")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_digest_depends_on_where_parts_end() -> None:
    assert digest_of([b"ab", b"c"]) != digest_of([b"a", b"bc"]) != digest_of([b"abc"])
    assert digest_of([b"ab", b"c"]) == digest_of(iter([b"ab", b"c"]))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_device_or_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        mode = path.stat().st_mode
        with pytest.raises(InputError, match="is a device or a pipe"), atomic_write(path) as temporary:
            temporary.write_text("content")
        assert path.stat().st_mode == mode
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_line_that_was_cut_stays_a_line_of_its_own(tmp_path: Path) -> None:
    """A process was killed while it wrote; what the next one appends is whole."""
    path = tmp_path / "lines.jsonl"
    append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": ')
    append_line(path, {"a": 2})
    append_line(path, {"a": 3})
    assert list(whole_lines(path)) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_no_line_is_appended_to_a_pipe_and_none_is_digested(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        append_line(tmp_path / "pipe", {})
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError, match="is no file"):
            file_digest(path)


def test_a_file_that_may_never_end_is_not_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are in records of a run; the kernel's files have a size of 0, or of all memory."""
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        file_digest(tmp_path / ("x" * 300))
    if (status := Path("/proc/self/status")).is_file():
        with pytest.raises(InputError, match="longer than its size says"):
            file_digest(status)
    (tmp_path / "a").write_bytes(b"abc")
    monkeypatch.setattr("fp4deploy.system.files.MAX_DIGESTED", 3)
    assert file_digest(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()
    (tmp_path / "a").write_bytes(b"abcd")
    with pytest.raises(InputError, match="is larger than"):
        file_digest(tmp_path / "a")


def written(path: Path, text: str = "content") -> None:
    with replace_folder(path) as temporary:
        (temporary / "1").mkdir()
        (temporary / "1" / "file").write_text(text)


def test_a_folder_is_replaced_where_it_was_written_by_the_same_function(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for text in ("first", "second"):
        written(path, text)
        assert (path / "1" / "file").read_text() == text
        assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "empty").mkdir()
    written(tmp_path / "empty")


ADDED = ("added", "hidden", "deep", "linked folder", "dangling link")


@pytest.mark.parametrize("change", [*ADDED, "changed", "link", "list removed", "list link"])
def test_what_somebody_added_or_changed_is_not_replaced(tmp_path: Path, change: str) -> None:
    path, other = tmp_path / "folder", tmp_path / "other"
    other.write_text("content")
    written(path)
    match change:
        case "added":
            (path / "2").write_text("mine")
        case "hidden":
            (path / "1" / ".mine").write_text("mine")
        case "linked folder":
            (tmp_path / "mine").mkdir()
            (path / "1" / "mine").symlink_to(tmp_path / "mine")
        case "dangling link":
            (path / "mine").symlink_to(tmp_path / "nowhere")
        case "changed":
            (path / "1" / "file").write_text("mine")
        case "link":
            (path / "1" / "file").unlink()
            (path / "1" / "file").symlink_to(other)
        case "list removed":
            (path / MANIFEST).unlink()
        case "list link":
            (path / MANIFEST).rename(tmp_path / "list")
            (path / MANIFEST).symlink_to(tmp_path / "list")
        case "deep":
            (path / "1" / "2").mkdir()
            (path / "1" / "2" / "file").write_text("mine")
    before = sorted(each.relative_to(path) for each in path.rglob("*"))
    with pytest.raises(InputError, match="is in the way"):
        written(path, "new")
    assert sorted(each.relative_to(path) for each in path.rglob("*")) == before
    assert (path / "1" / "file").read_text() != "new"


def test_a_link_or_a_file_is_no_folder_to_replace(tmp_path: Path) -> None:
    written(tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "file").write_text("mine")
    for name in ("link", "file"):
        with pytest.raises(InputError, match="it is no folder"):
            written(tmp_path / name)


def test_a_folder_stays_where_writing_its_successor_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder"
    written(path)
    with pytest.raises(ZeroDivisionError), replace_folder(path):
        raise ZeroDivisionError
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="could not be written"):
        written(path, "new")
    monkeypatch.setattr(os, "replace", replace)
    assert (path / "1" / "file").read_text() == "content"
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_contents_are_written_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "text", "größer")
    write_whole(tmp_path / "bytes", b"\0")
    assert (tmp_path / "text").read_bytes() == "größer".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\0"
    write_json(tmp_path / "document", {"a": [1]})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "document", {"a": float("nan")})
    assert json.loads((tmp_path / "document").read_text()) == {"a": [1]}
