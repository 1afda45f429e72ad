"""Children import nothing from the current folder, end with their parent, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fp4deploy.plugins.runtime.nvcc import find_nvcc
from fp4deploy.system import children
from tests.processes import end, pids_in, plant, runs, script, wait_until

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = ROOT / "fp4deploy" / "system"
posix = pytest.mark.skipif(os.name == "nt", reason="process groups and locks of POSIX")

# Loads children.py by itself, so that any Python can run it: the two modules import the standard library alone.
LOAD = f"""
import importlib.util, os, sys
for name in ("search_path", "children"):
    spec = importlib.util.spec_from_file_location(name, os.path.join({str(SYSTEM)!r}, name + ".py"))
    module = sys.modules[name] = sys.modules["fp4deploy.system." + name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
children = module
"""

STARTS_CHILDREN = (
    LOAD
    + """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

def main(isolated):
    sys.path.insert(0, "")
    os.environ["PYTHONPATH"] = os.getcwd()
    if isolated:
        print(children.run(children.python_call("json", "dumps", 3)).status)
    with children.isolated_start() if isolated else nullcontext():
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            context.Event()
            with ProcessPoolExecutor(1, context, children.end_with_parent) as pool:
                print(pool.submit(os.path.join, "a", "b").result())

if __name__ == "__main__":
    main(sys.argv[1] == "isolated")
"""
)


def python_310() -> str | None:
    """An interpreter without the option -P."""
    if sys.version_info < (3, 11):
        return sys.executable
    found = [shutil.which("python3.10"), *Path.home().glob(".pyenv/versions/3.10.*/bin/python")]
    asked = ((each, subprocess.run([each, "--version"], capture_output=True, check=False)) for each in found if each)
    return next((str(each) for each, done in asked if done.returncode == 0), None)  # a shim of pyenv may have none


@posix
@pytest.mark.parametrize("version", ["this", "3.10"])
def test_no_child_imports_from_the_current_folder_or_pythonpath(tmp_path: Path, version: str) -> None:
    python = sys.executable if version == "this" else python_310()
    if python is None:
        pytest.skip("there is no python3.10 on PATH")
    code, mark = tmp_path / "code.py", tmp_path / "executed"
    code.write_text(STARTS_CHILDREN, encoding="utf-8")
    folder = plant(tmp_path / "planted", mark)
    for how in ("isolated", "plain"):
        done = subprocess.run(
            [python, str(code), how], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        if how == "isolated":
            assert (done.returncode, done.stdout.split()) == (0, ["1", "a/b", "a/b"]), done.stderr
            assert not mark.exists(), mark.read_text()
    assert mark.exists()  # without isolated_start a planted module is executed: the test can fail


def test_the_path_of_a_child_is_the_parents_without_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir()
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", ["", ".", "relative", str(here), str(tmp_path / "link"), str(other)])
    assert children.import_path() == [str(other), str(ROOT)]
    assert "-P" not in children.python_call("json", "dumps", 3)  # Python 3.10 does not know it
    monkeypatch.chdir(ROOT)  # the package is found in a plain checkout too, after everything else
    monkeypatch.setattr("sys.path", [str(ROOT), str(other)])
    assert children.import_path() == [str(other), str(ROOT)]


@posix
def test_a_program_has_its_own_exit_status_and_outputs() -> None:
    assert children.run(["sh", "-c", "echo a; echo b >&2; exit 5"]) == children.Finished(5, "a\n", "b\n")
    assert children.run(["sh", "-c", "kill -SEGV $$"]).status == -signal.SIGSEGV
    assert children.run(["cat"]) == children.Finished(0, "", "")  # no input
    with pytest.raises(FileNotFoundError, match="there is no such program"):
        children.run(["no-such-program-here"])


@posix
def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    done = children.run(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid"])
    assert done.status == 0
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())), "the end of what it left running")


STARTS_PROGRAM = (
    LOAD
    + """
import signal
pids = sys.argv[1]
if sys.argv[2] == "program":
    children.run(["sh", "-c", f"sleep 600 & touch {pids}/$! {pids}/$$; wait"])

def work(pids):
    import subprocess, time
    children.end_with_parent(group=True)
    child = subprocess.Popen(["sleep", "600"])
    for pid in (os.getpid(), child.pid):
        open(f"{pids}/{pid}", "w").close()
    time.sleep(600)

if __name__ == "__main__":
    import multiprocessing
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(pids,))
    worker.start()
    worker.join()
