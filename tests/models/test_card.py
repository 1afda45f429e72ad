"""A model card from a file: every field has its type and limits, and nothing large is made before they are checked."""

from __future__ import annotations

import dataclasses
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp4deploy.errors import InputError
from fp4deploy.models import InstanceHead, ModelCard, build_unet, load_weights, save_checkpoint
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.checkpoint import network_of, read_signed
from fp4deploy.models.heads import ClassHead

CARD = ModelCard("fp16", 0.125, ("background", "a", "b"), 32, 32, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), True)
INSTANCE = dataclasses.replace(CARD, task="instance", head=InstanceHead("centres", 3, stuff=(1,)))
NAMES = ["background", "a", "b"]


def head(**changed: Any) -> dict[str, Any]:
    assert INSTANCE.head is not None
    return {"head": {**dataclasses.asdict(INSTANCE.head), **changed}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"height": 0}, "height = 0: input should be greater than or equal to 1"),
        ({"height": 1.5}, "height = 1.5: input should be a valid integer"),
        ({"height": None}, "height = None"),
        ({"height": True}, "height = True"),
        ({"width": 1 << 40}, "width = 1099511627776: input should be less than or equal to 16384"),
        ({"mean": [0, 0]}, "mean and std: the input has 3 channels"),
        ({"mean": [0, 0, "x"]}, "mean.2 = 'x'"),
        ({"std": [1, 0, 1]}, "std.1 = 0: input should be greater than or equal to 0.01"),
        ({"std": [1, 1, -1]}, "std.2 = -1"),
        ({"scale": 16}, "scale = 16: input should be less than or equal to 4"),
        ({"scale": 0}, "scale = 0"),
        ({"precision": "fp8"}, "precision = 'fp8': input should be 'fp16', 'nvfp4'"),
        ({"precision": "unknown"}, "precision = 'unknown': known are: fp16, nvfp4"),
        ({"recipe": 5}, "recipe = 5"),
        ({"recipe": "nvfp4_qat"}, "precision = 'fp16' with recipe = 'nvfp4_qat'"),
        ({"architecture": "vit"}, "architecture = 'vit': known are: unet"),
        ({"task": "pose"}, "task = 'pose': input should be 'semantic', 'instance', 'detection' or 'classification'"),
        ({"task": "semantic"}, "task = 'semantic' with an instance head"),
        ({"head": None}, "task = 'instance' without an instance head"),
        ({"head": []}, "head = []"),
        ({"class_names": "abc"}, "class_names = 'abc'"),
        ({"class_names": ["a", "a", "b"]}, "class_names: a name is given twice"),
        ({"class_names": ["a", ""]}, "class_names.1 = ''"),
        ({"class_names": ["a"]}, "head.classes = 3, and there are 1 class_names"),
        ({"class_names": [str(i) for i in range(10_001)]}, "class_names"),
        ({"background": 1}, "background = 1"),
        ({"include": "*"}, "include = '*'"),
        ({"colour": 1}, "colour is not a known field"),
        (head(nms=99999999999), "head.nms = 99999999999: input should be less than or equal to 63"),
        (head(nms=4), "head.nms = 4: a window around a pixel has an odd side"),
        (head(threshold=1), "head.threshold = 1"),
        (
            head(method="boxes"),
            "head.method = 'boxes': input should be one of 'centres', 'set', 'label', 'fcos', 'fcos_relu', 'retinanet'",
        ),
        (head(masks=3), "head.masks = 3 with 'centres'"),
        (head(stuff=[3]), "head.stuff: a number is no class"),
        (head(max_detections=0), "head.max_detections = 0"),
    ],
)
def test_fields_beyond_their_limits(changed: dict[str, Any], message: str) -> None:
    fields = {**json.loads(INSTANCE.to_json()), **changed}
    with pytest.raises(InputError) as error:
        ModelCard.from_json(json.dumps(fields), "best.safetensors: model card")
    assert str(error.value).startswith(f"best.safetensors: model card: {message}")


HEADS: dict[str, tuple[Any, str, tuple[int, ...]]] = {  # head, its task, and how many classes its card may name
    "none": (None, "semantic", (2, 3, 4)),
    "centres": (InstanceHead("centres", 3), "instance", (3,)),
    "set of classes": (InstanceHead("set", 3, masks=8), "instance", (3,)),
    "set of one class": (InstanceHead("set", 0, masks=8), "instance", (2, 3, 4)),
    "boxes": (DetectionHead("fcos", 2, (8, 16)), "detection", (3,)),
    "label": (ClassHead("label", 3), "classification", (3,)),
}


