"""The digits of an image: exact in E2M1, close to the image, and a UNet that reads them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD
from fp4deploy.errors import InputError
from fp4deploy.formats import E2M1_MAX, E2M1_VALUES, E4M3_MAX, FourOverSix, fake_quantize_nvfp4, quantize_nvfp4
from fp4deploy.formats.mxfp4 import fake_quantize_mxfp4
from fp4deploy.models import DetectionHead, ModelCard, UNet, build_unet, load_weights, read_card, save_checkpoint
from fp4deploy.models.detector import UNetDetector
from fp4deploy.models.input_encoding import (
    ENCODED_CHANNELS,
    GAIN,
    IMAGE_CHANNELS,
    UNITS,
    encode_input,
    expand_weight,
)
from fp4deploy.qat import calibrate, prepare, quantized_layers

pytestmark = pytest.mark.usefixtures("whole_unets")
BOUND = 1 / 48 / GAIN
CARD = ModelCard("fp16", 0.125, ("a", "b", "c"), 32, 32, IMAGE_MEAN, IMAGE_STD, False)


def decode_input(encoded: torch.Tensor) -> torch.Tensor:
    """The image [N, 3, H, W] that the terms [N, 13, H, W] stand for: `encode_input` undone up to its error."""
    terms = encoded[:, : ENCODED_CHANNELS - 1].split(IMAGE_CHANNELS, 1)
    return torch.stack([term / unit for term, unit in zip(terms, UNITS, strict=True)]).sum(0) / GAIN


def pixels() -> torch.Tensor:
    """All 8-bit values of the three colours, normalised: [1, 3, 16, 16]."""
    mean, std = (torch.tensor(numbers).view(3, 1) for numbers in (IMAGE_MEAN, IMAGE_STD))
    return ((torch.arange(256) / 255 - mean) / std).view(1, 3, 16, 16)


def image(count: int = 2, size: int = 32, seed: int = 0) -> torch.Tensor:
    """Random 8-bit pixels, normalised."""
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (IMAGE_MEAN, IMAGE_STD))
    values = torch.randint(0, 256, (count, 3, size, size), generator=torch.Generator().manual_seed(seed))
    return (values / 255 - mean) / std


def halves(seed: int = 0) -> torch.Tensor:
    """Random float16 numbers of every magnitude, most in an image's range: [4, 3, 64, 64]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 64, 64, generator=generator)
    x[1] *= 2.0 ** torch.randint(-24, 1, x[1].shape, generator=generator)
    x[2] = torch.randint(-1024, 1024, x[2].shape, generator=generator) / 384
    return x.half()


def test_every_8_bit_pixel_is_in_range() -> None:
    assert 4.4 < float(pixels().abs().max()) * GAIN < 4.5


@pytest.mark.parametrize("x", [pixels(), halves(), halves().float(), image()], ids=["8 bit", "half", "float", "image"])
def test_digits_are_e2m1_values_and_the_constant_is_6(x: torch.Tensor) -> None:
    found = encode_input(x)
    assert found.dtype == x.dtype
    assert found.shape == (len(x), ENCODED_CHANNELS, *x.shape[2:])
    assert set(found.abs().unique().tolist()) <= set(E2M1_VALUES)
    assert (found[:, -1] == 6).all()
    largest = found.abs().amax((0, 2, 3))
    assert (largest <= torch.tensor([4.0] * 3 + [1.5] * 3 + [0.5] * 6 + [6.0])).all()


@pytest.mark.parametrize("x", [pixels(), halves()], ids=["8 bit", "half"])
def test_an_image_comes_back_to_within_half_a_step_of_the_last_digit(x: torch.Tensor) -> None:
    exact = x.half().double()
    inside = exact.abs() * GAIN <= 4.5
    error = (decode_input(encode_input(x).double()) - exact).abs()[inside]
    assert float(error.max()) <= BOUND * (1 + 1e-12)
    assert float(error.max()) > 0.9 * BOUND  # the bound is tight
    assert float((decode_input(encode_input(x).double()) - x.double()).abs()[inside].max()) <= BOUND + 2**-10


