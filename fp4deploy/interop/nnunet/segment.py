"""A case from its files to its segmentation with nnU-Net's numbers, on the predictor's device.

    files -> nnU-Net's reader -> axes, box of what is not 0, nnU-Net's normalisation         `read`
    -> resampled -> windows, mirror images in batches -> logits -> resampled -> classes      `segment`
    -> box, axes -> nnU-Net's writer                                                         `write`

nnU-Net resamples image and logits by skimage on one thread of the CPU, copies the logits there for it, and starts
processes for both. Here the same splines are matrix products (`data.volumes.resample`) where the network is, and
logits never leave the device. What only some data sets need is left to nnU-Net's functions: another preprocessor,
another function of resampling, regions.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from acvl_utils.cropping_and_padding.bounding_boxes import bounding_box_to_slice, get_bbox_from_mask
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.preprocessing.cropping.cropping import crop_to_nonzero
from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
from nnunetv2.preprocessing.resampling.default_resampling import (
    compute_new_shape,
    determine_do_sep_z_and_axis,
    resample_data_or_seg_to_shape,
)
from numpy.typing import NDArray

from fp4deploy.data.sample import class_type
from fp4deploy.data.volumes.resample import resampled_bands
from fp4deploy.errors import InputError, named_cause

MIRRORED = 4  # mirror images of a window that the network is given at once


@dataclass
class Case:
    """A volume [C, *extents], normalised; nnU-Net's properties of it; the seconds of each part so far.

    spacing: of the file's voxels, and `target` that of the network's, in the order of its axes.
    resampled: `data` has the network's spacing already.
    """

    data: NDArray[np.float32]
    properties: dict[str, Any]
    spacing: list[float]
    target: list[float]
    resampled: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Measure a part."""
        began = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - began


