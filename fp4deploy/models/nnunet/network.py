"""The network of a results folder, from an allow-list of names.

plans.json names classes: the network's, its convolution, norm, dropout and activation. nnU-Net imports whatever is
named there. Here the network is one of `NETWORKS`, of dynamic_network_architectures, and the others one of `PARTS`, of
torch.nn, each looked up by its last name; nothing is imported by a name of the file.

The network is built without memory, on torch's meta device, and compared with the checkpoint before it has weights, so
that sizes in a file ask for nothing. Deep supervision is off: the network gives the logits of the largest resolution.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fp4deploy.errors import InputError, named_cause
from fp4deploy.models.nnunet.folder import PLANS, SPEC, Fold, ResultsFolder, named_folder, read_folder
from fp4deploy.models.volumes import IMAGES, NetworkInput
from fp4deploy.requirements import NNUNET
from fp4deploy.system.schema import Name, validated

NETWORKS = ("PlainConvUNet", "ResidualEncoderUNet", "ResidualUNet")
PARTS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        nn.Conv1d, nn.Conv2d, nn.Conv3d,
        nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
        nn.LeakyReLU, nn.ReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    )
}  # fmt: skip
BLOCKS = ("BasicBlockD", "BottleneckD")
AGAIN = "Take the plans.json that nnU-Net wrote."
MAX_PARTS = 64  # stages, blocks or convolutions of a stage


def build_network(folder: ResultsFolder, channels: int | None = None) -> nn.Module:
    """The network of a folder on torch's meta device, without deep supervision, in evaluation mode.

    Args:
        channels: of the output; by default those of the folder.

    Raises:
        InputError: the plans name a class that is not on the list, or arguments that it refuses.
        UnavailableError: nnunetv2 is not installed.
    """
    where = folder.path / PLANS
    architecture = folder.values.get("architecture")
    if not isinstance(architecture, Mapping):
        raise InputError(f"{where} describes no architecture of {folder.configuration}.")
    NNUNET.require("A results folder of nnU-Net")
    kind = _network(str(architecture.get("network_class_name")), where)
    given = dict(validated(dict[Name, Any], architecture.get("arch_kwargs"), f"{where}: arch_kwargs", AGAIN))
    for name in validated(list[Name], architecture.get("_kw_requires_import"), f"{where}: _kw_requires_import", AGAIN):
        if given.get(name) is not None:
            given[name] = _part(str(given[name]), name, where)
    _check_counts(given, where)
    given |= {"deep_supervision": False}
    try:
        with torch.device("meta"):
            network = kind(
                input_channels=folder.input_channels, num_classes=channels or folder.output_channels, **given
            )
    except Exception as error:
        raise InputError(
            f"{where}: {kind.__name__} cannot be built as written there: {named_cause(error, 200)}."
        ) from error
    built: nn.Module = network.eval()
    return built


def untrained_network(named: str, channels: int, inputs: NetworkInput = IMAGES) -> nn.Module:
    """The network of "FOLDER", of a model spec, with random weights, as nnU-Net initialises it.

    Args:
        channels: of the logits. inputs: what it has to read.

    Raises:
        InputError: it reads other axes or channels; a fold is named; or as of `read_folder` and `build_network`.
    """
    path, folds = named_folder(f"{SPEC}{named}")
    if folds:
        raise InputError(
            f"{SPEC}{path} is a network without weights here. Start from a fold's with: --init "
            f"{path}/fold_{folds[0]}/checkpoint_final.pth"
        )
    folder = read_folder(path)
    axes, read = len(folder.patch_size), folder.input_channels
    if (axes, read) != (inputs.axes, inputs.channels):
        raise InputError(
            f"{path} is for {axes}-D images of {read} channels, and these are {inputs.axes}-D images of "
            f"{inputs.channels}. Quantise, export and predict with the folder itself; train it with nnUNetv2_train -tr "
            "nnUNetTrainerNVFP4."
        )
    network = build_network(folder, channels).to_empty(device="cpu").train()
    for module in network.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    initialize = getattr(network, "initialize", None)
    return network.apply(initialize) if initialize is not None else network


def load_fold(network: nn.Module, fold: Fold, folder: ResultsFolder) -> nn.Module:
    """Give a network of `build_network`, prepared or not, the weights of a fold, FP32 on the CPU, in place.

    Raises:
        InputError: names or shapes differ: the trainer has built another network than the plans say.
    """
    wanted = network.state_dict(keep_vars=True)
    missing = [name for name in wanted if name not in fold.weights]
    unknown = [name for name in fold.weights if name not in wanted]
    differing = [
        f"{name} {list(fold.weights[name].shape)} instead of {list(value.shape)}"
        for name, value in wanted.items()
        if name in fold.weights and fold.weights[name].shape != value.shape
    ]
    if missing or unknown or differing:
        listed = [
            f"{len(names)} {what} (first {names[0]})"
            for names, what in ((missing, "missing"), (unknown, "unknown"), (differing, "of another shape"))
            if names
        ]
        raise InputError(
            f"{folder.path}/fold_{fold.name}: its tensors are not those of the network in {PLANS}: "
            f"{', '.join(listed)}. The trainer {fold.trainer} may have built another network; such a one is not read."
        )
    network.to_empty(device="cpu")
    network.load_state_dict({name: value.float() for name, value in fold.weights.items()})
    return network


def _network(name: str, where: object) -> Any:
    module, _, last = name.rpartition(".")
    if module.partition(".")[0] != "dynamic_network_architectures" or last not in NETWORKS:
        raise InputError(
            f"{where} names the network class {name[:100]}, which is not built from a file. Valid: "
            f"{', '.join(NETWORKS)} of dynamic_network_architectures. Prepare another one in your own code: fd.prepare"
        )
    return getattr(importlib.import_module("dynamic_network_architectures.architectures.unet"), last)


def _part(name: str, argument: str, where: object) -> Any:
    module, _, last = name.rpartition(".")
    if module.startswith("torch.nn") and last in PARTS:
        return PARTS[last]
    if module.startswith("dynamic_network_architectures.") and last in BLOCKS:
        return getattr(importlib.import_module("dynamic_network_architectures.building_blocks.residual"), last)
    raise InputError(
        f"{where}: {argument} = {name[:100]}, which is not built from a file. Valid, of torch.nn: {', '.join(PARTS)}; "
        f"blocks: {', '.join(BLOCKS)}."
    )


def _check_counts(given: Mapping[str, object], where: object) -> None:
    """Refuse numbers of stages, blocks or convolutions by which building a network would not end."""
    for name, value in given.items():
        for count in _numbers(value):
            if name.startswith("n_") and not 0 <= count <= MAX_PARTS:
                raise InputError(f"{where}: {name} = {str(value)[:60]}: input should be at most {MAX_PARTS}.")


def _numbers(value: object) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for each in value for number in _numbers(each)]
    return [value] if isinstance(value, int | float) else []
