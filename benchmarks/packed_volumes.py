"""A packed network over volumes against torch in FP16 and BF16: correctness, layers, whole networks.

    python benchmarks/packed_volumes.py --json benchmarks/results/packed_volumes_h200.json

The network is nnU-Net's plain one for a patch of 128 x 128 x 128: five stages of 32, 64, 128, 256 and 320 channels, two
convolutions of 3x3x3 each with InstanceNorm and LeakyReLU, strides of 2, transposed convolutions of 2x2x2; its weights
are random, calibrated on noise. First layer and head are in FP16.

* `correct`: convolutions of its kinds on small, awkward sizes, against torch in FP32 with the same operands, and every
  node of the network for a small volume against the CPU (`selftest.networks.node_errors`);
* `layers`: each convolution of batch 1, by kernels of this package, with moments for a norm, and by cuDNN in FP16 and
  BF16, channels_last_3d, its algorithm measured, without bias or moments;
* `networks`: `packed` are the steps of kernels, `packed, compiled` the network compiled by Inductor with cuDNN's
  convolutions of decoded operands: `predict` takes the faster one. Torch's forms are compiled, or eager, in
  channels_last_3d. All in CUDA graphs; `ratio` is the faster packed form over the fastest of torch.

--seconds: nothing is begun after so many. On a CPU (--device cpu) only what needs no GPU runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from peers import captured, command, measured, median_ms
from torch import nn

from fp4deploy.errors import Fp4DeployError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, read_packed, write_packed
from fp4deploy.packed.program import compile_program
from fp4deploy.plugins.gemm.convolution import decoded, warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight, supports
from fp4deploy.plugins.runtime.nvcc import compile_cubin
from fp4deploy.qat import calibrate, prepare, round_to_deployed
from fp4deploy.selftest.kernels import moved
from fp4deploy.selftest.networks import node_errors

WIDTHS, CLASSES = (32, 64, 128, 256, 320), 3
LAYOUT = torch.channels_last_3d


class Block(nn.Sequential):
    """Two convolutions with InstanceNorm and LeakyReLU."""

    def __init__(self, channels: int, outputs: int, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        for inputs, step in ((channels, stride), (outputs, 1)):
            layers.append(nn.Conv3d(inputs, outputs, 3, step, 1))
            layers += [nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)]
        super().__init__(*layers)


class PlainUNet(nn.Module):
    """[N, 1, D, H, W] -> [N, 3, D, H, W]."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            Block(channels, outputs, 1 if at == 0 else 2)
            for at, (channels, outputs) in enumerate(zip((1, *widths[:-1]), widths, strict=True))
        )
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose3d(channels, outputs, 2, 2) for channels, outputs in pairs)
        self.up = nn.ModuleList(Block(2 * outputs, outputs) for _, outputs in pairs)
        self.head = nn.Conv3d(widths[0], CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for rise, block, skip in zip(self.rise, self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([rise(x), skip], 1))
        return cast(torch.Tensor, self.head(x))


def made(widths: tuple[int, ...], path: Path | None = None) -> tuple[nn.Module, PackedFile]:
    """The module in FP32, and the packed network in NVFP4."""
    torch.manual_seed(0)
    model = PlainUNet(widths).eval()
    if path is not None and path.is_file():
        return model, read_packed(path)
    quantized, example = copy.deepcopy(model), torch.randn(1, 1, 32, 32, 32)
    prepare(quantized, "nvfp4_qat")
    calibrate(quantized, [example])
    round_to_deployed(quantized)
    file = packed_file(path or Path("volumes.fp4"), None, *pack_model(quantized, example))
    if path is not None:
        write_packed(file)
    return model, file


def packed_of(*shape: int, device: str) -> Nvfp4Tensor:
    """Noise in NVFP4."""
    q = quantize_nvfp4(torch.randn(*shape, device=device), amax=torch.tensor(6.0, device=device))
    return q


# Sizes, channels of each source, outputs, taps, stride, transposed, packed output.
Convolution = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], Any, bool, bool]
THREE, TWO = (3, 3, 3), (2, 2, 2)
AWKWARD: list[Convolution] = [
    ((2, 7, 13, 19), (32,), 32, THREE, 1, False, False),
    ((1, 8, 16, 16), (32, 32), 32, THREE, 1, False, False),
    ((1, 5, 9, 11), (32,), 32, THREE, 1, False, True),
    ((2, 5, 9, 11), (64,), 64, THREE, 1, False, False),
    ((1, 6, 17, 23), (64, 64), 64, THREE, 1, False, False),
    ((1, 3, 9, 10), (128, 64), 128, THREE, 1, False, True),
    ((1, 8, 8, 8), (320,), 320, THREE, 1, False, False),
    ((2, 9, 12, 14), (32,), 64, THREE, 2, False, False),
    ((1, 8, 9, 14), (64,), 128, THREE, (1, 2, 2), False, False),
    ((1, 4, 12, 14), (64,), 64, (1, 3, 3), 1, False, False),
    ((1, 3, 5, 9), (64,), 32, TWO, 2, True, True),
    ((2, 3, 5, 9), (320,), 256, TWO, 2, True, False),
    ((1, 3, 5, 9), (64,), 32, (1, 2, 2), (1, 2, 2), True, False),
]


