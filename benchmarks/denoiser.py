"""A small diffusion model of image crops in FP16, FP8 and NVFP4: how near the denoiser is, and what it samples.

    python benchmarks/denoiser.py --data DSB2018 --json benchmarks/results/denoiser_h200.json
    python benchmarks/denoiser.py --data DSB2018 --network unet2d --json benchmarks/results/denoiser_unet2d_h200.json

A network (first and output layer in high precision, as by default) learns to remove Gaussian noise of a level sigma
from crops in [-1, 1], with the preconditioning of Karras et al., "Elucidating the Design Space of Diffusion-Based
Generative Models", 2022; the level is a fourth channel. `unet` is this project's, `unet2d` the `UNet2DConditionModel`
of diffusers, whose time step is the level. The FP32 network is trained once; then

| form | what it is |
|---|---|
| FP32, FP16 | the network, and the same in FP16 |
| FP8, NVFP4 | scales from a few noisy crops, no training (`fp8_qat`, `nvfp4_qat`); `NVFP4 GPTQ`: weights by GPTQ |
| FP32 tuned, FP8 QAT, NVFP4 QAT | fine-tuned as long as each other, from the same network |
| NVFP4 QAT, packed | the last as a packed file, by the packed runtime |

and of each form:

| column | |
|---|---|
| sqnr_db | of the denoiser's outputs, signal to difference from FP32's on the same noisy crops |
| psnr | of denoised crops to the clean ones, of each sigma, dB |
| frechet | Frechet distance of 1024 samples (Heun's method, the same noise for each form) to held-out crops |

The distance ranks forms of one model, and is no FID (`sample_quality`). `real`: of training crops, the floor.
`denoiser_latency.py` times it.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peers import command, machine, origin
from sample_quality import HIGH, LOW, SEED, Denoise, frechet, sampled
from torch import nn

import fp4deploy as fd
from fp4deploy.data.images import read_image
from fp4deploy.models import build_unet
from fp4deploy.models.volumes import NetworkInput
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.qat import quantized_layers

DATA_STD = 0.5
SIGMAS = (0.1, 0.5, 2.0)  # of the columns
Network = nn.Module | PackedNetwork


class Denoiser(nn.Module):
    """The network F of c_skip x + c_out F(c_in x, log(sigma) / 4): [N, 4, H, W] -> [N, 3, H, W].

    scale: of the width.
    """

    def __init__(self, network: str, scale: float) -> None:
        super().__init__()
        if network == "unet":
            self.unet = build_unet(3, scale, inputs=NetworkInput(4))
            return
        from diffusers import UNet2DConditionModel

        widths = [32 * max(1, round(8 * scale)) * each for each in (1, 2, 2)]  # in 32 groups
        attention = {"down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 32}
        blocks = {**attention, "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D")}
        self.unet = UNet2DConditionModel(
            in_channels=3, out_channels=3, block_out_channels=widths, mid_block_type="UNetMidBlock2D", **blocks
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.unet, "time_embedding"):
            return cast(torch.Tensor, self.unet(x))
        step = 100 * x[:, 3, 0, 0]  # angles of the embedding that FP16 inputs still tell apart
        return cast(torch.Tensor, self.unet(x[:, :3], step, None, return_dict=False)[0])


def inputs_of(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """What the network reads: [N, 4, H, W] of noisy crops [N, 3, H, W] and their sigma [N, 1, 1, 1]."""
    level = (sigma.log() / 4).expand(-1, 1, *x.shape[2:])
    return torch.cat([x / (sigma**2 + DATA_STD**2).sqrt(), level], 1)


def denoised(network: Network, x: torch.Tensor, sigma: torch.Tensor, half: bool = False) -> torch.Tensor:
    """Crops without noise, as far as the network knows them."""
    read = inputs_of(x, sigma)
    if isinstance(network, PackedNetwork):
        found = cast(torch.Tensor, network(read.to(network.dtype)))
    else:
        with torch.autocast(x.device.type, torch.float16, enabled=half):
            found = network(read)
    return combined(x, found.float(), sigma)


def combined(x: torch.Tensor, found: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """c_skip x + c_out F."""
    variance = sigma**2 + DATA_STD**2
    return x * DATA_STD**2 / variance + found * sigma * DATA_STD / variance.sqrt()


def crops(folder: Path, size: int, count: int, held_out: bool) -> torch.Tensor:
    """[count, 3, size, size] in [-1, 1], of every tenth image or of the others."""
    paths = sorted(
        p
        for p in folder.rglob("*")
        if p.suffix.lower() in (".png", ".jpg") and "mask" not in str(p.relative_to(folder)).lower()
    )
    chosen = [path for at, path in enumerate(paths) if (at % 10 == 0) == held_out]
    random, images = np.random.default_rng(SEED + held_out), [np.asarray(read_image(path)) for path in chosen]
    images = [each for each in images if min(each.shape[:2]) >= size]
    if not images:
        raise SystemExit(f"{folder} has no images of {size} x {size} pixels or more.")
    found = []
    for _ in range(count):
        image = images[random.integers(len(images))]
        top, left = (int(random.integers(extent - size + 1)) for extent in image.shape[:2])
        found.append(torch.tensor(image[top : top + size, left : left + size]).permute(2, 0, 1))
    return torch.stack(found).float() / 127.5 - 1


def levels(count: int, high: float, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Log-uniform sigma [count, 1, 1, 1]."""
    at = torch.rand(count, 1, 1, 1, generator=generator, device=device)
    return LOW * (high / LOW) ** at


