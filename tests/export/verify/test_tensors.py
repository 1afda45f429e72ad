"""What counts as the same output."""

from __future__ import annotations

import torch

from fp4deploy.export.verify.tensors import same_outputs


def test_labels_are_compared_as_they_are() -> None:
    """Not by their largest row, which a map of labels has as well."""
    labels = torch.tensor([[[0, 1, 2], [3, 4, 5], [2, 2, 9]]])
    other = labels.clone()
    other[0, 0, 0] = 1  # the same row has the largest label of each column
    (same,) = same_outputs([labels], [other])
    assert same.sum() == 8
    (same,) = same_outputs([labels], [other.float()])  # a packed network gives floating point numbers
    assert same.sum() == 8


def test_maps_of_several_channels_are_compared_by_their_class() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0]).view(1, 3, 1, 1)
    (same,) = same_outputs([logits], [3 * logits])
    assert same.all()
    (same,) = same_outputs([logits[:, :1]], [3 * logits[:, :1]])
    assert not same.any()