class PackedPredictor(nnUNetPredictor):
    """nnU-Net's predictor whose mirror images are batches; `read`, `segment` and `write` take a case through it."""

    mirrored = MIRRORED
    window: Callable[[int, int], None] = staticmethod(lambda done, of: None)  # is told how many of a volume's are done
    done = of = 0

    def read(self, files: Sequence[Path | str]) -> Case:
        """A case as nnU-Net normalises it, not resampled yet; on the CPU, by any thread.

        Raises:
            InputError: nnU-Net cannot read the files.
        """
        try:
            began = time.perf_counter()
            found = self.plans_manager.image_reader_writer_class().read_images([str(file) for file in files])
            read = time.perf_counter() - began
            case = self._normalised(*found)
        except Exception as error:  # readers raise what they like
            raise InputError(f"{files[0]} cannot be read by nnU-Net: {named_cause(error, 200)}.") from error
        case.seconds |= {"read": read, "normalise": time.perf_counter() - began - read}
        return case

    def _normalised(self, data: NDArray[Any], properties: dict[str, Any]) -> Case:
        """`DefaultPreprocessor.run_case_npy` up to its resampling, without the mask that no normalisation reads."""
        plans, configuration = self.plans_manager, self.configuration_manager
        preprocessor = configuration.preprocessor_class(verbose=False)
        forward = plans.transpose_forward
        spacing = [float(properties["spacing"][axis]) for axis in forward]
        target = [*spacing[: len(spacing) - len(configuration.spacing)], *map(float, configuration.spacing)]
        if type(preprocessor) is not DefaultPreprocessor:
            data, _, properties = preprocessor.run_case_npy(
                data, None, properties, plans, configuration, self.dataset_json
            )
            return Case(data, properties, spacing, target, resampled=True)
        data = data.astype(np.float32).transpose([0, *(axis + 1 for axis in forward)])
        properties["shape_before_cropping"] = data.shape[1:]
        if any(configuration.use_mask_for_norm):
            data, mask, box = crop_to_nonzero(data)
        else:  # filling the mask's holes, which takes longest, does not change its box
            box = get_bbox_from_mask((data != 0).any(0))
            inside = (slice(None), *bounding_box_to_slice(box))
            data = data[inside]
            mask = np.broadcast_to(np.int8(0), (1, *data.shape[1:]))
        properties["bbox_used_for_cropping"] = box
        properties["shape_after_cropping_and_before_resampling"] = data.shape[1:]
        data = preprocessor._normalize(
            np.ascontiguousarray(data), mask, configuration, plans.foreground_intensity_properties_per_channel
        )
        return Case(data, properties, spacing, target)

    @torch.inference_mode()
    def segment(self, case: Case) -> NDArray[Any]:
        """The label of each voxel of the case's file, in the order of its reader's axes; `case.data` is given up."""
        configuration, properties = self.configuration_manager, case.properties
        with case.timed("resample"):
            try:
                data = self._at_target(case, self.device)
            except torch.OutOfMemoryError:  # nnU-Net's windows have a way of their own of not fitting
                torch.cuda.empty_cache()
                data = self._at_target(case, torch.device("cpu"))
            case.data = np.empty(0, np.float32)
        with case.timed("network"):
            logits = self._logits(data)
            del data
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        with case.timed("classes"):
            labels = self.label_manager
            before = properties["shape_before_cropping"]
            found = np.zeros(before, class_type(len(labels.foreground_labels) + 1))
            inside = found[bounding_box_to_slice(properties["bbox_used_for_cropping"])]
            bands = self._resampled(
                logits, inside.shape, configuration.resampling_fn_probabilities, case.target, case.spacing
            )
            top = 0
            for band in bands:
                half = band.to(logits.dtype)  # as nnU-Net resamples into an array of the logits' type
                classes = labels.convert_logits_to_segmentation(half.cpu()) if labels.has_regions else half.argmax(0)
                inside[top : top + len(classes)] = classes.to(torch.int16).cpu().numpy()
                top += len(classes)
            return found.transpose(self.plans_manager.transpose_backward)

    def _at_target(self, case: Case, device: torch.device) -> torch.Tensor:
        """The volume on a device, at the network's spacing."""
        data = torch.from_numpy(case.data).to(device)
        if case.resampled:
            return data
        size = compute_new_shape(data.shape[1:], case.spacing, case.target)
        how = self.configuration_manager.resampling_fn_data
        return torch.cat(list(self._resampled(data, size, how, case.spacing, case.target)), 1)

    def write(self, case: Case, labels: NDArray[Any], path: Path | str) -> None:
        """By nnU-Net's writer; by any thread."""
        with case.timed("write"):
            self.plans_manager.image_reader_writer_class().write_seg(labels, str(path), case.properties)

    def _resampled(
        self, x: torch.Tensor, size: Sequence[int], how: Any, spacing: list[float], target: list[float]
    ) -> Iterator[torch.Tensor]:
        """What the plans' function of resampling gives, in bands along the first axis."""
        options = {"order": 3, "order_z": 0, "force_separate_z": False, **how.keywords}
        separate, thick = determine_do_sep_z_and_axis(options.pop("force_separate_z"), spacing, target)
        order, thick_order = options.pop("order"), options.pop("order_z")
        known = how.func is resample_data_or_seg_to_shape and options in ({}, {"is_seg": False})
        if tuple(size) == tuple(x.shape[1:]):
            return iter((x,))
        if not known or (separate and thick_order != 0):
            return iter((torch.as_tensor(how(x.cpu(), size, spacing, target)).to(x.device),))
        orders = [thick_order if separate and axis == thick else order for axis in range(3)]
        return resampled_bands(x, [int(length) for length in size], orders, clip=True)

    def _logits(self, data: torch.Tensor) -> torch.Tensor:
        """Mean logits of the folds, where nnU-Net's sliding window has put them."""
        total: torch.Tensor | None = None
        for parameters in self.list_of_parameters:
            self.network.load_state_dict(parameters)
            found = self.predict_sliding_window_return_logits(data)
            total = found if total is None else total.to(found.device).add_(found)
        assert total is not None
        return total.div_(len(self.list_of_parameters)) if len(self.list_of_parameters) > 1 else total

    def _internal_predict_sliding_window_return_logits(self, data: Any, slicers: Any, do_on_device: bool = True) -> Any:
        """nnU-Net's, after a first window: its thread allocates memory, which no CUDA graph may be captured beside."""
        if self.device.type == "cuda":
            self.of = 0  # this window counts for none
            self._internal_maybe_mirror_and_predict(data[slicers[0]][None].to(self.device))
        self.done, self.of = 0, len(slicers)
        return super()._internal_predict_sliding_window_return_logits(data, slicers, do_on_device)

    @torch.inference_mode()
    def _internal_maybe_mirror_and_predict(self, x: torch.Tensor) -> torch.Tensor:
        """Mean logits of a window [1, C, *patch size] and its mirror images, added in nnU-Net's order."""
        allowed = self.allowed_mirroring_axes if self.use_mirroring else None
        axes = [axis + 2 for axis in allowed or ()]
        flips = [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]
        total: torch.Tensor | None = None
        for first in range(0, len(flips), self.mirrored):
            some = flips[first : first + self.mirrored]
            try:
                outputs = self.network(torch.cat([x.flip(chosen) for chosen in some]))
            except torch.OutOfMemoryError:
                if self.mirrored == 1:
                    raise
                outputs = None
            if outputs is None:  # outside of the handler, which holds what did not fit
                self.mirrored = 1
                return self._internal_maybe_mirror_and_predict(x)
            for output, chosen in zip(outputs.split(1), some, strict=True):
                total = output if total is None else total.add_(output.flip(chosen))
        assert total is not None
        self.done += 1
        if self.of:
            self.window(self.done, self.of)
        return total.div_(len(flips)) if len(flips) > 1 else total
