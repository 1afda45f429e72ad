"""A case on the device has nnU-Net's numbers: its cropping, normalisation, resampling and labels, without the CPU's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from fp4deploy.data.volumes import resample
from fp4deploy.errors import InputError
from fp4deploy.requirements import NNUNET
from tests.interop import nnunet_folder

ABSENT = NNUNET.why_missing()
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))


def predictor_of(changes: dict[str, Any], axes: tuple[int, ...] = (0, 1, 2), regions: bool = False) -> Any:
    """Of plans whose configuration is changed, around a network whose logits are its input, shifted by class."""
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    from fp4deploy.interop.nnunet.segment import PackedPredictor

    plans = nnunet_folder.plans()
    plans["configurations"]["3d_fullres"] |= changes
    plans |= {"transpose_forward": list(axes), "transpose_backward": np.argsort(axes).tolist()}
    manager, dataset = PlansManager(plans), dict(nnunet_folder.DATASET)
    if regions:
        dataset |= {"labels": {"background": 0, "whole": [1, 2], "back": 2}, "regions_class_order": [1, 2]}

    class Network(torch.nn.Module):
        def load_state_dict(self, *_: Any) -> None:  # type: ignore[override]
            """Nothing is loaded."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = x.cumsum(-1) / 4
            return torch.cat([x, one, 1 - x] if not regions else [x, one], 1)

    found = PackedPredictor(device=torch.device("cpu"), allow_tqdm=False)
    configuration = manager.get_configuration("3d_fullres")
    found.manual_initialization(Network(), manager, configuration, [{}], dataset, "nnUNetTrainer", (0, 2))
    return found


