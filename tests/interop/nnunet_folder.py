"""A results folder of nnU-Net and a raw data set, generated: two folds of a network of three stages, four volumes.

The checkpoints are what nnU-Net's trainer saves, with numbers of numpy in its log; the weights are random, the last
layer's so large that classes are not a tie.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

PATCH = (8, 16, 16)
NAME = "nnUNetTrainer__nnUNetPlans__3d_fullres"
CONV = "torch.nn.modules.conv.Conv3d"
NETWORK = "dynamic_network_architectures.architectures.unet.PlainConvUNet"
DATASET = {
    "channel_names": {"0": "MRI"},
    "labels": {"background": 0, "front": 1, "back": 2},
    "numTraining": 4,
    "file_ending": ".nii.gz",
}


def architecture(**changes: Any) -> dict[str, Any]:
    """As plans.json has it, of three stages."""
    arguments = {
        "n_stages": 3,
        "features_per_stage": [16, 16, 16],
        "conv_op": CONV,
        "kernel_sizes": [[3, 3, 3]] * 3,
        "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        "n_conv_per_stage": [1, 1, 1],
        "n_conv_per_stage_decoder": [1, 1],
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    needed = ["conv_op", "norm_op", "dropout_op", "nonlin"]
    return {"network_class_name": NETWORK, "arch_kwargs": arguments | changes, "_kw_requires_import": needed}


def plans() -> dict[str, Any]:
    """What nnU-Net's planner writes, as far as its preprocessor and predictor read it."""
    resampling = "resample_data_or_seg_to_shape"
    of_images = {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None}
    configuration = {
        "data_identifier": "nnUNetPlans_3d_fullres",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": list(PATCH),
        "median_image_size_in_voxels": [12.0, 20.0, 18.0],
        "spacing": [1.0, 1.0, 1.0],
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "resampling_fn_data": resampling,
        "resampling_fn_seg": resampling,
        "resampling_fn_data_kwargs": of_images,
        "resampling_fn_seg_kwargs": {**of_images, "is_seg": True, "order": 1},
        "resampling_fn_probabilities": resampling,
        "resampling_fn_probabilities_kwargs": {**of_images, "order": 1},
        "architecture": architecture(),
        "batch_dice": False,
    }
    return {
        "dataset_name": "Dataset900_Generated",
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": [1.0, 1.0, 1.0],
        "original_median_shape_after_transp": [12, 20, 18],
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {
            "0": {
                "max": 1.0,
                "mean": 0.5,
                "median": 0.5,
                "min": 0.0,
                "percentile_00_5": 0.0,
                "percentile_99_5": 1.0,
                "std": 0.3,
            }
        },
        "configurations": {"3d_fullres": configuration},
    }


def network(seed: int) -> torch.nn.Module:
    """The network of the plans, by nnU-Net's own function."""
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    torch.manual_seed(seed)
    said = architecture()
    arguments = (said["network_class_name"], said["arch_kwargs"], said["_kw_requires_import"])
    built: torch.nn.Module = get_network_from_plans(*arguments, 1, 3, True, True)
    torch.nn.init.normal_(built.get_submodule("decoder.seg_layers.1").weight, std=1.0)
    return built.eval()


def checkpoint(fold: int, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What nnU-Net's trainer saves."""
    return {
        "network_weights": weights,
        "optimizer_state": {"state": {}, "param_groups": [{"lr": 0.01, "params": [0]}]},
        "grad_scaler_state": None,
        "logging": {"train_losses": [np.float32(0.5)], "lrs": [0.01], "ema_fg_dice": [np.float64(0.25)]},
        "_best_ema": np.float64(0.25),
        "current_epoch": 1,
        "init_args": {
            "plans": plans(),
            "configuration": "3d_fullres",
            "fold": fold,
            "dataset_json": DATASET,
            "device": torch.device("cpu"),
        },
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (0, 2),
    }


def write_results(folder: Path, folds: int = 2) -> Path:
    """DatasetNNN_NAME/TRAINER__PLANS__CONFIGURATION below `folder`."""
    path = folder / "Dataset900_Generated" / NAME
    for fold in range(folds):
        (path / f"fold_{fold}").mkdir(parents=True)
        torch.save(checkpoint(fold, network(fold).state_dict()), path / f"fold_{fold}" / "checkpoint_final.pth")
    (path / "plans.json").write_text(json.dumps(plans()))
    (path / "dataset.json").write_text(json.dumps(DATASET))
    return path


def write_raw(folder: Path, cases: int = 4, size: tuple[int, int, int] = (12, 20, 14)) -> Path:
    """A raw data set: two blobs in noise; voxels of 1 x 1 x 1.25 mm, so that nnU-Net resamples."""
    import SimpleITK

    path = folder / "Dataset900_Generated"
    generator = np.random.default_rng(0)
    for name in ("imagesTr", "labelsTr"):
        (path / name).mkdir(parents=True)
    for case in range(cases):
        z, y, x = np.mgrid[tuple(map(slice, size))]
        labels = np.zeros(z.shape, np.uint8)
        for label, centre in ((1, (6, 6 + case % 3, 5)), (2, (6, 14, 9))):
            labels[(z - centre[0]) ** 2 + (y - centre[1]) ** 2 + (x - centre[2]) ** 2 < 12] = label
        image = (100 * labels + generator.normal(0, 10, labels.shape)).astype(np.float32)
        for name, values in ((f"imagesTr/case_{case:03}_0000", image), (f"labelsTr/case_{case:03}", labels)):
            volume = SimpleITK.GetImageFromArray(values)
            volume.SetSpacing((1.25, 1.0, 1.0))
            SimpleITK.WriteImage(volume, str(path / f"{name}.nii.gz"))
    (path / "dataset.json").write_text(json.dumps(DATASET))
    return path


def write_preprocessed(folder: Path, raw: Path) -> Path:
    """What nnUNetv2_plan_and_preprocess leaves of a raw data set, by nnU-Net's own preprocessor and these plans."""
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    path = folder / "Dataset900_Generated"
    (path / "nnUNetPlans_3d_fullres").mkdir(parents=True)
    manager, said = PlansManager(plans()), DefaultPreprocessor(verbose=False)
    cases = sorted(each.name.removesuffix(".nii.gz") for each in (raw / "labelsTr").iterdir())
    for case in cases:
        files = [str(raw / "imagesTr" / f"{case}_0000.nii.gz")]
        labels, target = str(raw / "labelsTr" / f"{case}.nii.gz"), str(path / "nnUNetPlans_3d_fullres" / case)
        said.run_case_save(target, files, labels, manager, manager.get_configuration("3d_fullres"), DATASET)
    splits = [{"train": cases[:-1], "val": cases[-1:]}]
    for name, value in (
        ("nnUNetPlans", plans()),
        ("dataset", DATASET),
        ("splits_final", splits),
        ("dataset_fingerprint", {}),
    ):
        (path / f"{name}.json").write_text(json.dumps(value))
    return path
