"""`fp4deploy kernels`: compile the Triton kernels ahead of time (AOT), for GPUs that need not be present."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import GateError

from ..console import note, notes, print_json, results, shown

if TYPE_CHECKING:
    from fp4deploy.plugins.aot.build import BuildResult

SHOWN = 10  # kernels that the error message names; the table has all


def kernels(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            help="GPU to compile for, such as sm120, or all; repeatable.",
            show_default="the GPU present, or all",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Also write them to this folder, for FP4DEPLOY_KERNEL_PATH.", show_default="the cache only"
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Parallel processes.", show_default="one for each CPU core")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """Compile every Triton kernel; exits 1 if one falls back to other instructions or spills registers."""
    from fp4deploy.plugins.aot.build import build
    from fp4deploy.plugins.gemm.triton.variants import all_variants

    requested = [(launch, target) for target in _targets(arch) for launch in all_variants(target)]
    note(f"Compiling {len(requested)} kernels for {', '.join(dict.fromkeys(target for _, target in requested))} ...")
    done = dict(build(requested, jobs, out))
    built = [done[index] for index in sorted(done)]
    if as_json:
        print_json({"folder": str(out) if out else None, "kernels": [each.as_json() for each in built]})
    else:
        _print_table(built)
    if out is not None:
        note(f"Wrote {shown(out)}. On the machine that runs them set: FP4DEPLOY_KERNEL_PATH={out.resolve()}")
    _judge(built)


def _targets(names: list[str] | None) -> list[str]:
    from fp4deploy.plugins.aot import store

    if names and "all" not in names:
        return list(dict.fromkeys(store.supported(name).triton_name for name in names))
    present = None if names else _present()
    return [present] if present else list(store.TARGETS)


def _present() -> str | None:
    import torch

    from fp4deploy.architecture import Architecture

    return Architecture.of_device().triton_name if torch.cuda.is_available() else None


def _print_table(built: list[BuildResult]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "for", "variant", "warps", "instructions", "registers", "spills", "shared", "diagnostics"):
        table.add_column(name, justify="right" if name in ("warps", "registers", "spills", "shared") else "left")
    for each in built:
        row = [each.launch.kernel.partition(":")[2], each.arch, _variant(each), str(each.launch.num_warps)]
        if each.compiled is not None:
            row += [", ".join(each.compiled.instructions)]
            row += map(str, (each.compiled.registers, each.compiled.spills, each.compiled.shared))
        else:
            row += [""] * 4
        wrong = "; ".join(each.diagnostics())
        table.add_row(*row, wrong, style="red" if wrong else None)
    results().print(table)


def _variant(each: BuildResult) -> str:
    """Constants in short, flags that are true by name only: "KH=3 KW=3 EVEN BIAS BM=128 BN=128 BK=32"."""
    constants = [pair for pair in each.launch.constants if pair[1] is not False]
    return " ".join(name if value is True else f"{name}={value}" for name, value in constants)


def _judge(built: list[BuildResult]) -> None:
    wrong = [each for each in built if each.diagnostics()]
    notes().print(f"{len(built) - len(wrong)} of {len(built)} kernels passed the checks.", markup=False)
    if wrong:
        named = [f"{each.launch.kernel} for {each.arch}: {'; '.join(each.diagnostics())}" for each in wrong[:SHOWN]]
        more = f" And {len(wrong) - SHOWN} more." if len(wrong) > SHOWN else ""
        raise GateError(f"{len(wrong)} of {len(built)} kernels failed the checks. {'. '.join(named)}.{more}")
