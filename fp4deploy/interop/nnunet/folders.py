"""Folds of a results folder as files of this project: packed networks and ONNX, compared with torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fp4deploy.export.to_onnx import ExportResult, export_onnx
from fp4deploy.export.to_packed import PackedResult, pack
from fp4deploy.interop.nnunet.cases import patches_of
from fp4deploy.interop.nnunet.quantization import load_network
from fp4deploy.models.nnunet.folder import ResultsFolder

PACKED, ONNX = "network.fp4", "network.onnx"
VERIFIED = 2  # patches that a file is compared with torch on


@dataclass(frozen=True)
class ExportedFold:
    """One file of one fold."""

    fold: str
    path: Path
    result: PackedResult | ExportResult


def pack_folder(
    folder: ResultsFolder,
    out: Path | None = None,
    *,
    folds: tuple[str, ...] | None = None,
    data: Path | None = None,
    rest: str | None = None,
    verify: bool = True,
) -> list[ExportedFold]:
    """Write the packed network of each fold, where `predictor` finds it: FOLDER/fold_N/network.fp4.

    Args:
        out: another folder; in it fold_N/network.fp4.
        data: a raw data set, or a folder of images, to compare with torch on; None: patches of normal noise.
        rest: what is not packed; None: as the plans say, else FP16.

    Raises:
        InputError: as of `read_fold`, `load_network` and `pack`.
        GateError: the packed network computes something else than torch.
    """

    def write(network: nn.Module, patches: list[torch.Tensor], path: Path, precision: str | None) -> PackedResult:
        return pack(network, path, example_inputs=torch.cat(patches), verify=verify, rest=precision)

    return _each(folder, out, folds, data, rest, PACKED, write)


def export_folder(
    folder: ResultsFolder,
    out: Path | None = None,
    *,
    folds: tuple[str, ...] | None = None,
    data: Path | None = None,
    rest: str | None = None,
    portable: bool = False,
    verify: bool = True,
) -> list[ExportedFold]:
    """Write the canonical ONNX file of each fold, FOLDER/fold_N/network.onnx, for patches of the plans' size.

    Args:
        portable: also the decomposed graph, network.portable.onnx.
        out, folds, data, rest: as of `pack_folder`.

    Raises:
        InputError: as of `read_fold`, `load_network` and `export_onnx`.
        GateError: ONNX Runtime and torch disagree.
    """

    def write(network: nn.Module, patches: list[torch.Tensor], path: Path, precision: str | None) -> ExportResult:
        example = patches[0]
        return export_onnx(network, example, path, patches, portable=portable, verify=verify, rest=precision)

    return _each(folder, out, folds, data, rest, ONNX, write)


def _each(
    folder: ResultsFolder,
    out: Path | None,
    folds: tuple[str, ...] | None,
    data: Path | None,
    rest: str | None,
    name: str,
    write: Callable[[nn.Module, list[torch.Tensor], Path, str | None], PackedResult | ExportResult],
) -> list[ExportedFold]:
    patches = patches_of(folder, data, VERIFIED) if data is not None else _noise(folder)
    written = []
    for fold in folder.chosen(folds):
        network, quantization = load_network(folder, fold)
        path = (out or folder.path) / f"fold_{fold}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        precision = rest or (quantization.rest if quantization is not None else None)
        written.append(ExportedFold(fold, path, write(network, patches, path, precision)))
    return written


def _noise(folder: ResultsFolder) -> list[torch.Tensor]:
    """Patches of normal noise: what nnU-Net's normalisation gives has mean 0 and standard deviation 1."""
    shape = (VERIFIED, folder.input_channels, *folder.patch_size)
    return list(torch.randn(shape, generator=torch.Generator().manual_seed(0)).split(1))
