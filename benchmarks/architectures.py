"""What becomes of many architectures: from `prepare` to an engine and a packed network, one row each.

    python -m benchmarks.architectures --json benchmarks/results/architectures_cpu.json
    python -m benchmarks.architectures --only unet:0.25 --only monai:BasicUNet --no-engine
    python -m benchmarks.architectures --only monai:UNet --args '{"channels": [16, 32, 64], "strides": [2, 2]}'
    python -m benchmarks.architectures --only net.py:build --size 64x64
    python -m benchmarks.architectures --size 16x32x32 --no-engine --json FILE
    python -m benchmarks.architectures --engines --json benchmarks/results/architectures_cpu.json
    python -m benchmarks.architectures --engines --size 16x32x32 --json FILE
    python -m benchmarks.architectures --add --only timm:davit_tiny --json benchmarks/results/architectures_cpu.json

| stage | what it shows |
|---|---|
| prepare | an epoch in full precision, then `fp4deploy.prepare` and `calibrate`: how many layers are in FP4 |
| train | an epoch of quantisation-aware training: loss and gradients finite, loss of the first and the last step |
| canonical | the ONNX file with Q/DQ nodes; `verify`: argmax equal to torch, or layer by layer where FP4 amplifies |
| portable | the file in standard operators, run by plain ONNX Runtime; argmax of torch, relative distance of logits |
| engine | TensorRT-RTX for SM120, `--conv gemm`: FP4 share of the multiply-accumulates, and layers that fell back |
| packed | the `.fp4` file run by this project on the CPU; argmax equal to torch, and its gate |

`--no-engine` leaves the engines out, for a machine without TensorRT-RTX; `--engines` then builds them, of untrained
networks, on another, and adds them to the rows of the file: an engine's layers do not depend on the weights. `--add`
measures the networks of `--only` and puts their rows into the file, which keeps the others.

Stages are independent: what one refuses is recorded with its message, and the next is tried. Networks learn a few
generated scenes for two epochs, so nothing here is an accuracy, and many pixels are near a tie of two classes: FP4 then
turns last bits into other classes, and the comparison with reference inputs decides; a network that has learned one
class by then has the same argmax everywhere, and only the logits' distance says something. Nothing runs on a GPU.

With a size of three axes networks are those of `VOLUMES`, over volumes with ellipsoids of two classes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.data import IGNORE, EvalTransform, generate_shapes, open_dataset
from fp4deploy.errors import Fp4DeployError
from fp4deploy.export import to_portable
from fp4deploy.export.onnx.session import portable_session
from fp4deploy.export.verify.packed import require_packed, verify_packed
from fp4deploy.export.verify.tensors import call
from fp4deploy.models import build_model, parse_spec
from fp4deploy.models.spec import name_model
from fp4deploy.models.volumes import NetworkInput
from fp4deploy.packed.describe import describe_packed
from fp4deploy.qat import deployed
from fp4deploy.requirements import ZOO

SIZE = (64, 64)
SCENES = 8  # to learn; as many steps as fours of them
BATCH = 4
CLASSES = 4  # of the networks whose engines are built alone
SECONDS = 900  # most for one architecture
ARCHITECTURES: dict[str, dict[str, Any]] = {  # spec -> arguments
    "unet:0.25": {},
    "smp:Unet/resnet34": {},
    "smp:DeepLabV3Plus/resnet18": {},
    "monai:BasicUNet": {},
    "smp:Segformer/mit_b0": {},
    "torchvision:lraspp_mobilenet_v3_large": {},
    "timm:convnext_atto": {},
    "smp:FPN/resnet18": {},
    "smp:PSPNet/resnet18": {},
    "monai:SegResNet": {},
    "timm:mobilenetv3_small_100": {},
    "torchvision:deeplabv3_mobilenet_v3_large": {},
    "monai:AttentionUnet": {"channels": [16, 32, 64], "strides": [2, 2]},
    "monai:DynUNet": {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
    "timm:resnet18": {},
    "benchmarks/own_networks.py:enet": {},
    "benchmarks/own_networks.py:bisenetv2": {},
    "smp:Linknet/resnet18": {},
    "monai:UNet": {"channels": [16, 32, 64], "strides": [2, 2]},
    "timm:davit_tiny": {},
}
VOLUMES: dict[str, dict[str, Any]] = {  # over three axes
    "unet:0.25": {},
    "monai:BasicUNet": {},
    "monai:DynUNet": {  # nnU-Net's network, for thick slices
        "kernel_size": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        "upsample_kernel_size": [[1, 2, 2], [2, 2, 2]],
    },
    "monai:SegResNet": {},
    "monai:UNet": {"channels": [16, 32, 64], "strides": [2, 2]},
    "monai:AttentionUnet": {"channels": [16, 32, 64], "strides": [2, 2]},
}
UNTUNED: dict[str, dict[str, Any]] = {  # run once, for the table: no code was changed for them
    "smp:UPerNet/resnet18": {},
    "timm:efficientnet_b0": {},
    "timm:regnetx_002": {},
}


def measure(
    text: str,
    arguments: dict[str, Any],
    engine: bool = True,
    size: tuple[int, ...] = SIZE,
    scenes: int = SCENES,
    packed: bool = True,
) -> dict[str, Any]:
    """The row of one architecture: a dict a stage, with "error" where the stage was refused."""
    row: dict[str, Any] = {"model": text, "arguments": arguments}
    torch.manual_seed(0)
    name_model(text)
    with tempfile.TemporaryDirectory() as folder:
        made = _scenes(Path(folder) / "scenes", size, scenes) if len(size) == 2 else _volumes(size, scenes)
        batches, images, classes = made
        spec = parse_spec(text, arguments)
        model: Any = _stage(row, "build", lambda: build_model(spec, classes, inputs=_inputs(size)))
        if model is None or _stage(row, "prepare", lambda: _prepare(model, batches)) is None:
            return row
        _stage(row, "train", lambda: _train(model, batches, 2e-4))
        model.eval()
        canonical = Path(folder) / "model.onnx"
        written = _stage(row, "canonical", lambda: _canonical(model, images, canonical))
        if written is not None:
            _stage(row, "portable", lambda: _portable(model, images, canonical))
            if engine:
                _stage(row, "engine", lambda: _engine(canonical))
        if packed:
            _stage(row, "packed", lambda: _packed(model, images, Path(folder) / "model.fp4"))
    return row


def measure_engine(text: str, arguments: dict[str, Any], size: tuple[int, ...] = SIZE) -> dict[str, Any]:
    """The stage `engine` alone, of an untrained network."""
    row: dict[str, Any] = {"model": text, "arguments": arguments}
    torch.manual_seed(0)
    name_model(text)
    with tempfile.TemporaryDirectory() as folder:
        canonical = Path(folder) / "model.onnx"

        def export() -> None:
            inputs = _inputs(size)
            model = fd.prepare(build_model(parse_spec(text, arguments), CLASSES, inputs=inputs))
            fd.calibrate(model, torch.rand(BATCH, inputs.channels, *size))
            onnx.save(fd.export_graph(model.eval(), (inputs.channels, *size)), canonical)

        _stage(row, "engine", export)
        if "error" not in row["engine"]:
            _stage(row, "engine", lambda: _engine(canonical))
    return row


def _inputs(size: tuple[int, ...]) -> NetworkInput:
    """Images of three channels, or volumes."""
    return NetworkInput(size=size, spacing=None if len(size) == 2 else (2.0, 1.0, 1.0))


def _stage(row: dict[str, Any], name: str, run: Callable[[], Any]) -> Any:
    """Run a stage and record what it gives, its seconds or its error; None where it was refused."""
    start = time.perf_counter()
    try:
        found = run()
    except Fp4DeployError as error:
        row[name] = {"error": str(error)}
        return None
    except Exception as error:  # a row, not the end of the table
        row[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}", "traceback": True}
        return None
    numbers = found if isinstance(found, dict) else {}
    row[name] = {**numbers, "seconds": round(time.perf_counter() - start, 2)}
    return found


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def _scenes(folder: Path, size: tuple[int, int], count: int) -> tuple[Batches, torch.Tensor, int]:
    """Batches to learn, images to compare on (of FP16 values, which ONNX files read), and the number of classes."""
    generate_shapes(folder, train=count, val=2, size=max(32, *size), seed=0)
    transform, found = EvalTransform(*size), {}
    for split in ("train", "val"):
        dataset = open_dataset(folder, split)
        samples = [transform(dataset.load(index)) for index in range(len(dataset))]
        found[split] = [torch.stack(each) for each in zip(*samples, strict=True)]
    images, labels = found["train"]
    batches = list(zip(images.half().float().split(BATCH), labels.split(BATCH), strict=True))
    return batches, found["val"][0].half().float(), len(dataset.class_names)


def _volumes(size: tuple[int, ...], count: int) -> tuple[Batches, torch.Tensor, int]:
    """`_scenes` of volumes: two ellipsoids in each, whose class is the channel that they are bright in, in noise."""
    generator = torch.Generator().manual_seed(0)
    grids = torch.meshgrid(*(torch.linspace(0, 1, side) for side in size), indexing="ij")
    volumes, labels = 0.2 * torch.randn(count + 2, 3, *size, generator=generator), torch.zeros(count + 2, *size).long()
    for at in range(count + 2):
        for value in (1, 2):
            centre = (0.25 + 0.5 * torch.rand(3, generator=generator)).tolist()
            inside = sum(((axis - middle) / 0.22) ** 2 for axis, middle in zip(grids, centre, strict=True)) < 1
            labels[at][inside], volumes[at, value, inside] = value, 1.0
    volumes = volumes.half().float()
    return list(zip(volumes[:count].split(BATCH), labels[:count].split(BATCH), strict=True)), volumes[count:], 3


def _prepare(model: nn.Module, batches: Batches) -> dict[str, Any]:
    learned = _train(model, batches, 1e-3)
    plans = fd.layer_plan(model)
    fd.prepare(model)
    fd.calibrate(model, batches[:2])
    return {
        "layers": len(plans),
        "fp4_layers": sum(plan.precision == "FP4" for plan in plans),
        "parameters": sum(each.numel() for each in model.parameters()),
        "loss": learned["losses"][-1],
    }


def _train(model: nn.Module, batches: Batches, rate: float) -> dict[str, Any]:
    """One epoch."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses, finite = [], True
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels, ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        finite &= all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return {"steps": len(losses), "losses": [losses[0], losses[-1]], "finite": finite and losses[-1] < float("inf")}


