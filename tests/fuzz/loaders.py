"""Every kind of file that fp4deploy reads: seeds that are read without an error, and what reads them.

A loader also uses what it accepted: a checkpoint is loaded into its network, a packed network answers an image with
finite numbers of the stated shape, a dataset draws its masks.
"""

from __future__ import annotations

import dataclasses
import io
import json
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import yaml
from onnx import helper, numpy_helper
from PIL import Image

from fp4deploy.audit.report import audit_file
from fp4deploy.bench.commands import recorded
from fp4deploy.bench.gate.baseline import find_baseline
from fp4deploy.bench.runtimes.ort import OrtRuntime
from fp4deploy.data import CocoDataset, check_dataset, generate_shapes, open_dataset
from fp4deploy.data.images import ImageError, read_class_ids, read_image
from fp4deploy.data.masks import class_values
from fp4deploy.errors import InputError
from fp4deploy.experiments.sweep.spec import load_sweep
from fp4deploy.export.ledger.ledger import Ledger, LedgerRow, load_ledger
from fp4deploy.export.lowering.lower import lower, read_buildable
from fp4deploy.export.onnx.layers import describe_onnx
from fp4deploy.instances import InstanceEvaluation, read_results
from fp4deploy.interop.modelopt import from_modelopt, read_modelopt
from fp4deploy.interop.onnx_network import read_network
from fp4deploy.models import ModelCard, build_unet, load_weights, read_card, save_checkpoint
from fp4deploy.models.build import network_for
from fp4deploy.models.card import CARD_KEY
from fp4deploy.models.checkpoint import network_of
from fp4deploy.models.initial import load_initial
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.plugins.aot import store
from fp4deploy.plugins.gemm.weight_cache import FP4WeightCache, fp4_quantize
from fp4deploy.plugins.runtime import cubin
from fp4deploy.report.figures.telemetry import read_snapshots
from fp4deploy.report.history import history
from fp4deploy.report.run_folder import read_run
from fp4deploy.runs import Run
from fp4deploy.system.files import digest_of
from fp4deploy.train.config import load_config
from fp4deploy.train.logging.jsonl_tracker import JsonlTracker, keep_epochs
from fp4deploy.train.state import Progress, read_progress, save_state
from tests.export.lowering.engine_graphs import CanonicalGraph
from tests.fuzz.datasets import dataset_loaders
from tests.fuzz.harness import Loader
from tests.fuzz.mutate import TOKENS, YAML_TOKENS, of_bytes, of_json, of_lines, of_safetensors, of_text, of_tree
from tests.fuzz.predicted import CARD, DETECTION, INSTANCE, of_onnx, predicted_loaders
from tests.fuzz.runs import run_loaders
from tests.interop.modelopt_network import network
from tests.interop.onnx_files import segmenter
from tests.interop.test_modelopt import FILE as MODELOPT_FILE
from tests.packed.small_networks import packed
from tests.plugins.aot.minimal_cubin import minimal_cubin

NVFP4 = dataclasses.replace(CARD, precision="nvfp4", recipe="nvfp4_qat", include=("*",))
CARDS = (CARD, NVFP4, INSTANCE, DETECTION)
PACKED_KEY, PACKED_SIGNED = "fp4deploy.packed", ("format", "version", "card", "graph")


