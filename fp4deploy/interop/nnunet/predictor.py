"""nnU-Net's predictor with packed networks inside.

nnU-Net reads, normalises, cuts windows, weighs and adds logits, and writes; what it calls for the logits of a window is
another module. It holds the packed network of each fold. For an ensemble nnU-Net loads the weights of one fold after
the other into one network; here that chooses the fold's network. What is on the device in between is `segment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.interop.nnunet.cases import check_cases, find_cases
from fp4deploy.interop.nnunet.folders import PACKED
from fp4deploy.models.nnunet.folder import ResultsFolder, read_fold, read_folder
from fp4deploy.packed import PackedFile, PackedModule, read_packed
from fp4deploy.requirements import NNUNET
from fp4deploy.system.progress import progress
from fp4deploy.tracing import not_compiled

if TYPE_CHECKING:
    from fp4deploy.interop.nnunet.segment import Case, PackedPredictor

FOLD = "fold"


class PackedFolds(nn.Module):
    """The packed networks of folds as one module, [N, C, *patch size] -> logits [N, classes, *patch size].

    `load_state_dict({"fold": NAME})` chooses the fold that `forward` runs.
    """

    def __init__(self, files: Mapping[str, PackedFile], device: torch.device) -> None:
        super().__init__()
        self.networks = {name: PackedModule(file, device, None) for name, file in files.items()}
        self.fold = next(iter(files))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Choose a fold; nnU-Net's predictor calls it before it predicts with each."""
        self.fold = state_dict[FOLD]

    @not_compiled
    def forward(self, x: torch.Tensor) -> Any:
        """Logits of the chosen fold, in memory of their own: nnU-Net adds flipped ones to them in place."""
        return self.networks[self.fold](x)


def predictor(
    folder: ResultsFolder | Path | str,
    folds: tuple[str, ...] | None = None,
    device: str | None = None,
    **options: object,
) -> PackedPredictor:
    """nnU-Net's predictor of a results folder, whose networks are the packed ones of its folds.

    Args:
        folds: by default those that nnU-Net predicts with: all, averaged.
        device: by default the first GPU, else the CPU, where packed networks run decoded in torch.
        options: of `nnUNetPredictor`: tile_step_size, use_gaussian, use_mirroring, allow_tqdm, ...

    Raises:
        InputError: no results folder, or a fold without packed network.
        UnavailableError: nnunetv2 is not installed.
    """
    folder = folder if isinstance(folder, ResultsFolder) else read_folder(folder)
    NNUNET.require("Prediction as nnU-Net does it")
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    from fp4deploy.interop.nnunet.segment import PackedPredictor

    chosen = folder.chosen(folds)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network = PackedFolds({name: _packed(folder, name) for name in chosen}, on)
    first = read_fold(folder.path, chosen[0], folder.checkpoint)
    mirrored = (first.mirroring or ()) if options.get("use_mirroring", True) else ()
    if any(axis >= len(folder.patch_size) for axis in mirrored):
        raise InputError(
            f"{folder.path}: the checkpoint of fold_{chosen[0]} mirrors along axes {mirrored}, and patches have "
            f"{len(folder.patch_size)}. Leave mirroring out (--no-mirror), or take a checkpoint of this configuration."
        )
    plans = PlansManager(folder.plans)
    found = PackedPredictor(device=on, perform_everything_on_device=on.type == "cuda", **options)
    found.manual_initialization(
        network,
        plans,
        plans.get_configuration(folder.configuration),
        [{FOLD: name} for name in chosen],
        folder.dataset,
        first.trainer,
        first.mirroring,
    )
    return found


@dataclass(frozen=True)
class Segmented:
    """A file that was written, and the seconds of each part: read, normalise, resample, network, classes, write."""

    path: Path
    seconds: dict[str, float]


def predict_folder(
    folder: ResultsFolder,
    images: Path,
    out: Path,
    folds: tuple[str, ...] | None = None,
    ahead: int = 3,
    **options: Any,
) -> list[Segmented]:
    """Segment a folder of images as nnUNetv2_predict does, with packed networks.

    Args:
        images: NAME_0000.nii.gz, NAME_0001.nii.gz, ... (the ending is that of dataset.json).
        ahead: cases that are read, and that are written, beside the one on the device; 0: one after the other.
        options: as of `predictor`.

    Raises:
        InputError: as of `predictor`, `find_cases` and `check_cases`; nothing was segmented.
    """
    ending = str(folder.dataset.get("file_ending", ".nii.gz"))
    cases = find_cases(Path(images), ending, folder.input_channels)
    found = predictor(folder, folds, **options)
    with progress("reading every file"):
        check_cases(cases)
    Path(out).mkdir(parents=True, exist_ok=True)
    written: list[Future[Segmented]] = []

    def write(case: Case, labels: NDArray[Any], path: Path) -> Segmented:
        found.write(case, labels, path)
        return Segmented(path, case.seconds)

    pools = (ThreadPoolExecutor(max(1, ahead)) for _ in range(2))
    with progress("segmenting") as bar, next(pools) as readers, next(pools) as writers:
        reading: dict[str, Future[Case]] = {}
        names = list(cases)
        for at, name in enumerate(names):
            for other in names[at : at + 1 + ahead]:
                if other not in reading:
                    reading[other] = readers.submit(found.read, cases[other])
            case = reading[name].result()
            reading[name] = Future()  # of which no one asks: the volume is given up
            found.window = partial(bar.phase, f"volume {at + 1} of {len(names)}, windows")
            labels = found.segment(case)
            written.append(writers.submit(write, case, labels, Path(out) / f"{name}{ending}"))
            written[max(0, at - ahead)].result()
    return [each.result() for each in written]


def _packed(folder: ResultsFolder, fold: str) -> PackedFile:
    path = folder.path / f"fold_{fold}" / PACKED
    if not path.is_file():
        raise InputError(
            f"There is no packed network {path}. Write it with: fp4deploy export {folder.path} --format packed; of a "
            "folder in FP32 first: fp4deploy quantize FOLDER --data RAW --out OUT"
        )
    return read_packed(path)
