"""The C library on networks of all kinds: every byte beside the same plan played in Python, and times.

    python -m benchmarks.native_networks FOLDER --prepare sm90      (no GPU: files, bundles, plans, kernels)
    python -m benchmarks.native_networks FOLDER --json benchmarks/results/native_networks_h200.json

Both from the same tree, since kernels are looked up by the digest of their sources. The library is compiled from
`native/src` by g++. Random weights and small inputs (`tests/export/packable_networks.py`): a recorded plan is the same
list of launches at any size. Bytes are compared for input in FP32 and FP16 and output in FP32 and FP16. `relative`:
difference from `PackedNetwork`, whose GEMMs add in another order and which FP4 amplifies in networks of random weights;
`same_classes` says what it means. Milliseconds are medians of replayed CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.native_calls import Library
from fp4deploy.architecture import Architecture
from fp4deploy.bench.runtimes.packed import first_output
from fp4deploy.native import Gpu, record, write_bundle
from fp4deploy.packed import PackedNetwork, read_packed, write_packed
from fp4deploy.plugins.aot.build import build
from fp4deploy.plugins.aot.spec import Launch
from tests.export.packable_networks import NETWORKS, OWN_QUANTIZERS
from tests.native.replay import replay
from tests.packed.small_networks import packed
from tests.packed.test_writer import network

UNET = "UNet of scale 0.25"
TYPES = (torch.float32, torch.float16)


def prepare(name: str, folder: Path, gpu: Gpu) -> None:
    """The packed file of a network, its bundle, its plan and the kernels that it launches."""
    if name == UNET:
        file, shape = packed("nvfp4_qat", 0.25)[1], (2, 3, 64, 96)
    else:
        file, x = network(name)
        shape = tuple(x.shape)
    path = folder / f"{name.replace(' ', '_').replace(',', '')}.fp4"
    file = replace(file, path=path)
    write_packed(file)
    plan = record(file, gpu, shape)
    write_bundle(path.with_suffix(".kernels"), file, [plan], 1)
    launches = {each.kernel for stage in plan.stages.values() for each in stage if isinstance(each.kernel, Launch)}
    list(build([(each, gpu.arch.triton_name) for each in launches], 1, folder / "kernels"))
    path.with_suffix(".plan").write_bytes(pickle.dumps(plan))
    print(f"{name}: {len(plan.stages['body'])} launches", flush=True)


def compiled() -> Library:
    """The library, from the sources of this tree."""
    folder = Path(tempfile.mkdtemp())
    whole, built = folder / "whole.cpp", folder / "libfp4deploy.so"
    sources = sorted(Path("native/src").glob("*.cpp"))
    whole.write_text("".join(f'#include "{source.resolve()}"\n' for source in sources))
    flags = ("-std=c++17", "-O2", "-shared", "-fPIC", "-I", "native/include", '-DFP4D_VERSION="tree"', "-ldl")
    subprocess.run(["g++", str(whole), *flags, "-o", str(built)], check=True)
    return Library(built)


def measured(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each prepared network."""
    library = compiled()
    for path in sorted(folder.glob("*.fp4")):
        file, plan = read_packed(path), pickle.loads(path.with_suffix(".plan").read_bytes())
        row: dict[str, Any] = {"network": path.stem.replace("_", " "), "shape": list(plan.inputs[0]), "different": {}}
        run = library.network(path, path.with_suffix(".kernels")).run(*plan.inputs)
        x = torch.randn(plan.inputs[0], device="cuda")
        for given, dtype in product(TYPES, TYPES):
            outputs = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for shape in plan.outputs]
            run.enqueue(x.to(given), *outputs)
            expected = replay(plan, file, [x.to(given)], str(dtype).removeprefix("torch."))
            torch.cuda.synchronize()
            pairs = [(y.view(torch.uint8), z.view(torch.uint8)) for y, z in zip(outputs, expected, strict=True)]
            types = " -> ".join(str(each).removeprefix("torch.") for each in (given, dtype))
            row["different"][types] = sum(int((y != z).sum()) for y, z in pairs)
            row["bytes"] = sum(y.numel() for y, _ in pairs)
        python, half, first = PackedNetwork(file, "cuda"), x.half(), outputs[0].float()
        wanted = first_output(python(half)).float()
        row["relative"] = float((first - wanted).norm() / wanted.norm())
        row["same_classes"] = float((first.argmax(1) == wanted.argmax(1)).float().mean())
        row["library_ms"] = peers.median_ms(peers.captured(lambda run=run, out=outputs, x=half: run.enqueue(x, *out)))
        row["python_ms"] = peers.median_ms(peers.captured(lambda python=python, x=half: python(x)))
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prepare", type=Architecture.parse, metavar="ARCH")
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS, *OWN_QUANTIZERS, UNET])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.prepare:
        sms = 132 if arguments.prepare.number == 90 else 170
        gpu = Gpu(arguments.prepare, "NVIDIA H200" if sms == 132 else "", sms)
        for name in arguments.networks:
            prepare(name, arguments.folder, gpu)
        return
    os.environ.setdefault("FP4DEPLOY_KERNEL_PATH", str(arguments.folder / "kernels"))
    report: dict[str, Any] = {"command": peers.command(), "machine": peers.machine(), "rows": []}
    for row in measured(arguments.folder):
        print(json.dumps(row), flush=True)
        report["rows"].append(row)
        if arguments.json is not None:  # after each: a run that is cut off keeps what it has
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
