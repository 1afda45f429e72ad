"""`fp4deploy kernels`: compile the Triton kernels ahead of time, for GPUs that need not be here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import GateError

from ..console import note, notes, print_json, results, shown

if TYPE_CHECKING:
    from fp4deploy.plugins.aot.build import Made

SHOWN = 10  # complaints that an error names; the table has all


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
        typer.Option("--out", help="Also write them here, for FP4DEPLOY_KERNEL_PATH.", show_default="the cache alone"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes that compile.", show_default="one a core")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """Compile every kernel the products can launch; a fallback to another instruction or a spill exits 1."""
    from fp4deploy.plugins.aot.build import build
    from fp4deploy.plugins.gemm.triton.variants import all_variants

    wanted = [(launch, target) for target in _targets(arch) for launch in all_variants(target)]
    note(f"Compiling {len(wanted)} kernels for {', '.join(dict.fromkeys(target for _, target in wanted))} ...")
    done = dict(build(wanted, jobs, out))
    made = [done[index] for index in sorted(done)]
    if as_json:
        print_json({"folder": str(out) if out else None, "kernels": [each.facts() for each in made]})
    else:
        _print_table(made)
    if out is not None:
        note(f"Wrote {shown(out)}. Where they run: FP4DEPLOY_KERNEL_PATH={out.resolve()}")
    _judge(made)


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


def _print_table(made: list[Made]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "for", "variant", "warps", "instructions", "registers", "spills", "shared", "wrong"):
        table.add_column(name, justify="right" if name in ("warps", "registers", "spills", "shared") else "left")
    for each in made:
        row = [each.launch.kernel.partition(":")[2], each.arch, _variant(each), str(each.launch.num_warps)]
        if each.compiled is not None:
            row += [", ".join(each.compiled.instructions)]
            row += map(str, (each.compiled.registers, each.compiled.spills, each.compiled.shared))
        else:
            row += [""] * 4
        wrong = "; ".join(each.complaints())
        table.add_row(*row, wrong, style="red" if wrong else None)
    results().print(table)


def _variant(each: Made) -> str:
    """What is true by its name, what has a value with it: "KH=3 KW=3 EVEN BIAS BM=128 BN=128 BK=32"."""
    constants = [pair for pair in each.launch.constants if pair[1] is not False]
    return " ".join(name if value is True else f"{name}={value}" for name, value in constants)


def _judge(made: list[Made]) -> None:
    wrong = [each for each in made if each.complaints()]
    notes().print(f"{len(made) - len(wrong)} of {len(made)} kernels are as they should be.", markup=False)
    if wrong:
        named = [f"{each.launch.kernel} for {each.arch}: {'; '.join(each.complaints())}" for each in wrong[:SHOWN]]
        more = f" And {len(wrong) - SHOWN} more." if len(wrong) > SHOWN else ""
        raise GateError(f"{len(wrong)} of {len(made)} kernels are not what was asked for. {'. '.join(named)}.{more}")
