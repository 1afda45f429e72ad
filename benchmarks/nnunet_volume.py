"""A volume from its file to its segmentation: nnU-Net's predictor, and the same folder with packed networks.

    python -m benchmarks.nnunet_volume --json benchmarks/results/nnunet_volume_h200.json
    python -m benchmarks.nnunet_volume --spacing 1.05 --json benchmarks/results/nnunet_volume_resampled_h200.json
    python -m benchmarks.nnunet_volume --device cpu --volume 20 24 28 --patch 16 --widths 16 16 --steps 1

A results folder of nnU-Net is made: its PlainConvUNet of five stages of 32 to 320 channels for a patch of 128 x 128 x
128, trained for some hundred steps on generated scenes (ellipsoids of two classes in noise), so that its classes are no
ties. A volume of 300 x 512 x 512 voxels, int16, .nii.gz, is segmented from file to file:

| form | what runs |
|---|---|
| `nnunet` | `nnUNetPredictor`, everything on the device, without its processes, which take longer to start |
| `nnunet, compiled` | with nnUNet_compile |
| `nnunet, compiled, channels_last_3d` | its network also laid out by hand as torch multiplies fastest |
| `fp16`, `nvfp4` | `fp4deploy predict --nnunet`: the packed form of these weights, and of `fp4deploy quantize` (amax) |

All with mirroring, or all without (`--no-mirror`); windows overlap by half, with Gaussian weights. Parts in seconds:
`read`, `normalise`, `resample` (of nnU-Net one `preprocess`), `network` (windows to logits), `classes`, `write` (of
nnU-Net one `export`). Each form has compiled and captured before, in `first_s`; what nnU-Net does on the CPU does not
depend on its network's form and is measured once. `command_s`: all of `predict_folder`, reading the folder, its
networks and checking the volume included. `ratio`: total over the shortest total of nnU-Net. `same_mask`: share of
voxels with one label. `windows`: the packed network for one window, by mirror images that it is given at once.

--spacing: voxels of the file are so many times finer than those of the plans, so that image and logits are resampled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import peers
from fp4deploy.interop.nnunet import pack_folder, predict_folder, predictor, quantize_folder
from fp4deploy.models.nnunet import read_folder
from tests.interop import nnunet_folder

WIDTHS, LABELS = (32, 64, 128, 256, 320), nnunet_folder.DATASET["labels"]
LAYOUT = torch.channels_last_3d


def plans_of(widths: Sequence[int], patch: int, spacing: float) -> dict[str, Any]:
    """What nnU-Net's planner writes for such a network."""
    plans, stages = nnunet_folder.plans(), len(widths)
    plans["configurations"]["3d_fullres"] |= {
        "patch_size": [patch] * 3,
        "spacing": [spacing] * 3,
        "architecture": nnunet_folder.architecture(
            n_stages=stages,
            features_per_stage=list(widths),
            kernel_sizes=[[3, 3, 3]] * stages,
            strides=[[1, 1, 1], *[[2, 2, 2]] * (stages - 1)],
            n_conv_per_stage=[2] * stages,
            n_conv_per_stage_decoder=[2] * (stages - 1),
        ),
    }
    return plans


