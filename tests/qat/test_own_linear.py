"""Linear layers of classes outside torch: what is one, and that it is quantised, exported and packed as one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.graph import capture
from fp4deploy.graph.own_linear import weight_axis
from fp4deploy.qat import deployed, prepare, quantized_layers, restore


class InOut(nn.Module):
    """x W + b with a weight [in, out], as transformers' Conv1D."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.size(-1))
        y = rows @ self.weight if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        return y.view(*x.shape[:-1], self.outputs)


class OutIn(nn.Module):
    """x W^T of a class of its own, without a bias at all."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...c,oc->...o", x, self.weight)


class Scaled(OutIn):
    """More than a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


class Multiplied(nn.Linear):
    """A subclass of torch's that multiplies by another operator, as Falcon's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(32, 32), InOut(32, 48), InOut(48, 32, bias=False)
        self.three, self.four, self.head = OutIn(32, 32), Multiplied(32, 32), nn.Linear(32, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.four(self.three(torch.relu(self.two(torch.relu(self.one(self.embed(ids))))))))
        return y


def test_a_linear_layer_is_found_by_what_it_computes() -> None:
    layers = (
        InOut(16, 32),
        InOut(16, 16, bias=False),
        OutIn(32, 16),
        OutIn(16, 16),
        Scaled(16, 16),
        nn.Embedding(9, 16),
    )
    assert [weight_axis(layer) for layer in layers] == [0, 0, 1, 1, None, None]
    assert weight_axis(nn.Linear(3, 4)) is None  # torch's own are known by their class


def test_it_computes_as_torchs_layer_and_keeps_its_parameters() -> None:
    layer = InOut(64, 32)
    reference = nn.Linear(64, 32)
    reference.weight.data, reference.bias = layer.weight.data.T.contiguous(), nn.Parameter(copy.deepcopy(layer.bias))
    before = {name: x.shape for name, x in layer.state_dict().items()}
    x = torch.randn(2, 5, 64)
    results = []
    for each in (prepare(layer, "nvfp4_train"), prepare(reference, "nvfp4_train")):
        torch.manual_seed(0)
        y = each(x)
        y.square().sum().backward()
        results.append(y)
    assert torch.equal(*results)
    assert torch.equal(layer.weight.T, layer._parameters["weight"])
    assert torch.equal(layer._parameters["weight"].grad, reference.weight.grad.T)
    assert {name: x.shape for name, x in layer.state_dict().items()} == before
    assert type(copy.deepcopy(layer)).__name__ == "QuantInOut"
    assert type(restore(layer)) is InOut
    assert layer.weight.shape == (64, 32)


def test_before_it_has_data_a_library_finds_the_shape_of_its_parameter() -> None:
    with torch.device("meta"):  # as `from_pretrained` makes a class that prepares itself
        layer = fd.prepare(InOut(32, 48, bias=False))
    assert type(layer).__name__ == "QuantInOut"
    assert layer.weight.shape == (32, 48)
    assert (layer.in_features, layer.out_features) == (32, 48)
    assert layer(torch.empty(2, 5, 32, device="meta")).shape == (2, 5, 48)  # as tools do that look for shapes
    assert layer.weight.shape == (32, 48)


def test_such_a_network_is_exported_and_packed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = Net().eval(), torch.randint(32, (2, 6))
    fd.prepare(model)
    assert list(quantized_layers(model)) == ["one", "two", "three", "four"]
    fd.calibrate(model, ids)
    result = fd.export_onnx(model, ids, tmp_path / "net.onnx")
    assert result.fp4_layers == 4
    assert fd.pack(model, tmp_path / "net.fp4", example_inputs=ids).verification.passed
    for name in ("net.onnx", "net.fp4"):
        with torch.no_grad():
            assert torch.allclose(
                torch.from_numpy(fd.open_runtime(tmp_path / name)(ids)), deployed(model)(ids), atol=2e-3
            )


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_plain_one_is_captured_as_a_linear_node(dynamic: bool) -> None:
    captured = capture(nn.Sequential(InOut(16, 8), OutIn(8, 4)), torch.zeros(2, 3, 16), dynamic)
    assert [node.op for node in captured.nodes if node.op not in ("reshape",)] == ["linear", "linear"]


class _Scaled(nn.Linear):
    """Multiplies by another operator, and by what an attribute says."""

    def __init__(self, gain: float, dropout: float = 0.0) -> None:
        super().__init__(32, 16)
        self.gain, self.dropout = gain, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x @ self.weight.T * self.gain + self.bias, self.dropout, self.training)


@pytest.mark.parametrize(("gain", "dropout", "axis"), [(1.0, 0.0, 1), (3.0, 0.0, None), (1.0, 0.5, None)])
def test_attributes_and_training_count(gain: float, dropout: float, axis: int | None) -> None:
    for _ in range(2):  # what one layer is says nothing of another one of its class
        assert weight_axis(_Scaled(1.0)) == 1
        assert weight_axis(_Scaled(gain, dropout)) == axis
