"""NVFP4 linear layers: the weight cache, its results, sharing it between threads, and every refusal."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from fp4deploy import plugins
from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, Nvfp4Tensor, quantize_nvfp4, swizzle_scales, unswizzle_scales
from fp4deploy.plugins import FP4WeightCache, fp4_cached_linear, fp4_linear, fp4_matmul, fp4_quantize
from tests.plugins.gemm.threads import together

LIMITS = {torch.float16: 1e-3, torch.bfloat16: 4e-3}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bytes(found: Any, expected: Nvfp4Tensor) -> bool:
    assert isinstance(found, Nvfp4Tensor)
    assert (found.shape, found.e4m3_max) == (expected.shape, expected.e4m3_max)
    scales = torch.equal(found.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    return torch.equal(found.codes, expected.codes) and scales and torch.equal(found.amax, expected.amax)


def close(found: Any, expected: torch.Tensor, limit: float) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= limit * float(expected.norm())


def exact(x: torch.Tensor | Nvfp4Tensor, cache: FP4WeightCache) -> torch.Tensor:
    """x W^T + b in float64 of the decoded operands."""
    left = x.dequantize(torch.float64) if isinstance(x, Nvfp4Tensor) else x.double()
    out = left @ cache.dequantize(torch.float64).T
    return out if cache.bias is None else out + cache.bias.double()


def test_the_package_offers_the_names() -> None:
    for name in ("FP4WeightCache", "fp4_quantize", "fp4_cached_linear", "fp4_linear", "fp4_matmul", "fp4_conv2d"):
        assert name in plugins.__all__
        assert callable(getattr(plugins, name))
    with pytest.raises(AttributeError, match="fp4_everything"):
        _ = plugins.fp4_everything


@pytest.mark.parametrize("options", [{}, {"four_over_six": FourOverSix()}], ids=["plain", "4/6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_cache_has_the_bytes_of_the_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    weight, filters = randn(17, 40, dtype=dtype), randn(5, 20, 3, 2, dtype=dtype)
    assert same_bytes(fp4_quantize(weight, **options).weight, quantize_nvfp4(weight, **options))
    turned = torch.nn.Parameter(weight.T.contiguous().T)
    assert same_bytes(fp4_quantize(turned, **options).weight, quantize_nvfp4(weight, **options))
    expected = quantize_nvfp4(filters.permute(0, 2, 3, 1), **options)
    for x in (filters, filters.to(memory_format=torch.channels_last)):
        assert same_bytes(fp4_quantize(x, **options).weight, expected)


def test_a_cache_packs_a_plain_weight_by_itself() -> None:
    weight, bias = torch.nn.Parameter(randn(17, 40, dtype=torch.float32)), randn(17, dtype=torch.float16)
    mine, other = FP4WeightCache(weight, bias, frozen=True), fp4_quantize(weight, bias)
    assert same_bytes(mine.weight, other.weight)
    assert mine.frozen
    assert mine.bias is not None
    assert mine.bias.dtype == torch.float32
    assert torch.equal(mine.bias, other.bias)
    assert FP4WeightCache(randn(5, 20, 3, 2, dtype=torch.float32)).bias is None
    for wrong in (torch.ones(3), torch.ones(2, 2, dtype=torch.int32), "weight"):
        with pytest.raises(InputError, match="can be packed"):
            FP4WeightCache(wrong)


@pytest.mark.parametrize(("n", "k"), [(8, 64), (7, 33), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_bytes_are_counted(n: int, k: int, bias: bool) -> None:
    cache = fp4_quantize(randn(n, k), randn(n, dtype=torch.float16) if bias else None)
    blocks = -(-k // 16)
    assert cache.nbytes == n * blocks * 9 + 4 + (4 * n if bias else 0)
    assert f"{cache.nbytes} bytes, cpu" in repr(cache)
    assert cache.device == torch.device("cpu")


@pytest.mark.parametrize("rows", [(), (1,), (3,), (40,), (2, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(5, 17), (33, 64), (1, 1), (16, 100)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_shape(rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype) -> None:
    x, limit = randn(*rows, k, dtype=dtype), LIMITS[dtype]
    cache = fp4_quantize(randn(n, k, seed=1), randn(n, seed=2))
    y = cache.forward(x)
    assert isinstance(y, torch.Tensor)
    assert (y.shape, y.dtype) == ((*rows, n), dtype)
    close(y, exact(x, cache), limit)
    close(cache.forward(x, input_amax="dynamic"), exact(quantize_nvfp4(x), cache), limit)
    close(cache.forward(x, input_amax=1.5), exact(quantize_nvfp4(x, amax=1.5), cache), limit)
    close(cache.forward(x, 1.5, relu=True), exact(quantize_nvfp4(x, amax=1.5), cache).relu(), limit)
    assert torch.equal(cache.forward(x, relu=True), y.relu())


@pytest.mark.parametrize("bias", [None, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_names_give_the_same_bits(bias: torch.dtype | None) -> None:
    weight, x = randn(12, 48), randn(6, 48, seed=1, dtype=torch.float16)
    b = None if bias is None else randn(12, seed=2, dtype=bias)
    cache = fp4_quantize(weight, b)
    assert cache.bias is None if b is None else cache.bias.dtype == torch.float32
    for options in ({}, {"input_amax": "dynamic"}, {"input_amax": 2.0, "relu": True}):
        y = cache.forward(x, **options)
        assert torch.equal(fp4_cached_linear(x, cache, **options), y)
        assert torch.equal(fp4_linear(x, weight, b, **options), y)
    packed = quantize_nvfp4(x, amax=2.0)
    y = cache.forward(packed)
    assert torch.equal(cache.forward(x, input_amax=2.0), y)
    assert torch.equal(cache.forward(x, input_amax=torch.tensor(2.0)), y)
    assert torch.equal(fp4_matmul(packed, cache.weight, cache.bias), y)
    assert torch.equal(fp4_matmul(x, weight, cache.bias), cache.forward(x, "dynamic"))
    better = fp4_quantize(weight, b, FourOverSix())
    assert torch.equal(fp4_linear(x, weight, b, four_over_six=FourOverSix()), better.forward(x))


def test_the_dtype_of_the_output() -> None:
    cache = fp4_quantize(randn(4, 32))
    for given, options, found in (
        (torch.float16, {}, torch.float16),
        (torch.bfloat16, {}, torch.bfloat16),
        (torch.bfloat16, {"dtype": torch.float16, "input_amax": "dynamic"}, torch.float16),
        (torch.float32, {"input_amax": "dynamic"}, torch.float16),
        (torch.float32, {"input_amax": "dynamic", "dtype": torch.bfloat16}, torch.bfloat16),
    ):
        y = cache.forward(randn(3, 32, dtype=given), **options)
        assert isinstance(y, torch.Tensor)
        assert y.dtype == found
    a = fp4_matmul(randn(3, 32, dtype=torch.bfloat16), randn(4, 32))
    assert isinstance(a, torch.Tensor)
    assert a.dtype == torch.bfloat16


def test_a_packed_output_is_the_next_input() -> None:
    first, second = fp4_quantize(randn(40, 32), randn(40)), fp4_quantize(randn(8, 40, seed=1))
    x = randn(5, 32, seed=2, dtype=torch.float16)
    for amax in (3.0, torch.tensor(3.0)):
        hidden = first.forward(x, "dynamic", relu=True, out_amax=amax)
        plain = first.forward(x, "dynamic", relu=True)
        assert isinstance(plain, torch.Tensor)
        assert same_bytes(hidden, quantize_nvfp4(plain, amax=3.0))
        assert torch.equal(second.forward(hidden), second.forward(plain, input_amax=3.0))  # type: ignore[arg-type]
        assert same_bytes(
            fp4_matmul(x, first.weight, first.bias, relu=True, out_amax=amax), quantize_nvfp4(plain, amax=3.0)
        )
    assert same_bytes(fp4_linear(x, randn(40, 32), randn(40), "dynamic", True, out_amax=3.0), hidden)  # type: ignore[arg-type]


def test_memory_that_is_not_dense() -> None:
    cache = fp4_quantize(randn(40, 64)[:, ::2], randn(40)[::1])
    wide = randn(3, 4, 64, dtype=torch.float16)
    for x in (wide[..., ::2], wide[..., :32].transpose(0, 1), wide[:1, :, 5:37].expand(7, 4, 32)):
        for amax in (None, "dynamic"):
            assert torch.equal(cache.forward(x, amax), cache.forward(x.contiguous(), amax))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_element_breaks_what_depends_on_it_and_nothing_else(value: float) -> None:
    weight, x = randn(6, 48), randn(5, 48, dtype=torch.float16)
    weight[2, 20] = value
    broken = fp4_quantize(weight)
    for amax in (None, "dynamic"):
        found = broken.forward(x, amax).isnan()  # type: ignore[union-attr, arg-type]
        assert found[:, 2].all()
        assert found.sum() == 5
    x[3, 7] = float("nan")
    for amax in (None, "dynamic"):
        found = fp4_quantize(randn(6, 48)).forward(x, amax).isnan()  # type: ignore[union-attr, arg-type]
        assert found[3].all()
        assert found.sum() == 6


def test_the_128x4_layout() -> None:
    for weight in (randn(130, 200), randn(3, 20, 3, 3)):
        cache = fp4_quantize(weight)
        scales = cache.weight.scales.flatten(1)
        assert cache.swizzled is None
        found = cache.swizzled_scales()
        assert torch.equal(found.view(torch.uint8), swizzle_scales(scales).view(torch.uint8))
        back = unswizzle_scales(found, *scales.shape)
        assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_leaving_the_context_frees_the_tensors() -> None:
    x = randn(2, 32, dtype=torch.float16)
    with fp4_quantize(randn(4, 32), randn(4)) as cache:
        expected = cache.forward(x)
        parts = [weakref.ref(part) for part in (cache.weight.codes, cache.weight.scales, cache.bias)]
    gc.collect()
    assert [part() for part in parts] == [None] * 3
    assert cache.released
    assert repr(cache) == "FP4WeightCache(released)"
    cache.release()
    for use in (
        lambda: cache.forward(x),
        lambda: fp4_cached_linear(x, cache),
        lambda: cache.nbytes,
        lambda: cache.device,
        lambda: cache.to("cpu"),
        lambda: cache.dequantize(),
        lambda: cache.swizzled_scales(),
        lambda: cache.save("nowhere"),
        cache.__enter__,
    ):
        with pytest.raises(InputError, match="was released"):
            use()
    assert expected.shape == (2, 4)


def test_an_error_inside_leaves_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), fp4_quantize(randn(4, 32)) as cache:
        raise ZeroDivisionError
    assert cache.released
    with pytest.raises(AttributeError, match="has no attribute 'weights'"):
        _ = cache.weights  # type: ignore[attr-defined]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("four_over_six", [None, FourOverSix()])
def test_another_device(frozen: bool, four_over_six: FourOverSix | None) -> None:
    cache = fp4_quantize(randn(4, 32), randn(4), four_over_six, frozen=frozen)
    assert cache.to("cpu") is cache
    away = cache.to("meta")
    assert away.device == torch.device("meta")
    assert (away.frozen, away.weight.e4m3_max, away.weight.shape) == (frozen, cache.weight.e4m3_max, cache.weight.shape)
    assert away.nbytes == cache.nbytes
    with pytest.raises(InputError, match="different devices: cpu, meta"):
        away.forward(randn(2, 32, dtype=torch.float16))
    with pytest.raises(InputError, match="different devices: cpu, meta"):
        away.forward(randn(2, 32), input_amax="dynamic")


def test_gradients_are_refused_not_lost() -> None:
    layer, x = torch.nn.Linear(32, 4), randn(2, 32, dtype=torch.float16)
    cache = fp4_quantize(layer.weight, layer.bias)  # a parameter may be packed
    asks = x.clone().requires_grad_()
    for use in (
        lambda: cache.forward(asks),
        lambda: cache.forward(asks, "dynamic"),
        lambda: fp4_linear(x, layer.weight),
        lambda: fp4_linear(x, layer.weight.detach(), layer.bias),
        lambda: fp4_matmul(asks, cache.weight),
        lambda: fp4_matmul(x, layer.weight),
    ):
        with pytest.raises(InputError, match=r"no gradient.*no_grad.*qat\.prepare"):
            use()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                use()
    assert torch.equal(fp4_linear(x, layer.weight.detach(), layer.bias.detach()), cache.forward(x))


def test_threads_share_a_cache() -> None:
    cache = fp4_quantize(randn(64, 96), randn(64))
    inputs = [randn(9, 96, seed=seed, dtype=torch.float16) for seed in range(4)]
    expected = [(cache.forward(x), cache.forward(x, "dynamic")) for x in inputs]
    found: list[list[Any]] = [[] for _ in inputs]

    def work(at: int) -> None:
        found[at] += [(cache.forward(inputs[at]), cache.forward(inputs[at], "dynamic")) for _ in range(20)]

    together(len(inputs), work)
    for at, pair in enumerate(expected):
        assert len(found[at]) == 20
        assert all(torch.equal(a, b) for each in found[at] for a, b in zip(each, pair, strict=True))