def test_what_is_beyond_saturates() -> None:
    x = torch.full((1, 3, 1, 1), 3.0)
    largest = 4.5 / GAIN
    torch.testing.assert_close(decode_input(encode_input(x)), torch.full_like(x, largest), rtol=0, atol=1e-6)
    torch.testing.assert_close(decode_input(encode_input(-x)), torch.full_like(x, -largest), rtol=0, atol=1e-6)


def test_the_digits_are_those_of_the_definition_in_exact_arithmetic() -> None:
    """In fractions, by Python's round, which like torch's takes the even one of two."""
    from fractions import Fraction

    x = torch.cat([pixels().flatten().half(), halves()[1:3].flatten()[:3000]])
    found = encode_input(x.view(1, 1, 1, -1).expand(1, 3, 1, -1))[0, :, 0].double()
    for value, written in zip(x.tolist(), found.T.tolist(), strict=True):
        v = max(min(Fraction(value) * Fraction(GAIN), Fraction(9, 2)), -Fraction(9, 2))
        d1 = round(v)
        d2 = Fraction(round(6 * (v - d1)), 2)
        d3 = Fraction(round(12 * (v - d1 - d2 / 3)), 2)
        d4 = Fraction(round(24 * (v - d1 - d2 / 3 - d3 / 6)), 2)
        assert written[0:12:3] == [float(d) for d in (d1, d2, d3, d4)], value


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e5])
def test_what_is_not_finite_shows(bad: float) -> None:
    x = image(1)
    x[0, 1, 5, 7] = bad
    found = encode_input(x)
    assert found[0, :, 5, 7].isnan().any()
    found[0, :, 5, 7] = 0
    assert found.isfinite().all()
    torch.manual_seed(0)
    model = build_unet(3, 0.125, digits=True).eval()
    assert model(x).isnan().any()
    prepare(model, include=["*"])
    calibrate(model, [image()])
    assert model(x).isnan().any()


def test_a_detector_reads_the_digits_in_the_precision_of_its_weights() -> None:
    torch.manual_seed(0)
    model = UNetDetector(DetectionHead("fcos", 2, width=16), 0.125, digits=True).eval()
    for rest in (torch.float32, torch.bfloat16):
        assert model.to(rest)(image()).dtype == rest


@pytest.mark.parametrize("amax", [6.0, None], ids=["static", "dynamic"])
@pytest.mark.parametrize("choice", [None, FourOverSix("mae"), FourOverSix("mse", 448), FourOverSix("mae", 256, True)])
def test_nvfp4_keeps_every_digit(amax: float | None, choice: FourOverSix | None) -> None:
    for x in (pixels(), image(), halves()):
        written = encode_input(x)
        quantized, inside = fake_quantize_nvfp4(written, (1,), amax, four_over_six=choice)
        assert torch.equal(quantized, written)
        assert inside.all()


@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_mxfp4_keeps_every_digit(rule: str) -> None:
    for x in (pixels(), image(), halves()):
        assert torch.equal(fake_quantize_mxfp4(encode_input(x), 1, rule), encode_input(x))


def test_a_stored_scale_gives_the_same_codes() -> None:
    """6 / 2688 is rounded: the step comes back an ulp below 1, which FP16 does not see."""
    stored = torch.tensor(6.0) / (E2M1_MAX * E4M3_MAX) * (E2M1_MAX * E4M3_MAX)
    assert stored != 6
    written = encode_input(image()).permute(0, 2, 3, 1).contiguous()
    one, other = quantize_nvfp4(written, amax=6.0), quantize_nvfp4(written, amax=stored)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales.view(torch.uint8), other.scales.view(torch.uint8))
    assert torch.equal(other.dequantize(torch.float16), written.half())


def test_the_scale_is_lost_without_the_constant() -> None:
    written = encode_input(image())[:, :-1]
    assert not torch.equal(fake_quantize_nvfp4(written, (1,))[0], written)


def test_an_expanded_weight_is_the_same_function_of_the_image() -> None:
    weight, x = torch.randn(8, 3, 3, 3, dtype=torch.double), image().double()
    expanded = expand_weight(weight)
    assert expanded.shape == (8, ENCODED_CHANNELS, 3, 3)
    found, expected = F.conv2d(encode_input(x), expanded), F.conv2d(x, weight)
    torch.testing.assert_close(found, F.conv2d(decode_input(encode_input(x)), weight))
    farthest = weight.abs().sum((1, 2, 3)).max() * (BOUND + 2**-10)
    assert 0 < float((found - expected).abs().max()) <= farthest


