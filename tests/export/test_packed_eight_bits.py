"""Layers in FP8 and INT8 of packed networks: from a prepared module to the file and back."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.export.to_packed import pack
from fp4deploy.formats import EightBitTensor, quantize_fp8, quantize_int8
from fp4deploy.packed import PackedFile, PackedNetwork, own_quantizer, read_packed, write_packed
from fp4deploy.packed.check import check_values
from fp4deploy.packed.describe import describe_packed
from fp4deploy.plugins.gemm.training import Window
from fp4deploy.qat import calibrate, prepare
from fp4deploy.qat.load import deployed
from tests.export.packable_networks import EightBits

QUANTIZE = {"fp8": quantize_fp8, "int8": quantize_int8}


PRODUCTS = {
    "body": lambda x, w: F.conv2d(x, w, None, 2, 2, 2, 4),
    "up": lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1, 2),
    "point": F.linear,
}


@pytest.fixture(scope="module", params=["fp8", "int8"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(form: str) -> nn.Module:
    torch.manual_seed(0)
    found = prepare(
        EightBits(), "nvfp4_qat", include=["wide", "body", "up", "point"], **{form: ["body", "up", "point"]}
    )
    calibrate(found, [torch.randn(2, 3, 16, 16) for _ in range(2)])
    return found.eval()


@pytest.fixture(scope="module")
def file(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> PackedFile:
    path = tmp_path_factory.mktemp("packed") / "eight.fp4"
    assert pack(model, path, example_inputs=torch.randn(2, 3, 16, 16)).verification is not None
    return read_packed(path)


def test_the_file_has_codes_and_a_scale_of_each_output_channel(form: str, file: PackedFile) -> None:
    precisions = {node.layer: node.precision for node in file.graph.nodes if hasattr(node, "precision")}
    assert precisions == {"stem": "fp16", "wide": "nvfp4", "head": "fp16"} | dict.fromkeys(
        ("body", "up", "point"), form
    )
    assert file.graph.format() == 11
    parts = [file.tensors[f"up.weight.{part}"] for part in ("codes", "scales", "amax")]
    assert [[*each.shape] for each in parts] == [[6, 3, 3, 20], [6], []]
    assert parts[0].dtype == {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[form]
    *_, table, last = describe_packed(file)
    assert last.startswith(f"1 of 6 layers that multiply in FP4, 3 in {form.upper()}; ")
    rows = {row[0]: row[2] for row in table}
    kernel = {"fp8": "FP8", "int8": "INT8 decoded"}[form]  # of layers of one group
    assert [rows[name] for name in ("wide", "body", "point")] == ["FP4", f"{form.upper()} decoded", kernel]


def test_a_layer_is_the_sum_of_codes_times_both_scales(form: str, model: nn.Module, file: PackedFile) -> None:
    network, exact = PackedNetwork(file), deployed(model)
    shapes = {"body": (2, 24, 9, 8), "up": (1, 20, 4, 5), "point": (3, 7, 12)}
    for node in (each for each in file.graph.nodes if getattr(each, "layer", "") in shapes):
        x, layer = torch.randn(shapes[node.layer]), exact.get_submodule(node.layer)
        (found,) = network.run_node(node, [x])
        given = QUANTIZE[form](x, amax=layer.input_amax)
        weight = QUANTIZE[form](layer.weight.detach(), layer.gemms().weight_axes[0])
        total = PRODUCTS[node.layer](given.codes.double(), weight.codes.double())
        axis = -1 if node.layer == "point" else 1
        shape = [-1 if at == axis % total.ndim else 1 for at in range(total.ndim)]
        scales = weight.scale.flatten().repeat(total.shape[axis] // weight.scale.numel())
        wanted = total * (given.scale * scales).double().view(shape) + layer.bias.detach().double().view(shape)
        wanted = wanted.relu() if getattr(node, "relu", False) else wanted
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, layer(x).relu() if node.layer != "up" else layer(x), rtol=1e-4, atol=1e-5)
        assert network.precision_of(node) == f"{form.upper()} as FP32"


def multiplied(
    x: EightBitTensor, w: EightBitTensor, window: Window, pixels: tuple[int, int], *rest: object
) -> torch.Tensor:
    """What `gather_gemm` computes."""
    dtype, bias, inverse = rest
    assert x.codes.shape[-1] % 16 == 0
    source, filters = x.codes.float().permute(0, 3, 1, 2), w.codes.float()
    steps = (window.stride, window.padding)
    if inverse:
        more = [size - (n - 1) * s + 2 * p - d * (k - 1) - 1 for size, n, k, s, p, d in zip(
            pixels, source.shape[2:], window.kernel, window.stride, window.padding, window.dilation, strict=True
        )]  # fmt: skip
        y = F.conv_transpose2d(source, filters.permute(3, 0, 1, 2), None, *steps, more, 1, window.dilation)
    else:
        y = F.conv2d(source, filters.permute(0, 3, 1, 2), None, *steps, window.dilation)
    assert tuple(y.shape[2:]) == pixels
    return (y.permute(0, 2, 3, 1) * (x.scale * w.scale) + bias).to(dtype)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_a_kernel_gets_the_places_of_each_layer_in_fp8(
    groups: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels as on Blackwell, here torch in their place; layers of several groups have none."""
    torch.manual_seed(1)
    names, x = ["body", "up", "point"], torch.randn(2, 3, 16, 16)
    model = prepare(EightBits(groups), "nvfp4_qat", include=names, fp8=names)
    calibrate(model, [x])
    pack(model.eval(), tmp_path / "eight.fp4", example_inputs=x, verify=False)
    decoded, network = (PackedNetwork(read_packed(tmp_path / "eight.fp4")) for _ in range(2))
    monkeypatch.setattr("fp4deploy.packed.network.gather_gemm", multiplied)
    network.has_mixed_kernels = True
    shapes = {"body": (2, 24, 9, 8), "up": (1, 20, 4, 5), "point": (3, 7, 12)}
    for node in (each for each in network.graph.nodes if getattr(each, "layer", "") in shapes):
        given = torch.randn(shapes[node.layer])
        network._load_weight(node, (given.shape[-1 if node.op == "linear" else 1],))
        (expected,), (found,) = decoded.run_node(node, [given]), network.run_node(node, [given])
        by_kernel = groups == (1, 1) or node.layer == "point"
        assert network.precision_of(node) == ("FP8" if by_kernel else "FP8 as FP32")
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)


