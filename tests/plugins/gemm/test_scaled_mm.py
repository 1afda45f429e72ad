"""torch's own FP4 `scaled_mm`: when it is chosen, and that its arguments mean the same GEMM.

No machine of the tests has such a GPU. A stand-in takes the arguments of `torch.nn.functional.scaled_mm`, has torch
check them by its own rules (its shape functions, on the meta device), decodes them and multiplies.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.formats import Nvfp4Tensor, decode_e2m1, quantize_nvfp4, unpack_codes, unswizzle_scales
from fp4deploy.plugins import FP4WeightCache, fp4_cached_linear, fp4_linear, fp4_matmul, fp4_quantize
from fp4deploy.plugins.gemm import scaled_mm
from fp4deploy.plugins.gemm.reference import matmul_reference

needs_torch = pytest.mark.skipif(
    not hasattr(F, "scaled_mm") or not hasattr(torch, "float4_e2m1fn_x2"), reason="scaled_mm begins with torch 2.10"
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class StandIn:
    """F.scaled_mm by decoding; keeps the arguments of every call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.signature = inspect.signature(F.scaled_mm)
        self.real = F.scaled_mm

    def __call__(self, *given: Any, **named: Any) -> torch.Tensor:
        call = self.signature.bind(*given, **named)
        call.apply_defaults()
        found = call.arguments
        self.calls.append(found)
        meta = self.real(
            *(_to_meta(value) for value in call.args), **{name: _to_meta(value) for name, value in call.kwargs.items()}
        )
        a = _decoded(found["mat_a"], found["scale_a"], found["scale_recipe_a"], found["swizzle_a"])
        b = _decoded(found["mat_b"].t(), found["scale_b"], found["scale_recipe_b"], found["swizzle_b"])
        out = a @ b.T
        if found["bias"] is not None:
            assert found["bias"].dtype == found["output_dtype"]
            out += found["bias"].double()
        assert (meta.shape, meta.dtype) == (out.shape, found["output_dtype"])
        return out.to(found["output_dtype"])