def test_the_expanded_weight_of_the_largest_is_exact_in_fp4() -> None:
    weight = torch.zeros(1, 3, 1, 1)
    weight[0, 1] = 0.7
    quantized, _ = fake_quantize_nvfp4(expand_weight(weight), (1,))
    torch.testing.assert_close(quantized, expand_weight(weight), rtol=1e-6, atol=0)


def models() -> tuple[UNet, UNet]:
    """Without and with digits, of one seed."""
    found = []
    for choice in (False, True):
        torch.manual_seed(3)
        found.append(build_unet(3, 0.125, digits=choice).eval())
        found[-1].drawn = torch.rand(1)
    return found[0], found[1]


def test_both_unets_of_a_seed_begin_as_the_same_function() -> None:
    plain, model = models()
    assert plain.drawn == model.drawn  # whatever is drawn next
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        expected = expand_weight(parameter) if name == "encoder.0.conv1.weight" else parameter
        assert torch.equal(ours[name], expected), name
    x = image()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(decode_input(encode_input(x))), rtol=0, atol=2e-5)
        exact, difference = plain(x), model(x) - plain(x)
    assert float(difference.square().mean().sqrt() / exact.std()) < 0.05


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layout_autocast_and_half_precision_keep_the_digits(layout: torch.memory_format) -> None:
    x = image().contiguous(memory_format=layout)
    written = encode_input(x)
    assert torch.equal(written, encode_input(image()))
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(encode_input(x), written)
        assert torch.equal(written.to(dtype).float(), written)
    assert torch.equal(encode_input(x.half()).float(), written)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch.compile on a CPU, g++, is missing")
def test_a_compiler_leaves_no_rounding_out() -> None:
    x = torch.cat([image(), torch.randn(2, 3, 32, 32)])
    x[0, 1, 2, 3], x[1, 0, 3, 3] = float("nan"), float("inf")
    torch._dynamo.reset()
    found = torch.compile(encode_input, fullgraph=True)(x)
    assert torch.equal(found.nan_to_num(9), encode_input(x).nan_to_num(9))
    assert not torch.equal(encode_input(x), encode_input(x + x * 2**-12))  # an FP16 rounding of x is seen in its digits


def test_the_gradient_reaches_the_first_layer_and_ends_there() -> None:
    _, model = models()
    x = image().requires_grad_()
    model.train()(x).square().sum().backward()
    gradient = model.encoder[0].conv1.weight.grad
    assert (gradient.abs().sum((0, 2, 3)) > 0).all()  # of all 13 channels
    assert x.grad is None or not x.grad.any()


def test_amax_tracking_finds_6() -> None:
    _, model = models()
    prepare(model, include=["*"]).train()
    model(image(seed=1))
    layer = quantized_layers(model)["encoder.0.conv1"]
    assert layer.input_amax == 6
    assert torch.equal(layer.quantized_input(encode_input(image())), encode_input(image()))


def test_only_rgb_has_digits() -> None:
    with pytest.raises(InputError, match="reads 4 channels"):
        UNet(3, 0.125, in_channels=4, digits=True)


def test_checkpoint_and_card(tmp_path: Path) -> None:
    path, (plain, model) = tmp_path / "digits.safetensors", models()
    save_checkpoint(path, model, dataclasses.replace(CARD, digits=True))
    card = read_card(path)
    assert card.digits
    again = build_unet(card.channels, card.scale, card.digits)
    load_weights(again, path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(InputError, match=r"does not fit this model.*\[8, 13, 3, 3\] instead of \[8, 3, 3, 3\]"):
        load_weights(plain, path)
    older = json.loads(CARD.to_json())
    del older["digits"]
    assert ModelCard.from_json(json.dumps(older)) == CARD
    assert not CARD.digits


def test_a_plain_checkpoint_can_be_expanded(tmp_path: Path) -> None:
    path, (plain, model) = tmp_path / "plain.safetensors", models()
    save_checkpoint(path, plain, CARD)
    torch.manual_seed(9)
    other = build_unet(3, 0.125, digits=True)
    with pytest.raises(InputError, match="does not fit this model"):
        load_weights(other, path)
    load_weights(other, path, to_encoding=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
