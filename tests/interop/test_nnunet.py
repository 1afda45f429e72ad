"""nnU-Net both ways: its folder quantised and packed, its predictor with packed networks, its trainer in NVFP4."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fp4deploy as fd
from cli.main import app
from fp4deploy.errors import InputError
from fp4deploy.models.nnunet import read_fold, read_folder
from fp4deploy.packed import read_packed
from fp4deploy.qat import quantized_layers
from fp4deploy.requirements import NNUNET, ZOO
from tests.fixtures import made_once
from tests.interop import nnunet_folder

ABSENT = NNUNET.why_missing()
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
LAYERS = ("encoder.stages.1.0.convs.0.conv", "encoder.stages.2.0.convs.0.conv", "decoder.stages.0.convs.0.conv",
          "decoder.stages.1.convs.0.conv", "decoder.transpconvs.0", "decoder.transpconvs.1")  # fmt: skip


def make(folder: Path) -> None:
    """Results, raw data, and what the command makes of them."""
    results, raw = nnunet_folder.write_results(folder / "fp32"), nnunet_folder.write_raw(folder / "raw", 3)
    given = ["--method", "amax", "--correction", "none", "--images", "4", "--batch", "2"]
    command = ["quantize", str(results), "--data", str(raw), "--out", str(folder / "nvfp4"), *given]
    said = CliRunner().invoke(app, command, prog_name="fp4deploy")
    assert said.exit_code == 0, said.stderr
    assert f"fp4deploy predict IMAGES --nnunet {folder / 'nvfp4'}" in said.stderr
    shares = [float(share) for share in re.findall(r"unchanged against the FP32 fold on ([\d.]+) %", said.stdout)]
    assert len(shares) == 2, "of each fold"
    assert all(50 < share < 100 for share in shares), "and quantising changes some"


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "nnunet", make)


@pytest.fixture(scope="session")
def raw(bed: Path) -> Path:
    return bed / "raw" / "Dataset900_Generated"


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """nnU-Net finds the trainer of this project."""
    from fp4deploy.interop.nnunet import TRAINERS

    monkeypatch.setenv("nnUNet_extTrainer", str(TRAINERS))


def segmentations(folder: Path) -> dict[str, np.ndarray]:
    import SimpleITK

    return {path.name: SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path))) for path in folder.glob("*.nii.gz")}


def test_the_quantised_folder_says_its_layers(bed: Path) -> None:
    folder = read_folder(bed / "nvfp4")
    assert folder.values["fp4deploy"] == {"recipe": "nvfp4_qat", "layers": list(LAYERS), "fp8": [], "rest": "fp16"}
    assert folder.folds == ("0", "1")
    for fold in folder.folds:
        read = read_fold(folder.path, fold)
        amaxes = {name: value for name, value in read.weights.items() if name.endswith("input_amax")}
        assert {f"{name}.input_amax" for name in LAYERS} <= amaxes.keys()
        assert all(value > 0 for value in amaxes.values())
        assert (read.trainer, read.mirroring) == ("nnUNetTrainerNVFP4", (0, 2))
        packed = read_packed(folder.path / f"fold_{fold}" / "network.fp4")
        assert sum(getattr(node, "precision", "") == "nvfp4" for node in packed.graph.nodes) == len(LAYERS)


@pytest.mark.usefixtures("trainers")
@pytest.mark.parametrize("folds", [None, ("1",)])
def test_segmentations_are_nnunets_of_the_quantised_network(
    bed: Path, raw: Path, tmp_path: Path, folds: tuple[str, ...] | None
) -> None:
    """nnU-Net's predictor on its own checkpoint, fake-quantised in torch, and with packed networks: voxel by voxel."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    given = [arguments for fold in folds or () for arguments in ("--fold", fold)]
    command = ["predict", str(raw), "--nnunet", str(bed / "nvfp4"), "--out", str(tmp_path / "ours"), *given]
    said = CliRunner().invoke(
        app, [*command, *(("--processes", "0", "--json") if folds else ())], prog_name="fp4deploy"
    )
    assert said.exit_code == 0, said.stderr  # what nnU-Net prints is on stderr
    if folds:
        document = json.loads(said.stdout)
        assert document["folds"] == ["1"]
        assert all(each["seconds"]["network"] > 0 for each in document["segmentations"])
    else:
        assert said.stdout.startswith("3 segmentations in ")
    theirs = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    theirs.initialize_from_trained_model_folder(str(bed / "nvfp4"), folds)
    assert tuple(quantized_layers(theirs.network)) == LAYERS
    cases = sorted((raw / "imagesTr").iterdir())
    (tmp_path / "theirs").mkdir()
    targets = [str(tmp_path / "theirs" / path.name.removesuffix("_0000.nii.gz")) for path in cases]
    theirs.predict_from_files_sequential([[str(path)] for path in cases], targets)
    ours, expected = segmentations(tmp_path / "ours"), segmentations(tmp_path / "theirs")
    assert ours.keys() == expected.keys()
    assert len(ours) == 3
    for name, values in expected.items():
        assert values.shape == (12, 20, 14)  # of the image, not of the resampled one
        assert len(np.unique(values)) > 1
        assert np.mean(ours[name] != values) <= 1e-3  # sums of another order, at a tie of two classes