def test_the_gate_notices_a_wrong_product(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_quantizer.multiply
    monkeypatch.setattr("fp4deploy.packed.network.multiply", lambda *each: 1.05 * own(*each))
    with pytest.raises(Fp4DeployError, match="differ"):
        pack(model, tmp_path / "wrong.fp4", example_inputs=torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scales", -1.0, "negative number"),
        ("scales", -0.0, "negative number"),
        ("scales", float("nan"), "NaN or Inf"),
        ("amax", -2.0, "not negative"),
    ],
)
def test_wrong_numbers_are_refused(file: PackedFile, part: str, value: float, message: str) -> None:
    name = f"body.weight.{part}"
    with pytest.raises(InputError, match=message):
        check_values(file.tensors | {name: torch.full_like(file.tensors[name], value)}, file.graph)


@pytest.mark.parametrize("part", ["codes", "scales", "amax"])
def test_wrong_shapes_are_refused(file: PackedFile, tmp_path: Path, part: str) -> None:
    name = f"body.weight.{part}"
    wrong = file.tensors | {name: file.tensors[name].flatten()[:1].repeat(3)}
    infos = file.graph.tensors | {name: file.graph.tensors[name].model_copy(update={"shape": [3]})}
    graph = file.graph.model_copy(update={"tensors": infos})
    write_packed(replace(file, path=tmp_path / "wrong.fp4", tensors=wrong, graph=graph))
    with pytest.raises(InputError, match=r"body"):
        read_packed(tmp_path / "wrong.fp4")


def test_a_negative_zero_is_no_block_scale_either(file: PackedFile) -> None:
    """A kernel that shifts its bits would read infinity."""
    name = "wide.weight.scales"
    wrong = file.tensors[name].view(torch.uint8).clone()
    wrong.flatten()[0] = 0x80
    with pytest.raises(InputError, match="wide.weight.scales' hold a negative number"):
        check_values(file.tensors | {name: wrong.view(torch.float8_e4m3fn)}, file.graph)


def test_weights_stay_codes_and_weigh_a_byte(file: PackedFile) -> None:
    network = PackedNetwork(file)
    for node in (each for each in file.graph.nodes if getattr(each, "layer", "") in PRODUCTS):
        assert network.weight_bytes(node) == file.tensors[f"{node.layer}.weight.codes"].numel()


@pytest.mark.parametrize(
    ("amax", "rest", "message"),
    [
        (65504.0, "fp16", ""),
        (1e5, "fp16", "body.input_amax reaches 100000, and FP16's largest number is 65504"),
        pytest.param(1e5, "bf16", "", marks=pytest.mark.variants),
        (1e9, "bf16", "body: its input reaches 1e.09, and scales of"),
    ],
)
def test_the_largest_input(model: nn.Module, tmp_path: Path, amax: float, rest: str, message: str) -> None:
    changed = copy.deepcopy(model)
    changed.body.input_amax.fill_(amax)
    path, x = tmp_path / "large.fp4", torch.randn(2, 3, 16, 16)
    if message:
        with pytest.raises(InputError, match=message):
            pack(changed, path, example_inputs=x, rest=rest, verify=False)
        return
    pack(changed, path, example_inputs=x, rest=rest, verify=False)
    assert read_packed(path).tensors["body.weight.amax"].item() == amax
