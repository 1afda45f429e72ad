"""Joint augmentation and loading."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy.data import (
    IGNORE,
    IMAGE_MEAN,
    IMAGE_STD,
    CachedDataset,
    EvalTransform,
    Sample,
    TrainTransform,
    cache_dataset,
    eval_loader,
    expand,
    generate_shapes,
    open_dataset,
    train_loader,
)
from fp4deploy.data.augmentation.transforms import recolour
from fp4deploy.data.loader import EpochSampler
from fp4deploy.errors import InputError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes") / "set"
    generate_shapes(root, train=10, val=3, size=48, seed=1)
    return open_dataset(root, "train")


def tinted(height=40, width=56) -> Sample:
    """A sample whose red channel says the class: smooth regions, red = 60 * class."""
    rows, columns = np.mgrid[:height, :width]
    mask = ((rows // 10 + columns // 14) % 4).astype(np.uint8)
    image = np.zeros((height, width, 3), dtype=np.uint8)
    image[..., 0], image[..., 1] = mask * 60, 30
    return Sample(image, mask, "tinted")


def denormalise(image: torch.Tensor) -> torch.Tensor:
    return image * torch.tensor(IMAGE_STD)[:, None, None] + torch.tensor(IMAGE_MEAN)[:, None, None]


def test_evaluation_normalises_and_keeps_the_whole_image():
    sample = tinted()
    image, mask = EvalTransform(40, 56)(sample)
    assert image.dtype == torch.float32
    assert mask.dtype == torch.int64
    torch.testing.assert_close(denormalise(image) * 255, torch.from_numpy(sample.image).permute(2, 0, 1).float())
    np.testing.assert_array_equal(mask, sample.mask)
    image, mask = EvalTransform(80, 112)(sample)
    assert image.shape == (3, 80, 112)
    np.testing.assert_array_equal(mask, sample.mask.repeat(2, axis=0).repeat(2, axis=1))


def test_image_and_mask_stay_aligned_through_every_augmentation():
    transform = TrainTransform(64, 64, seed=3, jitter=0.0, zoom=(0.5, 2.0))
    flipped = 0
    for index in range(24):
        image, mask = transform(tinted(), 0, index)
        known = mask != IGNORE
        read = (denormalise(image)[0] * 255 / 60).round().long()
        inner = known[1:-1, 1:-1]
        same = read[1:-1, 1:-1] == mask[1:-1, 1:-1]
        assert same[inner].float().mean() > 0.85  # edges between classes blend
        columns = mask.max(dim=0).values
        flipped += int(columns[0] != columns[-1])
    assert flipped


def test_a_flip_mirrors_image_and_mask():
    transform = TrainTransform(40, 56, jitter=0.0, zoom=(1.0, 1.0))
    sample = tinted()
    plain, _ = EvalTransform(40, 56)(sample)
    seen = set()
    for index in range(16):
        image, mask = transform(sample, 0, index)
        turned = not np.array_equal(mask, sample.mask)
        seen.add(turned)
        np.testing.assert_array_equal(mask, np.flip(sample.mask, 1) if turned else sample.mask)
        torch.testing.assert_close(image, plain.flip(-1) if turned else plain)
    assert seen == {True, False}


def test_padding_is_ignored_and_has_the_mean_colour():
    image, mask = TrainTransform(64, 64, zoom=(0.5, 0.5))(tinted())
    padding = mask == IGNORE
    assert padding.sum() == 64 * 64 - 32 * 32
    assert image[:, padding].abs().max() < 0.5 / 255 / min(IMAGE_STD) + 1e-5  # to 8 bits
    assert not (TrainTransform(64, 64, zoom=(1.0, 2.0))(tinted())[1] == IGNORE).any()


def test_jitter_changes_colours_only_and_stays_in_range():
    transform = TrainTransform(40, 56, jitter=0.5, zoom=(1.0, 1.0))
    images = torch.stack([denormalise(transform(tinted(), epoch, 0)[0]) for epoch in range(8)])
    assert images.min() > -1e-5
    assert images.max() < 1 + 1e-5
    assert images.std(dim=0).max() > 0.02


def test_every_epoch_has_an_order_of_its_own_and_each_has_every_sample():
    def order(seed, epoch):
        sampler = EpochSampler(20, seed)
        sampler.set_epoch(epoch)
        keys = list(sampler)
        assert {each for each, _ in keys} == {epoch}
        return [index for _, index in keys]

    found = [order(seed, epoch) for seed in (0, 1) for epoch in range(3)]
    assert len({tuple(each) for each in found}) == len(found)
    assert all(sorted(each) == list(range(20)) for each in found)
    assert order(1, 2) == found[-1]
    assert order(None, 7) == list(range(20))


def test_a_smaller_last_batch_is_left_out_unless_it_is_the_only_one(dataset):
    transform = TrainTransform(32, 32)
    assert [len(images) for images, _ in train_loader(dataset, transform, len(dataset) - 1)] == [len(dataset) - 1]
    assert [len(images) for images, _ in train_loader(dataset, transform, len(dataset) + 1)] == [len(dataset)]
    sizes = [len(images) for images, _ in eval_loader(dataset, EvalTransform(32, 32), len(dataset) - 1)]
    assert sizes == [len(dataset) - 1, 1]


def batches(dataset, workers, epoch, seed=5):
    loader = train_loader(dataset, TrainTransform(32, 32, seed=seed), 4, workers, seed)
    loader.set_epoch(epoch)
    return list(loader)


def test_batches_depend_on_seed_and_epoch_and_not_on_the_worker_count(dataset):
    state = torch.get_rng_state()
    first = batches(dataset, 0, 2)
    for other in (batches(dataset, 2, 2), batches(cache_dataset(dataset), 2, 2)):
        for (images, masks), (other_images, other_masks) in zip(first, other, strict=True):
            assert torch.equal(images, other_images)
            assert torch.equal(masks, other_masks)
    assert not torch.equal(first[0][0], batches(dataset, 0, 3)[0][0])
    assert not torch.equal(first[0][0], batches(dataset, 0, 2, seed=6)[0][0])
    assert torch.equal(state, torch.get_rng_state())


def test_an_epoch_is_the_same_after_resuming(dataset):
    loader = train_loader(dataset, TrainTransform(32, 32, seed=5), 4, 1, 5)
    for epoch in range(3):
        loader.set_epoch(epoch)
        seen = list(loader)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(seen, batches(dataset, 0, 2), strict=True))


def test_the_last_batch_is_left_out_unless_it_is_the_only_one(dataset):
    transform = TrainTransform(32, 32)
    assert [len(images) for images, _ in train_loader(dataset, transform, 4)] == [4, 4]
    assert [len(images) for images, _ in train_loader(dataset, transform, 16)] == [10]
    assert [len(images) for images, _ in train_loader(dataset, transform, 10)] == [10]
    assert [len(images) for images, _ in eval_loader(dataset, EvalTransform(32, 32), 4)] == [4, 4, 2]


def test_evaluation_keeps_the_order(dataset):
    transform = EvalTransform(48, 48)
    masks = torch.cat([mask for _, mask in eval_loader(dataset, transform, 4, workers=2)])
    for index in range(len(dataset)):
        np.testing.assert_array_equal(masks[index], dataset.load(index).mask)


def test_the_cache_holds_the_same_samples_and_respects_its_budget(dataset):
    cached = cache_dataset(dataset)
    assert isinstance(cached, CachedDataset)
    assert (cached.class_names, cached.layout, len(cached)) == (dataset.class_names, dataset.layout, len(dataset))
    for index in range(len(dataset)):
        np.testing.assert_array_equal(cached.load(index).image, dataset.load(index).image)
        np.testing.assert_array_equal(cached.load(index).mask, dataset.load(index).mask)
    assert not cached.load(0).image.flags.writeable
    size = 10 * 48 * 48 * 4
    assert isinstance(cache_dataset(dataset, size), CachedDataset)
    assert cache_dataset(dataset, size - 1) is dataset


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed is -1"):
        TrainTransform(32, 32, seed=-1)


def test_compact_batches_expand_to_the_same_bits(dataset):
    plain = train_loader(dataset, TrainTransform(32, 40, seed=5), 4, 0, 5)
    small = train_loader(dataset, TrainTransform(32, 40, seed=5), 4, 2, 5, compact=True)
    for (images, masks), compact in zip(plain, small, strict=True):
        assert [part.dtype for part in compact] == [torch.uint8, torch.uint8]
        assert compact[0].shape == (4, 32, 40, 3)
        expanded = expand(*compact)
        assert torch.equal(expanded[0], images)
        assert expanded[0].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(expanded[1], masks)
        assert torch.equal(expand(images, masks)[0], images)
    evaluated = next(iter(eval_loader(dataset, EvalTransform(48, 48), 4, compact=True)))
    assert torch.equal(expand(*evaluated)[0], next(iter(eval_loader(dataset, EvalTransform(48, 48), 4)))[0])


def test_jitter_is_the_three_steps_to_8_bits():
    image = np.random.default_rng(0).integers(40, 200, (8, 9, 3), dtype=np.uint8)
    brightness, contrast, saturation = 1.1, 0.8, 0.6
    x = image / 255
    grey = (x @ [0.299, 0.587, 0.114])[..., None]
    x = grey + saturation * (x - grey)
    x = grey.mean() + contrast * (x - grey.mean())
    expected = np.clip(brightness * x, 0, 1) * 255
    assert np.abs(recolour(image, brightness, contrast, saturation, 0.0) - expected).max() < 0.51
    assert recolour(image, 1.0, 1.0, 1.0, 0.0) is image