def test_folds_differ_and_are_averaged(bed: Path) -> None:
    from fp4deploy.interop.nnunet import predictor

    volume = torch.randn(1, 12, 20, 18, generator=torch.Generator().manual_seed(0))
    logits = {
        folds: predictor(bed / "nvfp4", folds, allow_tqdm=False).predict_logits_from_preprocessed_data(volume)
        for folds in (("0",), ("1",), ("0", "1"))
    }
    assert not torch.allclose(logits[("0",)], logits[("1",)], atol=0.1)
    torch.testing.assert_close((logits[("0",)] + logits[("1",)]) / 2, logits[("0", "1")])


def test_a_folder_is_exported_and_checked(bed: Path, raw: Path, tmp_path: Path) -> None:
    command = ["export", f"nnunet:{bed / 'nvfp4'}:1", "--portable", "--data", str(raw), "--out", str(tmp_path)]
    said = CliRunner().invoke(app, command, prog_name="fp4deploy")
    assert said.exit_code == 0, said.stderr
    assert "equal to torch on 100.000 %" in said.stdout
    folder = read_folder(bed / "nvfp4")
    x = torch.randn(1, 1, *folder.patch_size)
    file, packed = tmp_path / "fold_1" / "network.portable.onnx", folder.path / "fold_1" / "network.fp4"
    np.testing.assert_allclose(fd.open_runtime(file)(x), fd.open_runtime(packed)(x), atol=1e-3)
    for subject in (str(bed / "nvfp4"), str(tmp_path / "fold_1" / "network.onnx")):
        said = CliRunner().invoke(app, ["check", subject, "--json"], prog_name="fp4deploy")
        layers = json.loads(said.stdout)["layers"]
        assert {layer["name"] for layer in layers if layer["precision"] == "FP4"} == set(LAYERS)
        assert {layer["engine"] for layer in layers} == {"FP16"}  # no engine has FP4 convolutions over volumes


def test_an_unquantised_folder_is_planned_and_packed(bed: Path, tmp_path: Path) -> None:
    from fp4deploy.interop.nnunet import pack_folder

    fp32 = next((bed / "fp32").glob("*/*"))
    said = CliRunner().invoke(app, ["check", f"nnunet:{fp32}", "--json"], prog_name="fp4deploy")
    document = json.loads(said.stdout)
    heads = [layer for layer in document["layers"] if "seg_layers" in layer["name"]]
    assert [head["precision"] for head in heads] == ["FP16", "FP16"]  # also of deep supervision
    assert {layer["name"] for layer in document["layers"] if layer["precision"] == "FP4"} == set(LAYERS)
    written = pack_folder(read_folder(fp32), tmp_path, folds=("0",), verify=False)
    assert [each.path for each in written] == [tmp_path / "fold_0" / "network.fp4"]
    assert not any(getattr(node, "precision", "") == "nvfp4" for node in read_packed(written[0].path).graph.nodes)


def test_the_trainer_calibrates_continues_and_predicts(
    bed: Path, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainers: None
) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.run.load_pretrained_weights import load_pretrained_weights
    from nnunetv2.run.run_training import get_trainer_from_args, maybe_load_checkpoint

    from fp4deploy.interop.nnunet import load_network

    monkeypatch.setenv("nnUNet_preprocessed", str(nnunet_folder.write_preprocessed(tmp_path / "pre", raw).parent))
    monkeypatch.setenv("nnUNet_results", str(tmp_path / "results"))
    monkeypatch.setenv("nnUNet_n_proc_DA", "0")
    fp32 = next((bed / "fp32").glob("*/*")) / "fold_0" / "checkpoint_final.pth"
    monkeypatch.setenv("FP4DEPLOY_NNUNET_INIT", str(fp32))

    def trainer(again: bool) -> Any:
        name = ("Dataset900_Generated", "3d_fullres", 0, "nnUNetTrainerNVFP4", "nnUNetPlans", again)
        found = get_trainer_from_args(*name, device=torch.device("cpu"))
        found.num_epochs, found.num_iterations_per_epoch, found.num_val_iterations_per_epoch = 1, 1, 1
        return found

    first = trainer(False)
    first.initialize()
    load_pretrained_weights(first.network, str(fp32))  # -pretrained_weights, which wants nnU-Net's own names
    start = {name: value.clone() for name, value in first.network.state_dict().items()}
    assert all(torch.equal(value, start[name]) for name, value in nnunet_folder.network(0).state_dict().items())
    first.run_training()
    assert tuple(quantized_layers(first.network)) == LAYERS
    assert all(layer.input_amax > 0 for layer in quantized_layers(first.network).values())
    assert not torch.equal(first.network.state_dict()[f"{LAYERS[0]}.weight"], start[f"{LAYERS[0]}.weight"])
    monkeypatch.delenv("FP4DEPLOY_NNUNET_INIT")
    second = trainer(True)
    maybe_load_checkpoint(second, continue_training=True, validation_only=False)
    assert second.current_epoch == 1
    ours, theirs = first.network.state_dict(), second.network.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    folder = read_folder(first.output_folder_base)
    assert folder.values["fp4deploy"]["layers"] == list(LAYERS)
    predicting = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predicting.initialize_from_trained_model_folder(first.output_folder_base, (0,))
    x = torch.randn(1, 1, *folder.patch_size)
    network, _ = load_network(folder, "0")
    assert torch.equal(predicting.network.eval()(x), network(x))