def scene(size: Sequence[int], seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An image float32 [*size] of mean 0 and deviation about 1, and its labels int64: ellipsoids in smooth noise."""
    generator = torch.Generator(device).manual_seed(seed)

    def noise(step: int) -> torch.Tensor:
        coarse = torch.randn(1, 1, *(max(2, side // step) for side in size), generator=generator, device=device)
        return F.interpolate(coarse, tuple(size), mode="trilinear")[0, 0]

    labels = torch.zeros(*size, dtype=torch.int64, device=device)
    axes = [torch.arange(side, device=device, dtype=torch.float32) for side in size]
    chosen = np.random.default_rng(seed)
    for number in range(24):
        centre = [chosen.uniform(0.1, 0.9) * side for side in size]
        radius = [chosen.uniform(0.04, 0.14) * min(side, 2 * min(size)) for side in size]
        z, y, x = (((axis - at) / by) ** 2 for axis, at, by in zip(axes, centre, radius, strict=True))
        labels[z[:, None, None] + y[:, None] + x < 1] = 1 + number % 2
    image = 0.6 * noise(16) + torch.tensor([0.0, 1.6, -1.6], device=device)[labels]
    return image + 0.4 * torch.randn(*size, generator=generator, device=device), labels


def trained(plans: dict[str, Any], patch: int, steps: int, device: str) -> torch.nn.Module:
    """nnU-Net's network of the plans, trained on patches of scenes."""
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    said = plans["configurations"]["3d_fullres"]["architecture"]
    arguments = (said["network_class_name"], said["arch_kwargs"], said["_kw_requires_import"])
    torch.manual_seed(0)
    network: torch.nn.Module = get_network_from_plans(*arguments, 1, len(LABELS), True, False)
    network = network.to(device, memory_format=LAYOUT).train()  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    scenes = [scene([patch * 3 // 2] * 3, seed, device) for seed in range(1, 5)]
    chosen = np.random.default_rng(0)
    for step in range(steps):
        cuts = [[slice(at, at + patch) for at in chosen.integers(0, patch // 2, 3)] for _ in range(2)]
        image, labels = scenes[step % len(scenes)]
        x, y = (torch.stack([each[tuple(cut)] for cut in cuts]) for each in (image, labels))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(network(x[:, None]).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"trained, loss {loss.item():.4f}", flush=True)
    return network.eval().cpu().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def write_results(folder: Path, arguments: argparse.Namespace) -> Path:
    """The results folder and RAW/imagesTs with the volume; the folder of the former."""
    import SimpleITK

    plans = plans_of(arguments.widths, arguments.patch, 1.0)
    path = folder / "fp32" / "Dataset900_Generated" / nnunet_folder.NAME
    (path / "fold_0").mkdir(parents=True)
    network = trained(plans, arguments.patch, arguments.steps, arguments.device)
    weights = {name: value.contiguous() for name, value in network.state_dict().items()}
    saved = nnunet_folder.checkpoint(0, weights) | {"inference_allowed_mirroring_axes": (0, 1, 2)}
    saved["init_args"]["plans"] = plans
    torch.save(saved, path / "fold_0" / "checkpoint_final.pth")
    (path / "plans.json").write_text(json.dumps(plans))
    (path / "dataset.json").write_text(json.dumps(nnunet_folder.DATASET))
    image, labels = scene(arguments.volume, 0, arguments.device)
    small, _ = scene([arguments.patch * 3 // 2] * 3, 1, arguments.device)
    written = (("imagesTs/case_0000", image), ("calibration/small_0000", small), ("labelsTs/case", labels))
    for name, values in written:
        (folder / name).parent.mkdir()
        found = SimpleITK.GetImageFromArray(as_stored(values).cpu().numpy())
        found.SetSpacing([1 / arguments.spacing] * 3)
        SimpleITK.WriteImage(found, str(folder / f"{name}.nii.gz"), True)
    return path


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """Labels in bytes, intensities in 16 bits."""
    return (200 * values).to(torch.int16) if values.is_floating_point() else values.to(torch.uint8)


def nnunet(path: Path, files: list[str], out: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """nnU-Net's predictor: the parts on the CPU once, the network in each form."""
    from nnunetv2.inference.export_prediction import export_prediction_from_logits
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    once: dict[str, float] = {}
    device = torch.device(arguments.device)
    forms = ("nnunet", "nnunet, compiled", "nnunet, compiled, channels_last_3d")
    for form in forms if device.type == "cuda" else forms[:1]:
        os.environ["nnUNet_compile"] = str("compiled" in form)  # noqa: SIM112  nnU-Net's name
        torch._dynamo.reset()
        found = nnUNetPredictor(device=device, allow_tqdm=False, use_mirroring=arguments.mirror)
        found.initialize_from_trained_model_folder(str(path), (0,))
        if "channels_last" in form:
            found.network.to(device, memory_format=LAYOUT)
        if not once:
            once["preprocess"], (data, properties) = timed(preprocessed, found, files)
        window = (slice(None), *(slice(side) for side in found.configuration_manager.patch_size))
        first, _ = timed(found.predict_logits_from_preprocessed_data, data[window])
        spent, logits = timed(found.predict_logits_from_preprocessed_data, data)
        if "export" not in once:
            given = (found.configuration_manager, found.plans_manager, found.dataset_json, str(out))
            once["export"], _ = timed(export_prediction_from_logits, logits, properties, *given)
        seconds = {**once, "network": spent}
        yield form, {"seconds": seconds, "total_s": sum(seconds.values()), "first_s": first}
        del found, logits
        if device.type == "cuda":
            torch.cuda.empty_cache()


def preprocessed(found: Any, files: list[str]) -> tuple[torch.Tensor, dict[str, Any]]:
    """As `nnUNetPredictor.predict_from_files_sequential` does it."""
    preprocessor = found.configuration_manager.preprocessor_class(verbose=False)
    given = (found.plans_manager, found.configuration_manager, found.dataset_json)
    data, _, properties = preprocessor.run_case(files, None, *given)
    return torch.from_numpy(data), properties


def timed(run: Callable[..., Any], *given: Any, **options: Any) -> tuple[float, Any]:
    """Seconds, and what was returned."""
    began = time.perf_counter()
    found = run(*given, **options)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def ours(path: Path, images: Path, out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `fp4deploy predict --nnunet` does with each case, the second time; and all of the command."""
    options: dict[str, Any] = {"use_mirroring": arguments.mirror, "device": arguments.device, "allow_tqdm": False}
    row: dict[str, Any] = {"windows": {}}
    found = predictor(path, **options)
    x = torch.randn(1, 1, *found.configuration_manager.patch_size, device=arguments.device)

    def windows(count: int) -> Any:
        outputs = None
        for _ in range(count):
            outputs = found._internal_maybe_mirror_and_predict(x)
        return outputs

    logits: list[torch.Tensor] = []
    for mirrored in arguments.windows if arguments.mirror else ():
        found.mirrored = mirrored
        first, _ = timed(windows, 1)
        spent, other = timed(windows, 8)
        logits.append(other.float())
        differs = float((logits[-1].argmax(1) != logits[0].argmax(1)).float().mean())
        row["windows"][mirrored] = {"first_s": first, "seconds": spent / 8, "other_classes": differs}
        print(mirrored, "mirror images at once", row["windows"][mirrored], flush=True)
    found.mirrored = type(found).mirrored

    def case() -> dict[str, float]:
        case = found.read(sorted(images.iterdir()))
        found.write(case, found.segment(case), out / "case.nii.gz")
        return case.seconds

    out.mkdir()
    row["first_s"], _ = timed(case)
    _, row["seconds"] = timed(case)
    row["total_s"] = sum(row["seconds"].values())
    row["command_s"], _ = timed(predict_folder, read_folder(path), images, out, **options)
    return row


def compare(report: dict[str, Any], folder: Path) -> None:
    """Ratios of totals, and how masks agree."""
    import SimpleITK

    files = {form: folder / form / "case.nii.gz" for form in ("fp16", "nvfp4", "labelsTs")}
    files["nnunet"] = folder / "nnunet.nii.gz"
    masks = {form: SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(file))) for form, file in files.items()}
    totals = {form: row["total_s"] for form, row in report["forms"].items()}
    best = min(total for form, total in totals.items() if form.startswith("nnunet"))
    report["ratio"] = {form: totals[form] / best for form in ("fp16", "nvfp4")}
    pairs = (("fp16", "nnunet"), ("nvfp4", "fp16"), ("nvfp4", "nnunet"))
    report["same_mask"] = {f"{a}, {b}": float((masks[a] == masks[b]).mean()) for a, b in pairs}
    truth = masks.pop("labelsTs")
    report["dice"] = {form: [dice(mask == k, truth == k) for k in (1, 2)] for form, mask in masks.items()}


def dice(a: Any, b: Any) -> float:
    """Of two masks."""
    return float(2 * (a & b).sum() / max(1, a.sum() + b.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volume", type=int, nargs=3, default=[300, 512, 512], help="slices, rows, columns")
    parser.add_argument("--patch", type=int, default=128)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--spacing", type=float, default=1.0)
    parser.add_argument("--mirror", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--windows", type=int, nargs="*", default=[1, 2, 4, 8], help="mirrored at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, help="to keep what is made")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    told = peers.command("--folder").replace("benchmarks/nnunet_volume.py", "-m benchmarks.nnunet_volume")
    report: dict[str, Any] = {"command": told, "volume": arguments.volume, "forms": {}}
    if arguments.device == "cuda":
        report["machine"] = peers.machine()

    def keep(form: str = "", row: Any = None) -> None:
        if form:
            report["forms"][form] = row
            print(form, row, flush=True)
        if arguments.json is not None:  # after each: a run that is cut off keeps what it has
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    try:
        spent, path = timed(write_results, folder, arguments)
        print(f"made in {spent:.0f} s", flush=True)
        given = {"patches": 4, "verify": False, "device": arguments.device}
        pack_folder(read_folder(path), verify=False)
        spent, _ = timed(quantize_folder, read_folder(path), folder / "calibration", folder / "packed", "amax", **given)
        print(f"packed and quantised in {spent:.0f} s", flush=True)
        for form, where in (("fp16", path), ("nvfp4", folder / "packed")):
            keep(form, ours(where, folder / "imagesTs", folder / form, arguments))
        for form, row in nnunet(path, [str(folder / "imagesTs/case_0000.nii.gz")], folder / "nnunet", arguments):
            keep(form, row)
        compare(report, folder)
        keep()
        print(json.dumps({key: report[key] for key in ("ratio", "same_mask", "dice")}, indent=1), flush=True)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