@pytest.mark.parametrize(
    ("changes", "axes", "regions"),
    [
        ({}, (0, 1, 2), False),
        ({"spacing": [2.5, 0.8, 0.9]}, (2, 0, 1), False),  # slices nearest, planes by splines
        ({"spacing": [0.9, 1.1, 1.0], "use_mask_for_norm": [True]}, (1, 2, 0), True),
        ({"spacing": [1.0, 1.0, 1.25], "normalization_schemes": ["CTNormalization"]}, (0, 1, 2), True),  # as the file
        ({"spacing": [1.0, 1.2, 1.25], "preprocessor_name": "Other"}, (0, 1, 2), False),
        ({"spacing": [1.0, 1.2, 1.25], "resampling_fn_data": "resample_torch_fornnunet"}, (0, 1, 2), False),
    ],
)
def test_a_case_is_segmented_as_by_nnunet(
    changes: dict[str, Any], axes: tuple[int, ...], regions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import SimpleITK
    from nnunetv2.preprocessing.preprocessors import default_preprocessor

    if changes.get("preprocessor_name"):
        other = type("Other", (default_preprocessor.DefaultPreprocessor,), {})
        monkeypatch.setattr(default_preprocessor, "Other", other, raising=False)
    if "resampling_fn_data" in changes:
        name = "resample_torch_fornnunet"
        kwargs = {"is_seg": False, "force_separate_z": False, "memefficient_seg_resampling": False}
        changes = changes | {"resampling_fn_data_kwargs": kwargs, "resampling_fn_probabilities": name}
        changes |= {"resampling_fn_probabilities_kwargs": kwargs}
    monkeypatch.setattr(resample, "BAND", 5000)  # several bands
    file = tmp_path / "a_0000.nii.gz"
    image = np.zeros((14, 20, 17), np.float32)
    image[2:, 1:-1, :15] = np.random.default_rng(0).random((12, 18, 15))
    image[6:8, 5:8, 5:8] = 0  # a hole inside, which nnU-Net fills
    volume = SimpleITK.GetImageFromArray(image)
    volume.SetSpacing((1.25, 1.0, 1.0))
    SimpleITK.WriteImage(volume, str(file))
    found = predictor_of(changes, axes, regions)
    found.predict_from_files_sequential([[str(file)]], [str(tmp_path / "theirs")])
    case = found.read([file])
    found.write(case, found.segment(case), tmp_path / "ours.nii.gz")
    assert set(case.seconds) == {"read", "normalise", "resample", "network", "classes", "write"}
    theirs, ours = (SimpleITK.ReadImage(str(tmp_path / f"{name}.nii.gz")) for name in ("theirs", "ours"))
    assert (ours.GetSize(), ours.GetSpacing()) == (volume.GetSize(), volume.GetSpacing())
    a, b = SimpleITK.GetArrayFromImage(ours), SimpleITK.GetArrayFromImage(theirs)
    assert len(np.unique(b)) == 3
    assert (a != b).mean() < 1e-3


@pytest.mark.parametrize("thick", [0, 1, 2])
def test_thick_slices_are_nnunets_nearest_ones(thick: int) -> None:
    from nnunetv2.preprocessing.resampling.default_resampling import resample_data_or_seg_to_shape

    how = partial(resample_data_or_seg_to_shape, is_seg=False, order=3, order_z=0, force_separate_z=None)
    spacing, target = [1.0, 1.0, 1.0], [0.8, 0.7, 1.1]
    spacing[thick], target[thick] = 5.0, 3.0
    x = torch.randn(2, 9, 10, 11, generator=torch.Generator().manual_seed(0))
    size = [round(side * own / to) for side, own, to in zip(x.shape[1:], spacing, target, strict=True)]
    ours = torch.cat(list(predictor_of({})._resampled(x, size, how, spacing, target)), 1)
    theirs = how(x.numpy(), size, spacing, target)
    assert torch.allclose(ours, torch.from_numpy(theirs).float(), atol=2e-6)


def test_a_volume_that_does_not_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.interop.nnunet.segment import Case

    found, tried, told = predictor_of({"spacing": [1.0, 1.0, 1.25]}), [], []
    found.window = lambda *windows: told.append(windows)
    inner = found._at_target

    def fails_first(case: Case, device: torch.device) -> torch.Tensor:
        tried.append(device)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return inner(case, device)  # type: ignore[no-any-return]

    monkeypatch.setattr(found, "_at_target", fails_first)
    x, properties = np.random.default_rng(0).random((1, 8, 16, 16), np.float32), {"spacing": [1.0, 1.0, 1.25]}
    case = found._normalised(x, properties)
    assert found.segment(case).shape == (8, 16, 16)
    assert tried == [found.device, torch.device("cpu")]
    assert not case.data.size, "the volume is given up"
    assert told == [(1, 1)]


def test_the_first_window_on_a_gpu_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    found, told, x = predictor_of({}), [], torch.zeros(1, 1, *nnunet_folder.PATCH)
    found.window = lambda *windows: told.append(windows)
    found.device = SimpleNamespace(type="cuda")
    data = MagicMock()
    data.__getitem__.return_value.__getitem__.return_value.to.return_value = x

    def each_window(self: Any, data: Any, slicers: Any, do_on_device: bool) -> None:
        for _ in slicers:
            self._internal_maybe_mirror_and_predict(x)

    monkeypatch.setattr(nnUNetPredictor, "_internal_predict_sliding_window_return_logits", each_window)
    for _ in range(2):
        found._internal_predict_sliding_window_return_logits(data, ["first", "second"])
    assert told == [(1, 2), (2, 2)] * 2


def test_mirror_images_are_batches() -> None:
    found, seen = predictor_of({}), []
    found.network.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    x = torch.randn(1, 1, *nnunet_folder.PATCH)
    together = found._internal_maybe_mirror_and_predict(x)
    found.mirrored = 1
    assert torch.equal(together, found._internal_maybe_mirror_and_predict(x))
    expected = super(type(found), found)._internal_maybe_mirror_and_predict(x)
    assert torch.equal(together, expected)
    assert seen == [4, *[1] * 8]


def test_a_file_that_nnunet_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "a_0000.nii.gz").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"a_0000\.nii\.gz cannot be read by nnU-Net"):
        predictor_of({}).read([tmp_path / "a_0000.nii.gz"])
