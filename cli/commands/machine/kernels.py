"""`fp4deploy kernels`: compile the Triton kernels ahead of time (AOT), for GPUs that need not be present.

With --layers, only those that packed networks can take, also the ones in CUDA C++ that compete with Triton's.
With --for, only those that one packed network launches, with its launch plans, as a file for the C library (`bundle`).
With --emulate the PTX of all kernels, Triton's and CUDA's, is executed on the CPU instead, by a distribution of its own
(`fp4deploy_emulator`, in tools/emulator).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import GateError, InputError, UnavailableError, counted

from ... import completion
from ...console import note, notes, print_json, results, shown, table

if TYPE_CHECKING:
    from fp4deploy.plugins.aot.build import BuildResult
    from fp4deploy.plugins.aot.spec import Launch
    from fp4deploy_emulator.cases.case import Case, Outcome, Setting

SHOWN = 10  # kernels that the error message names; the table has all


def kernels(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="With --emulate: kernels or families.", show_default="all"),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            help="GPU to compile for, such as sm120, or all; repeatable.",
            show_default="the GPU present, or all",
            autocompletion=completion.architectures,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Also write them to this folder, for FP4DEPLOY_KERNEL_PATH; with --for, the file.",
            show_default="the cache only",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Parallel processes.", show_default="one for each CPU core")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
    network: Annotated[
        Path | None,
        typer.Option(
            "--for",
            help="Write the kernel bundle of this .fp4 file, for the C library.",
            autocompletion=completion.artifacts,
        ),
    ] = None,
    layers: Annotated[
        list[Path] | None,
        typer.Option(
            "--layers",
            help="Only what the packed layers of this .fp4 file can take, CUDA's included; repeatable.",
            show_default="every Triton kernel",
            autocompletion=completion.artifacts,
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", help="With --for: HxW in pixels; repeatable.", show_default="as trained"),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="With --for: images; repeatable.", show_default="1")
    ] = None,
    tuned_for: Annotated[
        str | None,
        typer.Option(
            "--tuned-for", help="With --for: a GPU that plans were measured on.", show_default="the GPU present"
        ),
    ] = None,
    processors: Annotated[
        int | None,
        typer.Option("--processors", min=1, help="With --for: its multiprocessors.", show_default="of the GPU, or 132"),
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Execute the PTX on the CPU and compare with the reference.")
    ] = False,
    model: Annotated[
        str, typer.Option("--model", help="Accumulator of --emulate: hardware, exact or mmasim.")
    ] = "hardware",
    seed: Annotated[int, typer.Option("--seed", help="Of the values that --emulate draws.")] = 0,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="With --emulate: run the PTX on the GPU too, and compare every byte.")
    ] = False,
) -> None:
    """Compile every Triton kernel; exits 1 if one falls back to other instructions or spills registers."""
    if layers and (emulate or network is not None):
        raise InputError("--layers compiles what networks can take, without --emulate and --for.")
    if emulate:
        from fp4deploy.requirements import EMULATOR

        EMULATOR.require("kernels --emulate")
        from fp4deploy_emulator.cases.case import Setting

        _emulate(names or [], _emulated(arch, gpu), Setting(model=model, seed=seed, gpu=0 if gpu else None), as_json)
        return
    if gpu:
        raise InputError("--gpu is for --emulate; without it kernels are compiled, not run.")
    if network is not None:
        from .bundle import write

        write(network, arch, size, batch, tuned_for, processors, out, jobs, as_json)
        return
    if size or batch or tuned_for or processors:
        raise InputError("--size, --batch, --tuned-for and --processors are for --for, which names a packed network.")
    if names:
        raise InputError("Names are for --emulate; without it every kernel is compiled.")
    from fp4deploy.plugins.aot.build import require_triton

    targets = _targets(arch)
    require_triton()
    from fp4deploy.plugins.gemm.triton.variants import all_variants

    listed = _of_networks(layers) if layers else all_variants
    requested = [(launch, target) for target in targets for launch in listed(target)]
    built = _built(requested, jobs, out)
    if as_json:
        print_json({"folder": str(out) if out else None, "kernels": [each.as_json() for each in built]})
    else:
        _print_table(built)
    if out is not None:
        note(f"Wrote {shown(out)}. On the machine that runs them set: FP4DEPLOY_KERNEL_PATH={out.resolve()}")
    _judge(built)


def _built(requested: list[tuple[Launch, str]], jobs: int | None, out: Path | None) -> list[BuildResult]:
    """All results, in the order of the kernels; those that are kept come first, so that the time left is of others."""
    from fp4deploy.bench.tables import duration
    from fp4deploy.plugins.aot import build
    from fp4deploy.system.processors import cores
    from fp4deploy.system.progress import progress

    known = build.already(requested)
    order = sorted(range(len(requested)), key=lambda index: not known[index])
    cached, missing = sum(known), len(requested) - sum(known)
    workers = min(jobs or cores(), missing)
    note(f"{len(requested)} kernels for {', '.join(dict.fromkeys(target for _, target in requested))}: {cached} kept.")
    if missing:
        seconds = sum(
            build.SECONDS[launch.compiler] for (launch, _), kept in zip(requested, known, strict=True) if not kept
        )
        expected = f"about {duration(seconds / workers)} on {counted(workers, 'free core')}"
        note(f"{missing} to compile, {expected}. What is compiled is kept: after Ctrl-C the same command goes on.")
    done = {}
    with progress("kept kernels" if cached else "compiling") as bar:
        for position, result in build.build([requested[index] for index in order], jobs, out):
            done[order[position]] = result
            if len(done) < cached:
                bar.phase("kept kernels", len(done), cached)
            else:
                bar.phase("compiling", len(done) - cached, missing)
    return [done[index] for index in sorted(done)]


def _of_networks(paths: list[Path]) -> Callable[[str], list[Launch]]:
    """What packed networks launch on an architecture; without nvcc, Triton's alone."""
    from fp4deploy.bench.locate import or_of_latest_run
    from fp4deploy.packed import packed_launches, read_packed
    from fp4deploy.plugins.runtime.nvcc import INSTALL_NVCC, find_nvcc

    files = [read_packed(or_of_latest_run(path)) for path in paths]
    compilers = {"triton", "nvcc"} if find_nvcc() else {"triton"}

    def listed(arch: str) -> list[Launch]:
        every = dict.fromkeys(launch for file in files for launch in packed_launches(file, arch))
        found = [launch for launch in every if launch.compiler in compilers]
        if len(found) < len(every):
            note(f"{len(every) - len(found)} kernels for {arch} are left out, as nvcc is missing: {INSTALL_NVCC}")
        return found

    return listed


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
    head = ("kernel", "for", "variant", "warps", "instructions", "registers", "spills", "shared", "diagnostics")
    listed = table(head, right=("warps", "registers", "spills", "shared"))
    for each in built:
        row = [each.launch.kernel.partition(":")[2], each.arch, _variant(each), str(each.launch.num_warps)]
        if each.compiled is not None:
            row += [", ".join(each.compiled.instructions)]
            row += map(str, (each.compiled.registers, each.compiled.spills, each.compiled.shared))
        else:
            row += [""] * 4
        wrong = "; ".join(each.diagnostics())
        listed.add_row(*row, wrong, style="red" if wrong else None)
    results().print(listed)


