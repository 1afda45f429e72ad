"""What the accumulator of the FP4 tensor core does to results: the hardware's model against exact rounding, on the CPU.

    python benchmarks/accumulator.py --json benchmarks/results/accumulator_cpu.json

Both models (`fp4deploy_emulator.accumulate`) multiply the same codes and scales, 64 elements of K an instruction,
taps one after the other, with the epilogue of the kernels: global scales, bias, ReLU, rounding to FP16. Nothing here
ran on a GPU: the hardware's accumulator is a published model of it.

1. Linear layers of N(0, 1), and of blocks whose magnitudes spread log-normally: relative error of the sums against
   float64, share of FP16 outputs and of packed codes that differ between the two models.
2. The UNet (untrained weights, calibrated on the same images): share of FP16 outputs of each convolution that differ
   given the same inputs, and of pixels whose class (argmax) differs at the end of the whole network.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from peers import origin

from fp4deploy.export.to_packed import pack_model
from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.models import ModelCard, build_unet
from fp4deploy.packed import PackedNetwork, packed_file
from fp4deploy.plugins.gemm import dispatch
from fp4deploy.plugins.gemm.reference import Sizes, each, output_sizes
from fp4deploy.qat import prepare
from fp4deploy_emulator.accumulate import DEPTH, block_scaled

ROWS = 512  # of a GEMM that are computed at a time


def unpacked(x: Nvfp4Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one a byte, and scale bytes, K padded with zeros to whole instructions."""
    codes = torch.stack([x.codes & 15, x.codes >> 4], -1).flatten(-2)
    scales = x.scales.view(torch.uint8)
    more = -codes.shape[-1] % DEPTH
    return F.pad(codes, (0, more)).numpy(), F.pad(scales, (0, more // 16)).numpy()


def gemm(a: tuple, b: tuple, acc: np.ndarray, model: str) -> np.ndarray:
    """acc + a b^T in pieces of rows."""
    pieces = []
    for start in range(0, len(acc), ROWS):
        rows = slice(start, start + ROWS)
        pieces.append(block_scaled(a[0][rows], b[0], a[1][rows], b[1], acc[rows], model))
    return np.concatenate(pieces)


def convolution(model: str) -> Any:
    """`conv2d_reference` with an accumulator model."""

    def run(
        sources: tuple[Nvfp4Tensor, ...],
        weight: Nvfp4Tensor,
        bias: torch.Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        relu: bool = False,
        dtype: torch.dtype = torch.float16,
        out_amax: torch.Tensor | None = None,
        accumulate: torch.dtype = torch.float32,
    ) -> Any:
        n, h, w = sources[0].shape[:3]
        outputs, kh, kw, _ = weight.shape
        oh, ow = output_sizes((h, w), (kh, kw), stride, padding, dilation)
        (sy, sx), (py, px), (dy, dx) = (each(size, 2) for size in (stride, padding, dilation))
        acc = np.zeros((n * oh * ow, outputs), np.float32)
        factor, first = torch.tensor(1.0), 0
        for source in sources:
            own = source.amax / (6 * source.e4m3_max)
            if first:
                acc = acc * (factor / own).numpy()
            factor = own
            channels = source.shape[3]
            part = Nvfp4Tensor(
                weight.codes[..., first // 2 : (first + channels + 1) // 2],
                weight.scales[..., first // 16 : -(-(first + channels) // 16)],
                weight.amax,
                torch.Size([outputs, kh, kw, channels]),
                weight.e4m3_max,
            )
            x, f = unpacked(source), unpacked(part)
            border = ((0, 0), (py, py), (px, px), (0, 0))
            padded = [np.pad(values, border) for values in x]
            for ky in range(kh):
                for kx in range(kw):
                    rows = slice(ky * dy, ky * dy + sy * (oh - 1) + 1, sy)
                    columns = slice(kx * dx, kx * dx + sx * (ow - 1) + 1, sx)
                    a = tuple(values[:, rows, columns].reshape(n * oh * ow, -1) for values in padded)
                    acc = gemm(a, (f[0][:, ky, kx], f[1][:, ky, kx]), acc, model)
            first += channels
        y = torch.from_numpy(acc) * (factor * (weight.amax / (6 * weight.e4m3_max)))
        y = y if bias is None else y + bias
        y = (y.relu() if relu else y).to(dtype).view(n, oh, ow, outputs)
        return y if out_amax is None else quantize_nvfp4(y, amax=out_amax)

    return run


def _spread(rows: int, k: int, spread: float, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(rows, k // 16, 16, generator=generator)
    return (values * torch.exp(spread * torch.randn(rows, k // 16, 1, generator=generator))).view(rows, k)


def linear(k: int, spread: float, seed: int) -> dict[str, float]:
    """M = N = 128; each value of a block is multiplied by exp(spread z), z from N(0, 1), one z a block of 16."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (quantize_nvfp4(_spread(128, k, spread, generator)) for _ in range(2))
    exact = x.dequantize(torch.float64) @ w.dequantize(torch.float64).mT
    factor = (x.amax / 2688) * (w.amax / 2688)
    found: dict[str, float] = {"k": k, "spread": spread, "seed": seed}
    outputs = {}
    for model in ("hardware", "exact"):
        sums = torch.from_numpy(gemm(unpacked(x), unpacked(w), np.zeros((128, 128), np.float32), model))
        outputs[model] = (sums * factor).half()
        scaled = sums.double() * float(factor)
        found[f"{model}_relative_error"] = float((scaled - exact).norm() / exact.norm())
    found["fp16_differ"] = float((outputs["hardware"] != outputs["exact"]).double().mean())
    sizes = outputs["exact"].float().abs()
    amax = sizes[sizes.isfinite()].amax()  # of sums that FP16 holds
    packed = [quantize_nvfp4(each, amax=amax) for each in outputs.values()]
    codes = [torch.stack([each.codes & 15, each.codes >> 4]) for each in packed]
    found["packed_codes_differ"] = float((codes[0] != codes[1]).double().mean())
    return found


def packed_operands() -> Any:
    """Inside, a CPU multiplies packed operands, as a GPU does; by itself it decodes them."""

    def multiply(network: Any, node: Any, inputs: Any, bias: Any, _: Any) -> Any:
        return network._multiply(node, inputs, bias)

    return mock.patch.object(PackedNetwork, "_multiply_on_cpu", multiply)


def unet(seed: int, scale: float, size: int) -> dict[str, float]:
    """Argmax of two images."""
    torch.manual_seed(seed)
    model = prepare(build_unet(5, scale), "nvfp4_qat")
    images = torch.randn(2, 3, size, size)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(images)
    names = tuple(f"class {index}" for index in range(5))
    rgb = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    card = ModelCard("nvfp4", scale, names, size, size, *rgb, False, "nvfp4_qat")
    file = packed_file(Path("unet.fp4"), card, *pack_model(model.eval(), torch.zeros(1, 3, size, size), False))
    network = PackedNetwork(file, dtype=torch.float16)
    hardware, exact = convolution("hardware"), convolution("exact")
    differ, total = 0, 0

    def both(*args: Any, **kwargs: Any) -> Any:
        nonlocal differ, total
        ours, other = hardware(*args, **kwargs), exact(*args, **kwargs)
        if isinstance(ours, torch.Tensor):
            differ, total = differ + int((ours != other).sum()), total + ours.numel()
        return other

    logits = {}
    for name, function in (("hardware", hardware), ("exact", exact), ("both", both)):
        with packed_operands(), mock.patch.object(dispatch, "conv2d_reference", function):
            logits[name] = network(images).float()
    with packed_operands():
        plain = network(images).float()
    classes = {name: each.argmax(1) for name, each in logits.items()}
    return {
        "seed": seed,
        "fp16_of_convolutions_differ": differ / total,
        "pixels": classes["exact"].numel(),
        "argmax_differ": int((classes["hardware"] != classes["exact"]).sum()),
        "argmax_differ_float32_reference": int((plain.argmax(1) != classes["exact"]).sum()),
        "largest_logit_difference": float((logits["hardware"] - logits["exact"]).abs().max()),
        "logit_scale": float(logits["exact"].std()),
    }


def main() -> None:
    """Parse the command line, print and write the results."""
    parser = argparse.ArgumentParser(description="The FP4 accumulator: the hardware's model against exact rounding.")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.125, help="of the UNet")
    parser.add_argument("--size", type=int, default=64, help="pixels of an image along each side")
    given = parser.parse_args()
    results: dict[str, Any] = {
        "command": f"python benchmarks/accumulator.py {' '.join(sys.argv[1:])}".strip(),
        **origin(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "note": "CPU only; the hardware's accumulator is a published model, nothing ran on a GPU",
        "linear": [
            linear(k, spread, seed)
            for spread in (0.0, 1.0, 2.0)
            for k in (64, 576, 4608)
            for seed in range(given.seeds)
        ],
        "unet": [unet(seed, given.scale, given.size) for seed in range(given.seeds)],
    }
    print(json.dumps(results, indent=1))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