def test_monais_sliding_window_with_a_packed_network_inside(bed: Path) -> None:
    reason = ZOO["monai"].why_missing()
    if reason is not None:
        pytest.skip(reason)
    from monai.inferers import SlidingWindowInferer

    from fp4deploy.interop.nnunet import load_network

    folder = read_folder(bed / "nvfp4")
    network, _ = load_network(folder, "0")
    packed = fd.compile(network, torch.zeros(1, 1, *folder.patch_size))
    volume = torch.randn(1, 1, 12, 20, 18, generator=torch.Generator().manual_seed(0))
    inferer = SlidingWindowInferer(folder.patch_size, sw_batch_size=2, overlap=0.5, mode="gaussian")
    with torch.inference_mode():
        torch.testing.assert_close(inferer(volume, packed), inferer(volume, network), atol=1e-3, rtol=1e-3)


def test_python_of_the_page(bed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hippocampus_nvfp4").symlink_to(bed / "nvfp4")
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[2] / "docs" / "nnunet.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    assert names["logits"].shape == (3, *nnunet_folder.PATCH)
    assert issubclass(names["nnUNetTrainerNVFP4Short"], names["nnUNetTrainerNVFP4"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "{fp32}", "--out", "x"), "needs --data RAW"),
        (("quantize", "{fp32}", "--data", "{raw}", "--out", "{fp32}"), "which would be lost"),
        (("quantize", "{nvfp4}", "--data", "{raw}", "--out", "x"), "is quantised already"),
        (
            ("quantize", "{fp32}", "--data", "{raw}", "--out", "x", "--fold", "4"),
            "has no fold_4/.* Folds with it: 0, 1",
        ),
        (("quantize", "{fp32}", "--data", "{bed}", "--out", "x"), "holds no image NAME_0000.nii.gz"),
        (("quantize", "{fp32}", "--data", "{raw}", "--out", "x", "--size", "8x8"), "are not for a folder of nnU-Net"),
        (("quantize", "a.safetensors", "--fold", "0"), "--fold is for a results folder of nnU-Net"),
        (("export", "{nvfp4}", "--format", "triton"), "--format triton takes files"),
        (("export", "nnunet:{nvfp4}:0", "--fold", "1"), "names a fold already"),
        (("predict", "{raw}", "--nnunet", "{fp32}", "--out", "x"), "There is no packed network .*fp4deploy quantize"),
        (("predict", "a", "b", "--nnunet", "{nvfp4}"), "give one folder of images"),
        (("predict", "a.png", "--fold", "1"), "--fold goes with --nnunet"),
        (("check", "nnunet:{bed}"), "has no plans.json"),
    ],
)
def test_one_error_each(bed: Path, raw: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    places = {"fp32": next((bed / "fp32").glob("*/*")), "nvfp4": bed / "nvfp4", "raw": raw, "bed": bed}
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        said = CliRunner().invoke(app, [each.format(**places) for each in arguments], prog_name="fp4deploy")
    finally:
        os.chdir(before)
    assert said.exit_code == 2
    assert re.search(message, said.stderr.replace("\n", " ")), said.stderr
    assert not any(tmp_path.iterdir())


def test_a_two_dimensional_network_sees_slices(bed: Path, raw: Path) -> None:
    from fp4deploy.interop.nnunet import predictor
    from fp4deploy.interop.nnunet.cases import patches_of

    flat = replace(read_folder(bed / "nvfp4"), patch_size=(16, 16))
    found = patches_of(flat, raw, 5)
    assert [tuple(patch.shape) for patch in found] == [(1, 1, 16, 16)] * 5
    assert not any(torch.equal(found[0], other) for other in found[1:])
    with pytest.raises(InputError, match=r"fold_0 mirrors along axes \(0, 2\), and patches have 2\. .*--no-mirror"):
        predictor(flat)
    assert predictor(flat, use_mirroring=False).configuration_manager is not None


def test_a_case_without_all_channels(raw: Path, tmp_path: Path) -> None:
    from fp4deploy.interop.nnunet.cases import find_cases

    with pytest.raises(
        InputError, match=r"holds case_000_0000\.nii\.gz, and .* 2 channels of a case: .*_0001\.nii\.gz"
    ):
        find_cases(raw, ".nii.gz", 2)
    (tmp_path / "a_0000.nii.gz").write_bytes(b"no image")
    from fp4deploy.interop.nnunet.cases import patches_of

    folder = read_folder(raw.parents[1] / "nvfp4")
    with pytest.raises(InputError, match=r"a_0000\.nii\.gz cannot be read and preprocessed by nnU-Net"):
        patches_of(folder, tmp_path, 1)
