"""What video pipelines of NVIDIA need around one exported model: DeepStream's nvinfer plugin, Holoscan's operators.

    OUT/NAME.onnx                                    pixels 0..255 in FP32 in, normalised inside
    DeepStream: nvinfer.txt, labels.txt, segmentation_parser.cpp        out: INT32 [N, H, W], the class of each pixel
    Holoscan:   segment.yaml, segment.py                                out: logits FP32 [1, classes, H, W]

nvinfer scales all channels by one factor, so that a standard deviation for each channel cannot be said in its file:
the network normalises. Both run engines of the full TensorRT, which is built on the device, with FP4 on Blackwell:
`fp4deploy build OUT/NAME.onnx --backend tensorrt`. Source of the keys: NVIDIA DeepStream documentation, "Gst-nvinfer";
NVIDIA Holoscan SDK user guide, "Bring Your Own Model".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import yaml

from fp4deploy.data.palette import colours
from fp4deploy.errors import InputError
from fp4deploy.export.lowering.interface import Interface, with_interface
from fp4deploy.export.onnx.canonical import metadata_object, read_onnx
from fp4deploy.export.onnx.size import has_open_size
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.naming import model_stem
from fp4deploy.system.files import replace_folder, require_own_folder
from fp4deploy.tasks import task_of

HERE = Path(__file__).parent
Files = dict[str, bytes]


def write_pipeline(path: Path, out: Path, form: str, most: int = 8) -> Path:
    """Write the folder of an exported semantic model for "deepstream" or "holoscan"; another folder is never replaced.

    Args:
        path: an .onnx file that `fp4deploy export` wrote, of one image size.
        most: frames of one batch (DeepStream; Holoscan has one).

    Raises:
        InputError: another file or task, or a folder that holds what this function did not write.
    """
    model = read_onnx(path)
    fields = metadata_object(model, CARD_KEY)
    if fields is None:
        raise InputError(f"{path} has no fp4deploy model card. Write it with: fp4deploy export")
    card = ModelCard.from_json(next(each.value for each in model.metadata_props if each.key == CARD_KEY), str(path))
    if not task_of(card).at_input_size or card.volume is not None or has_open_size(model):
        raise InputError(
            f"--format {form} is for semantic models of images of one size, and {path} is another one. Export it with "
            "--size HxW, or predict with: fp4deploy predict"
        )
    wanted, files = FORMS[form]
    changed = with_interface(model, wanted, fields)
    changed.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT  # numbers of bytes: the Cast stays
    name = model_stem(path)
    require_own_folder(out)
    with replace_folder(out) as folder:
        onnx.save(changed, folder / f"{name}.onnx")
        for inner, content in files(name, card, changed, most).items():
            (folder / inner).write_bytes(content)
    return out


def _deepstream(name: str, card: ModelCard, model: onnx.ModelProto, most: int) -> Files:
    labels = [" ".join(label.split()).replace(";", ",") for label in card.class_names]
    settings = {
        "gpu-id": 0,
        "onnx-file": f"{name}.onnx",
        "model-engine-file": f"{name}.plan",
        "labelfile-path": "labels.txt",
        "batch-size": most,
        "infer-dims": f"3;{card.height};{card.width}",
        "net-scale-factor": 1.0,  # the network normalises
        "offsets": "0;0;0",
        "model-color-format": 0,  # RGB
        "maintain-aspect-ratio": 0,
        "network-type": 2,  # semantic segmentation
        "num-detected-classes": card.channels,
        "segmentation-threshold": 0.0,
        "output-blob-names": model.graph.output[0].name,
        "parse-segmentation-func-name": "Fp4deploySegmentation",
        "custom-lib-path": "libsegmentation_parser.so",
        "network-mode": 2,  # FP16, if nvinfer builds an engine itself, of a file without FP4
        "process-mode": 1,  # whole frames
        "gie-unique-id": 1,
    }
    build = f"fp4deploy build {name}.onnx --backend tensorrt --max-batch {most} --out {name}.plan"
    lines = [
        f"# Build the engine on the device: {build}",
        "[property]",
        *(f"{key}={value}" for key, value in settings.items()),
        "",
    ]
    return {
        "nvinfer.txt": "\n".join(lines).encode(),
        "labels.txt": (";".join(labels) + "\n").encode(),
        "segmentation_parser.cpp": (HERE / "segmentation_parser.cpp").read_bytes(),
    }


def _holoscan(name: str, card: ModelCard, model: onnx.ModelProto, most: int) -> Files:
    palette = [(*(value / 255 for value in colour), 0.6) if colour else (0.0,) * 4 for colour in _colours(card)]
    frame, logits = model.graph.input[0].name, model.graph.output[0].name
    document = {
        "frame": {
            "in_dtype": "rgb888",
            "out_dtype": "float32",
            "out_tensor_name": frame,
            "resize_width": card.width,
            "resize_height": card.height,
            "scale_min": 0.0,
            "scale_max": 255.0,
        },
        "inference": {
            "backend": "trt",
            "is_engine_path": True,
            "model_path_map": {"segment": f"{name}.plan"},
            "pre_processor_map": {"segment": [frame]},
            "inference_map": {"segment": [logits]},
            "in_tensor_names": [frame],
            "out_tensor_names": [logits],
        },
        "classes": {"in_tensor_name": logits, "network_output_type": "softmax", "data_format": "nchw"},
        "screen": {
            "color_lut": [list(map(float, colour)) for colour in palette],
            "tensors": [
                {"name": "", "type": "color", "priority": 0},
                {"name": "out_tensor", "type": "color_lut", "priority": 1},
            ],
        },
    }
    heading = f"# Build the engine on the device: fp4deploy build {name}.onnx --backend tensorrt --out {name}.plan\n"
    return {
        "segment.yaml": (heading + yaml.safe_dump(document, sort_keys=False)).encode(),
        "segment.py": (HERE / "holoscan_app.py").read_bytes(),
    }


def _colours(card: ModelCard) -> list[tuple[int, int, int] | None]:
    return colours(card.class_names or ("",) * card.channels, card.background)


FORMS: dict[str, tuple[Interface, Callable[[str, ModelCard, onnx.ModelProto, int], Files]]] = {
    "deepstream": (Interface("uint8", "nchw", "argmax"), _deepstream),
    "holoscan": (Interface("uint8", "nhwc", "fp32"), _holoscan),
}
