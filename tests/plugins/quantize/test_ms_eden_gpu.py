"""MS-EDEN by the kernel, bit for bit beside `formats.quantize_ms_eden` on the CPU."""

from __future__ import annotations

import pytest
import torch

from fp4deploy import formats
from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize.ms_eden import fake_quantize_ms_eden, quantize_ms_eden
from fp4deploy.qat.operators import quantizers, wgrad_operands
from fp4deploy.qat.operators.gemms import ConvGemms
from fp4deploy.qat.recipes import RECIPES
from tests.plugins.quantize.test_channels_last_gpu import poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]
ROTATION, SEED = torch.tensor(-5), torch.tensor(1 << 40)
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
SHAPES = (
    *(((3, 128), 1), ((1, 1), 1), ((0, 128), 1), ((257, 130), 1), ((513, 70), 0), ((4000, 48), 0)),
    *(((2, 64, 5, 7), 1), ((2, 33, 5, 200), 3), ((3, 256, 9, 1), 3), ((1, 40, 3, 4, 35), 4), ((16, 32, 3, 3), 0)),
)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_values_codes_and_scales(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    layouts = [x, x.transpose(0, 1).contiguous().transpose(0, 1)]
    layouts += [x.contiguous(memory_format=torch.channels_last)] if x.ndim == 4 else []
    layouts += [x.contiguous(memory_format=torch.channels_last_3d)] if x.ndim == 5 else []
    layouts += [torch.cat((x.new_zeros(3), x.flatten()))[3:].view(shape)]  # begins between two 16-byte words
    for given in layouts:
        _require_equal(given, axis)


@pytest.mark.parametrize("value", [0.0, 6e-8, 3e4, float("inf"), float("nan")], ids=str)
def test_special_values(value: float) -> None:
    """A constant tensor, and one such number among others."""
    one = torch.randn(5, 256, dtype=torch.float16)
    one[2, 77] = value
    for x in (torch.full((4, 200), value, dtype=torch.float16), one, one.float() * 1e-38, one.float() * 1e34):
        _require_equal(x, 1)


def _require_equal(x: torch.Tensor, axis: int) -> None:
    expected = formats.quantize_ms_eden(x, ROTATION, SEED, axis)
    own = torch.empty(x.storage_offset() + x.numel(), dtype=x.dtype, device="cuda")[x.storage_offset() :]
    own, rotation, seed = own.as_strided(x.shape, x.stride()).copy_(x), ROTATION.cuda(), SEED.cuda()
    poison()
    values = fake_quantize_ms_eden(own, rotation, seed, axis)
    found = quantize_ms_eden(own, rotation, seed, axis)
    wanted = expected.dequantize(x.dtype).movedim(-1, axis)
    assert values.shape == wanted.shape
    numbers = ~wanted.isnan()
    assert torch.equal(values.cpu().isnan(), ~numbers)
    bits = BITS[x.dtype]
    assert torch.equal(values.cpu()[numbers].view(bits), wanted[numbers].view(bits))
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert torch.equal(found.scales.cpu().view(torch.uint8) & 0x7F, expected.scales.view(torch.uint8) & 0x7F)
    assert found.shape == expected.shape
    assert found.amax.cpu() == expected.amax


FILTERS: dict[str, tuple[tuple[int, ...], ConvGemms]] = {
    "same": ((2, 40, 6, 140), ConvGemms((3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "stride 2, groups": ((3, 66, 9, 41), ConvGemms((3, 3), (2, 2), (1, 1), (1, 1), 2)),
    "uneven": ((1, 32, 9, 37), ConvGemms((2, 3), (2, 1), (1, 2), (3, 1), 1)),
    "transposed": ((2, 32, 10, 34), ConvGemms((2, 2), (2, 2), (0, 0), (1, 1), 1, transposed=True)),
    "volume": ((2, 32, 3, 4, 18), ConvGemms((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)),
    "sequence": ((2, 32, 70), ConvGemms((5,), (1,), (2,), (1,), 1)),
}


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("shape", "gemms"), FILTERS.values(), ids=FILTERS)
def test_columns_of_a_filter(
    shape: tuple[int, ...], gemms: ConvGemms, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel finds them in the map; in both layouts."""
    for module in (wgrad_operands, quantizers):
        monkeypatch.setattr(module, "draw_seed", lambda device: SEED.to(device))
    by_kernel, calls = wgrad_operands.fake_quantize_columns, list[None]()
    monkeypatch.setattr(
        wgrad_operands, "fake_quantize_columns", lambda *given: calls.append(None) or by_kernel(*given)
    )  # what is quantised operand by operand has the same bytes
    recipe, rotation = RECIPES["quartet_2"], ROTATION.cuda()
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    steps = zip(shape[2:], *gemms.steps, strict=True)
    small = (shape[0], 8 * gemms.groups, *(output_size(*axis) for axis in steps))
    for x in (
        torch.randn(shape, dtype=dtype, device="cuda"),
        torch.randn(shape, device="cuda").to(dtype, memory_format=layout),
    ):
        other = torch.zeros(small, dtype=dtype, device="cuda")
        poison()
        if gemms.transposed:
            found = wgrad_operands.gradient_operands(x, small, gemms, recipe, False, True, [None, rotation])[1]
            rows = gemms.wgrad_gradient(x, small)
        else:
            found = wgrad_operands.activation_operand(x, other, gemms, recipe, rotation)
            rows = gemms.wgrad_input(x, small)
        expected = formats.quantize_ms_eden(rows.cpu(), ROTATION, SEED, -1).dequantize(dtype)
        assert torch.equal(found.cpu().contiguous().view(BITS[dtype]), expected.contiguous().view(BITS[dtype]))
    assert len(calls) == 2