@pytest.mark.parametrize("kind", HEADS)
def test_task_head_and_classes_go_together(kind: str) -> None:
    made, own, counts = HEADS[kind]
    for task, names in product({task for _, task, _ in HEADS.values()}, (2, 3, 4)):
        classes = ("background", "a", "b", "c")[:names]
        card = dataclasses.replace(CARD, task=task, head=made, class_names=classes)
        if task == own and names in counts:
            assert ModelCard.from_json(card.to_json()) == card
        else:
            with pytest.raises(InputError, match=r"task = |head.classes = "):
                ModelCard.from_json(card.to_json())


@pytest.mark.parametrize("field", ["precision", "scale", "class_names", "height", "mean", "background"])
def test_a_missing_field(field: str) -> None:
    fields = json.loads(CARD.to_json())
    del fields[field]
    with pytest.raises(InputError, match=f"{field} is missing"):
        ModelCard.from_json(json.dumps(fields))


def with_card(path: Path, card: ModelCard, model_scale: float = 0.125) -> Path:
    save_checkpoint(path, build_unet(3, model_scale), card)
    return path


class TestNetwork:
    """The network that a checkpoint's card describes is compared with the file before it takes memory."""

    def test_a_card_that_asks_for_gigabytes(self, tmp_path: Path) -> None:
        path = with_card(tmp_path / "best.safetensors", dataclasses.replace(CARD, scale=4.0))
        start = time.perf_counter()
        with pytest.raises(InputError, match="does not fit this model: .* differ in shape"):
            network_of(path, dataclasses.replace(CARD, scale=4.0))
        assert time.perf_counter() - start < 1

    def test_a_card_of_ten_thousand_classes(self, tmp_path: Path) -> None:
        card = dataclasses.replace(CARD, class_names=tuple(map(str, range(10_000))))
        with pytest.raises(InputError, match="does not fit this model"):
            network_of(with_card(tmp_path / "best.safetensors", card), card)

    def test_a_size_that_a_unet_does_not_take(self, tmp_path: Path) -> None:
        card = dataclasses.replace(CARD, height=17)
        with pytest.raises(InputError, match="17 x 32 pixels, and a UNet takes multiples of 16"):
            network_of(with_card(tmp_path / "best.safetensors", card), card)

    def test_an_nvfp4_checkpoint_that_calls_itself_fp16(self, tmp_path: Path) -> None:
        path = with_card(tmp_path / "best.safetensors", CARD)
        tensors = {**load_file(path), "up.0.input_amax": torch.ones(())}
        save_file(tensors, path, {"fp4deploy.card": CARD.to_json()})
        with pytest.raises(
            InputError, match=r"precision = 'fp16', and the file holds the NVFP4 scale up\.0\.input_amax"
        ):
            network_of(path, CARD)


class TestDigest:
    EXTRA = {"fp4deploy.epoch": "3"}  # noqa: RUF012

    def test_every_flipped_byte_of_the_tensors_is_found(self, tmp_path: Path) -> None:
        path = tmp_path / "best.safetensors"
        save_checkpoint(path, build_unet(3, 0.125), CARD, self.EXTRA)
        load_weights(build_unet(3, 0.125), path)
        whole = path.read_bytes()
        start = 8 + int.from_bytes(whole[:8], "little")
        for place in range(start, len(whole), (len(whole) - start) // 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(InputError, match="is corrupt: its content is not what was written"):
                load_weights(build_unet(3, 0.125), path)

    def test_a_changed_card_is_found(self, tmp_path: Path) -> None:
        path = tmp_path / "best.safetensors"
        save_checkpoint(path, build_unet(3, 0.125), CARD, self.EXTRA)
        path.write_bytes(path.read_bytes().replace(b"background", b"foreground"))
        with pytest.raises(InputError, match="is corrupt: its content is not what was written"):
            read_signed(path)

    def test_a_file_without_a_digest_is_read(self, tmp_path: Path) -> None:
        path = with_card(tmp_path / "best.safetensors", CARD)
        assert read_signed(path)[0].keys() == {"fp4deploy.card"}
        load_weights(build_unet(3, 0.125), path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bool])
def test_weights_of_an_odd_type(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "best.safetensors"
    tensors = {name: value.to(dtype) for name, value in build_unet(3, 0.125).state_dict().items()}
    save_file(tensors, path, {"fp4deploy.card": CARD.to_json()})
    for to_encoding in (False, True):
        with pytest.raises(InputError, match="weights of a type that no checkpoint has"):
            load_weights(build_unet(3, 0.125), path, to_encoding)
