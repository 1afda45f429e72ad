"""Packed networks of modules that are not ours: what they compute, which layers are FP4, which sizes they take."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import GateError, InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.nodes import NodeComparison, compare_nodes
from fp4deploy.export.verify.tensors import leaves
from fp4deploy.graph.copies import copied
from fp4deploy.packed import PackedFile, PackedNetwork, activation_bytes, full_precision, packed_file, read_packed
from fp4deploy.packed.describe import describe_packed
from fp4deploy.packed.graph import Affine, Concat, Conv2d, Layer
from fp4deploy.qat import quantized_layers
from fp4deploy.qat.load import round_to_deployed
from tests.export.packable_networks import FPN, NETWORKS, deployed
from tests.samples import sample
from tests.train.launch import start


@cache
def made(name: str) -> tuple[nn.Module, PackedFile, torch.Tensor]:
    torch.manual_seed(0)
    factory, size = NETWORKS[name]
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    model = deployed(factory(), x)
    return model, packed_file(Path("own.fp4"), None, *pack_model(model, x)), x


def digests(order: str, folder: str) -> list[str]:
    """SHA-256 of the ONNX files (o) and packed networks (p) of one network, written one after the other."""
    torch.manual_seed(0)
    x, found = torch.zeros(2, 3, 16, 16), []
    inner = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Upsample(scale_factor=2)]
    model = deployed(nn.Sequential(nn.Conv2d(3, 16, 1), *inner, nn.Conv2d(16, 4, 1)), x + 1)
    for number, kind in enumerate(order):
        file = Path(folder, f"{number}.onnx" if kind == "o" else f"{number}.fp4")
        if kind == "o":
            fd.export_onnx(model, x, file, verify=False)
        else:
            fd.pack(model, file, example_inputs=x, verify=False)
        found.append(hashlib.sha256(file.read_bytes()).hexdigest())
    return found


def write_digests(order: str, folder: str) -> None:
    """In a process of its own."""
    Path(folder, "digests").write_text(json.dumps(digests(order, folder)))


def test_a_file_does_not_depend_on_what_its_process_wrote_before(tmp_path: Path) -> None:
    fresh = start(write_digests, "opo", str(tmp_path))
    fresh.join(240)
    exported, packed, again = json.loads((tmp_path / "digests").read_text())
    assert again == exported
    assert digests("po", str(tmp_path)) == [packed, exported]


@pytest.mark.parametrize("name", sample(NETWORKS, every=3))
def test_every_layer_computes_what_torch_computes(name: str) -> None:
    model, file, x = made(name)
    with torch.inference_mode():
        errors = compare_nodes(model, PackedNetwork(file), x).errors
    weights = [layer for layer, module in model.named_modules() if list(module.parameters(recurse=False))]
    assert set(weights) == set(errors)
    assert max(errors.values()) < 1e-3, errors


@pytest.mark.parametrize("name", sample(NETWORKS, every=3))
def test_the_network_computes_what_torch_computes(name: str) -> None:
    """End to end: FP4 amplifies last bits, so that values may differ where a code did; most agree closely."""
    model, file, x = made(name)
    with torch.inference_mode():
        expected, got = leaves(model(x)), leaves(PackedNetwork(file)(x))
    for one, other in zip(expected, got, strict=True):
        assert one.shape == other.shape
        assert float((one - other).norm() / one.norm()) < 0.05
        assert float((one.argmax(1) == other.argmax(1)).float().mean()) > 0.95


@pytest.mark.parametrize("name", sample(NETWORKS, every=3))
def test_quantised_layers_are_packed(name: str) -> None:
    model, file, _ = made(name)
    packed = {node.layer for node in file.graph.nodes if isinstance(node, Layer) and node.precision == "nvfp4"}
    assert packed == set(quantized_layers(model))
    assert packed


@pytest.mark.parametrize("name", sample(NETWORKS, every=3))
def test_other_sizes_from_one_file(name: str) -> None:
    model, file, x = made(name)
    sizes = (*x.shape[2:-2], x.shape[-2] + 16, x.shape[-1] - 16)
    other = torch.randn(3, 3, *sizes, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        errors = compare_nodes(model, PackedNetwork(file), other).errors
        expected, got = leaves(model(other)), leaves(PackedNetwork(file)(other))
    assert max(errors.values()) < 1e-3, errors
    assert [each.shape for each in got] == [each.shape for each in expected]
    assert all(each.isfinite().all() for each in got)


@pytest.mark.parametrize("name", sample(NETWORKS, every=3))
def test_memory_and_description(name: str, tmp_path: Path) -> None:
    _, file, x = made(name)
    assert activation_bytes(file.graph, *x.shape[2:]) > 0
    assert activation_bytes(full_precision(file.graph), *x.shape[2:]) > 0
    path = tmp_path / "own.fp4"
    fd_file = PackedFile(path, None, file.graph, file.tensors, file.version)
    from fp4deploy.packed import write_packed

    write_packed(fd_file)
    facts, columns, rows, last = describe_packed(read_packed(path))
    assert len(rows) == len(file.graph.nodes)
    assert facts["precision"] == "nvfp4"
    assert "layers that multiply in FP4" in last
    assert {row[columns.index("precision")] for row in rows} <= {"FP4", "FP16", "FP4 decoded"}


def test_names_of_several_outputs() -> None:
    _, file, x = made("ASPP")
    outputs = PackedNetwork(file)(x)
    assert isinstance(outputs, dict)
    assert list(outputs) == ["out", "aux"]


def test_batch_norm_is_an_affine_epilogue_and_the_codes_are_the_trained_ones() -> None:
    model, file, _ = made("ResNet encoder")
    norm, layer = model.get_submodule("stages.1.norm1"), model.get_submodule("stages.1.conv1")
    assert [node.layer for node in file.graph.nodes if isinstance(node, Affine)].count("stages.1.norm1") == 1
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    torch.testing.assert_close(file.tensors["stages.1.norm1.scale"], scale.float(), rtol=1e-6, atol=0)
    unfolded = fd.quantize_nvfp4(layer.weight.detach().permute(2, 3, 0, 1))
    codes = unfolded.codes.permute(2, 0, 1, 3)
    assert torch.equal(file.tensors["stages.1.conv1.weight.codes"], codes)


class Renamed(nn.Module):
    """A layer that the code calls by the second of its names, as MONAI's DynUNet and nnU-Net's decoder do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1)
        self.called = nn.ModuleDict({"deep": self.body})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.called["deep"](torch.relu(self.stem(x))))


