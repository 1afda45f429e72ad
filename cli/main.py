"""The Typer app, and the one place where an error becomes a message and an exit code.

| exit | when |
|---|---|
| 0 | done |
| 1 | a gate failed (accuracy, verification, strict precision), or a defect of fp4deploy itself |
| 2 | wrong usage or input |
| 3 | this machine cannot do it |
| 128 + n | ended by signal n: 130 Ctrl-C (SIGINT), 143 SIGTERM, 129 SIGHUP |

Nothing here, nor in the command files at import time, may import torch, onnx, numpy or matplotlib, so that
`fp4deploy --help` answers in under half a second; a test enforces it.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fp4deploy import __version__
from fp4deploy.errors import Fp4DeployError, InputError, Interrupted, UnavailableError, printable
from fp4deploy.system.processors import limit_threads
from fp4deploy.system.search_path import ignore_local_settings, keep_absolute, keep_python_safe
from fp4deploy.system.terminal import QUIET

from .commands.machine import data, doctor, kernels, selftest
from .commands.results import audit, check, inspect, open_page, push, report, settings, telemetry, verify
from .commands.stages import (
    bench,
    build,
    estimate,
    export,
    import_modelopt,
    predict,
    profile,
    quantize,
    run,
    search,
    sweep,
    throughput,
    train,
)
from .console import collected
from .deferred import deferred
from .process import is_out_of_memory, lasting_output, refused_by_system, stop_on_signals
from .shells import asked, completion

DEBUG = "--debug"
SILENT = ("--quiet", "-q")
JSON = "--json"
LISTS = ("--models", "--classes")  # options that take values with commas between them


class CommandGroup(TyperGroup):
    """Takes `--debug`, `--quiet` and `--json` anywhere on the line; an error is one paragraph and its exit code.

    `--json` is JSON on stdout, and nothing else there. A command with an option of that name reads it itself; where
    that option may name a file, `--json` alone stands for `--json -`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note `--debug`, `--quiet` and `--json`, and hand on the other arguments."""
        completed = None if ctx.resilient_parsing else asked(args)
        if completed is not None:
            completion(*completed)
            raise typer.Exit()
        everywhere, rest = self._apart(ctx, args)
        ctx.obj = {"debug": DEBUG in everywhere, "json": None, "arguments": rest}
        if not everywhere.isdisjoint(SILENT):
            os.environ[QUIET] = "1"
        if JSON in rest:
            rest = self._read_json(ctx, rest)
        return super().parse_args(ctx, rest)

    def _apart(self, ctx: Any, args: list[str]) -> tuple[set[str], list[str]]:
        """The options that are allowed anywhere, and the rest; a value of another option is none of them."""
        command: Any = self
        found, rest = set(), []
        remaining = iter(args)
        for argument in remaining:
            if argument in (DEBUG, *SILENT):
                found.add(argument)
                continue
            rest.append(argument)
            if argument == "--":
                rest += remaining
            elif argument.startswith("-"):
                if argument != JSON and any(_takes_value(each) for each in command.params if argument in each.opts):
                    rest += itertools.islice(remaining, 1)
            elif isinstance(command, TyperGroup):
                command = command.get_command(ctx, argument) or command
        return found, rest

    def _read_json(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments without a `--json` that the command does not know, or with the value that it lacks."""
        command: Any = self
        names, end = [], 0
        for number, argument in enumerate(args):
            found = command.get_command(ctx, argument) if isinstance(command, TyperGroup) else None
            if found is not None:
                command, end = found, number
                names.append(argument)
        own = next((each for each in command.params if JSON in each.opts), None)
        if own is None or isinstance(command, TyperGroup):
            ctx.obj["json"] = " ".join(names) or None
            return [argument for argument in args if argument != JSON]
        place = args.index(JSON) + 1
        if place <= end:  # in front of the command, where it names no file
            value = [] if own.is_flag else ["-"]
            return [*args[: place - 1], *args[place : end + 1], JSON, *value, *args[end + 1 :]]
        lacks = place == len(args) or (args[place].startswith("-") and args[place] != "-")
        return [*args[:place], "-", *args[place:]] if lacks and not own.is_flag else args

    def invoke(self, ctx: Any) -> Any:
        """Run the command; map what it raises to a message on stderr and an exit code."""
        try:
            with collected(ctx.obj["json"]) if ctx.obj["json"] else nullcontext():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt as error:
            stop = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
            head = "Interrupted." if stop.number == signal.SIGINT else f"Ended by {signal.Signals(stop.number).name}."
            _say(head, _resume_hint(ctx, stop.resume))
            raise typer.Exit(128 + stop.number) from None
        except Fp4DeployError as error:
            _traceback(ctx)
            _say("Error:", str(error))
            raise typer.Exit(error.exit_code) from None
        except Exception as error:
            if hasattr(error, "format_message"):  # Typer's own usage errors: it prints them, exit 2
                _explain_list(error, ctx.obj["arguments"])
                raise
            _traceback(ctx)
            if is_out_of_memory(error):
                _say("Error:", "This machine has not enough free memory. Take smaller images, batches or models.")
                raise typer.Exit(UnavailableError.exit_code) from None
            cause = refused_by_system(error)
            if cause is not None:
                _say("Error:", cause)
                raise typer.Exit(InputError.exit_code) from None
            _say("Error:", f"{_first_line(error)} This is a defect of fp4deploy; run again with --debug to see where.")
            raise typer.Exit(1) from None


