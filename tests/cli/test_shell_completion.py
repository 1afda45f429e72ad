"""Completion in real shells: a person types in a pseudo-terminal, presses Tab, and the shell says what it would run."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import shells
from fp4deploy.errors import InputError
from tests.cli.command_line import ENVIRONMENT, PACKAGE, Invoke

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
PATIENCE = 60.0  # seconds; only a failure waits for them


class Terminal:
    """A shell in a pseudo-terminal."""

    def __init__(self, shell: str, folder: Path, environment: dict[str, str]) -> None:
        self.child, self.file = pty.fork()
        if self.child == 0:
            os.chdir(folder)
            os.execvpe(shell, [shell, "-i"], environment)
        self.seen = ""

    def wait(self, text: str) -> None:
        """Read until the shell has printed a text, behind the one that was last waited for."""
        end = time.monotonic() + PATIENCE
        while text not in plain(self.seen):
            assert time.monotonic() < end, f"no {text!r} in {plain(self.seen)!r}"
            if select.select([self.file], [], [], 0.2)[0]:
                data = os.read(self.file, 65536).decode(errors="replace")
                if "\x1b[0c" in data or "\x1b[c" in data:  # fish asks what terminal it has
                    self.type("\x1b[?1;2c")
                self.seen += data
        self.seen = plain(self.seen).partition(text)[2]

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.file, text.encode())

    def close(self) -> None:
        """End the shell."""
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        os.close(self.file)


def plain(text: str) -> str:
    """What a terminal printed, without its escapes."""
    return re.sub(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[()][A-Z0-9]|[=>])|\r", "", text)


@pytest.fixture
def terminal(
    request: pytest.FixtureRequest, tmp_path: Path, process: Invoke, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminal]:
    """A shell with the command on its path and the completion installed, in a folder with a run and a data set."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/config.yaml").write_text("seed: 0\n")
    names = ["road", "traffic light", "traffic sign"]
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.json").write_text(
        json.dumps({"categories": [{"id": number, "name": name} for number, name in enumerate(names)]})
    )
    command = tmp_path / "bin" / "fp4deploy"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {PACKAGE} "$@"\n')
    command.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("PS1='ready> '\n")
    (home / ".zshrc").write_text("PS1='ready> '\n")
    (home / ".config/fish").mkdir(parents=True)
    (home / ".config/fish/config.fish").write_text("function fish_prompt; echo -n 'ready> '; end\n")
    changed = {"HOME": str(home), "ZDOTDIR": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "TERM": "xterm"}
    changed |= {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
    for key, value in changed.items():
        monkeypatch.setitem(ENVIRONMENT, key, value)
    installed = process("--install-completion", shell)
    assert installed.returncode == 0, installed.stderr
    opened = Terminal(shell, tmp_path, dict(ENVIRONMENT))
    opened.wait("ready> ")
    yield opened
    opened.close()


LINES: tuple[tuple[str, str, str, list[str]], ...] = (  # what is typed, what Tab adds, what is typed then, the words
    (r"fp4deploy train --data set --classes traffic\ l", "ight", "", ["--data", "set", "--classes", "traffic light"]),
    ("fp4deploy train --set train.label_s", "moothing=", "0.1", ["--set", "train.label_smoothing=0.1"]),
    ("fp4deploy report runs/o", "ne", "", ["runs/one"]),
    ("fp4deploy build --arch sm11", "0", "", ["--arch", "sm110"]),
    ("fp4deploy train --recipe tetrajet_", "v2", "", ["--recipe", "tetrajet_v2"]),
)


@pytest.mark.parametrize(
    ("terminal", "lines"), [("bash", LINES[:2]), ("zsh", LINES), ("fish", LINES[:2])], indirect=["terminal"]
)
def test_tab_completes(terminal: Terminal, lines: tuple[tuple[str, str, str, list[str]], ...]) -> None:
    for begin, tail, more, words in lines:
        terminal.type(begin)
        terminal.wait(begin[-4:])
        terminal.type("\t")
        terminal.wait(tail)
        terminal.type(f"{more}\x01printf '<%s>' \r")
        terminal.wait("".join(f"<{word}>" for word in words))
        terminal.wait("ready> ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "pwsh"])
def test_the_script_of_a_named_shell_is_shown(process: Invoke, shell: str) -> None:
    word = {"bash": "complete -o", "zsh": "compdef", "fish": "complete --command", "pwsh": "Register-Argument"}[shell]
    for arguments in (["--show-completion", shell], [f"--show-completion={shell}"]):
        shown = process(*arguments)
        assert (shown.returncode, word in shown.stdout, shown.stderr) == (0, True, "")


def test_a_shell_without_completion_is_wrong_usage(process: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = process("--show-completion", "tcsh")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "bash, zsh, fish" in refused.stderr
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("ksh", "/bin/ksh"))
    with pytest.raises(InputError, match="it is 'ksh'"):
        shells.completion(shells.SHOW, "")


def test_without_a_name_it_is_the_shell_around(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("zsh", "/bin/zsh"))
    shells.completion(shells.SHOW, "")
    assert capsys.readouterr().out.startswith("#compdef fp4deploy")