def loaders(folder: Path) -> dict[str, Loader]:
    """All loaders, by name; seeds are made in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "shapes"
    generate_shapes(data, train=2, val=2, size=32, seed=0)
    annotations = (data / "annotations" / "instances_train2017.json").read_bytes()
    found = [
        Loader("card", "card.json", tuple(card.to_json().encode() for card in CARDS), of_json, _card),
        Loader("config", "run.yaml", _configs(), _of_yaml, lambda path: load_config(path)),
        Loader("sweep", "sweep.yaml", _sweeps(), _of_yaml, lambda path: load_sweep(path)),
        Loader("checkpoint", "best.safetensors", _checkpoints(folder), of_safetensors, _checkpoint),
        Loader("state", "state.safetensors", (_state(folder),), of_safetensors, read_progress),
        Loader("ledger", "unet.ledger.json", (_ledger(),), of_json, _use_ledger),
        Loader("baseline", "baseline.json", (_bench(),), of_json, lambda path: find_baseline(path, None)),
        Loader("metrics", "run/fp16/metrics.jsonl", (_metrics(),), of_lines, _use_metrics),
        Loader("telemetry", "run/fp16/telemetry.jsonl", (_telemetry(),), of_lines, _use_telemetry),
        Loader("report", "run/report.json", (_bench(),), of_json, _use_run),
        Loader("commands", "run/commands.jsonl", (_commands(),), of_lines, lambda path: recorded(Run(path.parent))),
        Loader("annotations", "data/annotations/instances_train2017.json", (annotations,), of_json, _data(data)),
        Loader("image", "photo.jpg", _images(), of_bytes, _image),
        Loader("results", "results.json", (_results(data),), of_json, _use_results(data)),
        Loader("kernel", "a.kernel", (_kernel(),), _of_kernel, _use_kernel),
        Loader("packed", "unet.fp4", _packed(folder), _of_packed, _use_packed),
        Loader("weight", "weight.safetensors", _weights(folder), of_safetensors, FP4WeightCache.load),
        Loader("onnx", "model.onnx", _graphs(), of_onnx, _use_onnx),
        Loader(
            "models",
            "run/models.json",
            (b'["fp16", "nvfp4"]\n',),
            of_json,
            lambda path: Run(path.parent).asked_models(),
        ),
        Loader("initial", "weights.pth", _initial(folder), of_bytes, _use_initial),
        Loader("account", "account.json", _accounts(), of_json, _use_account),
        Loader(
            "classes",
            "masks/classes.txt",
            (b"road\nsky\n\xc3\xa4\n",),
            of_text(TOKENS),
            lambda path: class_values(path.parent),
        ),
        Loader("served", "model.onnx", _served(), of_onnx, _use_served),
        Loader("modelopt", "model.pt", (MODELOPT_FILE.read_bytes(),), _of_containers, _use_modelopt),
        Loader("network", "model.onnx", _networks(), _of_network, _use_network),
    ]
    found += [*dataset_loaders(data), *run_loaders(data, _bench()), *predicted_loaders()]
    return {loader.name: loader for loader in found}


def _card(path: Path) -> object:
    card = ModelCard.from_json(path.read_bytes().decode("utf-8", errors="replace"))
    assert ModelCard.from_json(card.to_json()) == card
    return card.channels


def _of_yaml(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return of_text(YAML_TOKENS)(content, draw)
    try:
        return yaml.safe_dump(of_tree(_yaml(content), draw), allow_unicode=True).encode()
    except (yaml.YAMLError, UnicodeEncodeError, RecursionError):  # a value that YAML cannot write
        return of_bytes(content, draw)


@lru_cache
def _yaml(content: bytes) -> Any:
    return yaml.safe_load(content)


def _configs() -> tuple[bytes, ...]:
    whole = yaml.safe_dump(load_config().model_dump(mode="json"), sort_keys=False).encode()
    return whole, b"seed: 1\ntrain: {lr: 0.001, zoom: [0.5, 1.5], class_weights: {a: 2}}\nrecipe: nvfp4_qat\n"


def _sweeps() -> tuple[bytes, ...]:
    return (
        b"set: {train.epochs: 2}\nseeds: [0, 1]\nagainst: control\nvariants:\n  control: {model: fp16_control}\n"
        b"  qat: {model: nvfp4, set: {recipe: nvfp4_qat}}\n  other: {model: nvfp4, against: qat, note: text}\n",
    )


def _checkpoints(folder: Path) -> tuple[bytes, ...]:
    path = folder / "checkpoint.safetensors"
    found = []
    for card in (CARD, INSTANCE):
        for extra in (None, {"fp4deploy.epoch": "1"}):
            save_checkpoint(path, build_unet(card.channels, card.scale), card, extra)
            found.append(path.read_bytes())
    save_checkpoint(path, network_for(DETECTION), DETECTION)
    return (*found, path.read_bytes())


def _checkpoint(path: Path) -> object:
    card = read_card(path)
    model = network_of(path, card)
    load_weights(model, path)
    return model


def _state(folder: Path) -> bytes:
    path = folder / "state.safetensors"
    model = torch.nn.Linear(2, 2)
    counts = {"loss": 1.5, "batches": 2, "skipped": 0, "row": 1}
    progress = Progress(1, 2, 0.5, 3.0, {"a": 0.5, "b": None}, 0, 1, 4, 0.5, counts)
    save_state(path, model, torch.optim.Adam(model.parameters()), None, progress)
    return path.read_bytes()


def _ledger() -> bytes:
    row = LedgerRow("up.0", "Linear", "FP4", "FP4", "FP4", "FP4", "gemm", "", 100, False, ("k",), ("n",))
    card = json.loads(NVFP4.to_json())
    ledger = Ledger(
        "tensorrt-rtx", "1.7", "sm120", "auto", "build log", "unet.onnx", "0" * 64, "unet.plan", "1" * 64, 10, 0.5,
        (1, 1, 8), card, (row,), (),
    )  # fmt: skip
    return ledger.to_json().encode()


def _use_ledger(path: Path) -> object:
    ledger = load_ledger(path)
    ledger.model_card()
    return ledger.rows(), ledger.summary(), ledger.to_json()


def _bench() -> bytes:
    entry = {"path": "unet.onnx", "model": "nvfp4", "miou": 0.5, "split": "val", "data_sha256": "0" * 64,
             "per_class": {"a": 0.5}, "status": "ok",
             "latency_ms": {"p50": 1.0, "p90": 2.0, "p99": 3.0}, "size_bytes": 10, "sha256": "0" * 64}  # fmt: skip
    machine = {"python": "3.11", "platform": "Linux", "cpu": "x", "cores": 2, "gpus": [], "packages": {"torch": "2"}}
    counts = {"kind": "pixels", "classes": ["a"], "images": ["1.png", "2.png"], "lines": ["2/3/3", "-"]}
    return json.dumps({"created": "today", "artifacts": [entry, {**entry, "miou": None}], "evidence": [counts, None],
                       "environment": machine, "stages": [{"stage": "train", "seconds": 1.0}]}).encode()  # fmt: skip


def _metrics() -> bytes:
    line = {"epoch": 1, "step": 4, "loss": 1.0, "miou": 0.5, "per_class": {"a": 0.5, "b": None}, "images_per_s": 3.0}
    return b"".join(json.dumps({**line, "epoch": epoch}).encode() + b"\n" for epoch in (1, 2, 3))


def _use_metrics(path: Path) -> object:
    for epoch in history(Run(path.parents[1]), "fp16"):
        epoch.score("semantic")
    keep_epochs(path, 2)
    return len(history(Run(path.parents[1]), "fp16"))


def _telemetry() -> bytes:
    look = {"kind": "look", "step": 2, "epoch": 1, "values": {"loss": 1.0},
            "layers": {"up.0": {"weight": {"mean": 0.5, "sqnr_db": None}}},
            "codes": {"up.0": {"weight": list(range(16))}}}  # fmt: skip
    epoch = {"kind": "epoch", "step": 4, "epoch": 1, "values": {"miou": 0.5}}
    return b"".join(json.dumps(line).encode() + b"\n" for line in (look, {**look, "step": 4}, epoch))


def _use_telemetry(path: Path) -> object:
    found = read_snapshots(Run(path.parents[1]), "fp16")
    JsonlTracker(path).resume(2, 1)
    return found


def _commands() -> bytes:
    machine = json.loads(_bench())["environment"]
    return json.dumps({"at": "now", "command": "fp4deploy train", "environment": machine}).encode() + b"\n"


def _use_run(path: Path) -> object:
    (path.parent / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    return read_run(Run(path.parent)).model_dump_json()


def _data(data: Path) -> Callable[[Path], object]:
    images = {path.name: path.read_bytes() for path in (data / "train2017").iterdir()}

    def use(path: Path) -> object:
        root = path.parents[1]
        (root / "train2017").mkdir(exist_ok=True)
        for name, content in images.items():
            (root / "train2017" / name).write_bytes(content)
        check_dataset(root)
        open_dataset(root, "train").load(0)
        dataset = CocoDataset(root, "train", instances=True)
        dataset.ground_truth()
        return [dataset.load(index).mask.shape for index in range(len(dataset))]

    return use


def _images() -> tuple[bytes, ...]:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16, 3), dtype=np.uint8)
    found = []
    for form in ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF"):
        content = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(pixels).save(content, format=form, **({"exif": exif} if form in ("JPEG", "PNG") else {}))
        found.append(content.getvalue())
    palette = io.BytesIO()
    Image.fromarray(pixels[..., 0]).convert("P").save(palette, format="PNG")
    return (*found, palette.getvalue())


def _image(path: Path) -> object:
    try:
        read_class_ids(path)
    except ImageError as error:
        first = str(error)
    else:
        first = ""
    try:
        return read_image(path, (16, 24)), first
    except ImageError as error:
        raise InputError(str(error)) from error


def _results(data: Path) -> bytes:
    dataset = CocoDataset(data, "train", instances=True)
    truth = dataset.ground_truth()["annotations"]
    return json.dumps(
        [
            {
                "image_id": each["image_id"],
                "category_id": each["category_id"],
                "segmentation": {**each["segmentation"], "counts": each["segmentation"]["counts"].decode()},
                "score": 0.5,
            }
            for each in truth[:3]
        ]
    ).encode()


def _use_results(data: Path) -> Callable[[Path], object]:
    dataset = CocoDataset(data, "train", instances=True)
    truth = dataset.ground_truth()
    assert INSTANCE.head is not None
    evaluation = InstanceEvaluation(dataset, INSTANCE.head, truth)

    def use(path: Path) -> object:
        from fp4deploy.instances import average_precision

        return average_precision(evaluation.ground_truth, read_results(path))

    return use


def _kernel() -> bytes:
    code = minimal_cubin("scale_kernel", 90, 4, bytes(64))
    made = ("scale_kernel", ("*fp32", "i32"), (0,), 0, 4, 40, 0, (), "sm_90", "3.6.0", "0", "{}")
    return store.pack(store.Compiled(code, "// ptx", *made))  # type: ignore[arg-type]


def _of_kernel(content: bytes, draw: random.Random) -> bytes:
    head, _, rest = content.partition(b"\n")
    return of_bytes(content, draw) if draw.random() < 0.4 else of_json(head, draw) + b"\n" + rest


def _use_kernel(path: Path) -> object:
    found = store.unpack(path.read_bytes())
    if found is None:
        raise InputError("not a kernel file")
    assert found.num_warps == 4
    assert found.arch == "sm_90"
    try:
        cubin.resources(found.cubin)
    except ValueError:
        return None
    return found


def _packed(folder: Path) -> tuple[bytes, ...]:
    from fp4deploy.packed import write_packed

    found = []
    for recipe in ("nvfp4_qat", None):
        file = dataclasses.replace(packed(recipe, 0.125)[1], path=folder / "seed.fp4")
        write_packed(file)
        found.append((folder / "seed.fp4").read_bytes())
    return tuple(found)


def _of_packed(content: bytes, draw: random.Random) -> bytes:
    """Change the graph or the card and sign them again, as who wrote the file could; or change the file."""
    if draw.random() < 0.3:
        return of_safetensors(content, draw)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = json.loads(header["__metadata__"][PACKED_KEY])
    key = draw.choice(("graph", "graph", "graph", "card"))
    metadata[key] = json.dumps(of_tree(json.loads(metadata[key]), draw))
    metadata["sha256"] = digest_of(metadata[each].encode() for each in PACKED_SIGNED)
    header["__metadata__"][PACKED_KEY] = json.dumps(metadata)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _use_packed(path: Path) -> object:
    file = read_packed(path)
    size = (file.card.height, file.card.width) if file.card.height * file.card.width <= 1 << 16 else (32, 32)
    logits = PackedNetwork(file, torch.device("cpu"))(torch.zeros(1, 3, *size))
    assert logits.shape == (1, file.card.channels, *size), (logits.shape, size)
    assert logits.isfinite().all()
    return logits


def _weights(folder: Path) -> tuple[bytes, ...]:
    path = folder / "weight.safetensors"
    fp4_quantize(torch.randn(32, 32, generator=torch.Generator().manual_seed(0))).save(path)
    return (path.read_bytes(),)


def _graphs() -> tuple[bytes, ...]:
    graph = CanonicalGraph()
    x = graph.image(16, 16)
    x = graph.norm_relu("norm1", graph.conv("conv1", x, 32, fp4=False))
    x = graph.norm_relu("norm2", graph.conv("conv2", x, 32))
    x = graph.conv("head", graph.up("up", x, 16), 4, kernel=1, fp4=False)
    return (graph.model(x).SerializeToString(),)


def _use_onnx(path: Path) -> Any:
    model = read_buildable(path)
    facts = describe_onnx(path)
    audit_file(path)
    return facts, lower(model).layers


def _served() -> tuple[bytes, ...]:
    """One convolution, with a card."""
    weight = numpy_helper.from_array(np.ones((3, 3, 1, 1), np.float32), "w")
    kind, size = onnx.TensorProto.FLOAT, ["N", 3, 32, 32]
    image, logits = (helper.make_tensor_value_info(name, kind, size) for name in ("image", "logits"))
    nodes = [helper.make_node("Conv", ["image", "w"], ["y"]), helper.make_node("Relu", ["y"], ["logits"])]
    graph = helper.make_graph(nodes, "graph", [image], [logits], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {CARD_KEY: CARD.to_json()})
    return (model.SerializeToString(),)


def _use_served(path: Path) -> object:
    runtime = OrtRuntime(path, timeout=5)
    size = (
        (runtime.card.height, runtime.card.width) if runtime.card.height * runtime.card.width <= 1 << 16 else (16, 16)
    )
    return runtime.infer(np.zeros((1, 3, *size), np.float32)).shape


def _of_containers(content: bytes, draw: random.Random) -> bytes:
    """Change what a file of torch.save holds, or its bytes."""
    if draw.random() < 0.3:
        return of_bytes(content, draw)
    target = io.BytesIO()
    torch.save(of_tree(_containers(content), draw), target)
    return target.getvalue()


@lru_cache
def _containers(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def _use_modelopt(path: Path) -> object:
    return from_modelopt(network(), read_modelopt(path))


def _networks() -> tuple[bytes, ...]:
    return (segmenter().SerializeToString(), segmenter(size=(1, 3, 16, 16)).SerializeToString())


def _of_network(content: bytes, draw: random.Random) -> bytes:
    """Change the bytes, or operators, attributes, shapes and connections of a valid file."""
    if draw.random() < 0.3:
        return of_bytes(content, draw)
    graph = (model := onnx.load_from_string(content)).graph
    odd = (-(1 << 62), -2, -1, 0, 1, 2, 3, 7, 1000, 1 << 20, 1 << 31, 1 << 62)
    for _ in range(draw.choice((1, 1, 2, 3))):
        node, tensor = draw.choice(graph.node), draw.choice(graph.initializer)
        match draw.randrange(7):
            case 0:
                node.op_type = draw.choice(graph.node).op_type
            case 1 if node.attribute:
                attribute = draw.choice(node.attribute)
                attribute.i, attribute.f = draw.choice(odd), float(draw.choice(odd))
                attribute.ints[:] = [draw.choice(odd) if draw.random() < 0.5 else each for each in attribute.ints]
            case 2 if tensor.dims:
                tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(odd)
            case 3 if tensor.data_type == onnx.TensorProto.INT64 and 8 * sum(tensor.dims) == len(tensor.raw_data):
                values = numpy_helper.to_array(tensor).copy()
                values[draw.randrange(len(values))] = draw.choice(odd)
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
            case 4:
                node.input[draw.randrange(len(node.input))] = draw.choice((*draw.choice(graph.node).output, "", "x"))
            case 5:
                graph.node.remove(node)
            case _:
                tensor.data_type = draw.choice((1, 6, 7, 9, 10, 11, 16, 17, 23))
    return model.SerializeToString()


def _use_network(path: Path) -> object:
    network = read_network(path)
    channels, height, width = (size or 16 for size in network.input_shape)
    shape = (channels, min(height, 64), min(width, 64))
    if network.check_shapes(shape) > 1 << 22:
        return None
    with torch.no_grad():
        return network(torch.zeros(1, *shape))


def _initial(folder: Path) -> tuple[bytes, ...]:
    model, found = torch.nn.Linear(4, 4), []
    for content in (model.state_dict(), {"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}):
        for zipped in (True, False):
            torch.save(content, folder / "initial.pth", _use_new_zipfile_serialization=zipped)
            found.append((folder / "initial.pth").read_bytes())
    return tuple(found)


def _use_initial(path: Path) -> object:
    return load_initial(torch.nn.Linear(4, 4), path)


def _accounts() -> tuple[bytes, ...]:
    """Layer information of a TensorRT engine, a profile of ONNX Runtime."""
    tensor = {"Name": "a", "Dimensions": [4, 64], "Format/Datatype": "FP4"}
    layer = {"Name": "gemm_0", "LayerType": "gemm", "Inputs": [tensor], "Outputs": [tensor], "Constants": [tensor],
             "TacticName": "sm120_gemm", "Metadata": "[ONNX Layer: a]\x1f[ONNX Layer: b]"}  # fmt: skip
    called = {"op_name": "Conv", "provider": "CPUExecutionProvider", "input_type_shape": [{"float": [1, 3]}]}
    event = {"cat": "Node", "name": "conv_kernel_time", "dur": 12, "ts": 1, "ph": "X", "args": called}
    return json.dumps({"Layers": [layer, layer], "Bindings": ["x"]}).encode(), json.dumps([event, event]).encode()


def _use_account(path: Path) -> object:
    found = audit_file(path)
    return found.summary(), json.dumps([dataclasses.asdict(row) for row in found.rows], allow_nan=False)
