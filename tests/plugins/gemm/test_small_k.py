"""FP16 convolutions of small K without a GPU: which the kernel takes, its limits, its reference, its fallback."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4deploy.plugins.gemm.convolution import small_k

SHARED = 227 * 1024, 163 * 1024, 99 * 1024  # shared memory of a multiprocessor of SM90, SM80, SM86


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("channels", "outputs", "taps", "how"),
    [
        (3, 64, (3, 3), {"padding": (1, 1)}),
        (3, 64, (7, 7), {"stride": (2, 2), "padding": (3, 3)}),
        (64, 12, (1, 1), {}),
        (208, 1, (1, 1), {}),
        (1, 128, (5, 5), {"padding": (2, 2)}),
        (16, 100, (3, 3), {"padding": (1, 1)}),
        (13, 64, (3, 3), {"padding": (0, 1)}),
    ],
)
def test_takes(channels: int, outputs: int, taps: tuple[int, int], how: dict) -> None:
    assert small_k.supports(channels, outputs, taps, **how)


@pytest.mark.parametrize(
    ("channels", "outputs", "taps", "how"),
    [
        (64, 64, (3, 3), {}),
        (209, 1, (1, 1), {}),
        (3, 129, (3, 3), {}),
        (3, 64, (3, 3), {"dilation": (2, 2)}),
        (3, 64, (3, 3), {"dilation": (1, 2)}),
        (3, 64, (3, 3), {"stride": (1, 2)}),
        (3, 64, (3, 3), {"stride": (4, 4)}),
        (8, 64, (3, 3), {"groups": 8}),
        (3, 64, (11, 11), {}),
    ],
)
def test_takes_no_others(channels: int, outputs: int, taps: tuple[int, int], how: dict) -> None:
    assert not small_k.supports(channels, outputs, taps, **how)


def test_every_variant_fits_shared_memory() -> None:
    """Of every GPU one block, and of an H100 as many as the registers are divided among."""
    seen = 0
    for channels, outputs, kh, kw, stride in itertools.product(
        (1, 3, 4, 5, 8, 16, 20, 24, 32, 48, 64, 128, 208),
        (1, 12, 16, 21, 24, 64, 65, 128),
        range(1, 8),
        (1, 3, 7),
        (1, 2),
    ):
        if not small_k.supports(channels, outputs, (kh, kw), (stride, stride)):
            continue
        chosen = small_k.variant(channels, outputs, (kh, kw), stride)
        block = chosen.shared_bytes + chosen.static_bytes + 1024  # the system's
        assert block <= SHARED[2]
        assert chosen.resident * block <= SHARED[0]
        assert chosen.rows >= 1
        assert chosen.store == 0 or outputs % chosen.store == 0
        assert not chosen.point or (channels % 16 == 0 and (kh, kw, stride) == (1, 1, 1))
        seen += 1
    assert seen > 500


def test_sizes_that_counters_do_not_hold() -> None:
    weight = torch.zeros(64, 3, 3, 3, dtype=torch.float16)
    image = torch.empty(1, 3, 20, 30, device="meta").permute(0, 2, 3, 1)
    assert small_k.is_aligned(image, weight, (1, 1), (1, 1))
    for shape in ((1, 3, 30_000, 30_000), (600, 3, 2048, 2048)):
        assert not small_k.is_aligned(torch.empty(*shape, device="meta").permute(0, 2, 3, 1), weight, (1, 1), (1, 1))
    for shape in ((1, 3, 1, 1), (0, 3, 20, 30)):
        assert not small_k.is_aligned(torch.empty(*shape, device="meta").permute(0, 2, 3, 1), weight)
    wide = torch.empty(1 << 20, 3, device="meta").expand(1, 1, -1, -1).as_strided((1, 4, 4, 3), (0, 1 << 30, 3, 1))
    assert not small_k.is_aligned(wide, weight)


@pytest.mark.parametrize("stride", [1, 2])
def test_reference(stride: int) -> None:
    x, weight, bias = draw(2, 7, 9, 3), draw(5, 3, 2, 3, seed=1).half(), draw(5, seed=2)
    y = small_k.conv2d_reference(x, weight, bias, (stride, stride), (1, 0), relu=True)
    wanted = torch.nn.functional.conv2d(
        x.half().float().permute(0, 3, 1, 2), weight.float().permute(0, 3, 1, 2), bias, stride, (1, 0)
    )
    assert y.is_contiguous()
    torch.testing.assert_close(y.float(), wanted.relu().permute(0, 2, 3, 1), rtol=1e-3, atol=1e-5)
