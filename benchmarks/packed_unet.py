"""A whole UNet from its packed file, compared with the models in torch: agreement, bytes, memory, latency.

    fp4deploy train --config configs/camvid.yaml --data CAMVID && fp4deploy export --format packed
    python benchmarks/packed_unet.py RUN --data CAMVID --json benchmarks/results/packed_unet_h200.json

Agreement: the share of validation pixels with the same class as the fake-quantised model that torch computes in FP16
autocast on the same GPU, end to end; and that of this model with itself, computed by the fused kernels of training
instead of layer by layer: FP4 turns a difference in a last bit into a whole E2M1 step, so that another order of
accumulation changes classes. So each node of the packed network is also compared with reference inputs from torch, in
the same FP16 autocast: `stepped` has the largest error of each kind over the layers (share of packed elements that
differ, norm of plain activations) and the share of pixels with another class.

Latency: medians of CUDA events over random images that stay on the GPU, each as one CUDA graph (`ms`) and launched from
Python (`launched_ms`); `fp16 eager` and `fp16 compiled` are the FP16 model in half precision and channels_last,
`nvfp4 emulated` is what training sees, `packed` the packed file. More sizes and forms of torch: `packed_latency.py`.
Memory: the peak of one forward pass above what was allocated before (weights excluded), not captured. No GPU before
Blackwell multiplies FP4: `packed` decodes to FP16.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import machine, measured

from fp4deploy.data import EvalTransform, eval_loader, validation_set
from fp4deploy.export.verify.nodes import compare_nodes
from fp4deploy.export.verify.outputs import validation_images
from fp4deploy.packed import activation_bytes, read_packed
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.qat import load_model
from fp4deploy.qat.fused_unet import fuse_unet
from fp4deploy.runs import Run

Forward = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    found = measure(arguments.run, arguments.data, arguments.batches)
    found["stepped"] = layerwise(arguments.run, arguments.data)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


@torch.inference_mode()
def measure(run: Path, data: Path, batches: list[int]) -> dict[str, Any]:
    """All figures, printed as they are measured."""
    emulated, card = load_model(run / "nvfp4" / "best.safetensors", device="cuda")
    plain, _ = load_model(run / "fp16" / "best.safetensors", device="cuda")
    path = Run(run).exported("nvfp4", ".fp4")
    file = read_packed(path)
    network = PackedNetwork(file, "cuda")
    half = sum(2 * value.numel() for value in plain.state_dict().values())
    plain = plain.half().to(memory_format=torch.channels_last)

    def emulate(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return emulated(x.float())

    size = (card.height, card.width)
    result: dict[str, Any] = {
        "command": "python benchmarks/packed_unet.py RUN --data CAMVID",
        "machine": machine(),
        "model": {"scale": card.scale, "height": size[0], "width": size[1], "recipe": card.recipe},
        "bytes": {"fp16": half, "packed": path.stat().st_size, "ratio": path.stat().st_size / half},
    }
    print("weights: {packed} of {fp16} bytes, {ratio:.3f}".format(**result["bytes"]))
    fused = fuse_unet(copy.deepcopy(emulated))

    def emulate_fused(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return fused(x.float().contiguous(memory_format=torch.channels_last))

    result["agreement"] = agreement(card, data, emulate, network)
    result["agreement_of_torch"] = agreement(card, data, emulate, emulate_fused)
    for name in ("agreement", "agreement_of_torch"):
        print(name, "{share:.3%} of {pixels} pixels".format(**result[name]))
    forwards: dict[str, Forward] = {
        "fp16 eager": plain,
        "fp16 compiled": torch.compile(plain, dynamic=False),
        "nvfp4 emulated": emulate,
        "packed": network,
    }
    result["batches"] = [compare(forwards, network, batch, size) for batch in batches]
    return result


def agreement(card: Any, data: Path, one: Forward, other: Forward) -> dict[str, Any]:
    """How many pixels of the validation split get the same class."""
    same = pixels = 0
    transform = EvalTransform(card.height, card.width, card.mean, card.std)
    for images, _ in eval_loader(validation_set(card, data), transform, 8, 0):
        x = images.cuda()
        equal = one(x).argmax(1) == other(x).argmax(1)
        same, pixels = same + int(equal.sum()), pixels + equal.numel()
    return {"share": same / pixels, "pixels": pixels}


@torch.inference_mode()
def layerwise(run: Path, data: Path, images: int = 16) -> dict[str, Any]:
    """The error of every node of the packed network with reference inputs; the largest over images, by layer."""
    model, card = load_model(run / "nvfp4" / "best.safetensors", device="cuda")
    model = model.to(memory_format=torch.channels_last)
    network = PackedNetwork(read_packed(Run(run).exported("nvfp4", ".fp4")), "cuda")
    worst: dict[str, float] = {}
    for batch in validation_images(data, card, images):
        with torch.autocast("cuda", dtype=torch.float16):
            image = batch.to("cuda", torch.float16).contiguous(memory_format=torch.channels_last)
            errors = compare_nodes(model, network, image).errors
        for name, error in errors.items():
            worst[name] = max(worst.get(name, 0.0), error)
    kinds = {"packed elements": (".norm", "up."), "plain images": (".conv",), "classes": ("head",)}
    found: dict[str, Any] = {"images": images, "steps": worst}
    for kind, parts in kinds.items():
        name, error = max(((n, e) for n, e in worst.items() if any(part in n for part in parts)), key=lambda x: x[1])
        found[kind] = {"layer": name, "error": error}
        print(f"reference inputs, {kind}: at most {error:.2e}, {name}")
    return found


def compare(forwards: dict[str, Forward], network: PackedNetwork, batch: int, size: tuple[int, int]) -> dict[str, Any]:
    """Latency and memory of each on random images of one batch size."""
    x = torch.randn(batch, 3, *size, device="cuda", dtype=torch.float16)
    row: dict[str, Any] = {"batch": batch, "packed_images_bytes": activation_bytes(network.graph, *size, batch=batch)}
    for name, forward in forwards.items():
        images = x if name == "packed" else x.contiguous(memory_format=torch.channels_last)
        found = measured(partial(forward, images))
        if "error" in found:
            row[name] = found
            print(f"batch {batch:3d}  {name:15s} {found['error']}")
            continue
        row[name] = {"ms": found["graph_ms"], "launched_ms": found["launched_ms"], "peak_bytes": found["peak_bytes"]}
        memory = found["peak_bytes"] / 2**20
        print(f"batch {batch:3d}  {name:15s} {row[name]['ms']:8.3f} ms  {memory:8.1f} MiB above the weights")
    return row


if __name__ == "__main__":
    main()