def _canonical(model: nn.Module, images: torch.Tensor, path: Path) -> dict[str, Any]:
    graph = fd.export_graph(model, tuple(images.shape[1:]))
    onnx.save(graph, path)
    agreement = fd.verify(model, graph, images)
    return {
        "bytes": path.stat().st_size,
        "argmax": agreement.share,
        "with_reference_inputs": agreement.layerwise.share if agreement.layerwise else None,
        "passed": agreement.passed,
    }


def _portable(model: nn.Module, images: torch.Tensor, canonical: Path) -> dict[str, Any]:
    """The file that `export --portable` writes, in a session of plain ONNX Runtime."""
    path = canonical.with_suffix(".portable.onnx")
    onnx.save(to_portable(onnx.load(canonical)), path)
    session = portable_session(onnx.load(path))
    logits = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
    with torch.inference_mode():
        (expected,) = call(deployed(model), images)
    return {
        "bytes": path.stat().st_size,
        "argmax": _argmax(logits, expected),
        "distance": float((logits - expected).norm() / expected.norm()),
        "classes": len(expected.argmax(1).unique()),
    }


def _packed(model: nn.Module, images: torch.Tensor, path: Path) -> dict[str, Any]:
    result = fd.pack(model, path, example_inputs=images, verify=False)
    agreement = verify_packed(deployed(model), result.file, [images])
    _, _, rows, _ = describe_packed(result.file)
    found = {
        "bytes": path.stat().st_size,
        "argmax": agreement.share,
        "fp4": sum(each[2] == "FP4" for each in rows),
        "fp4_decoded": sum(each[2] == "FP4 decoded" for each in rows),
    }
    require_packed(agreement, path.name)
    return found | {"passed": True}


