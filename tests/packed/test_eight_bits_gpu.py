"""Layers in FP8, INT8 and W4A8 on a GPU: the kernel bit for bit, and every layer of a network against the CPU.

On Hopper the kernel decodes (`weights="packed"`); by default torch multiplies decoded operands in TF32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.export.to_packed import pack
from fp4deploy.formats import EightBitTensor
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.packed.graph import Layer, quantizes_itself
from fp4deploy.packed.network import has_mixed_kernel
from fp4deploy.plugins.gemm.training import POINTWISE, Window, gather_gemm, whole_blocks
from fp4deploy.qat import calibrate, prepare
from tests.export.packable_networks import EightBits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
NAMES = ["body", "up", "point"]


def codes(*shape: int, largest: bool = False) -> torch.Tensor:
    """Multiples of 1/4 up to 4; some of the largest, in one operand alone: sums of products are not rounded."""
    values = torch.randint(-16, 17, shape) / 4
    if largest:
        values[..., ::9] = 448 * values[..., ::9].sign()
    return values.cuda()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("channels", "outputs", "window", "inverse"),
    [
        (40, 20, Window((3, 3), (2, 2), (1, 1), (1, 1)), False),
        (256, 130, Window((3, 3), (1, 1), (2, 2), (2, 2)), False),
        (33, 17, Window((2, 2), (2, 2), (0, 0), (1, 1)), True),
        (72, 70, POINTWISE, False),
    ],
)
def test_the_kernel_is_the_reference_bit_for_bit(
    channels: int, outputs: int, window: Window, inverse: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    given, filters = codes(2, 30, 33, channels), codes(outputs, *window.kernel, channels, largest=True)
    scales, bias = 1 + torch.rand(outputs + 1).cuda(), torch.randn(outputs).cuda()
    image, weight, steps = given.double().permute(0, 3, 1, 2), filters.double(), (window.stride, window.padding)
    if inverse:
        total = F.conv_transpose2d(image, weight.permute(3, 0, 1, 2), None, *steps)
    else:
        total = F.conv2d(image, weight.permute(0, 3, 1, 2), None, *steps, window.dilation)
    assert total.abs().max() < 2**20  # of sixteenths: float32 has them all
    expected = (total.permute(0, 2, 3, 1).float() * (scales[0] * scales[1:]) + bias).to(dtype)
    x, w = (
        whole_blocks(EightBitTensor(each.to(torch.float8_e4m3fn), scale))
        for each, scale in ((given, scales[0]), (filters, scales[1:]))
    )
    pixels = (expected.shape[1], expected.shape[2])
    assert torch.equal(gather_gemm(x, w, window, pixels, dtype, bias, inverse), expected)


def network(folder: Path, form: str, groups: tuple[int, int]) -> Path:
    torch.manual_seed(0)
    model: nn.Module = prepare(EightBits(groups), "nvfp4_qat", include=NAMES, **{form: NAMES})
    x = torch.randn(2, 3, 32, 32)
    calibrate(model, [x])
    pack(model.eval(), folder / "eight.fp4", example_inputs=x, verify=False)
    return folder / "eight.fp4"


def differences(path: Path, device: str, weights: str | None) -> dict[str, float]:
    """Of each layer on a device, from the same FP16 numbers, to the CPU's, over its largest output."""
    file = read_packed(path)
    exact, own = PackedNetwork(file), PackedNetwork(file, device, weights)
    found, shapes = {}, {"body": (2, 24, 33, 32), "up": (1, 20, 14, 15), "point": (3, 70, 12)}
    for node in (each for each in file.graph.nodes if isinstance(each, Layer) and quantizes_itself(each)):
        if node.layer == "body" and weights == "packed" and has_mixed_kernel(node) and device == "cuda":
            assert own.precision_of(node) in ("FP8", "W4A8")
        x = torch.randn(shapes[node.layer]).half()
        (expected,), (y,) = exact.run_node(node, [x.float()]), own.run_node(node, [x.to(device, own.dtype)])
        assert isinstance(y, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        found[node.layer] = float((y.cpu().float() - expected).abs().max() / expected.abs().max())
    return found


@pytest.mark.parametrize("weights", [None, "packed"])
@pytest.mark.parametrize(("form", "groups"), [("fp8", (1, 1)), ("fp8", (4, 2)), ("int8", (4, 2)), ("w4a8", (1, 1))])
def test_every_layer_is_that_of_the_cpu(
    tmp_path: Path, form: str, groups: tuple[int, int], weights: str | None
) -> None:
    found = differences(network(tmp_path, form, groups), "cuda", weights)
    assert found.keys() == {*NAMES}
    assert max(found.values()) < 1e-3  # FP16 rounds the output by 2^-11 of it
