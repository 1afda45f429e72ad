"""`fp4deploy kernels --for FILE.fp4`: launch plans and kernels of a packed network in one file, for the C library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp4deploy.errors import InputError, counted

from ...console import note, print_json, results, shown
from ...settings import parse_axes

if TYPE_CHECKING:
    from fp4deploy.native import Gpu
    from fp4deploy.packed import PackedFile

LARGE = 132  # multiprocessors that plans assume where the GPU is not present


def write(
    network: Path,
    arch: list[str] | None,
    sizes: list[str] | None,
    batches: list[int] | None,
    tuned_for: str | None,
    processors: int | None,
    out: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Record the plans of a network for one architecture, compile their kernels, and write both.

    Raises:
        InputError: no architecture or several, a size that the network does not take, or an operator that nothing
            compiles.
        UnavailableError: Triton or nvcc is missing, or a kernel does not compile.
    """
    from fp4deploy.bench.locate import or_of_latest_run
    from fp4deploy.naming import built_name
    from fp4deploy.native import record, write_bundle
    from fp4deploy.native.bundle import SUFFIX
    from fp4deploy.packed import read_packed
    from fp4deploy.system.progress import progress

    network = or_of_latest_run(network)
    file, gpu = read_packed(network), _gpu(arch, tuned_for, processors)
    usual: list[str | None] = [None]
    pairs = [(size, batch) for size in sizes or usual for batch in batches or [1]]
    wanted = list(dict.fromkeys(_shapes(file, *pair) for pair in pairs))
    out = out or network.with_name(built_name(network, str(gpu.arch), SUFFIX))
    with progress("recording plans"):
        plans = [record(file, gpu, *shapes) for shapes in wanted]
    note(f"Compiling the kernels of {counted(len(plans), 'plan')} for {gpu.arch}, {gpu.processors} multiprocessors ...")
    with progress("kernels"):
        count = write_bundle(out, file, plans, jobs)
    about = {
        "path": str(out),
        "arch": str(gpu.arch),
        "tuned_for": gpu.name,
        "processors": gpu.processors,
        "kernels": count,
        "bytes": out.stat().st_size,
        "plans": [
            {"input": list(plan.inputs[0]), "workspace_bytes": plan.arena, "generated": plan.generated or None}
            for plan in plans
        ],
    }
    for why in dict.fromkeys(plan.generated for plan in plans if plan.generated):
        note(f"Kernels are generated: {why}. The bundle holds decoded weights, and is of {shown(network)} alone.")
    if as_json:
        print_json(about)
        return
    for plan in plans:
        shapes = ", ".join(" x ".join(map(str, shape)) for shape in plan.inputs)
        results().print(f"{shapes}: workspace {plan.arena / 1e6:.2f} MB", markup=False)
    size = f"{count} kernels, {out.stat().st_size / 1e6:.2f} MB"
    note(f"Wrote {shown(out)}: {size}. The C library opens it with {shown(network)}.")


def _shapes(file: PackedFile, size: str | None, batch: int) -> tuple[tuple[int, ...], ...]:
    """Of each input: the batch, and of an image or a volume its size, as asked, of the model card or of the example."""
    image = file.graph.inputs[0]
    axes = len(image.shape) - 2
    asked = parse_axes(size) if axes > 1 else None
    if size is not None and (asked is None or len(asked) != axes):
        raise InputError(f"--size is '{size}', and the first input of {file.path} is like {image.shape}.")
    usual = file.card.size if file.card and len(file.card.size) == axes else image.shape[2:]
    first = (*image.shape[:2], *(asked or usual))
    shapes = (first, *(tuple(each.shape) for each in file.graph.inputs[1:]))
    return tuple((batch, *shape[1:]) for shape in shapes)


def _gpu(names: list[str] | None, tuned_for: str | None, processors: int | None) -> Gpu:
    """What the plans are for: the architecture that is asked for, and the GPU that is present if it is of that one."""
    import torch

    from fp4deploy.architecture import Architecture
    from fp4deploy.native import Gpu
    from fp4deploy.plugins.aot import store

    present = Architecture.of_device() if torch.cuda.is_available() else None
    if not names and present is None:
        raise InputError("A bundle is for one architecture, and there is no GPU here: --arch sm90, --arch sm120, ...")
    if names and (len(names) > 1 or names[0] == "all"):
        raise InputError("A bundle is for one architecture: give --arch once.")
    arch = store.supported(names[0]) if names else present
    assert arch is not None
    name, count = "", LARGE
    if arch == present:
        found = torch.cuda.get_device_properties(0)
        name, count = found.name, found.multi_processor_count
    return Gpu(arch, tuned_for or name, processors or count)
