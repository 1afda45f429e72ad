"""50 steps of NVFP4 training by the kernels and by the torch reference, from the same weights on the same batches.

    python benchmarks/convergence.py --json benchmarks/results/convergence_h200.json

`kernels` and `reference` run the same unfused forward with deterministic convolutions and torch's loss, and differ only
in who quantises: their losses are equal bit by bit as far as those of two reference runs are. `fused` rounds at other
places (to FP16 once between GroupNorm and a convolution) and sums in another order; `reference, seed 1` shows how far
apart two reference runs from other initial weights are. The task: tell which of four brightness bands the neighbourhood
of a pixel is in, from noise.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import torch_loss
from torch import nn

from fp4deploy.models import build_unet
from fp4deploy.qat import prepare
from fp4deploy.qat.fused_unet import fuse_unet
from fp4deploy.train.losses.segmentation import SegmentationLoss

STEPS, BATCH, SIZE, CLASSES, SCALE = 50, 8, 128, 4, 0.5


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [8, 3, 128, 128] of noise on smooth fields, and the quartile of the field at each pixel."""
    generator = torch.Generator("cuda").manual_seed(step)
    coarse = torch.randn(BATCH, 1, 8, 8, device="cuda", generator=generator)
    field = F.interpolate(coarse, SIZE, mode="bicubic")
    noise = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda", generator=generator)
    edges = torch.tensor([-0.5, 0.0, 0.5], device="cuda")
    return (field + noise).to(memory_format=torch.channels_last), torch.bucketize(field[:, 0].contiguous(), edges)


def losses(kernels: str, fused: bool, seed: int = 0) -> list[float]:
    """The loss of every step."""
    os.environ["FP4DEPLOY_KERNELS"] = kernels
    torch.manual_seed(seed)
    model: nn.Module = prepare(build_unet(CLASSES, SCALE)).cuda()
    model = model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    model = fuse_unet(model) if fused else model
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cuda")
    loss_of, found = SegmentationLoss(), []
    for step in range(STEPS):
        images, masks = batch(step)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(images)
        with torch_loss():
            loss = loss_of(logits, masks)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    runs: dict[str, list[float]] = {
        "reference": losses("off", fused=False),
        "reference again": losses("off", fused=False),
        "kernels": losses("on", fused=False),
        "fused": losses("on", fused=True),
        "reference, seed 1": losses("off", fused=False, seed=1),
    }
    for step in (0, 1, 2, 4, 9, 19, 29, 39, 49):
        print(f"step {step + 1:3d}  " + "  ".join(f"{name} {values[step]:.6f}" for name, values in runs.items()))
    summary: dict[str, Any] = {"steps": STEPS, "equal_bits": {}}
    for name in ("reference again", "kernels"):
        same = sum(one == other for one, other in zip(runs["reference"], runs[name], strict=True))
        summary["equal_bits"][name] = same
        print(f"{name}: {same} of {STEPS} losses equal the reference's bit by bit")
    for name in ("kernels", "fused", "reference, seed 1"):
        apart = [abs(one - other) for one, other in zip(runs["reference"], runs[name], strict=True)]
        summary[name] = {"mean_difference": sum(apart) / STEPS, "largest_difference": max(apart)}
        print(f"{name}: mean |difference| {sum(apart) / STEPS:.4f}, largest {max(apart):.4f}")
    if arguments.json:
        report = {"command": "python benchmarks/convergence.py", "gpu": torch.cuda.get_device_name(), **summary}
        arguments.json.write_text(json.dumps({**report, "losses": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
