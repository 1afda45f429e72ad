"""What `quantize`, `export`, `predict` and `check` do with a results folder of nnU-Net in a checkpoint's place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4deploy.errors import InputError
from fp4deploy.system.terminal import is_quiet

from ...console import done, note, print_json, shown, typed

if TYPE_CHECKING:
    from fp4deploy.models.nnunet import ResultsFolder

FoldOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fold", help="Fold of a results folder of nnU-Net; repeatable.", show_default="as nnU-Net predicts with"
    ),
]


def is_folder(path: Path) -> bool:
    """Whether a command's argument is a results folder of nnU-Net."""
    from fp4deploy.models import nnunet  # imports torch

    return nnunet.is_folder(path)


@contextmanager
def nnunet_on_stderr() -> Iterator[None]:
    """What nnU-Net prints is no result: it goes to stderr, or nowhere with --quiet."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere if is_quiet() else sys.stderr):
        yield


def open_folder(named: Path, fold: list[str] | None) -> tuple[ResultsFolder, tuple[str, ...] | None]:
    """A folder as it was given, nnunet:FOLDER or nnunet:FOLDER:FOLD too, and the folds that were named."""
    from fp4deploy.models.nnunet import named_folder, read_folder

    path, folds = named_folder(named)
    if fold and folds:
        raise InputError(f"{named} names a fold already; leave out --fold.")
    return read_folder(path), tuple(fold) if fold else folds


def quantize(named: Path, fold: list[str] | None, data: Path | None, out: Path | None, **options: Any) -> None:
    """`fp4deploy quantize FOLDER --data RAW --out OUT`."""
    import torch

    from fp4deploy import provenance
    from fp4deploy.interop.nnunet import TRAINERS, quantize_folder

    folder, folds = open_folder(named, fold)
    if data is None or out is None:
        raise InputError(
            "A results folder of nnU-Net needs --data RAW (the data set that it was trained on, or a folder of images) "
            "and --out FOLDER."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for found in quantize_folder(folder, data, out, folds=folds, device=device, say=note, **options):
        made = found.quantized
        provenance.record("quantize", found.checkpoint, [folder.path / f"fold_{found.fold}" / folder.checkpoint])
        done(
            f"{shown(found.checkpoint)} and {found.packed.name} ({made.method}, correction {made.correction}, "
            f"{made.images} patches, {made.seconds:.1f} s), class unchanged against the FP32 fold on "
            f"{100 * found.unchanged:.2f} % of the voxels of some of them",
            checkpoint=str(found.checkpoint),
            packed=str(found.packed),
            fold=found.fold,
            method=made.method,
            correction=made.correction,
            images=made.images,
            unchanged=found.unchanged,
            seconds=round(made.seconds, 3),
        )
    note(f"Segment with the packed networks: fp4deploy predict IMAGES --nnunet {typed(out)}")
    note(
        f"nnU-Net runs it, too, fake-quantised in torch: nnUNet_extTrainer={TRAINERS} "
        f"nnUNetv2_predict_from_modelfolder -m {typed(out)} -i IMAGES -o OUT"
    )


def export(
    named: Path,
    fold: list[str] | None,
    form: str,
    portable: bool,
    data: Path | None,
    out: Path | None,
    verify: bool,
    rest: str | None,
) -> None:
    """`fp4deploy export FOLDER --format onnx|packed`."""
    from fp4deploy import provenance
    from fp4deploy.interop.nnunet import export_folder, pack_folder

    if form not in ("onnx", "packed"):
        first = "packed" if form == "monai-bundle" else "onnx"
        raise InputError(f"--format {form} takes files: export the folder with --format {first} first, then its file.")
    folder, folds = open_folder(named, fold)
    if verify and data is None:
        note("Comparing with torch on patches of noise; --data RAW compares on patches of images.")
    chosen: dict[str, Any] = {"folds": folds, "data": data, "rest": rest, "verify": verify}
    if form == "onnx":
        written = export_folder(folder, out, portable=portable, **chosen)
    else:
        written = pack_folder(folder, out, **chosen)
    for each in written:
        provenance.record("export", each.path, [folder.path / f"fold_{each.fold}" / folder.checkpoint])
        agreed = each.result.verification
        said = f" ({each.path.stat().st_size / 1e6:.2f} MB){f', {agreed.sentence()}' if agreed else ''}"
        done(f"{shown(each.path)}{said}", fold=each.fold, path=str(each.path), size_bytes=each.path.stat().st_size)
    if form == "packed" and out is None:
        note(f"Segment with them: fp4deploy predict IMAGES --nnunet {typed(folder.path)}")


def predict(
    named: Path, fold: list[str] | None, images: list[str], out: Path, ahead: int, mirror: bool, as_json: bool
) -> None:
    """`fp4deploy predict IMAGES --nnunet FOLDER --out OUT`."""
    from fp4deploy.interop.nnunet import predict_folder

    folder, folds = open_folder(named, fold)
    if len(images) != 1:
        raise InputError("With --nnunet give one folder of images NAME_0000, as nnU-Net names them.")
    with nnunet_on_stderr():
        written = predict_folder(folder, Path(images[0]), out, folds, ahead, use_mirroring=mirror, allow_tqdm=False)
    used = folder.chosen(folds)
    if as_json:
        rows = [{"path": str(each.path), "seconds": each.seconds} for each in written]
        print_json({"folds": list(used), "segmentations": rows})
        return
    done(f"{len(written)} segmentations in {shown(out)} ({', '.join(f'fold_{each}' for each in used)})")


def subject(named: Path, recipe: str) -> tuple[Any, list[Any], Any, str]:
    """Network, plan of its layers, example patch and rest, for `fp4deploy check FOLDER`."""
    import torch

    from fp4deploy.interop.nnunet import load_network
    from fp4deploy.interop.nnunet.quantization import plan_layers

    folder, folds = open_folder(named, None)
    network, said = load_network(folder, folder.chosen(folds)[0])
    patch = torch.zeros(1, folder.input_channels, *folder.patch_size)
    plans = plan_layers(network, patch, said.recipe if said is not None else recipe)
    return network, plans, patch, said.rest if said is not None else "fp16"
