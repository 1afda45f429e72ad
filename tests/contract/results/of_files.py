"""Of files: what is found in folders, read, imported and written beside a model, and what servers do with images."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import onnx
import torch
from fp4deploy.cli.commands.stages.engine_formats import layers_in_fp8
from onnx import helper
from PIL import Image

from fp4deploy.data import check_dataset, import_coco, open_boxes, open_dataset, open_instances, summarise
from fp4deploy.data.cache import cache_dataset
from fp4deploy.data.folders import FolderDataset
from fp4deploy.data.images import ImageError, read_class_ids, read_image
from fp4deploy.data.importing import yolo
from fp4deploy.data.importing.anything import import_folder
from fp4deploy.data.importing.label_studio import coco_content
from fp4deploy.data.inspection.summary import shared_images
from fp4deploy.data.part import part_of, repeated
from fp4deploy.data.photos import usual_size
from fp4deploy.data.volumes import nifti
from fp4deploy.data.volumes.layout import read_layout
from fp4deploy.detection.decode import candidates, suppress
from fp4deploy.detection.evaluation import DetectionEvaluation
from fp4deploy.models import InstanceHead, ModelCard
from fp4deploy.models.checkpoint import _signed_parts
from fp4deploy.models.heads import ClassHead
from fp4deploy.native.plan import Constant, Gpu, Plan
from fp4deploy.packed.graph import Layer, weight_names
from fp4deploy.predict import timing
from fp4deploy.predict.choose import candidates as artefacts
from fp4deploy.predict.predictor import Predictor
from fp4deploy.predict.sources import find_sources
from fp4deploy.predict.write import predict_files
from fp4deploy.runs import Run
from fp4deploy.serving import pipelines, repository
from fp4deploy.system.files import digest_of
from fp4deploy.tasks import TASKS
from tests.contract.results.arguments import gathered, objects, picture, real
from tests.contract.results.of_pages import in_a_folder
from tests.contract.results.of_scores import HEADS, box_outputs
from tests.contract.results.plain import Answer, each, plain
from tests.data.test_label_studio import tasks
from tests.fuzz.edits import _coco
from tests.native.replay import constant_bytes
from tests.packed.small_networks import packed
from tests.predict.pointwise import Pointwise, card
from tests.volumes import write as write_nifti

BIRDS = ("ant", "bird", "cat")
ORIENTATIONS = range(1, 9)
CARD = ModelCard("fp16", 0.125, ("background", "c3", "c4"), 24, 40, (0.5,) * 3, (0.2,) * 3, True)


def _encoded(form: str, orientation: int = 1, mode: str = "RGB") -> bytes:
    target, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    more = {"exif": exif} if orientation > 1 else {}
    Image.fromarray(picture()).convert(mode).save(target, format=form, **more)
    return target.getvalue()


def _written(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(seed=number)).save(path)
    return paths


def sources(folder: Path) -> Any:
    _written(folder, "a.png", "a.jpg", "sub/a.png", "sub/b.png", "c.bmp")
    (folder / "v.mp4").touch()
    given = ([str(folder)], [str(folder / "sub"), str(folder / "c.bmp")], [str(folder / "*.png"), str(folder / "v.mp4")],
             [str(folder / "a.png"), str(folder / "a.jpg")])  # fmt: skip
    return [[(source.path.name, source.name, source.is_video) for source in find_sources(each)] for each in given]


def images(folder: Path) -> Any:
    found = []
    for form, mode in (("JPEG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("PNG", "P"), ("PNG", "1"), ("WEBP", "RGB")):
        for orientation in ORIENTATIONS if form == "JPEG" or mode == "L" else (1,):
            path = folder / f"x.{form.lower()}"
            path.write_bytes(_encoded(form, orientation, mode))
            for read in (read_image, read_class_ids):
                try:
                    found.append(plain(read(path)))
                except ImageError:
                    found.append("refused")
    return found


def served(folder: Path) -> Any:
    """The tensors that a server makes of images that lie on their side, in formats and modes, and masks of logits."""
    given = repository.Served(Path("m.onnx"), card(24, 16), 4, True, 8, b"")
    module: Any = types.ModuleType("triton_python_backend_utils")
    module.Tensor = lambda name, array: types.SimpleNamespace(name=name, array=array, as_numpy=lambda: array)
    module.InferenceResponse = lambda output_tensors=(), error=None: error or [t.array for t in output_tensors]
    module.TritonError = str
    module.get_input_tensor_by_name = lambda request, name: module.Tensor(name, request[name])
    backends = []
    for name, files in (("pre", repository._preprocess("n", given)), ("post", repository._postprocess("n", given))):
        for inner, content in files.items():
            (folder / name / inner).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / inner).write_bytes(content)
        with mock.patch.dict(sys.modules, triton_python_backend_utils=module):
            spec = importlib.util.spec_from_file_location(name, folder / name / "1" / "model.py")
            assert spec is not None and spec.loader is not None  # noqa: PT018
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        model = loaded.TritonPythonModel()
        text = (folder / name / "config.pbtxt").read_text()
        parameters = {
            line.split('"')[1]: {"string_value": json.loads(line[line.index("string_value: ") + 14 : line.rindex(" } }")])}
            for line in text.splitlines() if line.startswith("parameters")
        }  # fmt: skip
        model.initialize({"model_config": json.dumps({"parameters": parameters})})
        backends.append(model)
    before, after = backends
    contents = [_encoded("JPEG", orientation) for orientation in ORIENTATIONS] + [_encoded("PNG", 1, "RGBA")]
    ready = before.execute([{"IMAGE": np.array([[content]], np.object_)} for content in contents])
    masks = after.execute([{"logits": real(2, 4, 6, 8, scale=3).numpy(), "SIZE": np.array([[20, 31], [9, 5]])}])[0][0]
    return ready, [np.asarray(Image.open(io.BytesIO(each))) for each in masks.ravel()], [
        {name: content.decode() for name, content in files.items() if not name.endswith(".py") and not name.endswith(".onnx")}
        for files in (repository._network("n", given), repository._ensemble("n", given))
    ]  # fmt: skip


def pipeline(form: str) -> Any:
    image = helper.make_tensor_value_info("frames", onnx.TensorProto.FLOAT, [1, 3, 24, 16])
    logits = helper.make_tensor_value_info("classes", onnx.TensorProto.FLOAT, [1, 4, 24, 16])
    model = helper.make_model(helper.make_graph([], "g", [image], [logits]))
    interface, files = pipelines.FORMS[form]
    written = files("net", card(24, 16), model, 3)
    return interface, {name: text.decode() for name, text in written.items() if not name.endswith((".py", ".cpp"))}


def planes(recipe: str) -> Any:
    """What the C library computes of packed weights."""
    _, file = packed(recipe)
    layers = [node for node in file.graph.nodes if isinstance(node, Layer) and node.precision == "nvfp4"][:4]
    plan = Plan(Gpu(None, "", 1), (), (), 0, (), {})  # type: ignore[arg-type]
    made = [Constant("planes", node.layer, 0, (2 * file.tensors[weight_names(node)[0]].shape[-1],)) for node in layers]
    return [constant_bytes(plan, file, each) for each in made]


def dataset(folder: Path) -> Path:
    """A set in COCO's format with everything that a region may be; as boxes and objects, too."""
    for split in ("train", "val"):
        _written(folder, f"{split}2017/1.png", f"{split}2017/2.png")
        tree = _coco()
        for record in tree["images"]:
            record |= {"height": 21, "width": 34}
        for record in tree["annotations"][2:]:
            record["segmentation"] = {"size": [21, 34], "counts": [60, 44, 610]}
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(tree))
    return folder


