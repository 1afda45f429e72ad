"""The shell around the commands: speed of --help, exit codes, messages, --debug."""

from __future__ import annotations

import ast
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import require_no_empty_argument
from fp4deploy.errors import GateError, InputError, UnavailableError
from tests.cli.command_line import ENVIRONMENT, PACKAGE, Invoke

HEAVY = ("torch", "onnx", "onnxruntime", "onnx_ir", "numpy", "yaml", "matplotlib", "accelerate", "PIL")
HEAVY += ("fp4deploy_emulator",)
COMMANDS = (
    "run",
    "train",
    "estimate",
    "sweep",
    "export",
    "build",
    "bench",
    "profile",
    "throughput",
    "predict",
    "report",
    "check",
    "inspect",
    "audit",
    "doctor",
    "kernels",
    "selftest",
    "data",
)


def commands(app: Any) -> dict[str, Any]:
    import typer.main

    group = typer.main.get_command(app)
    found = dict(group.commands)
    for name, command in list(found.items()):
        found |= {f"{name} {inner}": part for inner, part in getattr(command, "commands", {}).items()}
    return found


def test_help_names_every_command(process: Invoke) -> None:
    result = process("--help")
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in COMMANDS)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        f"import sys, json, {PACKAGE}.main as m\n"
        "from typer.testing import CliRunner\n"
        "codes = [CliRunner().invoke(m.app, [*c.split(), '--help']).exit_code for c in sys.argv[1:]]\n"
        "print(json.dumps([codes, sorted({n.partition('.')[0] for n in sys.modules})]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "", *COMMANDS, "data shapes", "data check", "telemetry plot"],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=ENVIRONMENT,
    )  # fmt: skip
    codes, loaded = json.loads(result.stdout)
    assert codes == [0] * (1 + len(COMMANDS) + 3)
    assert [name for name in HEAVY if name in loaded] == []


def test_help_reads_no_options_of_commands(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer.main

    group = typer.main.get_command(app)
    monkeypatch.setattr(typer.main, "get_command", lambda app: group)
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    assert [name for name, command in group.commands.items() if vars(command).get("params")] == []
    assert [parameter.name for parameter in group.commands["report"].params] != []


def test_the_contract_of_commands(app: Any) -> None:
    telemetry = {"telemetry", "telemetry plot", "telemetry study"}
    assert {*COMMANDS, "data shapes", "data check", *telemetry} <= set(commands(app))


def test_every_option_is_documented(app: Any) -> None:
    undocumented = [
        f"{name} {parameter.name}"
        for name, command in commands(app).items()
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert undocumented == []


def test_every_option_is_read() -> None:
    """Each parameter of a command, and of the functions that its file has beside it; callbacks read some."""
    unread, folder = [], Path(importlib.import_module(f"{PACKAGE}.commands").__path__[0])
    for path in sorted(folder.rglob("*.py")):
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(function, ast.FunctionDef):
                read = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
                given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
                own = [
                    each
                    for each in given
                    if ast.unparse(each.annotation or each) not in ("CompileOption", "DeviceOption")
                ]
                unread += [f"{path.name}: {function.name}({each.arg})" for each in own if each.arg not in read]
    assert unread == []


def test_every_optional_value_shows_its_default(app: Any) -> None:
    silent = [
        f"{name} {parameter.name}"
        for name, command in commands(app).items()
        for parameter in command.params
        if parameter.default is None and not parameter.required and not getattr(parameter, "show_default", None)
    ]
    assert silent == []


def test_version(invoke: Invoke) -> None:
    from fp4deploy import __version__

    assert invoke("--version").stdout == f"fp4deploy {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [("trian",), ("build", "--backend", "tensor"), ("bench", "--no-such"), ("check",), ("bench", "--batch", "0")],
)
def test_usage_errors_exit_2(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: fp4deploy" in result.stderr


def test_an_unknown_command_is_answered_with_the_nearest(invoke: Invoke) -> None:
    assert "Did you mean 'train'?" in invoke("trian").stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make `doctor` raise something."""
    import fp4deploy.bench.environment as environment

    def arm(error: BaseException) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(environment, "tools", fail)

    return arm


@pytest.mark.parametrize(("kind", "code"), [(GateError, 1), (InputError, 2), (UnavailableError, 3)])
def test_the_error_tree_gives_the_exit_code(invoke: Invoke, failing: Any, kind: type[Exception], code: int) -> None:
    failing(kind("One short paragraph."))
    result = invoke("doctor")
    assert result.exit_code == code
    assert (result.stdout, result.stderr) == ("", "Error: One short paragraph.\n")


def test_a_defect_is_named_without_a_traceback(invoke: Invoke, failing: Any) -> None:
    failing(ZeroDivisionError("division by zero\nsecond line"))
    result = invoke("doctor")
    assert result.exit_code == 1
    told = "This is a defect of fp4deploy; run again with --debug to see where."
    assert result.stderr == f"Error: ZeroDivisionError: division by zero. {told}\n"


@pytest.mark.parametrize("arguments", [("--debug", "doctor"), ("doctor", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(invoke: Invoke, failing: Any, arguments: tuple[str, ...]) -> None:
    failing(InputError("Wrong."))
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("Error: Wrong.\n")


def test_interruption_is_one_line(invoke: Invoke, failing: Any) -> None:
    failing(KeyboardInterrupt())
    result = invoke("doctor")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted. Nothing half-written is left.\n"


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m {PACKAGE} check unet:0.125 | head -n 1"
    result = subprocess.run(
        command, shell=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.stdout.startswith("layer")
    assert "Traceback" not in result.stderr
    assert "Error" not in result.stderr


def test_signals_do_after_a_command_what_they_did_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers[1:]]
    monkeypatch.setattr(sys, "argv", ["fp4deploy", "--version"])
    try:
        handlers = [signal.getsignal(number) for number in numbers]
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"{PACKAGE}.main").main()
        assert not ended.value.code
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        for number, handler in zip(numbers[1:], before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("word", ["-q", "--quiet", "--debug"])
def test_a_value_of_another_option_is_left_alone(invoke: Invoke, word: str) -> None:
    result = invoke("train", "--models", word)
    assert f"Unknown model '{word}'" in result.stderr
    assert "No such option" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("train", "--models", "fp16", "nvfp4"), "Several values are one argument: --models fp16,nvfp4"),
        (("train", "--set", "a=1", "b=2"), "Name the option for each value: --set a=1 --set b=2"),
    ],
)
def test_an_argument_too_many_after_an_option(invoke: Invoke, arguments: tuple[str, ...], hint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert hint in " ".join(result.stderr.replace("│", " ").split())


def test_an_empty_argument_is_no_folder() -> None:
    """As of a shell's variable that is not set."""
    with pytest.raises(InputError, match="after --out is empty"):
        require_no_empty_argument(["fp4deploy", "predict", "images", "--out", ""])
    with pytest.raises(InputError, match="after --out is empty"):
        require_no_empty_argument(["fp4deploy", "predict", "images", "--out="])
    require_no_empty_argument(
        ["", "predict", "images", "--set", "a=", "--set=a=", "--mask-suffix", "", "--mask-suffix="]
    )
