"""The C library beside the Python runtime on one GPU: the same bytes, and the latency of both.

    cmake -S native -B build && cmake --build build
    python benchmarks/native_library.py --library build/libfp4deploy.so --example build/segment --json FILE

UNets of random weights, calibrated on random images. `own`: first and last layer in FP16, computed by this package's
kernel in both runtimes (`plain="kernel"`). `torch`: the Python runtime as it is, with cuDNN for these two layers; the
share of pixels with the same class is compared. `digits`: every layer in FP4, so that the Python runtime needs no
option. Bytes are compared for inputs in FP32 and FP16, outputs in FP16 and FP32, class maps, the host call and a
replayed CUDA graph. With `--example`, the program `native/examples/segment.c` segments a photo of random pixels, and
its mask is compared with the classes of the Python runtime. Times: medians of CUDA events, launched one by one and
replayed from a graph that torch captures on its stream, for both alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from native_calls import Library, Run
from peers import captured, machine, median_ms

from fp4deploy.architecture import Architecture
from fp4deploy.export.to_packed import pack_model
from fp4deploy.models import ModelCard, build_unet
from fp4deploy.native import Gpu, record, write_bundle
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, write_packed
from fp4deploy.qat import calibrate, prepare, round_to_deployed

MEAN, STD = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
RECIPE, CLASSES = "nvfp4_qat", tuple(f"class {i}" for i in range(12))
KINDS = {"own": (False, None), "digits": (True, ["*"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--example", type=Path, help="the built segment.c")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--size", type=int, nargs=2, default=[352, 480], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for scale in arguments.scales:
            for kind in arguments.kinds:
                rows += compare(arguments, Path(folder), scale, kind)
    if arguments.json:
        command = "python benchmarks/native_library.py --library build/libfp4deploy.so"
        command += " --example build/segment" if arguments.example else ""
        height, width = arguments.size
        found = {"command": command, "machine": machine(), "height": height, "width": width, "rows": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def network(path: Path, scale: float, height: int, width: int, digits: bool, include: list[str] | None) -> PackedFile:
    torch.manual_seed(0)
    model = build_unet(len(CLASSES), scale, digits)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    prepare(model, RECIPE, include=include)
    calibrate(model.cuda(), [torch.randn(1, 3, height, width, device="cuda")])
    round_to_deployed(model.cpu())
    card = ModelCard("nvfp4", scale, CLASSES, height, width, MEAN, STD, False, RECIPE, digits=digits)
    graph, tensors = pack_model(model.eval(), torch.zeros(1, 3, height, width), dynamic_size=False)
    file = packed_file(path, card, graph, tensors)
    write_packed(file)
    return file


def compare(arguments: Any, folder: Path, scale: float, kind: str) -> list[dict[str, Any]]:
    height, width = arguments.size
    file = network(folder / f"{kind}-{scale}.fp4", scale, height, width, *KINDS[kind])
    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(Architecture.of_device(0), properties.name, properties.multi_processor_count)
    shapes = [(batch, 3, height, width) for batch in arguments.batches]
    kernels = folder / f"{kind}-{scale}.kernels"
    count = write_bundle(kernels, file, [record(file, gpu, shape) for shape in shapes])
    print(f"{kind} {scale}: {count} kernels, {kernels.stat().st_size >> 10} KiB", flush=True)
    native = Library(arguments.library).network(file.path, kernels)
    runtimes = {"own": PackedNetwork(file, "cuda", plain="kernel"), "torch": PackedNetwork(file, "cuda")}
    rows = []
    for shape in shapes:
        row: dict[str, Any] = {"kind": kind, "scale": scale, "batch": shape[0]}
        row |= bytes_of(native.run(shape), runtimes, shape, kind)
        if arguments.example and shape[0] == 1:
            row["different"]["example"] = of_example(arguments.example, file.path, kernels, runtimes["own"], shape[2:])
        if not arguments.no_times:
            row |= times_of(native.run(shape), runtimes, shape)
        print(row, flush=True)
        rows.append(row)
    return rows


@torch.inference_mode()
def bytes_of(run: Run, runtimes: dict[str, PackedNetwork], shape: tuple[int, ...], kind: str) -> dict[str, Any]:
    """Elements that differ from the Python runtime's, by what was compared."""
    torch.manual_seed(1)
    x = torch.randn(shape, device="cuda")
    expected: Any = runtimes["own"](x)
    wanted = expected.contiguous()
    results = {dtype: torch.empty(wanted.shape, dtype=dtype, device="cuda") for dtype in (torch.float16, torch.float32)}
    classes = torch.empty((shape[0], *shape[2:]), dtype=torch.uint8, device="cuda")
    different: dict[str, int] = {}
    for dtype, y in results.items():
        run.enqueue(x, y)
        different[f"to {dtype}"] = _different(y.half(), wanted)
    run.enqueue(x, classes)
    different["classes"] = int((classes != wanted.argmax(1)).sum())
    y = results[torch.float16]
    half: Any = runtimes["own"](x.half())
    run.enqueue(x.half(), y)
    different["from float16"] = _different(y, half.contiguous())
    hosted = torch.empty(wanted.shape, dtype=torch.float16)
    run.host(x.cpu(), hosted)
    different["host"] = _different(hosted, wanted.cpu())
    y.zero_()
    captured(lambda: run.enqueue(x, y))()
    different["graph"] = _different(y, wanted)
    usual: Any = runtimes["torch"](x)
    if kind == "digits":
        different["usual runtime"] = _different(usual.contiguous(), wanted)
    same = (usual.argmax(1) == wanted.argmax(1)).float().mean()
    return {"values": wanted.numel(), "different": different, "same class as with cuDNN": round(float(same), 6)}


def _different(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def of_example(program: Path, model: Path, kernels: Path, network: PackedNetwork, size: tuple[int, ...]) -> int:
    """Pixels in which the mask of the C program differs from the Python runtime's classes."""
    (height, width), folder = size, model.parent
    pixels = np.random.default_rng(2).integers(0, 256, (height, width, 3), np.uint8)
    photo, mask = folder / "photo.ppm", folder / "mask.pgm"
    photo.write_bytes(b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes())
    subprocess.run([program, model, kernels, photo, mask], check=True, stdout=subprocess.DEVNULL)
    found = np.frombuffer(mask.read_bytes()[-height * width :], np.uint8).reshape(height, width)
    image = (pixels / np.float32(255) - np.float32(MEAN)) / np.float32(STD)
    logits: Any = network(torch.from_numpy(image).permute(2, 0, 1)[None].cuda())
    return int((logits[0].argmax(0).cpu().numpy() != found).sum())


@torch.inference_mode()
def times_of(run: Run, runtimes: dict[str, PackedNetwork], shape: tuple[int, ...]) -> dict[str, Any]:
    """Milliseconds of a forward pass from FP16 to FP16."""
    x = torch.randn(shape, device="cuda").half()
    y = torch.empty((shape[0], len(CLASSES), *shape[2:]), dtype=torch.float16, device="cuda")
    calls: dict[str, Callable[[], Any]] = {"library": lambda: run.enqueue(x, y)}
    calls |= {f"python, {name}": (lambda network=network: network(x)) for name, network in runtimes.items()}
    return {
        name: {"launched_ms": round(median_ms(call), 4), "graph_ms": round(median_ms(captured(call)), 4)}
        for name, call in calls.items()
    }


if __name__ == "__main__":
    main()