def opened(folder: Path) -> Any:
    root = dataset(folder)
    sets = [open_dataset(root, "train"), open_instances(root, "train"), open_boxes(root, "val")]
    return (
        [[one.load(0), one.load(1), one.class_names] for one in sets],
        cast(Any, sets[1]).ground_truth(),
        usual_size(sets[0]),
    )


def described(folder: Path) -> Any:
    root = dataset(folder)
    return [(d.file, d.kind, d.annotation_id) for d in check_dataset(root)], [vars(s) for s in summarise(root)]


def uneven(layout: str) -> Any:
    """Splits that differ: images of nine sizes, one of them in both splits and twice in one; no "bird" to validate on."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tree: Any = {
            "images": [],
            "annotations": [],
            "categories": [{"id": 7 - n, "name": c} for n, c in enumerate(BIRDS)],
        }
        for split, shown in (("train", (0, 1, 2, 2, 0, 1)), ("val", (2, 0, 2))):
            of_split = {**tree, "images": [], "annotations": []}
            for number, shows in enumerate(shown):
                first = number in (1, 5)
                side = 9 if first else 7 + 2 * number + 5 * (split == "val")
                file = f"{number}.png"
                path = root / split / (BIRDS[shows] if layout == "folders" else "") / file
                path.parent.mkdir(parents=True, exist_ok=True)
                seed = 1 if first else side
                pixels = np.random.default_rng(seed).integers(0, 200, (side, side + 3, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(path)
                mask = np.zeros(pixels.shape[:2], np.uint8)
                mask[1:4, number % 3 : 5] = shows + 1
                mask[-1, -1] = 255
                if layout == "masks":
                    (root / "masks" / split).mkdir(parents=True, exist_ok=True)
                    Image.fromarray(mask).save(root / "masks" / split / file)
                box = [number % 3, 1, 5 - number % 3, 3]
                corners = [box[0], 1, 5, 1, 5, 4, box[0], 4]
                of_split["images"].append({"id": number, "file_name": file, "height": side, "width": side + 3})
                of_split["annotations"].append({"id": number, "image_id": number, "category_id": 7 - shows, "bbox": box,
                                                "area": 9, "iscrowd": 0, "segmentation": [corners]})  # fmt: skip
            if layout == "coco":
                (root / "annotations").mkdir(exist_ok=True)
                (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(of_split))
        if layout == "masks":
            (root / "classes.txt").write_text("\n".join(("background", *BIRDS)))
        opens = FolderDataset if layout == "folders" else open_dataset
        sets = [cache_dataset(opens(root, split, chosen), budget) for split in ("train", "val")
                for chosen, budget in ((None, 10**6), (BIRDS[:0:-1], 700))]  # fmt: skip
        every = [each.load(at) for each in sets for at in range(len(each))]
        seen = [type(each).__name__ for each in sets], [each.class_names for each in sets]
        return *seen, every, summarise(root), shared_images(root), check_dataset(root)


def volume_cases(folder: Path) -> Any:
    """Classes and cases by split, of more classes than digits, with the splits of the rule and of a file."""
    labels = {"ignore": 12, **{f"c{n}": n for n in range(11, 0, -1)}, "background": 0}
    content = {"channel_names": {"0": "T1", "1": "T2"}, "labels": labels, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(content))
    names = [f"case_{n}" for n in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)]
    for part, of_part in (("Tr", names), ("Ts", ["case_21", "case_3"])):
        files = [f"images{part}/{name}_000{n}.nii.gz" for name in of_part for n in (0, 1)]
        for file in (*files, *(f"labels{part}/{name}.nii.gz" for name in of_part[1:])):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).touch()
    found = []
    for listed in (None, {"train": ["case_9", "case_1"], "val": ["case_4"]}):
        if listed is not None:
            (folder / "splits_final.json").write_text(json.dumps([listed]))
        layout = read_layout(folder)
        cases = [
            [(c.name, [i.name for i in c.images], c.labels.name) for c in layout.cases(s)]
            for s in ("train", "val", "test")
        ]
        found.append((layout.classes, layout.ignored, layout.channels, cases))
    return found


def imported(folder: Path) -> Any:
    root = dataset(folder / "given")
    import_coco(
        {"train": root / "annotations" / "instances_train2017.json"},
        [root / "train2017"],
        folder / "out",
        val_share=0.5,
        seed=1,
    )
    return _contents(folder / "out")


def _contents(folder: Path) -> Any:
    return {
        path.relative_to(folder).as_posix(): path.read_text() if path.suffix in (".json", ".txt") else path.stat().st_size
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def of_yolo(folder: Path) -> Any:
    _written(folder, "train/images/a.jpg", "train/images/b.jpg", "valid/images/c.jpg")
    (folder / "data.yaml").write_text("names: {0: cat, 1: dog}\ntrain: ../train/images\nval: ../valid/images\n")
    for name, text in (
        ("train/labels/a.txt", "0 0.5 0.4 0.2 0.3\n1 0.1 0.2 0.9 0.25 0.4 0.8\n"),
        ("valid/labels/c.txt", "1 0.05 0.9 0.3 0.3\n"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return yolo.yolo_contents(folder)[0]


def of_masks(threshold: int | None, seed: int) -> Any:
    """Two classes by threshold, of three values; or by 0 and 255."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _written(folder, *(f"images/{name}.png" for name in "abcd"))
        (folder / "masks").mkdir()
        for number, name in enumerate("abcd"):
            found = 255 * (objects() == 1 + number % 2)
            values = found if threshold is None else found + 200 * (objects() == 4)
            Image.fromarray(values.astype(np.uint8)).save(folder / "masks" / f"{name}_mask.png")
        said: list[str] = []
        options = {"suffix": "_mask", "val_share": 0.25, "seed": seed, "threshold": threshold, "say": said.append}
        import_folder(None, folder / "images", folder / "masks", folder / "out", **options)  # type: ignore[arg-type]
        return said, [open_dataset(folder / "out", split).load(0) for split in ("train", "val")]


