"""What a configuration leaves to a set of volumes: the size and the spacing of the network's input."""

from __future__ import annotations

from typing import TypeVar

from fp4deploy.data import SegmentationDataset
from fp4deploy.data.volumes.dataset import VolumeDataset
from fp4deploy.errors import InputError
from fp4deploy.models.volumes import VolumeInput
from fp4deploy.train.config import Config

Dataset = TypeVar("Dataset", bound=SegmentationDataset)
OF_IMAGES = ("model.digits", "augment.rotate", "augment.aspect", "augment.hue", "train.upside_down")


def at_spacing(config: Config, data: Dataset) -> Dataset:
    """A split at the spacing of the configuration, where it has one; a split of images as it is."""
    if isinstance(data, VolumeDataset) and config.data.spacing is not None:
        return data.at(config.data.spacing)  # type: ignore[return-value]
    return data


def sized(config: Config, data: SegmentationDataset) -> Config:
    """The configuration with the size and spacing that a set of volumes has where none was given.

    Args:
        data: a split as `open_splits` gives it.

    Raises:
        InputError: settings of images for volumes, or the other way round.
    """
    section = config.data
    if not isinstance(data, VolumeDataset):
        if section.depth is not None or section.spacing is not None:
            raise InputError(
                f"data.depth and data.spacing are of volumes, and {section.root} holds images. Give --size HxW alone."
            )
        return config
    for key in OF_IMAGES:
        name, _, field = key.partition(".")
        usual = type(getattr(config, name)).model_fields[field].default
        if (value := getattr(getattr(config, name), field)) != usual:
            raise InputError(f"{key} = {value}: it is of images, and {section.root} holds volumes. Leave it {usual}.")
    assert data.size is not None
    depth, height, width = section.size if section.depth is not None else data.size
    found = {"depth": depth, "height": height, "width": width, "spacing": data.input.spacing}
    return config.model_copy(update={"data": section.model_copy(update=found)})


def volume_input(config: Config, data: SegmentationDataset) -> VolumeInput | None:
    """The input contract of a model of a configuration that is `sized`; None of images."""
    if not isinstance(data, VolumeDataset):
        return None
    assert config.data.depth is not None
    return VolumeInput(config.data.depth, data.input.spacing, data.input.channels, data.input.intensities)
