"""Results folders of nnU-Net: what is read, what is refused by name, and that nothing in them runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.models.build import build_model
from fp4deploy.models.initial import load_initial, read_containers
from fp4deploy.models.nnunet import build_network, load_fold, named_folder, read_fold, read_folder
from fp4deploy.models.spec import UnnamedCodeError, parse_spec, require_named
from fp4deploy.requirements import NNUNET
from tests.interop import nnunet_folder

ABSENT = NNUNET.why_missing()
needs_nnunet = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nnunet_folder.write_results(tmp_path_factory.mktemp("results"), folds=1)


def edited(made: Path, folder: Path, name: str, edit: Edit) -> Path:
    """The folder with one JSON file changed; the checkpoint is linked."""
    target = folder / made.name
    (target / "fold_0").mkdir(parents=True)
    (target / "fold_0" / "checkpoint_final.pth").symlink_to(made / "fold_0" / "checkpoint_final.pth")
    for each in ("plans.json", "dataset.json"):
        value = json.loads((made / each).read_text())
        if each == name:
            edit(value)
        (target / each).write_text(json.dumps(value))
    return target


@needs_nnunet
def test_a_folder_is_nnunets_network(made: Path) -> None:
    folder = read_folder(made)
    assert (folder.configuration, folder.patch_size, folder.folds) == ("3d_fullres", nnunet_folder.PATCH, ("0",))
    assert (folder.input_channels, folder.output_channels) == (1, 3)
    fold = read_fold(made, "0")
    assert (fold.trainer, fold.mirroring) == ("nnUNetTrainer", (0, 2))
    network, expected = load_fold(build_network(folder), fold, folder), nnunet_folder.network(0)
    assert next(build_network(folder).parameters()).is_meta
    x = torch.randn(1, 1, *nnunet_folder.PATCH)
    assert torch.equal(network(x), expected(x)[0])  # with deep supervision the largest comes first


@pytest.mark.parametrize(
    ("text", "folds"), [("nnunet:a/b__c__2d:3", ("3",)), ("nnunet:a:all", ("all",)), ("nnunet:a:b", None), ("a", None)]
)
def test_folds_in_a_name(text: str, folds: tuple[str, ...] | None) -> None:
    path, named = named_folder(text)
    assert named == folds
    assert str(path) == text.removeprefix("nnunet:").removesuffix(f":{folds[0]}" if folds else "")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no plans.json, so it is no results folder"),
        (["plans.json"], "has no dataset.json"),
        (["plans.json", "dataset.json"], "has no fold_0: nothing was trained into it"),
        (["plans.json", "dataset.json", "fold_3/debug.json"], "has no fold_3/checkpoint_final.pth"),
    ],
)
def test_what_is_no_results_folder(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=message):
        read_folder(tmp_path)


def test_without_nnunet_the_extra_is_named(made_without_nnunet: Path) -> None:
    with pytest.raises(UnavailableError, match=r"needs nnunetv2, which is missing. Add it with: .*\[nnunet\]"):
        read_folder(made_without_nnunet)


@pytest.fixture
def made_without_nnunet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fold_0").mkdir()
    for name in ("plans.json", "dataset.json", "fold_0/checkpoint_final.pth"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "nnunetv2", None)
    return tmp_path


def of(*keys: str) -> Callable[[Any], Edit]:
    """An edit that sets a nested key."""

    def value_of(value: Any) -> Edit:
        def edit(document: dict[str, Any]) -> None:
            for key in keys[:-1]:
                document = document[key]
            document[keys[-1]] = value

        return edit

    return value_of


CONFIGURATION = ("configurations", "3d_fullres")
ARCHITECTURE = (*CONFIGURATION, "architecture")
REFUSED: dict[str, tuple[str, Edit, str]] = {
    "cascade": ("plans.json", of(*CONFIGURATION, "previous_stage")("3d_lowres"), "second stage of a cascade"),
    "configuration": (
        "plans.json",
        lambda plans: plans["configurations"].update({"3d_fulres": plans["configurations"].pop("3d_fullres")}),
        "has no configuration '3d_fullres'.* Did you mean '3d_fulres'",
    ),
    "patch": ("plans.json", of(*CONFIGURATION, "patch_size")([8, -1, 8]), "patch_size"),
    "class": ("plans.json", of(*ARCHITECTURE, "network_class_name")("os.system"), "names the network class os.system"),
    "other class": (
        "plans.json",
        of(*ARCHITECTURE, "network_class_name")("dynamic_network_architectures.architectures.primus.Primus"),
        "Valid: PlainConvUNet, ResidualEncoderUNet, ResidualUNet",
    ),
    "part": ("plans.json", of(*ARCHITECTURE, "arch_kwargs", "nonlin")("os.system"), "nonlin = os.system"),
    "torch's part": ("plans.json", of(*ARCHITECTURE, "arch_kwargs", "norm_op")("torch.nn.Module"), "norm_op = torch"),
    "count": ("plans.json", of(*ARCHITECTURE, "arch_kwargs", "n_conv_per_stage")([10**9] * 3), "at most 64"),
    "argument": (
        "plans.json",
        of(*ARCHITECTURE, "arch_kwargs", "hub")("x"),
        "PlainConvUNet cannot be built as written",
    ),
    "width": (
        "plans.json",
        of(*ARCHITECTURE, "arch_kwargs", "features_per_stage")([16, 16, 2**40]),  # built without memory
        "of another shape",
    ),
    "labels": ("dataset.json", of("labels")({"front": 1}), "names no channels and labels"),
    "classes": ("dataset.json", of("labels")({"background": 0, "all": 1}), "The trainer nnUNetTrainer may have built"),
}


@needs_nnunet
@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_is_not_built(kind: str, made: Path, tmp_path: Path) -> None:
    name, edit, message = REFUSED[kind]
    path = edited(made, tmp_path, name, edit)
    with pytest.raises(InputError, match=message):
        folder = read_folder(path)
        load_fold(build_network(folder), read_fold(path, "0"), folder)


@needs_nnunet
def test_regions_and_an_ignored_label_count_as_nnunet_counts(made: Path, tmp_path: Path) -> None:
    labels = {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}
    path = edited(made, tmp_path, "dataset.json", lambda d: d.update(labels=labels, regions_class_order=[1, 2]))
    assert read_folder(path).output_channels == 2


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return open, (str(tmp_path / "ran"), "a")

    (tmp_path / "fold_0").mkdir()
    path = tmp_path / "fold_0" / "checkpoint_final.pth"
    torch.save({"network_weights": {}, "init_args": Evil()}, path)
    with pytest.raises(InputError, match="holds more than tensors"):
        read_fold(tmp_path, "0")
    assert not (tmp_path / "ran").exists()
    torch.save({"network_weights": {"a": 3}, "init_args": {}, "trainer_name": "x"}, path)
    with pytest.raises(InputError, match="is no checkpoint of nnU-Net v2 .*a weight is no tensor"):
        read_fold(tmp_path, "0")


def test_numbers_of_numpy_are_read_as_pythons(tmp_path: Path) -> None:
    path = tmp_path / "log.pth"
    log = [np.float64(0.1), np.float32(-2.5), np.int64(2**40), np.uint8(7), np.bool_(True), np.dtype(">f4").type(3)]
    torch.save({"network_weights": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "log": log}, path)
    found = read_containers(path)["log"]
    assert found == [0.1, -2.5, 2**40, 7, True, 3.0]
    assert [type(each) for each in found] == [float, float, int, int, bool, float]
    layer = torch.nn.Linear(2, 2)
    assert "2 tensors" in load_initial(layer, path)
    assert torch.equal(layer.weight, torch.ones(2, 2))
    for value in (np.array([1.0]), np.datetime64("2020-01-01"), np.complex64(1j)):
        torch.save({"log": value}, path)
        with pytest.raises(InputError, match=r"holds more than tensors|cannot be read"):
            read_containers(path)


@needs_nnunet
def test_a_spec_names_the_network_of_a_folder(made: Path, tmp_path: Path) -> None:
    two = {"conv_op": "torch.nn.Conv2d", "norm_op": "torch.nn.InstanceNorm2d", "kernel_sizes": [[3, 3]] * 3}
    built = nnunet_folder.architecture(**two, strides=[[1, 1], [2, 2], [2, 2]])

    def edit(plans: dict[str, Any]) -> None:
        plans["configurations"]["3d_fullres"].update(architecture=built, patch_size=[32, 32])

    path = edited(made, tmp_path, "plans.json", edit)
    channels = {str(number): name for number, name in enumerate("RGB")}
    (path / "dataset.json").write_text(json.dumps({**nnunet_folder.DATASET, "channel_names": channels}))
    spec = parse_spec(f"nnunet:{path}")
    assert (spec.text, spec.known) == (f"nnunet:{path}", False)
    network = build_model(spec, 5).eval()
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 5, 32, 32)
    assert all(value.isfinite().all() for value in network.state_dict().values())
    with pytest.raises(InputError, match="Start from a fold's with: --init"):
        build_model(parse_spec(f"nnunet:{path}:0"), 5)
    with pytest.raises(InputError, match="3-D images of 1 channels, and these are 2-D images of 3"):
        build_model(parse_spec(f"nnunet:{made}"), 5)
    with pytest.raises(UnnamedCodeError, match="a file never says which folder is read"):
        require_named(spec, "best.safetensors")