def read_back(folder: Path) -> Any:
    """Volumes of several axes and orders of axes, read, and masks written in their geometry."""
    found = []
    for number, (axes, shape) in enumerate(
        (("RAS", (5, 4, 3)), ("LPI", (5, 4, 3, 1)), ("SAR", (5, 4, 3, 1, 1)), ("PIL", (5, 4, 3)))
    ):
        path = folder / f"{number}.nii.gz"
        write_nifti(path, real(*shape).numpy(), axes, (3.0, 1.0, 0.5))
        voxels, grid = nifti.read_volume(path)
        labels = (voxels > 0).astype(np.uint8)
        nifti.write_labels(folder / "mask.nii.gz", labels, grid)
        back, other = nifti.read_labels(folder / "mask.nii.gz")
        assert (back == labels).all()
        found.append(
            (
                voxels,
                grid.size,
                grid.spacing,
                grid.differs(other, "x"),
                nifti.is_mask(folder / "mask.nii.gz"),
                nifti.is_mask(path),
            )
        )
    return found


def timed(folder: Path) -> Any:
    """By a clock on which each look takes one more second than the one before."""
    paths, looks = _written(folder, "a.png", "b.png", "c.png"), iter(range(10**6))
    total = 0.0

    def now() -> float:
        nonlocal total
        total += next(looks)
        return total

    with mock.patch("time.perf_counter", now):
        return timing.stage_times(Predictor(Pointwise(card())), paths)[0]