class Layer:
    """One convolution: operands, and what computes it."""

    def __init__(self, convolution: Convolution, device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        size, channels, outputs, taps, self.stride, self.transposed, packed = convolution
        self.sources = tuple(packed_of(*size, count, device=device) for count in channels)
        self.weight = quantize_nvfp4(torch.randn(outputs, *taps, sum(channels), device=device) * 0.05)
        pairs = warpgroup.pairs(channels, outputs, taps, self.transposed)
        assert supports(channels, 1 if self.transposed else math.prod(taps))
        self.decoded = decode_weight(self.weight, channels, self.transposed, pairs)
        self.bias = torch.randn(outputs, device=device)
        self.padding = 0 if self.transposed else tuple(count // 2 for count in taps)
        self.amax = torch.tensor(24.0, device=device) if packed else None

    def run(self, moments: bool = True) -> Any:
        """By the kernels."""
        place = {"transposed": True} if self.transposed else {"stride": self.stride, "padding": self.padding}
        return decoded.conv2d(
            self.sources, self.decoded, self.bias, out_amax=self.amax, moments=moments and not self.transposed, **place
        )

    def exact(self) -> torch.Tensor:
        """In FP32, [N, D, H, W, O]."""
        x = torch.cat([source.dequantize(torch.float32) for source in self.sources], -1).movedim(-1, 1)
        w = self.weight.dequantize(torch.float32).movedim(-1, 1)
        if self.transposed:
            y = F.conv_transpose3d(x, w.transpose(0, 1), self.bias, self.stride)
        else:
            y = F.conv3d(x, w, self.bias, self.stride, self.padding)
        return y.movedim(1, -1)

    def cudnn(self, dtype: torch.dtype) -> Callable[[], Any]:
        """By cuDNN, of decoded operands."""
        x = torch.cat([source.dequantize(torch.float32) for source in self.sources], -1).to(dtype).movedim(-1, 1)
        w = self.weight.dequantize(torch.float32).to(dtype).movedim(-1, 1)
        if self.transposed:
            w = w.transpose(0, 1).contiguous(memory_format=LAYOUT)
            return lambda: F.conv_transpose3d(x, w, None, self.stride)
        w = w.contiguous(memory_format=LAYOUT)
        return lambda: F.conv3d(x, w, None, self.stride, self.padding)


def correct(layer: Layer) -> dict[str, float]:
    """Relative errors of the output and of the combined moments; of a packed output the share of other codes."""
    y, moments = layer.run()
    exact, found = layer.exact(), {}
    if isinstance(y, Nvfp4Tensor):
        wanted = quantize_nvfp4(exact.half(), amax=y.amax)
        return {"codes": float((y.codes != wanted.codes).float().mean())}
    found["error"] = float((y.float() - exact).norm() / exact.norm())
    if moments is not None:
        from fp4deploy.plugins.quantize.statistics import combine

        ones = torch.ones(y.shape[-1], device=y.device)
        rows = y.flatten(1, 2)
        a, b = combine(moments, rows.shape, None, ones, 0 * ones, y.shape[-1], 1e-5).unbind(1)
        flat = y.flatten(1, -2).double()
        scale = (flat.var(1, correction=0) + 1e-5).rsqrt()
        found["moments"] = float(max((a / scale - 1).abs().max(), (b + flat.mean(1) * scale).abs().max()))
    return found


def layers_of(size: int, widths: tuple[int, ...] = WIDTHS) -> dict[str, Convolution]:
    """The quantised convolutions of a network for a patch, batch 1, each once."""
    found: dict[str, Convolution] = {}
    for at, width in enumerate(widths):
        d = size >> at
        if at:
            found[f"{2 * d}: {widths[at - 1]} to {width}, stride 2"] = (
                *((1, 2 * d, 2 * d, 2 * d), (widths[at - 1],), width),
                *(THREE, 2, False, False),
            )
        found[f"{d}: {width} to {width}"] = (1, d, d, d), (width,), width, THREE, 1, False, False
        if at + 1 < len(widths):
            found[f"{d // 2}: {widths[at + 1]} to {width}, transposed"] = (
                *((1, d // 2, d // 2, d // 2), (widths[at + 1],), width),
                *(TWO, 2, True, True),
            )
            found[f"{d}: {width} + {width} to {width}"] = (1, d, d, d), (width, width), width, THREE, 1, False, False
    return found


def compile_ahead(shapes: list[Convolution]) -> None:
    """Compile what nvcc compiles of these, several at a time."""
    torch.cuda.init()
    sms, macros = torch.cuda.get_device_properties(0).multi_processor_count, []
    for size, channels, outputs, taps, stride, transposed, packed in shapes:
        one = stride == 1 or transposed
        if not one or not warpgroup.supports(channels, outputs, taps, transposed=transposed) or taps[0] == 1:
            continue
        layer = Layer((size[:1] + (1,) * 3, channels, outputs, taps, stride, transposed, packed), "cpu")
        layer.sources = tuple(
            Nvfp4Tensor(x.codes, x.scales, x.amax, torch.Size((*size, x.shape[-1]))) for x in layer.sources
        )
        around = (0, 0, 0) if transposed else layer.padding
        shape = warpgroup.shape_of(layer.sources, layer.decoded, cast("tuple[int, ...]", around), 1, transposed, packed)
        chosen = warpgroup.variant(shape, sms)
        if chosen is not None:
            macros.append(chosen.macros(torch.float16, not transposed and chosen.splits == 1, packed))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: compile_cubin(warpgroup.SOURCE, "sm_90a", each), macros))


def torch_form(model: nn.Module, dtype: torch.dtype, compiled: bool, x: torch.Tensor) -> Callable[[], Any]:
    """A forward pass of torch."""
    own: Any = copy.deepcopy(model).to("cuda", dtype).to(memory_format=LAYOUT)  # type: ignore[call-overload]
    images = x.to(dtype).contiguous(memory_format=LAYOUT)
    if compiled:
        torch._dynamo.reset()
        own = torch.compile(own, dynamic=False)
    return lambda: own(images)


def forms(
    model: nn.Module, file: PackedFile, network: PackedNetwork, x: torch.Tensor
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """What makes each form, in the order in which they are measured."""
    return {
        "packed": lambda: lambda: network(x.half()),
        "fp16, compiled": lambda: torch_form(model, torch.float16, True, x),
        "packed, compiled": lambda: cast("Any", lambda run: lambda: run(x.half()))(compile_program(file, [x.half()])),
        "bf16, compiled": lambda: torch_form(model, torch.bfloat16, True, x),
        "fp16, eager": lambda: torch_form(model, torch.float16, False, x),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--file", type=Path, help="the packed network, written where it is not there yet")
    parser.add_argument("--only", nargs="+", default=["correct", "layers", "networks"])
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began, device, widths = time.monotonic(), arguments.device, tuple(arguments.widths)
    found: dict[str, Any] = {"command": command("--seconds", "--file"), "size": arguments.size, "widths": widths}
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, False

    def late() -> bool:
        return time.monotonic() - began > arguments.seconds

    def keep() -> None:
        found["seconds"] = time.monotonic() - began
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    model, file = made(widths, arguments.file)
    print(f"made {time.monotonic() - began:.0f} s", flush=True)
    if device == "cpu":
        for convolution in AWKWARD:
            layer = Layer(convolution, device)
            print(convolution, tuple(layer.exact().shape))
        x = torch.randn(1, 1, arguments.size, arguments.size, arguments.size)
        errors = node_errors(file, x, PackedNetwork(file, dtype=torch.float16).run_node)
        print(len(errors), "nodes, largest difference", max(errors.values()), flush=True)
        return
    from peers import machine

    found["machine"] = machine()
    shapes = layers_of(arguments.size, widths)
    with torch.inference_mode():
        compile_ahead([*AWKWARD, *shapes.values()])
        print(f"compiled {time.monotonic() - began:.0f} s", flush=True)
        network = PackedNetwork(file, device)
        if "correct" in arguments.only:
            found["correct"] = {}
            for convolution in AWKWARD:
                try:
                    errors = correct(Layer(convolution, device))
                except Exception as error:
                    errors = {"failed": f"{type(error).__name__}: {error}"[:300]}  # type: ignore[dict-item]
                found["correct"][str(convolution)] = errors
                print(convolution, errors, flush=True)
            x = torch.randn(1, 1, 16, 32, 48)
            errors = node_errors(
                file, x, lambda node, inputs: network.run_node(node, [moved(y, device) for y in inputs])
            )
            found["nodes"] = errors
            print(len(errors), "nodes", sorted(errors.items(), key=lambda each: -each[1])[:4], flush=True)
            whole, wanted = network(x.to(device)), PackedNetwork(file)(x)
            found["whole"] = {
                "classes_equal": float((whole.argmax(1).cpu() == wanted.argmax(1)).float().mean()),  # type: ignore[union-attr]
                "difference": float((whole.float().cpu() - wanted).norm() / wanted.norm()),  # type: ignore[union-attr]
            }
            print("whole network", found["whole"], flush=True)
            keep()
        if "layers" in arguments.only:
            found["layers"] = {}
            for name, convolution in shapes.items():
                if late():
                    break
                layer = Layer(convolution, device)
                row = found["layers"][name] = {"packed_us": 1e3 * median_ms(captured(layer.run), 11)}
                for dtype in (torch.float16, torch.bfloat16):
                    row[f"{str(dtype)[6:]}_us"] = 1e3 * median_ms(captured(layer.cudnn(dtype)), 11)
                print(f"{name:28s} {row}  {time.monotonic() - began:.0f} s", flush=True)
                keep()
        found["networks"] = []
        for batch in arguments.batches if "networks" in arguments.only else []:
            x = torch.randn(batch, 1, *(arguments.size,) * 3, device=device)
            row = {"batch": batch, "runs": {}}
            found["networks"].append(row)
            for name, make in forms(model, file, network, x).items():
                if late():
                    break
                try:
                    run = measured(make())
                except Fp4DeployError as error:
                    run = {"error": str(error)}  # type: ignore[dict-item]
                row["runs"][name] = run
                print(batch, name, run, f"{time.monotonic() - began:.0f} s", flush=True)
                times = {each: of["graph_ms"] for each, of in row["runs"].items() if "graph_ms" in of}
                best = [ms for each, ms in times.items() if not each.startswith("packed")]
                ours = [ms for each, ms in times.items() if each.startswith("packed")]
                if best and ours:
                    row["ratio"] = min(ours) / min(best)
                keep()
            print("batch", batch, "packed over the best of torch:", row.get("ratio"), flush=True)


if __name__ == "__main__":
    main()
