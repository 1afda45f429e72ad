"""nnU-Net's trainer with quantisation-aware training in NVFP4.

    export nnUNet_extTrainer=$(python -c "from fp4deploy.interop.nnunet import TRAINERS; print(TRAINERS)")
    export FP4DEPLOY_NNUNET_INIT=nnUNet_results/.../fold_0/checkpoint_final.pth     FP32 weights to start from
    nnUNetv2_train 4 3d_fullres 0 -tr nnUNetTrainerNVFP4

Everything is nnU-Net's but the network, which `qat.prepare` prepares when the training starts, once the weights to
start from are in it, and calibrates on the first batches. Its state dict then has one tensor more for each quantised
layer, the static amax of its input, so that checkpoints continue and predict as usual. The choice of layers is written
into the plans of the results folder (`quantization`).

An instance trains, so it builds nnU-Net's own network; the class, which the predictor asks, builds the prepared one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.interop.nnunet.quantization import KEY, Quantization, plan_network, prepare_as, quantization_of
from fp4deploy.models.initial import read_weights
from fp4deploy.models.nnunet.folder import PLANS
from fp4deploy.qat.prepare import calibrate, quantized_layers
from fp4deploy.system.schema import read_json

INITIAL = "FP4DEPLOY_NNUNET_INIT"


class nnUNetTrainerNVFP4(nnUNetTrainer):
    """Trains a network whose layers are fake-quantised to NVFP4. Settings are attributes, for subclasses:

    recipe: of `qat.prepare`. include, exclude: which layers. calibration_batches: of the training data, augmented.
    """

    recipe = "nvfp4_qat"
    include: list[str] | None = None
    exclude: list[str] | None = None
    calibration_batches = 4

    def __init__(
        self,
        plans: dict[str, object],
        configuration: str,
        fold: int,
        dataset_json: dict[str, object],
        device: torch.device = torch.device("cuda"),  # noqa: B008  nnU-Net's signature
    ) -> None:
        super().__init__(plans, configuration, fold, dataset_json, device)
        if self.is_ddp:
            raise InputError("nnUNetTrainerNVFP4 trains on one GPU: leave out -num_gpus.")
        self.build_network_architecture = super().build_network_architecture  # type: ignore[method-assign]
        self.calibrated = False

    @classmethod
    def build_network_architecture(
        cls,
        plans_manager: Any,
        configuration_manager: Any,
        num_input_channels: int,
        num_output_channels: int,
        enable_deep_supervision: bool = True,
    ) -> nn.Module:
        """The network for prediction, prepared as the plans of a results folder say."""
        network: nn.Module = super().build_network_architecture(
            plans_manager, configuration_manager, num_input_channels, num_output_channels, enable_deep_supervision
        )
        said = quantization_of(configuration_manager.configuration, PLANS)
        if said is None:
            raise InputError(
                "These plans name no quantised layers: read the plans.json of the results folder, which "
                "nnUNetTrainerNVFP4 wrote when it began to train."
            )
        return prepare_as(network, said)

    @property
    def plain_network(self) -> Any:
        """The network without the wrapper of torch.compile."""
        return getattr(self.network, "_orig_mod", self.network)

    def initialize(self) -> None:
        """nnU-Net's, then weights of `FP4DEPLOY_NNUNET_INIT`."""
        super().initialize()
        initial = os.environ.get(INITIAL)
        if initial:
            self._start_from(Path(initial))

    def load_checkpoint(self, filename_or_checkpoint: object) -> None:
        """nnU-Net's, of a network that was calibrated before the checkpoint was written."""
        if not self.was_initialized:
            self.initialize()
        self._prepare()
        super().load_checkpoint(filename_or_checkpoint)
        self.calibrated = True

    def on_train_start(self) -> None:
        """Prepare the network, nnU-Net's own start, then calibrate where no checkpoint was loaded."""
        if not self.was_initialized:
            self.initialize()
        self._prepare()
        super().on_train_start()
        if not self.calibrated:
            self._calibrate()

    def _prepare(self) -> None:
        """Prepare once, as the folder's plans say, which its other folds are of, else as planned here."""
        network = self.plain_network
        if quantized_layers(network):
            return
        patch = torch.zeros(1, self.num_input_channels, *self.configuration_manager.patch_size, device=self.device)
        said = self._written() or plan_network(network, patch, self.recipe, self.include, self.exclude)
        prepare_as(network, said)
        self.plans_manager.plans.update(said.of_plans(self.plans_manager.plans, self.configuration_name))
        self.print_to_log_file(f"{KEY}: {len(said.layers)} layers by {said.recipe}: {', '.join(said.layers)}")

    def _written(self) -> Quantization | None:
        path = Path(self.output_folder_base) / PLANS
        if not path.is_file():
            return None
        values = read_json(path).get("configurations", {}).get(self.configuration_name, {})
        return quantization_of(values, path)

    def _calibrate(self) -> None:
        network = self.plain_network
        device = self.device.type
        with torch.autocast(device, enabled=device == "cuda"):
            batches = [next(self.dataloader_train)["data"] for _ in range(self.calibration_batches)]
            calibrate(network, [batch.to(self.device) for batch in batches])
        self.calibrated = True
        self.print_to_log_file(f"{KEY}: calibrated on {len(batches)} batches.")

    def _start_from(self, path: Path) -> None:
        weights = read_weights(path)
        wanted = self.plain_network.state_dict()
        given = {name: value for name, value in weights.items() if name in wanted}
        differing = [name for name, value in wanted.items() if name not in given or given[name].shape != value.shape]
        if differing:
            raise InputError(
                f"{INITIAL} names {path}, which does not fit this network: {len(differing)} tensors are missing or of "
                f"another shape (first {differing[0]}). Take a checkpoint of the same plans and configuration."
            )
        self.plain_network.load_state_dict(given)
        self.print_to_log_file(f"{KEY}: starts from the weights of {path}.")