"""
)


@posix
@pytest.mark.parametrize("kind", ["program", "worker"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_and_theirs_end_with_a_parent_that_is_killed(tmp_path: Path, kind: str, how: int) -> None:
    if kind == "worker" and how != signal.SIGKILL:
        pytest.skip("multiprocessing itself ends workers where the parent can act")
    pids = tmp_path / "pids"
    pids.mkdir()
    parent = script(tmp_path / "parent.py", STARTS_PROGRAM, pids, kind)
    wait_until(lambda: len(pids_in(pids)) == 2 or parent.poll() is not None, "the start of two processes")
    started = pids_in(pids)
    assert len(started) == 2
    assert all(map(runs, started))
    end(parent, how)
    wait_until(lambda: not any(map(runs, started)), "the end of the children")


@posix
def test_a_killed_supervisor_takes_its_program_along(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("PR_SET_PDEATHSIG is Linux's")
    with children.start(["sh", "-c", f"touch {tmp_path}/$$; exec sleep 600"]) as supervisor:
        wait_until(lambda: pids_in(tmp_path), "the start of the program")
        (program,) = pids_in(tmp_path)
        assert program != supervisor.pid
        supervisor.kill()
        wait_until(lambda: not runs(program), "the end of the program")


HOLDS_FOLDER = (
    LOAD
    + """
with children.owned_folder() as folder:
    (folder / "half").touch()
    print(folder, flush=True)
    sys.stdin.read()
    import time
    time.sleep(600)
"""
)


@posix
def test_where_locks_do_not_work_no_folder_is_taken_for_an_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", refuse)
        mine = children.owned_folder()
        folder = mine.__enter__()
    children.remove_orphans(tmp_path)
    assert folder.is_dir()
    mine.__exit__(None, None, None)
    assert not folder.exists()


@posix
def test_folders_of_dead_processes_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    users = tmp_path / "fp4deploy-data"
    users.mkdir()
    (users / "photo.jpg").touch()
    (tmp_path / "fp4deploy-link").symlink_to(users)
    with children.owned_folder() as mine:
        dead, alive = (script(tmp_path / "holder.py", HOLDS_FOLDER, TMPDIR=str(tmp_path)) for _ in range(2))
        try:
            left, kept = (Path(each.stdout.readline().strip()) for each in (dead, alive) if each.stdout)
            end(dead)
            assert (left / "half").exists()
            with children.owned_folder() as other:
                assert not left.exists()
                assert (kept / "half").exists()
                assert mine.is_dir()
                assert other.stat().st_mode & 0o777 == 0o700
            assert not other.exists()
        finally:
            end(alive)
    assert (users / "photo.jpg").exists()


@pytest.mark.parametrize("entry", ["", ".", "bin"])
def test_no_program_of_the_current_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """PATH=$PATH:$UNSET has an empty entry, which means the current folder; so for libraries and headers."""
    for folder in (tmp_path, tmp_path / "bin"):
        folder.mkdir(exist_ok=True)
        for name in ("nvcc", "some-compiler"):
            (folder / name).write_text("#!/bin/sh\ntouch PWNED\n")
            (folder / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    folders = os.pathsep.join([entry, os.environ["PATH"], entry])
    for name in ("PATH", "LD_LIBRARY_PATH", "CPATH"):
        monkeypatch.setenv(name, folders)
    with pytest.raises(FileNotFoundError):
        children.run(["some-compiler"])
    assert (find_nvcc() or tmp_path.parent).is_absolute()
    assert tmp_path not in (find_nvcc() or Path("/")).resolve().parents
    child = children.run(["sh", "-c", 'some-compiler; echo "$PATH:$LD_LIBRARY_PATH:$CPATH"'])
    found = child.output.strip().split(os.pathsep)
    assert found
    assert all(map(os.path.isabs, found))
    assert not (tmp_path / "PWNED").exists()
