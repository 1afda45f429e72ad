"""The gradient of a learned amax in the fused path, against the definition in `qat.operators.learned`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.models import build_unet
from fp4deploy.plugins import available
from fp4deploy.qat import calibrate_percentile, prepare, quantized_layers
from fp4deploy.qat.fused_unet import FusedUNet, fuse_unet
from fp4deploy.qat.operators.learned import fake_quantize_learned
from fp4deploy.qat.recipes import QuantSpec
from tests.plugins.quantize.test_channels_last_gpu import feature_map, poison, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

ops = torch.ops.fp4deploy
ABOVE = 1e9


def expected(value: torch.Tensor, upstream: torch.Tensor, amax: float) -> torch.Tensor:
    learned = torch.tensor(amax, device="cuda", requires_grad=True)
    fake_quantize_learned(value.float(), QuantSpec(scale="static"), 1, learned).backward(upstream.float())
    assert learned.grad is not None
    return learned.grad


@pytest.mark.parametrize("shape", [(3, 64, 12, 18), (1, 16, 2, 2), (2, 1024, 4, 6)])
@pytest.mark.parametrize("amax", [0.5, 2.5])
def test_the_gradient_is_that_of_the_definition(shape: tuple[int, ...], amax: float) -> None:
    n, c, h, w = shape
    x, b, dy = feature_map(shape), feature_map((n, 48, h, w), seed=1), feature_map(shape, seed=2)
    dpooled, gradient = feature_map((n, c, h // 2, w // 2), seed=3), feature_map((n, c + 48, h, w), seed=4)
    ab = torch.randn(n, 2, c, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    scale, bound = torch.tensor([amax], device="cuda"), torch.tensor([ABOVE], device="cuda")
    first, second = ab[..., None, None].unbind(1)
    normalized = torch.relu(first.double() * x.double() + second.double())
    poison()
    bias = torch.randn(48, device="cuda", generator=torch.Generator("cuda").manual_seed(6))
    added = b + bias.half()[:, None, None]
    pairs = (
        (ops.group_norm_relu_damax(x, dy, ab, scale, bound), expected(normalized, dy, amax)),
        (ops.pool_damax(x, dpooled, scale, bound), expected(F.max_pool2d(x, 2), dpooled, amax)),
        (ops.concat_damax(x, b, gradient, scale, None), expected(torch.cat([x, b], 1), gradient, amax)),
        (ops.concat_damax(x, b, gradient, scale, None, bias), expected(torch.cat([x, added], 1), gradient, amax)),
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    assert ops.pool_damax(x, dpooled, bound, scale) == 0
    assert pairs[-1][0] == ops.concat_damax(x, added, gradient, scale, None)


@pytest.mark.parametrize("name", ["encoder.1.conv2", "encoder.1.conv1", "decoder.1.conv1"])
def test_the_fused_unet_learns_as_the_plain_one(name: str) -> None:
    """One quantised layer, behind a norm, a pooling and a concatenation; with more, FP4 amplifies last bits.

    The gradient of an amax is a sum whose terms cancel: one step may come near 0, so eight are compared. In FP16,
    emulated on a CPU, both paths are 0.1 to 0.4 from float64, now one nearer and now the other.
    """
    torch.manual_seed(0)
    exact = prepare(build_unet(5, 0.25), "nvfp4_qat+learned", include=[name])
    exact = exact.cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    calibrate_percentile(exact, [torch.randn(4, 3, 96, 128, device="cuda")], 99.0)
    plain, fused = copy.deepcopy(exact), fuse_unet(copy.deepcopy(exact))
    assert isinstance(fused, FusedUNet)
    assert fused._fusable()
    models = {"exact": exact.double(), "plain": plain, "fused": fused}
    found: dict[str, list[torch.Tensor]] = {kind: [] for kind in models}
    for _ in range(8):
        images, upstream = torch.randn(4, 3, 96, 128, device="cuda"), torch.randn(4, 5, 96, 128, device="cuda")
        for kind, model in models.items():
            model.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=kind != "exact"):
                logits = model(images.double() if kind == "exact" else images)
            logits.double().backward(upstream.double())
            (layer,) = quantized_layers(model).values()
            assert layer.input_amax is not None
            assert layer.input_amax.grad is not None
            found[kind].append(layer.input_amax.grad.double().reshape(()))
    gradients = {kind: torch.stack(each) for kind, each in found.items()}
    error = {kind: relative(gradients[kind], gradients["exact"]) for kind in ("plain", "fused")}
    assert error["fused"] < 2 * error["plain"] + 0.03, error
