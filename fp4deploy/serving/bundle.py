"""A packed network of volumes as a bundle of MONAI, which its own command runs.

    OUT/configs/metadata.json      what the network reads and gives, and which packages it was written with
    OUT/configs/inference.json     MONAI's transforms, sliding window and evaluator around the packed network
    OUT/models/model.fp4           the packed network
    OUT/docs/README.md             the commands

    python -m monai.bundle run --config_file OUT/configs/inference.json --bundle_root OUT --dataset_dir IMAGES

The transforms do what `predict` does to a volume (`models.volumes`): axes turned, intensities normalised, cubic splines
to the network's spacing; the logits go back the same way before they become classes. Source: MONAI documentation,
"MONAI Bundle Specification".
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile
from typing import Any

from fp4deploy import __version__
from fp4deploy.errors import InputError
from fp4deploy.models.card import ModelCard
from fp4deploy.models.volumes import VolumeInput
from fp4deploy.naming import model_stem
from fp4deploy.packed import read_packed
from fp4deploy.requirements import package_version
from fp4deploy.system.files import replace_folder, require_own_folder

MONAI = "1.6.1"  # whose bundles this was tried with, written where none is installed
AXES = "SAR"  # towards superior, anterior and right: depth, height, width


def write_bundle(path: Path, out: Path) -> Path:
    """Write the bundle of a packed file; another folder is never replaced.

    Raises:
        InputError: no packed network of volumes of one class a voxel, or a folder that this function did not write.
    """
    if path.suffix != ".fp4":
        raise InputError(
            f"A bundle of MONAI holds a packed network, not {path}. Write one with: fp4deploy export --format packed"
        )
    card = read_packed(path).card
    if card is None or card.volume is None:
        raise InputError(
            f"MONAI's bundle is of volumes, and {path} is of {'images' if card else 'no known input'}. Predict with: "
            "fp4deploy predict; in a program of MONAI's the network is fp4deploy.packed.PackedModule(FILE)."
        )
    name = model_stem(path)
    configs = {"metadata": _metadata(name, card, card.volume), "inference": _inference(card, card.volume)}
    require_own_folder(out)
    with replace_folder(out) as folder:
        for inner in ("configs", "models", "docs"):
            (folder / inner).mkdir()
        for config, values in configs.items():
            (folder / "configs" / f"{config}.json").write_text(json.dumps(values, indent=4) + "\n", encoding="utf-8")
        copyfile(path, folder / "models" / "model.fp4")
        (folder / "docs" / "README.md").write_text(README.format(name=name), encoding="utf-8")
    return out


README = """# {name}

A network packed by fp4deploy. Its layers in NVFP4 are multiplied in FP4 on Blackwell GPUs, and decoded on others and on
CPUs. With fp4deploy, monai, pytorch-ignite, fire and nibabel installed, in the folder above this bundle:

    python -m monai.bundle run --config_file BUNDLE/configs/inference.json --bundle_root BUNDLE --dataset_dir IMAGES

Masks are written to BUNDLE/eval (`--output_dir`).
"""


def _metadata(name: str, card: ModelCard, volume: VolumeInput) -> dict[str, object]:
    shape = list(card.size)
    versions = {package: package_version(package) or "unknown" for package in ("torch", "numpy", "nibabel")}
    common = {"type": "image", "num_channels": len(volume.channels), "spatial_shape": shape, "dtype": "float32"}
    classes = {str(number): called for number, called in enumerate(card.class_names)}
    return {
        "version": "0.1.0",
        "changelog": {"0.1.0": f"written by fp4deploy {__version__}"},
        "monai_version": package_version("monai") or MONAI,
        "pytorch_version": versions["torch"],
        "numpy_version": versions["numpy"],
        "required_packages_version": {
            "fp4deploy": __version__,
            "nibabel": versions["nibabel"],
            "pytorch-ignite": "0.5",
        },
        "name": name,
        "task": f"Segmentation of {', '.join(card.class_names[1:])}",
        "description": f"{card.architecture} in {card.precision}, packed",
        "authors": "",
        "copyright": "",
        "intended_use": "",
        "network_data_format": {
            "inputs": {
                "image": {
                    **common,
                    "format": "magnitude",
                    "modality": ", ".join(volume.channels),
                    "value_range": [],
                    "is_patch_data": True,
                    "channel_def": dict(enumerate(volume.channels)),
                }
            },
            "outputs": {
                "pred": {
                    **common,
                    "format": "logits",
                    "num_channels": card.channels,
                    "value_range": [],
                    "is_patch_data": True,
                    "channel_def": classes,
                }
            },
        },
    }


def _inference(card: ModelCard, volume: VolumeInput) -> dict[str, object]:
    count, keys = len(volume.channels), "image"
    names = [keys] if count == 1 else [f"channel{number}" for number in range(count)]
    files = ", ".join(f"'{name}': f.replace('_0000.nii', '_{number:04d}.nii')" for number, name in enumerate(names))
    pattern = "*.nii*" if count == 1 else "*_0000.nii*"
    loaded = [
        {"_target_": "LoadImaged", "keys": names, "reader": "NibabelReader"},
        {"_target_": "EnsureChannelFirstd", "keys": names},
        *([{"_target_": "ConcatItemsd", "keys": names, "name": keys}] if count > 1 else []),
        {"_target_": "Orientationd", "keys": keys, "axcodes": AXES},
        *_normalised(keys, volume),
        {"_target_": "Spacingd", "keys": keys, "pixdim": list(volume.spacing), "mode": 3, "scale_extent": True},
        {"_target_": "EnsureTyped", "keys": keys, "device": "@device"},
    ]
    inverted = {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing", "orig_keys": keys}
    saved = {"_target_": "SaveImaged", "keys": "pred", "output_dir": "@output_dir", "output_postfix": "seg"}
    return {
        "imports": ["$import glob", "$import os", "$import torch"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "datalist": f"$[{{{files}}} for f in sorted(glob.glob(os.path.join(@dataset_dir, '{pattern}')))]",
        "network_def": {
            "_target_": "fp4deploy.packed.PackedModule",
            "file": "$@bundle_root + '/models/model.fp4'",
            "device": "@device",
        },
        "preprocessing": {"_target_": "Compose", "transforms": loaded},
        "dataset": {"_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(card.size),
            "sw_batch_size": 1,
            "overlap": 0.5,
            "mode": "gaussian",
        },
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {**inverted, "nearest_interp": False, "to_tensor": True},
                {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
                {**saved, "output_dtype": "uint8", "separate_folder": False, "resample": False},
            ],
        },
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network_def",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
        "initialize": [],
        "run": ["$@evaluator.run()"],
    }


def _normalised(keys: str, volume: VolumeInput) -> list[dict[str, object]]:
    """Clipping and normalisation of each channel, by given numbers or by those of the volume."""
    found: list[dict[str, Any]] = []
    lows, highs, means, deviations = (
        [getattr(each, name) for each in volume.intensities] for name in ("low", "high", "mean", "std")
    )
    if any(limit is not None for limit in (*lows, *highs)):
        limits = (
            ", ".join(none if limit is None else str(limit) for limit in each)
            for each, none in ((lows, "-torch.inf"), (highs, "torch.inf"))
        )
        low, high = (f"torch.tensor([{each}]).view(-1, 1, 1, 1)" for each in limits)
        found.append({"_target_": "Lambdad", "keys": keys, "func": f"$lambda x: x.clamp({low}, {high})"})
    given = {"subtrahend": means, "divisor": deviations}
    return [*found, {"_target_": "NormalizeIntensityd", "keys": keys, "channel_wise": True, **given}]