def _variant(each: BuildResult) -> str:
    """Constants in short, flags that are true by name only: "KH=3 KW=3 EVEN BIAS BM=128 BN=128 BK=32"."""
    constants = [pair for pair in each.launch.constants if pair[1] is not False and pair[1] is not None]
    return " ".join(name if value is True else f"{name}={value}" for name, value in constants)


def _judge(built: list[BuildResult]) -> None:
    wrong = [each for each in built if each.diagnostics()]
    notes().print(f"{len(built) - len(wrong)} of {len(built)} kernels passed the checks.", markup=False)
    if wrong:
        named = [f"{each.launch.kernel} for {each.arch}: {'; '.join(each.diagnostics())}" for each in wrong[:SHOWN]]
        more = f" And {len(wrong) - SHOWN} more." if len(wrong) > SHOWN else ""
        raise GateError(f"{len(wrong)} of {len(built)} kernels failed the checks. {'. '.join(named)}.{more}")


def _emulated(names: list[str] | None, gpu: bool) -> list[str]:
    """The architectures to emulate; with a GPU, its own.

    Raises:
        UnavailableError: there is no GPU, or none of a requested architecture.
    """
    if not gpu:
        return _targets(names or ["sm120"])
    from fp4deploy.architecture import Architecture
    from fp4deploy_emulator.device import why_not

    present = _present()
    targets = _targets(names) if names else [present or ""]
    for target in targets:
        why = "there is no CUDA GPU that torch can use" if present is None else why_not(0, Architecture.parse(target))
        if why:
            raise UnavailableError(f"--gpu compares with a GPU of the architecture that is emulated: {why}.")
    return targets