def _argmax(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.argmax(1) == other.argmax(1)).float().mean())


def _engine(canonical: Path) -> dict[str, Any]:
    built = fd.build_engine(canonical, canonical.with_suffix(".plan"), arch="sm120", conv="gemm")
    totals = built.ledger.totals()
    return {
        "bytes": built.size_bytes,
        "fp4_gemms": totals.fp4_gemms,
        "fp4_mac_share": totals.fp4_mac_share,
        "fp16_with_fp4_weights": totals.fp16_with_fp4_weights,
        "fallbacks": totals.fell_back,
    }


def _rows(names: list[str], options: argparse.Namespace, engine: bool) -> Iterator[dict[str, Any]]:
    """Rows as they are done, each from a process of its own: a crash, or a network without end, is a row as well.

    Processes are forked from this one, which has imported the libraries and computed nothing.
    """
    _import_libraries()
    context, waiting = multiprocessing.get_context("fork"), list(names)
    running: list[tuple[str, Any, Any, float]] = []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            text = waiting.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(theirs, text, options, engine), daemon=True)
            child.start()
            theirs.close()
            running.append((text, child, mine, time.monotonic()))
        for each in list(running):
            text, child, mine, start = each
            if mine.poll(0.2):
                with contextlib.suppress(EOFError):
                    yield mine.recv()
                    running.remove(each)
                    child.join()
                    continue
                child.join()
                yield {"model": text, "build": {"error": f"the process ended with {child.exitcode}", "traceback": True}}
                running.remove(each)
            elif time.monotonic() - start > options.seconds:
                child.kill()
                yield {"model": text, "build": {"error": f"not done after {options.seconds} s"}}
                running.remove(each)


