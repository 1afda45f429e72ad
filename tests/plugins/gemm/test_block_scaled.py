"""Convolutions by block-scaled mma: what variants need of a multiprocessor, their machine code, who takes a layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4deploy.errors import UnavailableError
from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.gemm import dispatch
from fp4deploy.plugins.gemm.convolution import block_scaled, fastest
from fp4deploy.plugins.gemm.reference import Output, conv2d_reference
from fp4deploy.plugins.runtime import nvcc
from fp4deploy.plugins.runtime.cubin import main_loop, matrix_instructions, resources
from fp4deploy.plugins.runtime.fallback import Fallback

NVCC = nvcc.find_nvcc()
MAX_SHARED = 101_376  # bytes that a block can have on SM120
REGISTERS = 65_536  # of a multiprocessor


@given(
    st.tuples(st.integers(1, 17), st.integers(1, 300), st.integers(1, 300)),
    st.lists(st.integers(1, 40), min_size=1, max_size=2),
    st.integers(1, 1100),
    st.sampled_from([(1, 1), (3, 3), (5, 1), (7, 7), (2, 2)]),
    st.integers(1, 4),
    st.integers(1, 36),
    st.sampled_from([1, 48, 170]),
)
def test_every_variant_fits(
    pixels: tuple[int, int, int],
    blocks: list[int],
    outputs: int,
    taps: tuple[int, int],
    stride: int,
    dilation: int,
    num_sms: int,
) -> None:
    channels = tuple(16 * count for count in blocks)
    chosen = block_scaled.variant(channels, outputs, taps, stride, dilation, pixels, num_sms)
    resident = chosen.tile.resident
    assert chosen.stages >= block_scaled.FEWEST_STAGES
    assert chosen.shared_bytes <= MAX_SHARED
    assert resident * (chosen.shared_bytes + block_scaled.RESERVED) <= block_scaled.SHARED
    assert chosen.whole == all(count % 64 == 0 for count in channels)
    assert chosen.tile.threads * resident * 128 <= REGISTERS  # as many as sums alone have


@pytest.mark.parametrize(
    ("taps", "strides", "taken"),
    [((3, 3), (2, 2), True), ((7, 7), (1, 1), True), ((3, 3), (2, 1), False), ((3, 3, 3), (1, 1, 1), False)],
)
def test_supports(taps: tuple[int, ...], strides: tuple[int, ...], taken: bool) -> None:
    assert block_scaled.supports(taps, strides) is taken


def test_no_gpu_runs_nothing() -> None:
    assert not block_scaled.is_available(torch.device("cpu"))


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    ("arch", "channels", "outputs", "size", "stride", "packed"),
    [
        ("sm_120a", 128, 128, 3, 1, False),
        ("sm_121a", 128, 128, 3, 1, False),
        ("sm_120a", 128, 128, 3, 1, True),
        ("sm_120a", 128, 64, 3, 1, True),
        ("sm_120a", 128, 64, 1, 1, False),
        ("sm_120a", 96, 128, 3, 2, False),
        ("sm_120a", 96, 64, 3, 1, True),
    ],
)
def test_the_machine_code_multiplies_fp4_and_spills_nothing(
    arch: str, channels: int, outputs: int, size: int, stride: int, packed: bool
) -> None:
    chosen = block_scaled.variant((channels,), outputs, (size, size), stride, 1, (1, 400, 400), 170)
    macros = chosen.macros(torch.float16, packed, outputs)
    cubin = nvcc.compile_cubin(block_scaled.SOURCE, arch, macros)
    registers, stack = resources(cubin)
    assert stack == 0
    # With fewer at its start than consumers will ask for, the kernel would wait for ever.
    assert registers * chosen.tile.threads * chosen.tile.resident == REGISTERS
    loop = main_loop(cubin, "block_scaled_conv")
    assert loop is not None
    assert loop.matrix == 32  # of 64 x 64 outputs and 64 channels
    assert loop.issued < 5 * loop.matrix
    ptx = nvcc.compile_ptx(block_scaled.SOURCE, arch, macros)
    assert matrix_instructions(ptx) == ("mma.sync m16n8k64 kind::mxf4nvf4",)


@pytest.mark.parametrize("choice", [fastest.OWN, fastest.TORCH])
@pytest.mark.parametrize("packed", [False, True])
def test_the_faster_kernel_computes_a_layer(choice: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight = quantize_nvfp4(torch.randn(1, 5, 6, 48)), quantize_nvfp4(torch.randn(24, 3, 3, 48))
    bias, amax = torch.randn(24), torch.tensor(8.0) if packed else None
    place = (2, (1, 1), 1, True, torch.bfloat16, amax)
    expected = conv2d_reference((x,), weight, bias, *place)
    called: list[str] = []

    def kernel(*operands: object) -> Output:
        called.append("own")
        assert operands == ((x,), weight, bias, *place)
        return expected

    def by_triton() -> Output:
        called.append("triton")
        return expected

    monkeypatch.setattr(block_scaled, "fallback", Fallback("Test kernels", "Triton's"))
    monkeypatch.setattr(block_scaled, "is_available", lambda _: True)
    monkeypatch.setattr(block_scaled, "conv2d", kernel)
    monkeypatch.setattr(fastest, "_choices", {})
    monkeypatch.setattr(fastest, "_choice", lambda *_: choice)
    y = fastest.convolve_packed((x,), weight, bias, (2, 2), (1, 1), 1, True, torch.bfloat16, amax, by_triton)
    assert y is expected
    assert isinstance(y, Nvfp4Tensor) is packed
    assert called == ["own" if choice == fastest.OWN else "triton"]


def test_other_gpus_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = quantize_nvfp4(torch.ones(1, 3, 3, 16)), quantize_nvfp4(torch.ones(8, 1, 1, 16))
    monkeypatch.setattr(fastest, "_choice", lambda *_: pytest.fail("measured"))
    y = conv2d_reference((x,), weight)
    place = ((1, 1), (0, 0), 1, False, torch.float16, None)
    assert fastest.convolve_packed((x,), weight, None, *place, lambda: y) is y


def test_what_triton_lacks_is_no_refusal_of_the_other_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, weight = quantize_nvfp4(torch.ones(1, 3, 3, 16)), quantize_nvfp4(torch.ones(8, 1, 1, 16))
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    monkeypatch.setattr(block_scaled, "fallback", Fallback("Test kernels", "Triton's"))
    monkeypatch.setattr(block_scaled, "is_available", lambda _: True)
    monkeypatch.setattr(fastest, "_choices", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    place = ((1, 1), (0, 0), 1, False, torch.float16, None)

    def by_triton() -> Output:
        raise UnavailableError("Triton has no binary")

    with pytest.raises(UnavailableError, match="no binary"):
        fastest.convolve_packed((x,), weight, None, *place, by_triton)
    assert not block_scaled.fallback.refused(x.codes.device)


def test_the_order_of_sums_can_be_one_that_no_time_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = quantize_nvfp4(torch.ones(1, 3, 3, 16)), quantize_nvfp4(torch.ones(8, 1, 1, 16))
    monkeypatch.setattr(dispatch, "runs_kernels", lambda _: True)
    monkeypatch.setattr(dispatch, "launch_gemm", lambda *_, **__: "Triton's")
    monkeypatch.setattr(dispatch, "convolve_packed", lambda *_: "measured")
    assert dispatch.conv2d((x,), weight) == "measured"
    assert dispatch.conv2d((x,), weight, measured=False) == "Triton's"
