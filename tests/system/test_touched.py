"""The commands that `touched` traces are all that there are, and none of them asks a network or leaves files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from fp4deploy.cli.main import app
from typer.main import get_command

from tests.system.touched import COMMANDS, NOT_TRACED, TRACER, asked, touched

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "touched_cpu.json"
LEFT = ("XDG_CACHE_HOME/fp4deploy", "XDG_CACHE_HOME/matplotlib", "XDG_CONFIG_HOME/matplotlib")  # as SECURITY.md says


def commands() -> set[str]:
    """Names of all commands, those of groups with the group's."""
    found: set[str] = set()
    for name, each in get_command(app).commands.items():  # type: ignore[attr-defined]
        found |= {f"{name} {own}" for own in each.commands} if hasattr(each, "commands") else {name}
    return found


def test_every_command_is_traced_and_recorded() -> None:
    assert {name.partition(" --")[0] for name in COMMANDS} | NOT_TRACED.keys() == commands()
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    assert [row["command"] for row in rows] == list(COMMANDS)
    assert [row for row in rows if row["lookups"] or row["temporary"]] == []
    assert [path for row in rows for path in row["home"] if not path.startswith(LEFT)] == []


def test_addresses_are_seen() -> None:
    calls = """7 connect(3, {sa_family=AF_UNIX, sun_path="/var/run/nscd/socket"}, 110) = -1 ENOENT
7 connect(3, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("10.0.0.1")}, 16) = -1 ENETUNREACH
8 sendto(4, "x", 1, 0, {sa_family=AF_INET6, inet_pton(AF_INET6, "fe80::1", &sin6_addr)}, 28) = 1
8 bind(4, {sa_family=AF_INET, sin_addr=inet_addr("127.0.0.1")}, 16) = 0"""
    assert asked(calls) == ["10.0.0.1", "fe80::1"]


def _can_trace(folder: Path) -> bool:
    try:
        return not subprocess.run([*TRACER, str(folder / "x"), "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_commands_ask_no_network_and_leave_no_files(tmp_path: Path) -> None:
    if not _can_trace(tmp_path):
        pytest.skip("strace or namespaces are missing here (apt install strace)")
    for name in COMMANDS:
        found = touched(tmp_path, name)
        assert (found.lookups, found.temporary) == ([], []), name
        assert [path for path in found.home if not path.startswith(LEFT)] == [], name