def _child(answer: Any, text: str, options: argparse.Namespace, engine: bool) -> None:
    size = tuple(map(int, options.size.split("x")))
    known = VOLUMES if len(size) == 3 else {**ARCHITECTURES, **UNTUNED}
    given = json.loads(options.args) if options.args else known.get(text, {})
    if options.engines:
        answer.send(measure_engine(text, given, size))
    else:
        answer.send(measure(text, given, engine, size, options.scenes))


def _import_libraries() -> None:
    for library in ZOO.values():
        library.why_missing()


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    names = ("onnx", "onnxruntime", "tensorrt-rtx", "segmentation-models-pytorch", "torchvision", "monai", "timm")
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a model spec; repeatable")
    parser.add_argument("--args", help="arguments of the networks of --only, as a JSON object")
    parser.add_argument("--size", default=f"{SIZE[0]}x{SIZE[1]}", help="of the images, HxW, or of volumes, DxHxW")
    parser.add_argument("--scenes", type=int, default=SCENES, help="generated scenes of an epoch")
    parser.add_argument("--json", type=Path, help="write the table here, row by row")
    parser.add_argument("--no-engine", action="store_true", help="build no engine")
    parser.add_argument(
        "--engines", action="store_true", help="build engines alone, and add them to the rows of --json"
    )
    parser.add_argument("--add", action="store_true", help="keep the other rows of --json")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="most for one architecture")
    return parser.parse_args()


def _add_engine(path: Path, row: dict[str, Any]) -> None:
    table = json.loads(path.read_text())
    table["engines"] = {
        "command": " ".join(["python -m benchmarks.architectures", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU used",
        "versions": _versions(),
    }
    for each in table["rows"]:
        if each["model"] == row["model"]:
            each["engine"] = row["engine"]
    path.write_text(json.dumps(table, indent=1) + "\n")


def _kept(table: dict[str, Any], names: list[str], command: str) -> dict[str, Any]:
    """The table without the rows that are made again, and with the command that makes them."""
    if command not in table["command"]:
        table["command"] += f"; {command}"
    table["rows"] = [each for each in table["rows"] if each["model"] not in names]
    return table


def main() -> None:
    options = _options()
    size = list(map(int, options.size.split("x")))
    order = [*VOLUMES] if len(size) == 3 else [*UNTUNED, *ARCHITECTURES]
    names = options.only or order
    engine = not options.no_engine and find_spec("tensorrt_rtx") is not None
    table: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.architectures", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU used",
        "versions": _versions(),
        "size": size,
        "scenes": options.scenes,
        "untuned": [text for text in names if text in UNTUNED],
        "rows": [],
    }
    if options.add and options.json:
        table = _kept(json.loads(options.json.read_text()), names, str(table["command"]))
    for row in _rows(names, options, engine):
        if options.engines:
            print(json.dumps(row), flush=True)
            if options.json:
                _add_engine(options.json, row)
            continue
        table["rows"].append(row)
        table["rows"].sort(key=lambda each: order.index(each["model"]) if each["model"] in order else len(order))
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