def _emulate(names: list[str], targets: list[str], common: Setting, as_json: bool) -> None:
    from fp4deploy_emulator.accumulate import MODELS
    from fp4deploy_emulator.cases import cases

    if common.model not in MODELS:
        raise InputError(f"There is no accumulator '{common.model}'. Valid: {', '.join(MODELS)}.")
    done: list[tuple[str, Case, Outcome]] = []
    for target in targets:
        setting = replace(common, arch=target)
        for case in cases(names, setting.capability):
            note(f"{case.name} for {target} ...")
            done.append((target, case, case.outcome(setting)))
    if as_json:
        kernels = [_outcome_json(*each) for each in done]
        print_json({"model": common.model, "seed": common.seed, "kernels": kernels})
    else:
        _print_outcomes(done)
    equal = sum(outcome.good for _, _, outcome in done)
    notes().print(f"{equal} of {len(done)} cases are bit-equal to the reference.", markup=False)
    lacking = [outcome.unavailable for _, _, outcome in done if outcome.unavailable]
    wrong = [f"{case.name} for {target}" for target, case, outcome in done if not (outcome.good or outcome.unavailable)]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise GateError(f"{len(wrong)} of {len(done)} cases failed: {', '.join(wrong[:SHOWN])}{more}.")
    if lacking:
        raise UnavailableError(f"{len(lacking)} of {len(done)} cases were not compiled here. The first: {lacking[0]}")


def _outcome_json(target: str, case: Case, outcome: Outcome) -> dict[str, object]:
    about: dict[str, object] = {"kernel": case.name, "family": case.family, "arch": target}
    about |= {"launches": outcome.kernels, "values": outcome.values, "different": outcome.wrong}
    about |= {"instructions": outcome.statistics.instructions, "lines": outcome.statistics.lines}
    if outcome.statistics.device_bytes:
        about |= {"gpu_bytes": outcome.statistics.device_bytes, "gpu_different": outcome.statistics.device_wrong}
    return about | {
        "bit_equal": outcome.good,
        "hazard": outcome.fault,
        "unavailable": outcome.unavailable,
        "remarks": sorted(outcome.statistics.remarks),
        "seconds": round(outcome.seconds, 2),
    }


def _print_outcomes(done: list[tuple[str, Case, Outcome]]) -> None:
    counted = ("launches", "PTX lines", "instructions", "values")
    head = ("kernel", "family", "for", *counted, "bit-equal", "hazards", "seconds")
    listed = table(head, right=(*counted, "seconds"))
    for target, case, outcome in done:
        counts = (outcome.kernels, outcome.statistics.lines, outcome.statistics.instructions, outcome.values)
        equal = "yes" if outcome.good else f"{outcome.wrong} differ" if not outcome.fault else "no"
        equal = "not compiled" if outcome.unavailable else equal
        if outcome.statistics.device_wrong:
            equal += f"; {outcome.statistics.device_wrong} bytes differ from the GPU's"
        row = [
            case.name,
            case.family,
            target,
            *map(str, counts),
            equal,
            outcome.fault or "; ".join(sorted(outcome.statistics.remarks)) or "none",
        ]
        listed.add_row(*row, f"{outcome.seconds:.1f}", style=None if outcome.good else "red")
    results().print(listed)
