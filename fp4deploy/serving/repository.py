"""A model repository of Triton Inference Server for one exported model.

    REPOSITORY/NAME/config.pbtxt, labels.txt, 1/model.onnx or 1/model.plan    tensors in, logits out
    REPOSITORY/NAME_preprocess/                                                encoded image -> tensor and size
    REPOSITORY/NAME_postprocess/                                               logits and size -> mask as PNG
    REPOSITORY/NAME_segment/                                                   all three: image in, mask out

    REPOSITORY/NAME_packed/config.pbtxt, 1/model.py, 1/model.fp4               of a packed network: pixels in, masks or
                                                                               objects out, by fp4deploy itself

The first axis is the batch that the server fills by itself (dynamic batching). An instance model gets no ensemble: its
objects are decoded by fp4deploy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import onnx

from fp4deploy.data.palette import colours, png_palette
from fp4deploy.data.sample import class_type
from fp4deploy.errors import InputError
from fp4deploy.export.engine.build import open_plan
from fp4deploy.export.onnx.canonical import read_onnx
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.models.heads import InstanceHead
from fp4deploy.naming import model_stem
from fp4deploy.packed import read_packed
from fp4deploy.system.files import replace_folder, require_own_folder
from fp4deploy.tasks import task_of

HERE = Path(__file__).parent
BACKENDS = {".onnx": "onnxruntime", ".plan": "tensorrt"}


@dataclass(frozen=True)
class Served:
    """What a repository is made of: one model file, and the contract of its tensors."""

    path: Path
    card: ModelCard
    channels: int
    half: bool
    most: int
    content: bytes

    @property
    def kind(self) -> str:
        return "TYPE_FP16" if self.half else "TYPE_FP32"


def write_repository(path: Path, out: Path, name: str | None = None, most: int = 8) -> list[Path]:
    """Write the repository of an exported model; folders that this function wrote are replaced, and no others.

    Args:
        path: an .onnx file that `fp4deploy export` wrote (a canonical one is decomposed first, because ONNX Runtime has
            no FP4), a .plan of the full TensorRT with its ledger, or a packed network.
        out: the repository; other models in it stay.
        name: of the model; the file's stem by default, and of a packed network `_packed` behind it.
        most: largest batch of the server; a plan's own largest batch is the limit.

    Returns:
        The folders of the models.

    Raises:
        InputError: a file of another kind, without a model card, an engine that the server has no backend for, or a
            folder that cannot be written, or that holds what this function did not write; then none is.
    """
    path = Path(path)
    packed = path.suffix == ".fp4"
    name = name or model_stem(path).replace(".", "_") + "_packed" * packed
    if not name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"'{name}' is no name of a model: letters, digits, - and _ are.")
    served = _served(path, most)
    if served.card.volume is not None:
        raise InputError(f"{path} is of volumes, and a model repository serves images. Predict with: fp4deploy predict")
    folders = {name: (_packed if packed else _network)(name, served)}
    if not packed and not task_of(served.card).counts_objects:
        folders |= {
            f"{name}_preprocess": _preprocess(name, served),
            f"{name}_postprocess": _postprocess(name, served),
            f"{name}_segment": _ensemble(name, served),
        }
    for folder in folders:
        require_own_folder(Path(out) / folder)
    for folder, files in folders.items():
        with replace_folder(Path(out) / folder) as temporary:
            for inner, content in files.items():
                target = temporary / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    return [Path(out) / folder for folder in folders]


def _served(path: Path, most: int) -> Served:
    if path.suffix == ".onnx":
        return _onnx(path, most)
    if path.suffix == ".plan":
        return _plan(path, most)
    if path.suffix == ".fp4":
        return _fp4(path, most)
    raise InputError(f"{path} cannot be served: .onnx, .plan and .fp4 files are. Write one with: fp4deploy export")


def _onnx(path: Path, most: int) -> Served:
    model = read_onnx(path)
    card = next((entry.value for entry in model.metadata_props if entry.key == CARD_KEY), None)
    if card is None:
        raise InputError(f"{path} has no fp4deploy model card. Write it with: fp4deploy export")
    if model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16:
        model = to_portable(model)
    parsed = ModelCard.from_json(card, str(path))
    return Served(path, parsed, parsed.channels, False, most, model.SerializeToString(deterministic=True))


def _fp4(path: Path, most: int) -> Served:
    file = read_packed(path)
    if file.card is None or len(file.graph.inputs) != 1:
        raise InputError(
            f"{path} cannot be served: it has no model card, which says how images are read, or takes other inputs."
        )
    return Served(path, file.card, file.card.channels, False, most, path.read_bytes())


def _plan(path: Path, most: int) -> Served:
    ledger = open_plan(path)
    if ledger.backend != "tensorrt":
        raise InputError(
            f"{path} is an engine of {ledger.backend}, for which Triton Inference Server has no backend. Serve the "
            ".onnx file, or build with: fp4deploy build --backend tensorrt"
        )
    card = ledger.model_card()
    if card is None:
        raise InputError(f"{path} was built of an ONNX file without a model card. Write it with: fp4deploy export")
    if ledger.interface is not None or ledger.sizes is not None or ledger.options or ledger.batch[0] > 1:
        raise InputError(
            f"{path} was built with another interface, a range of image sizes, a smallest batch or options, which the "
            "model repository does not describe. Build it again without them: fp4deploy build --backend tensorrt"
        )
    return Served(path, card, card.channels, True, min(most, ledger.batch[2]), path.read_bytes())


Files = dict[str, bytes]


def _network(name: str, served: Served) -> Files:
    suffix = served.path.suffix
    backend = BACKENDS[suffix]
    card = served.card
    config = f"""name: "{name}"