def test_a_layer_of_two_names_is_compared_with_reference_inputs() -> None:
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    model = deployed(Renamed(), x)
    with torch.inference_mode():
        errors = compare_nodes(
            model, PackedNetwork(packed_file(Path("own.fp4"), None, *pack_model(model, x))), x
        ).errors
    assert set(errors) == {"stem", "called.deep", "head"}


def test_branches_of_one_scale_share_one_packed_form() -> None:
    """A residual block's first convolution and its projection read the same activation."""
    _, file, _ = made("ResNet encoder")
    reads = {node.layer: node.inputs for node in file.graph.nodes if isinstance(node, Layer)}
    assert reads["stages.1.conv1"] == reads["stages.1.project.0"]


@pytest.mark.parametrize("name", [pytest.param("ResNet encoder", marks=pytest.mark.variants), "InstanceNorm UNet"])
def test_layers_of_any_scales_compute_what_torch_computes(name: str) -> None:
    """As a percentile or a learned scale leaves them: layers that read one activation may differ in theirs."""
    model, x = copied(made(name)[0]), made(name)[2]
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in quantized_layers(model).values():
            layer.input_amax.mul_(2 ** torch.rand((), generator=random).mul(3).sub(2))  # type: ignore[union-attr]
    round_to_deployed(model)
    file = packed_file(Path("own.fp4"), None, *pack_model(model, x))
    with torch.inference_mode():
        errors = compare_nodes(model, PackedNetwork(file), x).errors
    assert len({float(layer.input_amax) for layer in quantized_layers(model).values()}) > 4  # type: ignore[arg-type]
    assert max(errors.values()) < 1e-3, errors


