"""Processors by the quota of a container, and machines that others use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp4deploy.system.processors import THREADS, WAITING, busy, cores, limit_threads


def group(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "broken"}, 8),
        ({}, 8),
    ],
)
def test_a_quota_is_the_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0, 0))
    assert cores(group(tmp_path, files)) == expected
    environ: dict[str, str] = {}
    limit_threads(environ, tmp_path)
    assert environ == ({THREADS: str(expected)} if expected < 8 else {})
    environ = {THREADS: "5"}
    limit_threads(environ, tmp_path)
    assert environ == {THREADS: "5"}, "what the user says stays"


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.9, 9, 9))
    assert busy() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (11.2, 0, 0))
    assert "11 processes want its 2 processors" in str(busy())
    for environ, waiting in (({}, "passive"), ({WAITING: "active"}, "active")):
        limit_threads(environ)
        assert environ[WAITING] == waiting
