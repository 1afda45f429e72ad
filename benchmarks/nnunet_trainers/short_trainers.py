"""nnU-Net's trainer and ours, seeded and shortened by environment variables, for `benchmarks.nnunet_hippocampus`.

nnU-Net looks trainers up by their names in the folders of nnUNet_extTrainer, so names and signatures are its.
Everything that a variable does not name is nnU-Net's (plans, augmentation, loss, SGD with a polynomial rate, mixed
precision), but validation, of four iterations and without a picture or a last one of whole volumes.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as module
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from fp4deploy.interop.nnunet.trainer import INITIAL, nnUNetTrainerNVFP4
from fp4deploy.models.initial import read_weights

PREFIX = "NNUNET_SHORT_"


def _nothing(*_: Any) -> None:
    pass


def setting(name: str) -> float:
    return float(os.environ[PREFIX + name])


class Short(nnUNetTrainer):
    """SEED, EPOCHS, ITERATIONS of an epoch, RATE at the start."""

    def initialize(self) -> None:
        seed = int(setting("SEED"))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.num_epochs, self.num_iterations_per_epoch = int(setting("EPOCHS")), int(setting("ITERATIONS"))
        self.num_val_iterations_per_epoch = 4
        self.initial_lr = setting("RATE")
        self.logger.plot_progress_png = _nothing  # seconds an epoch
        super().initialize()

    def get_dataloaders(self) -> Any:
        """nnU-Net's, whose workers draw from this seed; which worker's batch comes first stays chance."""
        whole, seed = module.NonDetMultiThreadedAugmenter, int(setting("SEED"))

        def seeded(**options: Any) -> Any:
            options["seeds"] = [1000 * seed + number for number in range(options["num_processes"])]
            return whole(**options)

        with mock.patch.object(module, "NonDetMultiThreadedAugmenter", seeded):
            return super().get_dataloaders()

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        """None: the test volumes are predicted instead."""


class nnUNetTrainerBase(Short):
    """The network that fine-tuning starts from."""


class nnUNetTrainerControl(Short):
    """The base trained on as it is, all of its layers."""

    def initialize(self) -> None:
        super().initialize()
        if INITIAL in os.environ:
            network: Any = getattr(self.network, "_orig_mod", self.network)
            network.load_state_dict(read_weights(Path(os.environ[INITIAL])))


class nnUNetTrainerTuned(Short, nnUNetTrainerNVFP4):
    """The base trained on in NVFP4, which starts from the same variable."""
