"""A bundle of MONAI, run by MONAI: its masks are those of `predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import nn
from typer.testing import CliRunner

import fp4deploy as fd
from cli.main import app
from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.models import ModelCard
from fp4deploy.models.build import build_model
from fp4deploy.models.spec import parse_spec
from fp4deploy.models.volumes import Intensity, NetworkInput, VolumeInput
from fp4deploy.packed import PackedModule, packed_file, write_packed
from fp4deploy.predict.volumes import find_volumes, predict_volumes
from fp4deploy.qat import round_to_deployed
from fp4deploy.requirements import ZOO
from fp4deploy.serving.bundle import write_bundle
from tests.volumes import nibabel, scene, write

SIZE, NAMES = (8, 16, 16), ("background", "small", "large")
CT, MRI = Intensity(-50.0, 250.0, 80.0, 60.0), Intensity()


def packed(folder: Path, intensities: tuple[Intensity, ...], spacing: tuple[float, float, float]) -> Path:
    """An untrained network of these channels, packed in NVFP4, with its card."""
    torch.manual_seed(0)
    count = len(intensities)
    layers = [nn.Conv3d(before, after, 1) for before, after in ((count, 16), (16, 16), (16, 3))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).eval()  # windows do not matter
    example = torch.randn(1, count, *SIZE)
    with torch.no_grad():
        model[-1].bias.copy_(-model[:4](example).flatten(2).mean(2)[0] @ model[-1].weight.flatten(1).T)  # no class wins
    fd.calibrate(fd.prepare(model, include="2"), [example])
    round_to_deployed(model)
    names = tuple(f"T{number}" for number in range(count))
    volume = VolumeInput(SIZE[0], spacing, names, intensities)
    card = ModelCard("nvfp4", 1.0, NAMES, *SIZE[1:], (0.0,) * count, (1.0,) * count, True, "nvfp4_qat", volume=volume)
    file = packed_file(folder / "net.fp4", card, *pack_model(model, example))
    write_packed(file)
    return file.path


def test_the_files_of_a_bundle(tmp_path: Path) -> None:
    path = packed(tmp_path, (CT, MRI), (3.0, 1.0, 1.0))
    said = CliRunner().invoke(
        app, ["export", str(path), "--format", "monai-bundle", "--out", str(tmp_path / "bundles")]
    )
    assert said.exit_code == 0, said.output
    bundle = tmp_path / "bundles" / "net"
    assert "monai.bundle run --config_file" in said.stderr
    metadata = json.loads((bundle / "configs" / "metadata.json").read_text())
    needed = {"version", "changelog", "monai_version", "pytorch_version", "numpy_version", "task", "description"}
    assert needed <= metadata.keys()
    given = metadata["network_data_format"]
    assert given["inputs"]["image"]["spatial_shape"] == list(SIZE)
    assert given["outputs"]["pred"]["channel_def"] == {"0": "background", "1": "small", "2": "large"}
    config = json.loads((bundle / "configs" / "inference.json").read_text())
    clip, normalise = config["preprocessing"]["transforms"][4:6]
    assert "[-50.0, -torch.inf]" in clip["func"]
    assert (normalise["subtrahend"], normalise["divisor"]) == ([80.0, None], [60.0, None])
    assert (bundle / "models" / "model.fp4").read_bytes() == path.read_bytes()
    (bundle / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is in the way: .*notes\.txt"):
        write_bundle(path, bundle)
    with pytest.raises(InputError, match="holds a packed network, not .*export --format packed"):
        write_bundle(tmp_path / "net.onnx", tmp_path / "other")


@pytest.mark.parametrize(
    ("intensities", "spacing", "own", "axes"),
    [
        ((CT, MRI), (1.0, 1.0, 2.0), (1.0, 1.0, 2.0), "PIR"),
        ((MRI,), (1.6, 1.0, 0.9), (1.1, 1.0, 1.4), "RAS"),
    ],
)
def test_monai_runs_it_to_the_masks_of_predict(
    intensities: tuple[Intensity, ...],
    spacing: tuple[float, float, float],
    own: tuple[float, float, float],
    axes: str,
    tmp_path: Path,
) -> None:
    bundles = pytest.importorskip("monai.bundle", reason=ZOO["monai"].install)
    pytest.importorskip("ignite", reason="pytorch-ignite is missing: pip install pytorch-ignite")
    images = tmp_path / "images"
    voxels = gaussian_filter(scene((20, 18, 14), seed=4)[0], 1.5)
    for channel in range(len(intensities)):
        write(images / f"a_{channel:04d}.nii.gz", voxels * (1 - 2 * channel), axes, own)
    path = packed(tmp_path, intensities, spacing)
    bundle = write_bundle(path, tmp_path / "bundle")
    config, metadata = (str(bundle / "configs" / f"{name}.json") for name in ("inference", "metadata"))
    bundles.verify_net_in_out("network_def", metadata, config, device="cpu", bundle_root=str(bundle))
    places = {"dataset_dir": str(images), "output_dir": str(tmp_path / "monai")}
    bundles.run(config_file=config, bundle_root=str(bundle), device="cpu", **places)
    runtime = fd.open_runtime(path)
    sources = find_volumes([str(images)], runtime.card.volume.channels)  # type: ignore[union-attr]
    _, failures = predict_volumes(runtime, {}, sources, tmp_path / "ours")
    assert not failures
    ours, theirs = (nibabel.load(next((tmp_path / name).glob("*.nii.gz"))) for name in ("ours", "monai"))
    assert np.allclose(ours.affine, theirs.affine)
    a, b = np.asarray(ours.dataobj), np.squeeze(np.asarray(theirs.dataobj))
    assert len(np.unique(a)) > 1
    assert (a == b).mean() > (0.999 if axes == "PIR" else 0.95), "MONAI's grid of another spacing is its own"


def test_a_network_of_images_is_none(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 2, 1)
    file = packed_file(tmp_path / "a.fp4", None, *pack_model(model, torch.randn(1, 3, 8, 8)))
    write_packed(file)
    with pytest.raises(InputError, match=r"is of volumes, and .*a\.fp4 is of no known input.*PackedModule"):
        write_bundle(file.path, tmp_path / "bundle")
    module = PackedModule(file.path, "cpu").train()
    assert module(torch.ones(1, 3, 8, 8).half()).dtype == torch.float32


DYNUNET = {
    "kernel_size": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
    "upsample_kernel_size": [[1, 2, 2], [2, 2, 2]],
    "filters": [16, 16, 32],
}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("DynUNet", DYNUNET),
        ("SegResNet", {"init_filters": 16, "blocks_down": [1, 1], "blocks_up": [1]}),
    ],
)
def test_networks_of_monai_in_its_sliding_window(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Prepared, and packed in its place: the same logits, and the tensor with an affine that MONAI gives."""
    inferers = pytest.importorskip("monai.inferers", reason=ZOO["monai"].install)
    from monai.data import MetaTensor

    torch.manual_seed(0)
    volumes = NetworkInput(1, (16, 16, 16), (1.0, 1.0, 1.0))
    model = build_model(parse_spec(f"monai:{name}", arguments), 2, inputs=volumes).eval()
    example = torch.randn(1, 1, 16, 16, 16)
    fd.calibrate(fd.prepare(model), [example])
    round_to_deployed(model)
    fd.pack(model, tmp_path / "net.fp4", example_inputs=example, verify=False)
    affine = torch.diag(torch.tensor([1.0, 2.0, 3.0, 1.0]))
    volume = MetaTensor(torch.randn(1, 1, 20, 20, 16), affine=affine)
    inferer = inferers.SlidingWindowInferer((16, 16, 16), sw_batch_size=2, overlap=0.25, mode="gaussian")
    with torch.inference_mode():
        ours, theirs = (inferer(volume, each) for each in (PackedModule(tmp_path / "net.fp4", "cpu"), model))
    assert torch.equal(ours.affine, theirs.affine)
    away = (ours - theirs).abs().as_tensor()
    assert away.median() < 1e-2 * theirs.abs().max(), "but where last bits become steps of FP4"
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() > 0.95
