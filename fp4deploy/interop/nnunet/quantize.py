"""A results folder in FP32 -> one in NVFP4, without training.

    read plans and folds -> patches of the training cases -> ptq.quantize of each fold -> as deployed -> folder

The written folder is one of nnU-Net: `nnUNetv2_predict_from_modelfolder` runs it, with `nnUNetTrainerNVFP4` among the
trainers that nnU-Net finds (`TRAINERS`), fake-quantised in torch. Each fold also has its packed network, which holds
the same numbers: what is not quantised is stored as it is deployed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack
from fp4deploy.interop.nnunet.cases import patches_of
from fp4deploy.interop.nnunet.folders import PACKED, VERIFIED
from fp4deploy.interop.nnunet.quantization import Quantization, load_network, plan_network, quantization_of
from fp4deploy.models.nnunet.folder import DATASET, FINAL, PLANS, Fold, ResultsFolder, read_fold
from fp4deploy.ptq.methods import find_method
from fp4deploy.ptq.quantize import Result, Say, quantize
from fp4deploy.qat.load import round_to_deployed
from fp4deploy.qat.selection import Selection
from fp4deploy.rest import rest_of
from fp4deploy.system.files import replace_folder, require_own_folder

TRAINER = "nnUNetTrainerNVFP4"


@dataclass(frozen=True)
class FoldResult:
    """One fold of a quantised folder; unchanged: share of the voxels of some patches, which calibrated too, whose class
    is that of the FP32 fold."""

    fold: str
    checkpoint: Path
    packed: Path
    quantized: Result
    unchanged: float


def quantize_folder(
    folder: ResultsFolder,
    data: Path | str,
    out: Path | str,
    method: str = "gptq",
    *,
    folds: tuple[str, ...] | None = None,
    patches: int = 64,
    batch: int = 1,
    include: Selection = None,
    exclude: Selection = None,
    formats: Mapping[str, Selection] | None = None,
    rest: str | None = None,
    verify: bool = True,
    device: str = "cpu",
    say: Say = lambda text: None,
    **options: object,
) -> list[FoldResult]:
    """Quantise folds of a folder of nnU-Net to NVFP4 and write a folder of the same layout, with packed networks.

    Args:
        data: the raw data set (its training images calibrate), or a folder of images.
        out: the folder to write; one that this function wrote is replaced.
        method, options: as of `ptq.quantize`.
        folds: by default those that nnU-Net predicts with.
        patches: how many calibrate. batch: of them in one forward pass.
        verify: compare each packed network with torch before anything is written.

    Raises:
        InputError: the folder is quantised already, or as of `patches_of` and `ptq.quantize`.
        GateError: a packed network computes something else than torch.
    """
    out = Path(out)
    if quantization_of(folder.values, folder.path / PLANS) is not None:
        raise InputError(f"{folder.path} is quantised already. Give the FP32 folder that it was made of.")
    if out.resolve() == folder.path.resolve():
        raise InputError(f"--out is the FP32 folder {folder.path} itself, which would be lost. Give another folder.")
    chosen, recipe = folder.chosen(folds), find_method(method).recipe
    require_own_folder(out)
    found = patches_of(folder, Path(data), patches)
    batches = list(torch.cat(found).split(batch))
    network, _ = load_network(folder, chosen[0])
    planned = plan_network(network, found[0], recipe, include, exclude, rest_of(rest).name, **(formats or {}))
    plans = planned.of_plans(folder.plans, folder.configuration)
    results = []
    with replace_folder(out) as temporary:
        _write_json(temporary / PLANS, plans)
        _write_json(temporary / DATASET, folder.dataset)
        fingerprint = folder.path / "dataset_fingerprint.json"
        if fingerprint.is_file():
            shutil.copyfile(fingerprint, temporary / fingerprint.name)
        for name in chosen:
            say(f"fold_{name}: {len(planned.layers)} layers to {method}.")
            fold = read_fold(folder.path, name, folder.checkpoint)
            network, result, unchanged = _quantized(folder, fold, planned, batches, method, device, say, options)
            where = temporary / f"fold_{name}"
            where.mkdir()
            torch.save(_checkpoint(fold, network, plans), where / FINAL)
            example = torch.cat(found[:VERIFIED])
            pack(network, where / PACKED, example_inputs=example, verify=verify, rest=planned.rest)
            results.append(FoldResult(name, out / where.name / FINAL, out / where.name / PACKED, result, unchanged))
    return results


def _quantized(
    folder: ResultsFolder,
    fold: Fold,
    planned: Quantization,
    batches: list[torch.Tensor],
    method: str,
    device: str,
    say: Say,
    options: dict[str, Any],
) -> tuple[nn.Module, Result, float]:
    network, _ = load_network(folder, fold)
    compared, regions = batches[:VERIFIED], bool(folder.dataset.get("regions_class_order"))
    before = _classes(network.eval(), compared, regions)
    network.to(device)
    given = [batch.to(device) for batch in batches]
    options = {**planned.formats, **options}
    result = quantize(network, given, method, include=planned.layers, say=say, **options)
    network.cpu().eval()
    round_to_deployed(network, rest_of(planned.rest))
    return network, result, float((_classes(network, compared, regions) == before).float().mean())


@torch.no_grad()
def _classes(network: nn.Module, batches: list[torch.Tensor], regions: bool) -> torch.Tensor:
    """The class of each voxel; of a network of overlapping regions whether it lies in each of them."""
    logits = torch.cat([network(batch) for batch in batches])
    return logits > 0 if regions else logits.argmax(1)


def _checkpoint(fold: Fold, network: nn.Module, plans: dict[str, object]) -> dict[str, object]:
    """What nnU-Net's predictor reads, and its trainer's arguments; tensors, containers and plain values."""
    settings = {**fold.settings, "plans": plans}
    return {
        "network_weights": network.state_dict(),
        "init_args": settings,
        "trainer_name": TRAINER,
        "inference_allowed_mirroring_axes": fold.mirroring,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")
