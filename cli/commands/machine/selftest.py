"""`fp4deploy selftest`: what this machine's GPU and libraries were shown to compute, as one file for an issue."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import GateError, InputError, UnavailableError

from ...console import done, note, results, shown

if TYPE_CHECKING:
    from fp4deploy.selftest.records import CheckRecord

COLOURS = {"proven": "green", "failed": "red", "not possible here": "yellow"}


def selftest(
    out: Annotated[
        Path, typer.Option("--out", help="JSON file to write; the page has the same name and the suffix .html.")
    ] = Path("selftest.json"),
    require_gpu: Annotated[
        bool, typer.Option("--require-gpu", help="Exit 3 at once where there is no CUDA GPU.")
    ] = False,
) -> None:
    """Check kernels, networks and engines on this machine, without data or network; exits 1 if a check fails."""
    import torch

    from fp4deploy.selftest.run import self_test
    from fp4deploy.system.progress import progress

    if out.suffix != ".json":
        raise InputError(f"--out is {out}; give a name that ends in .json.")
    if require_gpu and not torch.cuda.is_available():
        raise UnavailableError("There is no CUDA GPU that torch can use, and --require-gpu asks for one.")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    compiling = "; the first run compiles kernels, which takes most of the time" if device.type == "cuda" else ""
    note(f"Testing the {'GPU' if compiling else 'CPU alone: there is no CUDA GPU'}{compiling}.")
    with progress("checks") as bar:
        record = self_test(out, device, _print, begin=bar.phase)
    done(f"{record.sentence()} Wrote {shown(out)} and {shown(out.with_suffix('.html'))}.", file=str(out))
    failed = [check for check in record.checks if check.status == "failed"]
    if failed:
        raise GateError(
            f"{len(failed)} of {len(record.checks)} checks failed: {'; '.join(check.claim for check in failed)}. "
            f"Please attach {shown(out)} to an issue."
        )


def _print(check: CheckRecord) -> None:
    from rich.text import Text

    text = Text.assemble(
        (check.status, COLOURS[check.status]), f": {check.group}: {check.claim} ({check.seconds:.1f} s)"
    )
    results().print(text, soft_wrap=True)
    facts = {"group": check.group, "claim": check.claim, "status": check.status, "seconds": round(check.seconds, 3)}
    done(f"    {check.detail}", **facts)