def decoded_boxes(output: Any, head: Any) -> Any:
    boxes, classes, scores = candidates(output, head, (24, 40))
    kept = suppress(boxes, classes, head.nms, head.max_detections)
    return boxes[kept], classes[kept] + 1, scores[kept]


def scored_boxes(head: Any) -> Any:
    """The same outputs decoded by the evaluation and by the file itself."""
    with tempfile.TemporaryDirectory() as folder:
        data, answers = open_boxes(dataset(Path(folder)), "val"), []
        for decoded in (False, True):
            evaluation = DetectionEvaluation(data, head, (24, 40))
            indices = np.array([1, 0])
            outputs = [box_outputs(head), box_outputs(head).flip(1)]
            if decoded:
                evaluation.update_decoded(
                    [decoded_boxes(output, head) for output in outputs], torch.from_numpy(indices)
                )
            else:
                evaluation.update(
                    torch.from_numpy(np.stack([output.numpy() for output in outputs])), torch.from_numpy(indices)
                )
            answers.append(plain(evaluation.results()))
        assert answers[0] == answers[1]
        return len(answers[1]), answers[1][0], plain(evaluation.compute())


def predicted_files(folder: Path) -> Any:
    _written(folder / "in", "a.png", "b.jpg", "deep/a.png")
    (folder / "in" / "broken.png").write_bytes(b"no image")
    found, failures = predict_files(
        Predictor(Pointwise(card()), batch=2), Path("m"), find_sources([str(folder / "in")]), folder / "out", 2
    )
    found.pop("created", None)
    names = sorted(
        path.relative_to(folder / "out").as_posix() for path in (folder / "out").rglob("*") if path.is_file()
    )
    return json.loads(json.dumps(found).replace(str(folder), "")), len(failures), names


def chosen(folder: Path) -> Any:
    run = Run(folder)
    for name in ("fp16/best.safetensors", "nvfp4/best.safetensors", "export/unet.nvfp4.onnx", "export/unet.nvfp4.portable.onnx",
                 "export/unet.nvfp4.fp4", "engines/unet.nvfp4.sm120.plan", "export/unet.fp16.onnx"):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    return [[path.relative_to(folder).as_posix() for path in artefacts(run, gpu)] for gpu in (False, True)]