def train(network: nn.Module, data: torch.Tensor, steps: int, lr: float, options: Any) -> nn.Module:
    """Minimise the weighted error of denoised crops."""
    batch = options.batch
    generator = torch.Generator(data.device).manual_seed(SEED)
    optimizer = torch.optim.AdamW(network.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    half = torch.autocast(data.device.type, torch.bfloat16, enabled=data.is_cuda, cache_enabled=False)
    network.train()
    if data.is_cuda:  # a step of small networks is mostly the time of launches
        with half:
            torch.cuda.make_graphed_callables(
                network, (inputs_of(data[:batch], torch.ones(batch, 1, 1, 1).to(data)),), allow_unused_input=True
            )
    for _ in range(steps):
        clean = data[torch.randint(len(data), (batch,), generator=generator, device=data.device)]
        sigma = levels(batch, options.high, generator, data.device)
        noisy = clean + sigma * torch.randn(clean.shape, generator=generator, device=data.device)
        weight = (sigma**2 + DATA_STD**2) / (sigma * DATA_STD) ** 2
        with half:
            found = network(inputs_of(noisy, sigma))
        loss = (weight * (combined(noisy, found.float(), sigma) - clean) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    vars(network).pop("forward", None)  # the graphs, which copies of the network would share
    return network.eval()


def noisy_inputs(data: torch.Tensor, options: Any) -> list[torch.Tensor]:
    """Eight batches to calibrate with."""
    generator, found = torch.Generator(data.device).manual_seed(SEED + 1), []
    for _ in range(8):
        clean = data[: options.batch]
        sigma = levels(len(clean), options.high, generator, data.device)
        noise = torch.randn(clean.shape, generator=generator, device=data.device)
        found.append(inputs_of(clean + sigma * noise, sigma))
    return found


def calibrated(base: nn.Module, recipe: str, seen: list[torch.Tensor]) -> nn.Module:
    """A copy of `base` in a recipe's precision."""
    model = fd.prepare(copy.deepcopy(base), recipe)
    fd.calibrate(model, seen)
    return model.eval()


def forms(base: nn.Module, data: torch.Tensor, options: Any) -> Iterator[tuple[str, Network, bool]]:
    """Name, network, and whether it runs in FP16."""
    seen = noisy_inputs(data, options)
    tune = partial(train, data=data, steps=options.tune, lr=1e-4, options=options)

    yield "FP32", base, False
    yield "FP16", base, True
    yield "FP8", calibrated(base, "fp8_qat", seen), True
    yield "NVFP4", calibrated(base, "nvfp4_qat", seen), True
    gptq = copy.deepcopy(base)
    fd.quantize(gptq, seen, method="gptq")
    yield "NVFP4 GPTQ", gptq.eval(), True
    yield "FP32 tuned", tune(copy.deepcopy(base)), False
    for name, recipe in (("FP8 QAT", "fp8_qat"), ("NVFP4 QAT", "nvfp4_qat")):
        tuned = tune(calibrated(base, recipe, seen))
        yield name, tuned, True
    yield "NVFP4 QAT, packed", packed(tuned, seen[0][:2]), True


def packed(network: nn.Module, example: torch.Tensor, verify: bool = True) -> PackedNetwork:
    """A network as its packed file computes it, on the device of `example` [N, 4, H, W]."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "denoiser.fp4"
        file = fd.pack(copy.deepcopy(network).cpu(), path, example_inputs=example.cpu(), verify=verify).file
    return PackedNetwork(file, example.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of images, DSB2018 or CamVid")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--crops", type=int, default=8192)
    parser.add_argument("--network", choices=("unet", "unet2d"), default="unet")
    parser.add_argument("--scale", type=float, default=0.25, help="width of the network")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--tune", type=int, default=1500, help="steps of fine-tuning")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--sampler-steps", type=int, default=32)
    parser.add_argument("--high", type=float, default=HIGH, help="largest sigma, which samples start from")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = machine() if device.type == "cuda" else {**origin(), "gpu": None, "torch": torch.__version__}
    content: dict[str, Any] = {"command": command(), "machine": where, "rows": []}
    data = crops(options.data, options.size, options.crops, held_out=False).to(device)
    fresh = crops(options.data, options.size, max(options.samples, options.batch), held_out=True).to(device)
    content["real"] = round(frechet(data[: options.samples], fresh), 5)
    start = time.perf_counter()
    base = train(Denoiser(options.network, options.scale).to(device), data, options.steps, 3e-4, options)
    content["train_seconds"] = round(time.perf_counter() - start, 1)
    content |= {"parameters": sum(each.numel() for each in base.parameters()), "crops": len(data)}
    content["fp4_layers"] = len(quantized_layers(fd.prepare(copy.deepcopy(base))))

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n")

    exact: dict[float, torch.Tensor] = {}
    for name, network, half in forms(base, data, options):
        row = scored(partial(denoised, network, half=half), fresh, exact, options)
        content["rows"].append({"form": name, **row})
        print(json.dumps(content["rows"][-1]), flush=True)
        keep()


@torch.no_grad()
def scored(denoise: Denoise, fresh: torch.Tensor, exact: dict[float, torch.Tensor], options: Any) -> dict[str, Any]:
    """The columns of a form; the first one, FP32, is what the others are compared with."""
    row: dict[str, Any] = {"psnr": {}, "sqnr_db": {}}
    for sigma in SIGMAS:
        generator = torch.Generator(fresh.device).manual_seed(SEED + 2)
        noise = torch.randn(fresh.shape, generator=generator, device=fresh.device)
        level = torch.full((len(fresh), 1, 1, 1), sigma, device=fresh.device)
        pieces = zip((fresh + sigma * noise).split(options.batch), level.split(options.batch), strict=True)
        found = torch.cat([denoise(x, s) for x, s in pieces])
        wanted = exact.setdefault(sigma, found)
        error = float(((found - fresh) ** 2).mean())
        row["psnr"][str(sigma)] = round(10 * float(np.log10(4 / max(error, 1e-20))), 3)
        power, apart = float((wanted**2).sum()), float(((found - wanted) ** 2).sum())
        row["sqnr_db"][str(sigma)] = round(10 * float(np.log10(power / apart)), 2) if apart else None
    made = sampled(
        denoise, options.samples, options.size, options.sampler_steps, fresh.device, 4 * options.batch, options.high
    )
    return row | {"frechet": round(frechet(made, fresh), 5), "std_of_samples": round(float(made.std()), 4)}


if __name__ == "__main__":
    main()