def _to_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_meta(each) for each in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _decoded(rows: torch.Tensor, scales: list[torch.Tensor], recipe: list[Any], swizzle: list[Any]) -> torch.Tensor:
    assert recipe == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    assert swizzle == [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    blocks, whole = scales
    assert (blocks.dtype, whole.dtype, tuple(whole.shape)) == (torch.float8_e4m3fn, torch.float32, (1,))
    codes = rows.view(torch.uint8)
    each = unswizzle_scales(blocks, codes.shape[0], codes.shape[1] // 8).double() * whole.double()
    return decode_e2m1(unpack_codes(codes)).double() * each.repeat_interleave(16, -1)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A machine whose torch and GPU multiply NVFP4, as far as `scaled_matmul` can tell."""
    found = StandIn()
    monkeypatch.delenv(scaled_mm.VARIABLE, raising=False)
    monkeypatch.setattr(scaled_mm, "why_unavailable", lambda device: None)
    monkeypatch.setattr(F, "scaled_mm", found)
    return found


def close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= 2e-3 * float(expected.norm())


def packed(*shape: int, seed: int = 0) -> Nvfp4Tensor:
    return quantize_nvfp4(randn(*shape, seed=seed))


@needs_torch
@pytest.mark.parametrize("rows", [(1,), (130,), (2, 3), ()], ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (144, 96), (32, 20)])
def test_the_arguments_mean_the_gemm(stand_in: StandIn, rows: tuple[int, ...], n: int, k: int) -> None:
    a, b, bias = packed(*rows, k), packed(n, k, seed=1), randn(n, seed=2)
    exact = {"dtype": torch.float64, "accumulate": torch.float64}
    for relu in (False, True):
        found = fp4_matmul(a, b, bias, relu=relu)
        close(found, matmul_reference(a, b, bias, relu, **exact))  # type: ignore[arg-type]
    close(fp4_matmul(a, b), matmul_reference(a, b, **exact))  # type: ignore[arg-type]
    assert len(stand_in.calls) == 3


@needs_torch
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_take_it(stand_in: StandIn, dtype: torch.dtype) -> None:
    weight, bias, x = randn(48, 64), randn(48), randn(5, 64, seed=1, dtype=dtype)
    cache = fp4_quantize(weight, bias)
    assert cache.swizzled is not None
    assert cache.nbytes == 48 * 36 + 4 + 4 * 48 + 512
    y = fp4_cached_linear(x, cache, "dynamic")
    assert stand_in.calls[0]["scale_b"][0] is cache.swizzled
    assert stand_in.calls[0]["output_dtype"] == dtype
    assert torch.equal(fp4_linear(x, weight, bias, "dynamic"), y)  # type: ignore[arg-type]
    assert torch.equal(cache.forward(x, "dynamic", backend="scaled_mm"), y)  # type: ignore[arg-type]
    assert len(stand_in.calls) == 3
    cache.forward(x)
    cache.forward(x, "dynamic", backend="kernels")
    cache.forward(x, "dynamic", out_amax=3.0)
    assert len(stand_in.calls) == 3
    with cache:
        pass
    assert cache.released


UNFIT: dict[str, tuple[Any, ...]] = {
    "K must be a multiple of 32": (packed(4, 16), packed(16, 16)),
    "N of 16": (packed(4, 32), packed(15, 32)),
    "nothing empty": (packed(0, 32), packed(16, 32)),
}


@needs_torch
@pytest.mark.parametrize("words", UNFIT)
def test_what_it_cannot_take_goes_to_the_kernels(stand_in: StandIn, words: str) -> None:
    a, b = UNFIT[words]
    assert torch.equal(fp4_matmul(a, b), matmul_reference(a, b))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=words):
        fp4_matmul(a, b, backend="scaled_mm")
    assert not stand_in.calls


@needs_torch
def test_wrong_operands_are_refused_in_the_same_words(stand_in: StandIn) -> None:
    a, b = packed(4, 32), packed(16, 32)
    for arguments, words in (
        ((a, b, randn(15)), r"bias is \(15,\)"),
        ((a, b, None, False, torch.float64), "not torch.float64"),
        ((quantize_nvfp4(randn(4, 32), row_scaled=True), b), "row-scaled"),
        ((a, b, randn(16).to("meta")), "different devices"),
    ):
        with pytest.raises(InputError, match=words):
            fp4_matmul(*arguments)
        with pytest.raises(InputError, match="scaled_mm cannot compute this GEMM"):
            fp4_matmul(*arguments, backend="scaled_mm")
    with pytest.raises(InputError, match="no packed output"):
        fp4_matmul(a, b, out_amax=1.0, backend="scaled_mm")
    odd = torch.zeros(4 * 16 + 1, dtype=torch.uint8)[1:].view(4, 16).copy_(a.codes)
    with pytest.raises(InputError, match="aligned"):
        fp4_matmul(Nvfp4Tensor(odd, a.scales, a.amax, a.shape), b, backend="scaled_mm")
    assert not stand_in.calls


@needs_torch
def test_the_keyword_is_stronger_than_the_variable(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = packed(4, 32), packed(16, 32)
    for variable, keyword, calls in (
        (None, None, 1),
        ("", None, 1),
        ("auto", None, 1),
        ("kernels", None, 0),
        ("scaled_mm", None, 1),
        ("kernels", "auto", 1),
        ("scaled_mm", "kernels", 0),
    ):
        stand_in.calls.clear()
        monkeypatch.delenv("FP4DEPLOY_MATMUL", raising=False)
        if variable is not None:
            monkeypatch.setenv("FP4DEPLOY_MATMUL", variable)
        fp4_matmul(a, b, backend=keyword)
        assert len(stand_in.calls) == calls, (variable, keyword)
    monkeypatch.setenv("FP4DEPLOY_MATMUL", "cublas")
    with pytest.raises(InputError, match=r"FP4DEPLOY_MATMUL is 'cublas'\. Valid: auto, kernels, scaled_mm"):
        fp4_matmul(a, b)


@needs_torch
def test_a_refusal_of_torch_is_said(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = packed(4, 32), packed(16, 32)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(F, "scaled_mm", refuse)
    with pytest.warns(UserWarning, match=r"refused a GEMM \(CUBLAS_STATUS_NOT_SUPPORTED\).*FP4DEPLOY_MATMUL=kernels"):
        assert torch.equal(fp4_matmul(a, b), matmul_reference(a, b))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="CUBLAS"):
        fp4_matmul(a, b, backend="scaled_mm")
    monkeypatch.setattr(F, "scaled_mm", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fp4_matmul(a, b)


def test_on_the_cpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP4DEPLOY_KERNELS", raising=False)
    a, b = packed(4, 32), packed(16, 32)
    assert torch.equal(fp4_matmul(a, b), matmul_reference(a, b))  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="the tensors are on the CPU, not on a CUDA device"):
        fp4_matmul(a, b, backend="scaled_mm")
    monkeypatch.setenv("FP4DEPLOY_KERNELS", "off")
    with pytest.raises(UnavailableError, match="switched off by FP4DEPLOY_KERNELS=off"):
        fp4_matmul(a, b, backend="scaled_mm")
    assert FP4WeightCache(b, None).swizzled is None


@needs_torch
@pytest.mark.parametrize(
    ("capability", "cuda", "hip", "words"),
    [
        ((9, 0), "13.0", None, "sm90, and FP4 tensor cores begin with sm100"),
        ((8, 9), "13.0", None, "sm89"),
        ((10, 0), "12.6", None, "CUDA 12.6, and NVFP4 begins with 12.8"),
        ((10, 0), None, "6.4", "ROCm"),
        ((10, 0), "12.8", None, None),
        ((12, 1), "13.0", None, None),
    ],
)
def test_what_a_machine_offers(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str | None, hip: str | None, words: str | None
) -> None:
    monkeypatch.delenv("FP4DEPLOY_KERNELS", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    scaled_mm._lacking.cache_clear()
    try:
        found = scaled_mm.why_unavailable(torch.device("cuda", 0))
        assert found is None if words is None else words in str(found)
        with monkeypatch.context() as older:
            older.delattr(F, "scaled_mm")
            scaled_mm._lacking.cache_clear()
            assert "has no NVFP4 scaled_mm" in str(scaled_mm.why_unavailable(torch.device("cuda", 0)))
    finally:
        scaled_mm._lacking.cache_clear()
