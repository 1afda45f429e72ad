"""NVFP4 layers on a GPU: packed bytes of the reference, and results near float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp4deploy import formats
from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, Nvfp4Tensor
from fp4deploy.plugins import (
    FP4WeightCache,
    available,
    fp4_cached_linear,
    fp4_conv2d,
    fp4_linear,
    fp4_matmul,
    fp4_quantize,
)
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.gemm.reference import conv2d_reference, matmul_reference
from tests.plugins.gemm.gpu_cases import AMAXES, DEVICE, close, equal, poison, randn, same_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not aot.available() or not available(),
        reason="no NVIDIA GPU that kernels run on",
    ),
]
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 4e-3}
EXACT: dict[str, Any] = {"dtype": torch.float64, "accumulate": torch.float64}


@pytest.mark.parametrize("options", [{}, {"four_over_six": FourOverSix()}], ids=["plain", "4/6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_have_the_bytes_of_the_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for weight in (randn(64, 256, dtype=dtype), randn(17, 33, dtype=dtype), randn(1, 1, dtype=dtype)):
        poison()
        same_bytes(fp4_quantize(weight, **options).weight, formats.quantize_nvfp4(weight.cpu(), **options))
        same_bytes(fp4_quantize(weight.T, **options).weight, formats.quantize_nvfp4(weight.T.cpu(), **options))
    filters = randn(24, 40, 3, 5, dtype=dtype)
    expected = formats.quantize_nvfp4(filters.permute(0, 2, 3, 1).cpu(), **options)
    for x in (filters, filters.to(memory_format=torch.channels_last), filters.repeat_interleave(2, 3)[..., ::2]):
        poison()
        same_bytes(fp4_quantize(x, **options).weight, expected)


@pytest.mark.parametrize("rows", [(1,), (5,), (16,), (17,), (300,), (2, 3, 7), (), (0,)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 17), (70, 100), (129, 1024), (512, 256), (96, 4096)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_layers(rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype) -> None:
    x, limit = randn(*rows, k, dtype=dtype), LIMITS[dtype]
    weight, bias = randn(n, k, seed=1), randn(n, seed=2)
    cache = fp4_quantize(weight, bias)
    for amax in AMAXES:
        left = x if amax is None else formats.quantize_nvfp4(x, amax=None if amax == "dynamic" else amax)
        poison()
        y = fp4_cached_linear(x, cache, amax)
        close(y, matmul_reference(left, cache.weight, cache.bias, **EXACT), limit)
        assert isinstance(y, torch.Tensor)
        assert y.dtype == dtype
        poison()
        assert torch.equal(fp4_linear(x, weight, bias, amax), y)  # type: ignore[arg-type]
        assert torch.equal(cache.forward(x, amax, relu=True), y.relu())  # type: ignore[arg-type]
    if rows and 0 not in rows:
        close(fp4_matmul(x, weight), matmul_reference(formats.quantize_nvfp4(x), cache.weight, **EXACT), limit)


def test_long_rows_are_read_in_parts() -> None:
    """Sixteen rows of activations that no block can hold, of a weight with rows left over."""
    cache, x = fp4_quantize(randn(70, 40_960), randn(70)), randn(16, 40_960)
    for rows in (1, 7, 16):
        poison()
        y = cache.forward(x[:rows])
        close(y, matmul_reference(x[:rows], cache.weight, cache.bias, **EXACT))
        assert torch.equal(cache.forward(x[:rows]), y)  # type: ignore[arg-type]


def test_memory_that_is_not_dense() -> None:
    wide, cache = randn(6, 50, 256), fp4_quantize(randn(96, 128), randn(96))
    for x in (
        wide[..., ::2],
        wide[..., :128].transpose(0, 1),
        wide[0, :3, 3:131],
        wide[:1, :, :128].expand(4, 50, 128),
    ):
        for amax in AMAXES:
            assert torch.equal(cache.forward(x, amax), cache.forward(x.contiguous(), amax))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 3, 5, 7])
@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "not dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_convolutions(layout: str, size: int, dtype: torch.dtype) -> None:
    for channels, outputs in ((20, 6), (64, 64)):
        x, filters, bias = randn(2, channels, 19, 22, dtype=dtype), randn(outputs, channels, size, size), randn(outputs)
        x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
        x = x[:, :, ::2] if layout == "not dense" else x
        cache, image = fp4_quantize(filters, bias), formats.quantize_nvfp4(x.permute(0, 2, 3, 1).cpu())
        image = Nvfp4Tensor(image.codes.to(DEVICE), image.scales.to(DEVICE), image.amax.to(DEVICE), image.shape)
        for stride, padding, dilation in ((1, size // 2, 1), (2, 3, 1), (1, 2 * (size - 1), 2)):
            geometry = {"stride": stride, "padding": padding, "dilation": dilation}
            expected = conv2d_reference((image,), cache.weight, cache.bias, **geometry, **EXACT)
            poison()
            y = fp4_conv2d(x, cache, **geometry)  # type: ignore[arg-type]
            close(y, expected.permute(0, 3, 1, 2), LIMITS[dtype])  # type: ignore[union-attr]
            assert torch.equal(fp4_conv2d(image, cache, dtype=dtype, **geometry), y)  # type: ignore[arg-type]
            assert torch.equal(fp4_conv2d(x, filters, bias, **geometry), y)  # type: ignore[arg-type]
            assert isinstance(y, torch.Tensor)
            assert y.is_contiguous(memory_format=torch.channels_last)
            poison()
            packed = fp4_conv2d(x, cache, out_amax=3.0, **geometry)  # type: ignore[arg-type]
            same_bytes(packed, formats.quantize_nvfp4(y.permute(0, 2, 3, 1), amax=3.0))


def test_addresses_that_are_not_aligned() -> None:
    cache, x = fp4_quantize(randn(96, 128), randn(96)), randn(4, 128)
    shifted = torch.empty(4 * 128 + 1, dtype=x.dtype, device=DEVICE)[1:].view(4, 128).copy_(x)
    close(cache.forward(shifted), matmul_reference(x, cache.weight, cache.bias, **EXACT))
    for amax in AMAXES[1:]:
        equal(cache.forward(shifted, amax), cache.forward(x, amax))


def test_a_packed_output_is_the_next_input() -> None:
    first, second, x = fp4_quantize(randn(80, 64), randn(80)), fp4_quantize(randn(33, 80)), randn(37, 64)
    plain = first.forward(x, "dynamic", relu=True)
    assert isinstance(plain, torch.Tensor)
    poison()
    hidden = first.forward(x, "dynamic", relu=True, out_amax=9.0)
    same_bytes(hidden, formats.quantize_nvfp4(plain, amax=9.0))
    assert torch.equal(second.forward(hidden), second.forward(plain, 9.0))  # type: ignore[arg-type]


def test_a_file_comes_back_to_the_gpu(tmp_path: Path) -> None:
    cache, x = fp4_quantize(randn(40, 72), randn(40)), randn(3, 72)
    cache.save(tmp_path / "layer.safetensors")
    read = FP4WeightCache.load(tmp_path / "layer.safetensors", DEVICE)
    same_bytes(read.weight, cache.weight)
    assert read.device == cache.device
    assert torch.equal(read.forward(x), cache.forward(x))  # type: ignore[arg-type]
    assert cache.to(cache.device) is cache


def test_leaving_the_context_frees_the_memory() -> None:
    before = torch.cuda.memory_allocated()
    weight = randn(1024, 1024)
    with fp4_quantize(weight) as cache:
        del weight
        held = torch.cuda.memory_allocated() - before
        assert cache.nbytes <= held <= cache.nbytes + 4096
        assert cache.nbytes < 2 * 1024 * 1024 / 3  # with scales in both layouts on Blackwell
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_another_gpu_than_the_current_one() -> None:
    weight, bias, x = randn(128, 256), randn(128), randn(33, 256)
    filters, image = randn(48, 32, 3, 3), randn(2, 32, 12, 12)
    here, there = fp4_quantize(weight, bias), fp4_quantize(weight.to("cuda:1"), bias.to("cuda:1"))
    same_bytes(there.weight, here.weight)
    for rows in (33, 4):
        for amax in AMAXES:
            y = there.forward(x[:rows].to("cuda:1"), amax)
            assert isinstance(y, torch.Tensor)
            assert y.device == torch.device("cuda", 1)
            equal(y.to("cuda:0"), here.forward(x[:rows], amax))
    equal(here.to("cuda:1").forward(x.to("cuda:1")).to("cuda:0"), here.forward(x))  # type: ignore[union-attr]
    z = fp4_conv2d(image.to("cuda:1"), filters.to("cuda:1"), padding=1)
    assert isinstance(z, torch.Tensor)
    equal(z.to("cuda:0"), fp4_conv2d(image, filters, padding=1))
    assert torch.cuda.current_device() == 0
    with pytest.raises(InputError, match="different devices: cuda:0, cuda:1"):
        there.forward(x)