backend: "{backend}"
max_batch_size: {served.most}
input [
  {{ name: "image" data_type: {served.kind} dims: [ 3, {card.height}, {card.width} ] }}
]
output [
  {{ name: "logits" data_type: {served.kind} dims: [ {served.channels}, {card.height}, {card.width} ]
    label_filename: "labels.txt" }}
]
dynamic_batching {{ }}
"""
    return {"config.pbtxt": config.encode(), "labels.txt": _labels(card), f"1/model{suffix}": served.content}


def _packed(name: str, served: Served) -> Files:
    card = served.card
    kind = f"TYPE_{class_type(card.channels if card.head is None else card.head.classes).__name__.upper()}"
    masks = f'  {{ name: "MASK" data_type: {kind} dims: [ -1, -1 ] label_filename: "labels.txt" }}'
    found = '  { name: "FOUND" data_type: TYPE_STRING dims: [ 1 ] }'
    has_masks = card.head is None or isinstance(card.head, InstanceHead)
    outputs = ",\n".join([masks] * has_masks + [found] * (card.head is not None))
    config = f"""name: "{name}"
backend: "python"
max_batch_size: {served.most}
input [
  {{ name: "FRAMES" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }}
]
output [
{outputs}
]
instance_group [ {{ kind: KIND_MODEL }} ]
dynamic_batching {{ }}
{_parameters({"tile": False, "min_score": 0.0})}"""
    code = (HERE / "packed_model.py").read_bytes()
    return {
        "config.pbtxt": config.encode(),
        "labels.txt": _labels(card),
        "1/model.py": code,
        "1/model.fp4": served.content,
    }


def _labels(card: ModelCard) -> bytes:
    return "".join(f"{' '.join(label.split())}\n" for label in card.class_names).encode()  # one line each


def _preprocess(name: str, served: Served) -> Files:
    card = served.card
    given = {"height": card.height, "width": card.width, "mean": card.mean, "std": card.std, "half": served.half}
    config = f"""name: "{name}_preprocess"
backend: "python"
max_batch_size: {served.most}
input [
  {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }}
]
output [
  {{ name: "image" data_type: {served.kind} dims: [ 3, {card.height}, {card.width} ] }},
  {{ name: "SIZE" data_type: TYPE_INT32 dims: [ 2 ] }}
]
{_parameters(given)}"""
    return {"config.pbtxt": config.encode(), "1/model.py": (HERE / "preprocess.py").read_bytes()}


def _postprocess(name: str, served: Served) -> Files:
    card = served.card
    palette = png_palette(colours(card.class_names or ("",) * served.channels, card.background))
    config = f"""name: "{name}_postprocess"
backend: "python"
max_batch_size: {served.most}
input [
  {{ name: "logits" data_type: {served.kind} dims: [ {served.channels}, {card.height}, {card.width} ] }},
  {{ name: "SIZE" data_type: TYPE_INT32 dims: [ 2 ] }}
]
output [
  {{ name: "MASK" data_type: TYPE_STRING dims: [ 1 ] }}
]
{_parameters({"palette": palette})}"""
    return {"config.pbtxt": config.encode(), "1/model.py": (HERE / "postprocess.py").read_bytes()}


def _ensemble(name: str, served: Served) -> Files:
    config = f"""name: "{name}_segment"
platform: "ensemble"
max_batch_size: {served.most}
input [
  {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }}
]
output [
  {{ name: "MASK" data_type: TYPE_STRING dims: [ 1 ] }}
]
ensemble_scheduling {{
  step [
    {{
      model_name: "{name}_preprocess" model_version: -1
      input_map {{ key: "IMAGE" value: "IMAGE" }}
      output_map {{ key: "image" value: "image" }}
      output_map {{ key: "SIZE" value: "SIZE" }}
    }},
    {{
      model_name: "{name}" model_version: -1
      input_map {{ key: "image" value: "image" }}
      output_map {{ key: "logits" value: "logits" }}
    }},
    {{
      model_name: "{name}_postprocess" model_version: -1
      input_map {{ key: "logits" value: "logits" }}
      input_map {{ key: "SIZE" value: "SIZE" }}
      output_map {{ key: "MASK" value: "MASK" }}
    }}
  ]
}}
"""
    return {"config.pbtxt": config.encode(), "1/.keep": b""}


def _parameters(values: dict[str, object]) -> str:
    """Parameters, each JSON in a string."""
    lines = (
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(json.dumps(value))} }} }}\n'
        for key, value in values.items()
    )
    return "".join(lines)
