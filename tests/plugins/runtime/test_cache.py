"""The cache of compiled kernels is private, whole, and not to be led elsewhere by links."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from fp4deploy.errors import InputError
from fp4deploy.plugins.runtime import cache

pytestmark = pytest.mark.skipif(os.name == "nt", reason="owners and modes of POSIX")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_folder_is_made_for_its_user_alone(folder: Path) -> None:
    assert cache.cache_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_default_folder_of_the_umask_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP4DEPLOY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "fp4deploy").mkdir()
    (tmp_path / "fp4deploy").chmod(0o775)
    assert cache.cache_folder() == tmp_path / "fp4deploy"
    assert stat.S_IMODE((tmp_path / "fp4deploy").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    (folder / "planted").touch()
    with pytest.warns(UserWarning, match="others can write to it.*FP4DEPLOY_CACHE"):
        used = cache.cache_folder()
    assert used != folder
    assert not (used / "planted").exists()
    assert stat.S_IMODE(used.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    else:
        mine = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert cache.cache_folder() != folder


def test_a_user_without_a_home_has_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FP4DEPLOY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache.cache_folder() == tmp_path / f"fp4deploy-cache-{os.getuid()}"
    monkeypatch.setenv("FP4DEPLOY_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(InputError, match="FP4DEPLOY_CACHE is ~nobody.*absolute"):
        cache.cache_folder()


def test_a_damaged_entry_counts_as_missing(folder: Path) -> None:
    entry = folder / "kernels" / "one.cubin"
    cache.write_entry(entry, b"machine code")
    assert cache.read_entry(entry) == b"machine code"
    entry.write_bytes(b"M" + entry.read_bytes()[1:])
    assert cache.read_entry(entry) is None


def test_a_link_at_the_lock_is_not_followed(folder: Path) -> None:
    entry, victim = folder / "one.cubin", folder.parent / "victim"
    folder.mkdir()
    victim.write_text("kept")
    entry.with_suffix(".lock").symlink_to(victim)
    with cache.one_process(entry):
        pass
    assert victim.read_text() == "kept"
    entry.with_suffix(".lock").unlink()
    entry.with_suffix(".lock").symlink_to(folder.parent / "created")
    with cache.one_process(entry):
        pass
    assert not (folder.parent / "created").exists()


def test_what_torch_compiles_is_kept_in_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import cache_dir_utils

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    cache.keep_compiled_private()
    assert Path(cache_dir_utils.cache_dir()) == folder / "inductor"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache_dir_utils.default_cache_dir())  # as a trace of torch leaves it
    cache.keep_compiled_private()
    assert Path(cache_dir_utils.cache_dir()) == folder / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    cache.keep_compiled_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"


def test_what_nobody_uses_is_deleted_and_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    names = ("programs/old", "programs/read", "programs/written", "inductor/a/old", "kernels/old")
    days = {"old": (31, 31), "read": (29, 31), "written": (31, 29)}
    outside = tmp_path / "outside"
    outside.mkdir()
    kept = outside / "old"
    for path in (*(folder / name for name in names), kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        read, written = (time.time() - 86400 * each for each in days[path.name])
        os.utime(path, (read, written))
    (folder / "inductor" / "link").symlink_to(outside)
    cache.remove_unused("programs", "inductor", "absent")
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"programs/read", "programs/written", "kernels/old"}
    assert kept.is_file()