def test_two_sources_instead_of_a_concatenation() -> None:
    _, file, _ = made("InstanceNorm UNet")
    assert not [node for node in file.graph.nodes if isinstance(node, Concat)]
    pairs = [node.layer for node in file.graph.nodes if isinstance(node, Conv2d) and len(node.inputs) == 2]
    assert pairs == ["decoder.0.0", "decoder.1.0"]


def test_pack_writes_what_was_compared(tmp_path: Path) -> None:
    model, _, x = made("MobileNet")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = fd.pack(model, tmp_path / "own.fp4", example_inputs=x)
    assert result.verification is not None
    assert result.verification.images == len(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    runtime = fd.open_runtime(tmp_path / "own.fp4")
    assert runtime.infer(x.numpy()).shape == (2, 5, 32, 32)


@pytest.mark.variants
def test_a_plain_module_is_packed_in_fp16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = FPN(), torch.randn(1, 3, 32, 40)
    deployed(model, x, None)
    file = fd.pack(model, tmp_path / "plain.fp4", example_inputs=x).file
    torch.testing.assert_close(PackedNetwork(file)(x), model(x).detach(), rtol=0, atol=2e-4)


def test_a_single_layer(tmp_path: Path) -> None:
    layer = nn.Linear(16, 8)
    file = fd.pack(layer, tmp_path / "one.fp4", example_inputs=torch.randn(3, 16)).file
    assert PackedNetwork(file)(torch.randn(5, 16)).shape == (5, 8)


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(F.relu(x))


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (Inverse(), r"aten\.linalg_inv\S*, test_packed_networks\.py, line \d+\) has no packed form"),
        (Odd(), r"decides by values .*test_packed_networks\.py, line \d+"),
    ],
)
def test_what_has_no_packed_form_is_named(model: nn.Module, cause: str, tmp_path: Path) -> None:
    example = torch.randn(1, 3, 8, 8)
    with pytest.raises(InputError, match=cause):
        fd.pack(model, tmp_path / "own.fp4", example_inputs=example)
    assert not list(tmp_path.iterdir())


def test_wrong_requests(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="example_inputs"):
        fd.pack(nn.Conv2d(3, 4, 3), tmp_path / "own.fp4")
    with pytest.raises(InputError, match=r"\.fp4"):
        fd.pack(nn.Conv2d(3, 4, 3), tmp_path / "own.onnx", example_inputs=torch.zeros(1, 3, 8, 8))
    with pytest.raises(InputError, match="never calibrated"):
        fd.pack(
            fd.prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1))),
            tmp_path / "own.fp4",
            example_inputs=torch.zeros(1, 3, 32, 32),
        )


def test_the_gate_compares_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.export import to_packed

    model, file, x = made("MobileNet")

    def wrong(*arguments: object, **options: object) -> tuple:  # type: ignore[type-arg]
        name = "blocks.0.0.weight.codes"
        return file.graph, {**file.tensors, name: file.tensors[name].flip(0)}

    monkeypatch.setattr(to_packed, "pack_model", wrong)
    with pytest.raises(GateError, match=r"first node to differ is blocks\.0\.0, by"):
        fd.pack(model, tmp_path / "own.fp4", example_inputs=x)
    assert not list(tmp_path.iterdir())


def test_a_node_that_gives_no_number_is_wrong() -> None:
    """NaN is neither more nor less than what is allowed."""
    errors = {"right": 0.0, "NaN": float("nan"), "infinite": float("inf"), "far": 0.5}
    assert {*NodeComparison(errors, []).wrong} == {"NaN", "infinite", "far"}
