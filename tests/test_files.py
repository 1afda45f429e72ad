"""Files are whole or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fp4deploy.errors import InputError
from fp4deploy.files import atomic_write, digest_of


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


def test_a_digest_depends_on_where_parts_end() -> None:
    assert digest_of([b"ab", b"c"]) != digest_of([b"a", b"bc"]) != digest_of([b"abc"])
    assert digest_of([b"ab", b"c"]) == digest_of(iter([b"ab", b"c"]))