def _takes_value(parameter: Any) -> bool:
    return parameter.param_type_name == "option" and not parameter.is_flag and not parameter.count


def _explain_list(error: Any, arguments: list[str]) -> None:
    """Add to the error of an argument too many how the option before it takes several values."""
    extra = re.match(r"Got unexpected extra argument\S* \((\S+)", str(error.message))
    word = extra[1].rstrip(")") if extra else ""
    before = arguments[: arguments.index(word)] if word in arguments else []
    place = max((number for number, each in enumerate(before) if each.startswith("-")), default=len(before))
    if len(before) < place + 2:  # the word does not follow an option with a value
        return
    option, values = before[place], [*before[place + 1 :], word]
    parameter = next((each for each in error.ctx.command.params if option in each.opts), None)
    if option in LISTS:
        error.message += f". Several values are one argument: {option} {','.join(each.strip(',') for each in values)}"
    elif parameter is not None and parameter.multiple:
        error.message += f". Name the option for each value: {' '.join(f'{option} {each}' for each in values)}"


def _say(head: str, text: str) -> None:
    coloured = f"\x1b[31;1m{head}\x1b[0m" if sys.stderr.isatty() else head
    print(f"{coloured} {printable(text)}", file=sys.stderr)


def _traceback(ctx: Any) -> None:
    if ctx.obj["debug"]:
        traceback.print_exc(file=sys.stderr)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _resume_hint(ctx: Any, command: str) -> str:
    if ctx.invoked_subcommand == "sweep":
        return "Finished runs are kept; give the same command to go on."
    if command:
        return f"Finished epochs are kept; resume with: {command}"
    if ctx.invoked_subcommand == "kernels":
        return "What was compiled is kept; the same command goes on from there."
    if ctx.invoked_subcommand == "run":
        return "Finished stages are kept."
    if ctx.invoked_subcommand == "selftest":
        return "What was checked is in the JSON file and its page."
    return "Nothing half-written is left."


app = typer.Typer(
    cls=CommandGroup,
    name="fp4deploy",
    help="NVFP4 for segmentation UNets: train, export, build and bench, with a proof at every stage.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"fp4deploy {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show the traceback of an error (allowed anywhere on the line).")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(JSON, help="Results as JSON on stdout, and nothing else there (allowed anywhere on the line)."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option(*SILENT, help="No progress and no remarks on stderr (allowed anywhere on the line).")
    ] = False,
) -> None:
    pass


deferred(app, "run")(run.run)
deferred(app, "train")(train.train)
deferred(app, "estimate")(estimate.estimate)
deferred(app, "sweep")(sweep.sweep)
deferred(app, "quantize")(quantize.quantize)
deferred(app, "search")(search.search)
deferred(app, "import-modelopt")(import_modelopt.import_modelopt)
deferred(app, "export")(export.export)
deferred(app, "build")(build.build)
deferred(app, "bench")(bench.bench)
deferred(app, "profile")(profile.profile)
deferred(app, "throughput")(throughput.throughput)
deferred(app, "predict")(predict.predict)
deferred(app, "report")(report.report)
deferred(app, "push")(push.push)
deferred(app, "open")(open_page.open_page)
deferred(app, "settings")(settings.settings)
deferred(app, "check")(check.check)
deferred(app, "verify")(verify.verify)
deferred(app, "inspect")(inspect.inspect)
deferred(app, "audit")(audit.audit)
deferred(app, "doctor")(doctor.doctor)
deferred(app, "kernels")(kernels.kernels)
deferred(app, "selftest")(selftest.selftest)
app.add_typer(data.app, name="data")
app.add_typer(telemetry.app, name="telemetry")


MAY_BE_EMPTY = ("--mask-suffix",)  # no path


def require_no_empty_argument(arguments: Sequence[str]) -> None:
    """Refuse an empty argument, which as a path would be the current folder.

    Raises:
        InputError: one of them is.
    """
    for before, text in itertools.pairwise(arguments):
        option, equals, value = text.partition("=") if text.startswith("--") else (before, "", text)
        if value or (text and not equals) or option in MAY_BE_EMPTY:
            continue
        raise InputError(
            f"The argument after {option} is empty: a variable of the shell that is not set? The current folder is ."
        )


def main() -> None:
    """Entry point of the `fp4deploy` command."""
    keep_absolute(os.environ)  # Triton and torch.compile start the host compiler by name, too
    keep_python_safe(os.environ)
    limit_threads(os.environ)
    ignore_local_settings()
    status: Any = 0
    try:
        with stop_on_signals(), lasting_output():
            try:
                require_no_empty_argument(sys.argv)
                app(prog_name="fp4deploy")
            except SystemExit as ended:
                status = ended.code
    except InputError as error:
        if sys.stderr is not None:
            with suppress(OSError):  # stderr may be where stdout is
                _say("Error:", str(error))
        status = status or error.exit_code
    except KeyboardInterrupt as error:  # before the command began, or while a shell waits for a completion
        status = 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)
    sys.exit(status)
