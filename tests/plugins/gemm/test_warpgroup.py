"""Which convolutions the kernel by wgmma takes, and what its variants ask of a multiprocessor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4deploy.formats import quantize_nvfp4
from fp4deploy.plugins.gemm.convolution import warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.runtime import nvcc
from fp4deploy.plugins.runtime.cubin import resources

NVCC = nvcc.find_nvcc()
REGISTERS = 128  # of 512 threads: what producers keep and consumers take is twice as much


@pytest.mark.parametrize(
    ("channels", "outputs", "taps", "more", "taken"),
    [
        ((64,), 64, (3, 3), {}, True),
        ((128, 64), 192, (1, 1), {}, True),
        ((64,), 64, (7, 7), {"dilation": 3}, True),
        ((64,), 64, (2, 2), {"transposed": True}, True),
        ((64,), 96, (3, 3), {}, False),
        ((96,), 64, (3, 3), {}, False),
        ((64,), 64, (3, 3), {"stride": 2}, False),
        ((64,), 64, (9, 1), {}, False),
        ((64, 64, 64), 64, (3, 3), {}, False),
        ((0,), 64, (3, 3), {}, False),
    ],
)
def test_takes(channels: tuple, outputs: int, taps: tuple, more: dict, taken: bool) -> None:
    assert warpgroup.supports(channels, outputs, taps, **more) is taken


def test_no_gpu_runs_nothing() -> None:
    assert not warpgroup.is_available(torch.device("cpu"))
    assert not warpgroup.is_available(torch.device("meta"))


@given(
    st.tuples(st.integers(1, 17), st.integers(1, 300), st.integers(1, 300)),
    st.lists(st.integers(1, 17), min_size=1, max_size=2),
    st.integers(1, 16),
    st.sampled_from([(1, 1), (3, 3), (5, 1), (7, 7)]),
    st.integers(1, 36),
    st.booleans(),
    st.sampled_from([1, 78, 132]),
)
def test_every_variant_fits(
    pixels: tuple[int, int, int],
    chunks: list[int],
    outputs: int,
    taps: tuple[int, int],
    dilation: int,
    transposed: bool,
    count: int,
) -> None:
    shape = warpgroup.Shape(
        pixels, tuple(chunks), 64 * outputs, (1, 1) if transposed else taps, 1 if transposed else dilation, transposed
    )
    found = list(warpgroup.variants(shape, count))
    chosen = warpgroup.variant(shape, count)
    assert (chosen is None) == (not found)
    assert chosen is None or chosen in found
    for each in found:
        assert each.shared_bytes <= warpgroup.SHARED
        assert each.stages >= (1 if each.resident else warpgroup.FEWEST_STAGES)
        assert each.splits <= sum(chunks)
        assert shape.outputs % each.outputs == 0
        programs, works, columns = each.programs(shape, count), each.works(shape), each.columns(shape)
        assert 0 < programs <= min(works, count)
        assert works % columns == 0
        if each.resident:  # a program keeps its outputs, and its weights are all in the stages
            assert programs % columns == 0
            assert each.stages == shape.steps
            assert each.splits == 1
        down, across = each.tiles(*pixels[1:])
        assert down * each.height >= pixels[1]
        assert across * warpgroup.WIDTH >= pixels[2]


@pytest.mark.parametrize("transposed", [False, True])
def test_boxes_are_the_weights_of_a_step(transposed: bool) -> None:
    """A box of the tensor map, read by its strides, has the elements of one plane, place and tap."""
    torch.manual_seed(0)
    taps, channels, outputs = 2 if transposed else 3, (128, 64), 128
    weight = decode_weight(quantize_nvfp4(torch.randn(outputs, taps, taps, sum(channels))), channels, transposed)
    chosen = warpgroup.Variant((1, 1) if transposed else (3, 3), 1, transposed, True, 8, 1, 4, 2, False)
    tensor, sizes, strides, box, width = warpgroup.weight_boxes(weight, chosen)
    assert (box, width) == ((64, 1, 64), 64)
    assert math.prod(sizes) == tensor.nbytes
    whole = torch.as_strided(tensor.view(torch.uint8).flatten(), sizes[::-1], (*strides[::-1], 1))
    planes = tensor.unflatten(1, (outputs, -1)).transpose(1, 2)  # [2, places, outputs, K]
    for plane in range(2):
        for place in range(sizes[1]):
            rows = whole[plane * outputs : (plane + 1) * outputs, place].contiguous().view(torch.float16)
            assert torch.equal(rows, planes[plane, place])


@pytest.mark.skipif(NVCC is None, reason=f"no nvcc here; {nvcc.INSTALL_NVCC}")
@pytest.mark.parametrize(("joint", "height", "size"), [(True, 24, 3), (False, 20, 3), (True, 24, 1)])
def test_registers_that_warpgroups_exchange(joint: bool, height: int, size: int) -> None:
    """With fewer registers at its start than consumers will ask for, the kernel would wait for ever."""
    shape = warpgroup.Shape((1, 64, 64), (2,), 128, (size, size))
    chosen = warpgroup.fitted(shape, joint, height, 1, 132)
    assert chosen is not None
    code = nvcc.compile_cubin(warpgroup.SOURCE, "sm_90a", chosen.macros(torch.float16, True))
    assert resources(code) == (REGISTERS, 0)
