"""What a results folder of nnU-Net v2 holds.

    nnUNet_results/Dataset004_Hippocampus/nnUNetTrainer__nnUNetPlans__3d_fullres/
        plans.json, dataset.json                architecture, patch size, preprocessing; channels and labels
        fold_0/checkpoint_final.pth             weights, and which configuration of the plans they are of

A folder may be anyone's. The JSON files have this project's limits (`system.schema`). A checkpoint is a pickle, of
which tensors, plain containers and numbers are read and nothing is called (`initial.read_containers`). nnU-Net's own
code resolves plans that inherit from others or are of older versions, and counts channels and labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp4deploy.errors import InputError, first_line, suggest
from fp4deploy.models.initial import read_containers
from fp4deploy.models.spec import NNUNET as NAME
from fp4deploy.requirements import NNUNET
from fp4deploy.system.schema import read_json

SPEC = f"{NAME}:"
PLANS, DATASET = "plans.json", "dataset.json"
FINAL, BEST = "checkpoint_final.pth", "checkpoint_best.pth"
LAYOUT = "A results folder is nnUNet_results/DatasetNNN_NAME/TRAINER__PLANS__CONFIGURATION."
_FOLD = re.compile(r"fold_(all|\d{1,4})\Z")


@dataclass(frozen=True)
class Fold:
    """One checkpoint: fold ("0" or "all"), weights by name, and what nnU-Net keeps beside them.

    mirroring: axes of the patch that prediction may flip; None: none.
    settings: the keyword arguments of the trainer, plain values.
    """

    name: str
    weights: dict[str, torch.Tensor]
    configuration: str
    trainer: str
    mirroring: tuple[int, ...] | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class ResultsFolder:
    """A folder, as far as networks and prediction need it.

    configuration: its name in the plans; `values` are the plans' of it, inheritance resolved.
    input_channels, output_channels: of the network. patch_size: in voxels, in the order of the network's axes.
    folds: names of the folds that have `checkpoint`, numbered ones first.
    """

    path: Path
    plans: dict[str, Any]
    dataset: dict[str, Any]
    configuration: str
    values: Mapping[str, Any]
    input_channels: int
    output_channels: int
    patch_size: tuple[int, ...]
    folds: tuple[str, ...]
    checkpoint: str

    def chosen(self, folds: tuple[str, ...] | None) -> tuple[str, ...]:
        """These folds; by default all numbered ones, or fold_all where there is no other, as nnU-Net predicts.

        Raises:
            InputError: one of them has no checkpoint.
        """
        wanted = folds or tuple(each for each in self.folds if each != "all") or self.folds
        for each in wanted:
            if each not in self.folds:
                raise InputError(
                    f"{self.path} has no fold_{each}/{self.checkpoint}. Folds with it: {', '.join(self.folds)}."
                )
        return wanted


def is_folder(path: Path) -> bool:
    """Whether a path is meant as a results folder: it says so, or holds plans."""
    return str(path).startswith(SPEC) or (path / PLANS).is_file()


def named_folder(text: str | Path) -> tuple[Path, tuple[str, ...] | None]:
    """Folder and folds of "FOLDER", "nnunet:FOLDER" or "nnunet:FOLDER:FOLD"; None: no fold is named.

    >>> named_folder("nnunet:results/A__B__2d:0")[1], named_folder("results/A__B__2d")[1]
    (('0',), None)
    """
    rest = str(text)
    if not rest.startswith(SPEC):
        return Path(rest), None
    rest = rest.removeprefix(SPEC)
    folder, colon, fold = rest.rpartition(":")
    if colon and _FOLD.match(f"fold_{fold}") and not Path(rest).exists():
        return Path(folder), (fold,)
    return Path(rest), None


def read_folder(path: Path | str) -> ResultsFolder:
    """Read plans, data set and the configuration that the first checkpoint is of: checkpoint_final.pth, or
    checkpoint_best.pth where no fold has that.

    Raises:
        InputError: no results folder, a missing or damaged file, or a cascade, which reads another network's result.
        UnavailableError: nnunetv2 is not installed.
    """
    path = Path(path)
    for name in (PLANS, DATASET):
        if not (path / name).is_file():
            raise InputError(f"{path} has no {name}, so it is no results folder of nnU-Net v2. {LAYOUT}")
    folds, checkpoint = _folds(path)
    NNUNET.require("A results folder of nnU-Net")
    plans, dataset = read_json(path / PLANS), read_json(path / DATASET)
    for name, value in ((PLANS, plans), (DATASET, dataset)):
        if not isinstance(value, dict):
            raise InputError(f"{path / name} holds no mapping. Take the file that nnU-Net wrote.")
    configuration = read_fold(path, folds[0], checkpoint).configuration
    values = _configuration(path, plans, configuration)
    if values.get("previous_stage"):
        raise InputError(
            f"{path} is the second stage of a cascade ({configuration}), which reads the segmentation of "
            f"{values['previous_stage']} as further channels. Take a folder of another configuration: 2d, 3d_fullres "
            "or 3d_lowres."
        )
    return ResultsFolder(
        path, plans, dataset, configuration, values, *_channels(path, dataset), _patch(path, values), folds, checkpoint
    )


def read_fold(path: Path, fold: str, checkpoint: str = FINAL) -> Fold:
    """One checkpoint of a folder.

    Raises:
        InputError: it is missing or damaged, holds something else, or loading it would run code.
    """
    file = path / f"fold_{fold}" / checkpoint
    found = read_containers(file)
    try:
        weights, settings = dict(found["network_weights"]), dict(found["init_args"])
        if not all(isinstance(value, torch.Tensor) for value in weights.values()):
            raise TypeError("a weight is no tensor")
        axes = found.get("inference_allowed_mirroring_axes")
        mirroring = None if axes is None else tuple(int(axis) for axis in axes)
        configuration, trainer = settings["configuration"], found["trainer_name"]
        if not isinstance(configuration, str) or not isinstance(trainer, str):
            raise TypeError("a name is no text")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{file} is no checkpoint of nnU-Net v2 ({type(error).__name__}: {first_line(error, 100)}). Take one that "
            "nnUNetv2_train wrote."
        ) from error
    names = {str(name).removeprefix("module."): value for name, value in weights.items()}
    return Fold(fold, names, configuration, trainer, mirroring, settings)


def _folds(path: Path) -> tuple[tuple[str, ...], str]:
    there = sorted(each.name.removeprefix("fold_") for each in path.iterdir() if _FOLD.match(each.name))
    there.sort(key=lambda name: (name == "all", int(name) if name != "all" else 0))
    for wanted in (FINAL, BEST):
        folds = tuple(fold for fold in there if (path / f"fold_{fold}" / wanted).is_file())
        if folds:
            return folds, wanted
    if not there:
        raise InputError(f"{path} has no fold_0: nothing was trained into it. Train it with: nnUNetv2_train")
    raise InputError(
        f"{path} has no fold_{there[0]}/{FINAL}: the training has not finished, or wrote under another name. "
        "Finish it with: nnUNetv2_train ... --c"
    )


def _configuration(path: Path, plans: dict[str, object], name: str) -> Mapping[str, Any]:
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    known = plans.get("configurations")
    if not isinstance(known, dict) or name not in known:
        names = list(known) if isinstance(known, dict) else []
        raise InputError(
            f"{path / PLANS} has no configuration '{name}', which the checkpoint is of.{suggest(name, names)} "
            f"It has: {', '.join(names) or 'none'}."
        )
    try:
        found: Mapping[str, Any] = PlansManager(plans).get_configuration(name).configuration
        return found
    except Exception as error:  # nnU-Net's code on a file that it has not written
        raise InputError(
            f"{path / PLANS}: nnU-Net cannot read the configuration '{name}' ({type(error).__name__}: "
            f"{first_line(error, 100)})."
        ) from error


def _channels(path: Path, dataset: dict[str, Any]) -> tuple[int, int]:
    """Input channels, and output channels as nnU-Net's label manager counts them."""
    from nnunetv2.utilities.label_handling.label_handling import LabelManager

    try:
        channels = len(dataset["channel_names"] if "channel_names" in dataset else dataset["modality"])
        outputs = LabelManager(dataset["labels"], dataset.get("regions_class_order")).num_segmentation_heads
    except Exception as error:  # its sanity checks are assertions
        raise InputError(
            f"{path / DATASET} names no channels and labels as nnU-Net v2 wants them ({type(error).__name__}: "
            f"{first_line(error, 150)})."
        ) from error
    return channels, int(outputs)


def _patch(path: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    size = values.get("patch_size")
    fits = isinstance(size, list) and len(size) in (2, 3) and all(isinstance(each, int) for each in size)
    if not fits or not all(0 < each <= 4096 for each in size):  # type: ignore[union-attr]
        raise InputError(
            f"{path / PLANS}: patch_size = {str(size)[:60]}: input should be two or three sizes up to 4096."
        )
    return tuple(size)  # type: ignore[arg-type]