def parts(folder: Path) -> Any:
    """Parts of sets and sets several times over, of each kind of set."""
    root = dataset(folder)
    found = [open_dataset(root, "train"), open_instances(root, "val"), open_boxes(root, "val")]
    made = [made for one in found for made in (part_of(one, 1), repeated(one, 2), part_of(repeated(one, 2), 3))]
    return [(one.class_names, one.background, one.layout, len(one), one.load(len(one) - 1).name) for one in made]


def in_eight_bits(int8: tuple[str, ...] | None, recipe: str) -> Any:
    """What an engine multiplies in FP8 of a network, of which some layers are in INT8."""
    own = dataclasses.replace(CARD, precision="nvfp4", recipe=recipe, formats={} if int8 is None else {"int8": int8})
    return [layers_in_fp8(own, target) for target in ("rtx sm120", "tensorrt sm100")]


def by_task(name: str) -> Any:
    """What a task opens, of all classes and of some, how it augments, and what it scores of one set of outputs."""
    task, classes = TASKS[name], ("background", "c4", *(("c3",) if name == "detection" else ()))
    classes = ("b", "a") if name == "classification" else classes
    head = {"instance": InstanceHead("centres", 2), "detection": HEADS[0], "classification": ClassHead("label", 2)}.get(
        name
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if name != "classification":
            dataset(root)
        else:
            _written(root, "train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b/4.png", "val/b/5.png")
        own = dataclasses.replace(
            CARD, class_names=classes, task=cast(Any, name), head=head, background=name != "classification"
        )
        data, every = task.for_card(own, root), task.open(root, "val")
        facts = {key: getattr(task, key) for key in ("name", "key", "metric", "per_class", "hub", "counts_objects", "at_input_size",
                                                     "boxes", "whole_images", "unused")}  # fmt: skip
        sample = data.load(1)
        shown = [task.transform((24, 40))(sample, 0, 1), task.augmentation((24, 40), 3)(sample, 1, 1)]
        evaluation = task.evaluation(data, own)
        if name in ("semantic", "classification"):
            shape = (2, 2, 24, 40) if name == "semantic" else (2, 2)
            evaluation.update(
                real(*shape), torch.stack([task.transform((24, 40))(data.load(n), 0, n)[1] for n in (0, 1)])
            )
        else:
            outputs = box_outputs(head) if name == "detection" else real(own.channels, 24, 40, scale=2)
            evaluation.update(outputs[None], torch.tensor([1]))
        return (
            facts,
            data.class_names,
            every.class_names,
            len(data),
            sample,
            shown,
            task.untiled(own),
            evaluation.compute(),
        )


def signatures() -> Any:
    """Digests of tensors and metadata that differ in one thing each; none of them is another's."""
    x = torch.arange(6.0)
    tensors = [
        {"a": x},
        {"b": x},
        {"a": x.view(2, 3)},
        {"a": x.view(torch.int32)},
        {"a": x, "c": x},
        {"a": -x},
        {"a": x.half()},
    ]
    metadata: list[dict[str, str]] = [{}, {"k": "v"}, {"k": "w"}, {"kv": ""}, {"k": "v", "l": "v"}]
    found = [digest_of(_signed_parts(one, other)) for one in tensors for other in metadata]
    assert len(set(found)) == len(found)
    return found


RESULTS: dict[str, Answer] = {
    "sources": in_a_folder(sources),
    "image files": in_a_folder(images),
    "served images": in_a_folder(served),
    "pipelines": each(pipeline, pipelines.FORMS),
    "planes": each(planes, ("nvfp4_qat", "nvfp4_4o6_weight_qat")),
    "opened": in_a_folder(opened),
    "described": in_a_folder(described),
    "uneven splits": each(uneven, ("folders", "masks", "coco")),
    "volume cases": in_a_folder(volume_cases),
    "imported": in_a_folder(imported),
    "yolo": in_a_folder(of_yolo),
    "masks imported": each(of_masks, (None, 200, 201, 255), (2, 3)),
    "label studio": lambda: coco_content(tasks(), lambda name: (8, 6)),
    "volumes read": in_a_folder(read_back),
    "stages timed": in_a_folder(timed),
    "boxes scored": gathered(HEADS, scored_boxes),
    "files predicted": in_a_folder(predicted_files),
    "artefacts chosen": in_a_folder(chosen),
    "tasks": each(by_task, TASKS),
    "parts": in_a_folder(parts),
    "in eight bits": each(in_eight_bits, (None, ("decoder.*",)), ("nvfp4_qat", "nvfp4_4o6_qat")),
    "signatures": signatures,
}
