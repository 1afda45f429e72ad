"""Digits on a GPU: the same bits as on the CPU, in the fused UNet as in the plain one, seen by telemetry, compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp4deploy.models import build_unet
from fp4deploy.models.input_encoding import ENCODED_CHANNELS, encode_input
from fp4deploy.plugins import available
from fp4deploy.qat import prepare, quantized_layers
from fp4deploy.qat.fused_unet import FusedUNet, fuse_unet
from fp4deploy.qat.telemetry.collect import Watcher
from fp4deploy.train.losses.segmentation import SegmentationLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]
FIRST = "encoder.0.conv1"


def images(count: int = 4, seed: int = 0) -> torch.Tensor:
    """[count, 3, 96, 128] on the CPU, values of normalised images and a few beyond."""
    return torch.randn(count, 3, 96, 128, generator=torch.Generator().manual_seed(seed))


def unet(quantised: str, recipe: str = "nvfp4_qat") -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_unet(5, 0.25, digits=True)
    if quantised != "nothing":
        prepare(model, recipe, include=["*"] if quantised == "all layers" else None)
    return model.cuda().to(memory_format=torch.channels_last).train()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_digits_are_those_of_the_cpu(layout: torch.memory_format, compiled: bool) -> None:
    x = images()
    x[0, 1, 5, 7], x[1, 0, 3, 3], x[2, 2, 9, 9] = float("nan"), float("inf"), 1e5
    torch._dynamo.reset()
    function = torch.compile(encode_input) if compiled else encode_input
    given = x.cuda().contiguous(memory_format=layout)
    for dtype in (torch.float32, torch.float16):
        expected = encode_input(x.to(dtype))
        assert torch.equal(function(given.to(dtype)).cpu().nan_to_num(9), expected.nan_to_num(9))
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.equal(function(given.to(dtype)).float().cpu().nan_to_num(9), expected.float().nan_to_num(9))


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_qat_delayed", "nvfp4_4o6_qat"])
def test_the_kernel_that_quantises_the_first_input_keeps_every_digit(recipe: str) -> None:
    layer = quantized_layers(unet("all layers", recipe))[FIRST]
    written = encode_input(images().cuda()).half().contiguous(memory_format=torch.channels_last)
    assert torch.equal(layer.quantized_input(written), written)
    assert layer.input_amax == 6
    layer.eval()
    assert torch.equal(layer.quantized_input(written), written)


@pytest.mark.parametrize("quantised", ["nothing", "by default", "all layers"])
def test_the_fused_unet_is_as_exact_as_the_plain_one(quantised: str) -> None:
    """Against FP32, as without digits; the first layer multiplies the same digits in all three."""
    exact = unet(quantised)
    plain, fused = copy.deepcopy(exact), fuse_unet(copy.deepcopy(exact))
    assert isinstance(fused, FusedUNet)
    assert fused._fusable()
    x = images().cuda()
    masks = torch.randint(0, 5, (4, 96, 128), device="cuda")
    gradients = {}
    for name, model in (("exact", exact), ("plain", plain), ("fused", fused)):
        with torch.autocast("cuda", dtype=torch.float16, enabled=name != "exact"):
            logits = model(x)
        (SegmentationLoss()(logits, masks) * 65536).backward()
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert (model.get_parameter(f"{FIRST}.weight").grad.abs().sum((0, 2, 3)) > 0).all()
    error = {name: relative(gradients[name], gradients["exact"]) for name in ("plain", "fused")}
    assert error["fused"] < 1.15 * error["plain"]
    if quantised == "all layers":
        assert quantized_layers(fused)[FIRST].input_amax == 6


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_qat_delayed"])
def test_the_fused_unet_recomputes_what_it_computed(recipe: str) -> None:
    model = fuse_unet(unet("all layers", recipe))
    other = copy.deepcopy(model)
    with torch.backends.cudnn.flags(deterministic=True):
        for seed in range(2):
            x = images(seed=seed).cuda().requires_grad_()
            for each in (model, other):
                each.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    logits = checkpoint(each, x, use_reentrant=False) if each is other else each(x)
                    (logits.float().square().mean() * 1024).backward()
            for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
                assert relative(two.grad, one.grad) < 1e-6, name


@pytest.mark.parametrize("quantised", ["by default", "all layers"])
def test_the_fused_forward_shows_the_digits(quantised: str) -> None:
    model, x = fuse_unet(unet(quantised)), images().cuda().contiguous(memory_format=torch.channels_last)
    assert isinstance(model, FusedUNet)
    seen: list[torch.Tensor] = []
    first = model.get_submodule(FIRST)

    def show(layer: torch.nn.Module, shape: torch.Size, read: object) -> None:
        if layer is first:
            assert shape == (4, ENCODED_CHANNELS, 96, 128)
            seen.append(read(slice(1, 3)))  # type: ignore[operator]

    with torch.autocast("cuda", dtype=torch.float16), model.observe_inputs(show):
        model(x)
    assert torch.equal(seen[0].float(), encode_input(x)[1:3])
    watcher = Watcher(model)
    with torch.autocast("cuda", dtype=torch.float16), watcher.watching(x):
        model(x)
    values = watcher.snapshot().read().values[FIRST, "activation"]
    assert values["max"] == 6


def test_evaluation_gives_the_same_classes_as_the_plain_forward() -> None:
    plain = unet("nothing").eval()
    fused, x = fuse_unet(copy.deepcopy(plain)), images().cuda()
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        expected, found = plain(x).argmax(1), fused(x).argmax(1)
    assert float((found == expected).float().mean()) > 0.99
