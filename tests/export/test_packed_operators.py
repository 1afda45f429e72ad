"""Operators of users' code in packed networks: known, decomposed by torch's table, computed at capture, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.packed import PackedNetwork
from fp4deploy.packed.file import KEY, read_packed
from fp4deploy.packed.graph import Aten, Layer
from fp4deploy.packed.program import trace
from fp4deploy.packed.writer import Writer
from tests.samples import sample

Function = Callable[["Around", torch.Tensor], torch.Tensor]


class Around(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.slopes = nn.Parameter(torch.rand(16))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.function(self, torch.relu(self.stem(x))))


def statistics(_: Around, x: torch.Tensor) -> torch.Tensor:
    x = (x - x.amin((2, 3), True)) / (x.var((2, 3), keepdim=True) + 1).sqrt() + x.std(1, keepdim=True)
    x = F.normalize(x, dim=1) + x / (1 + x.norm(dim=(2, 3), keepdim=True)) - x.max(1, keepdim=True)[0]
    return x + 0.1 * x.cumsum(2)


def choices(_: Around, x: torch.Tensor) -> torch.Tensor:
    x = torch.where(x > 0.1, x, 2 * x).masked_fill(x < 0.01, 0.5) + x * ((x > 0.2) & ~(x >= 1)).float()
    return torch.maximum(x, x.mean(1, keepdim=True)) + F.hardshrink(x) + F.threshold(x, 0.1, 0.2)


def elementwise(net: Around, x: torch.Tensor) -> torch.Tensor:
    x = F.prelu(x - 1, net.slopes) + (x + 1).pow(1.5) - x.abs() + torch.exp(-x) + F.softsign(x)
    return torch.lerp(x, torch.log1p(x.square()), 0.3) + net.slopes.view(1, -1, 1, 1) + F.gelu(x, approximate="tanh")


def places(_: Around, x: torch.Tensor) -> torch.Tensor:
    x = torch.roll(x, (1, -2), (2, 3)) + x.flip(3) + F.channel_shuffle(x, 4) + x[:, [3, 1, 0, 2] * 4]
    x = x + x[:, :8].repeat(1, 2, 1, 1) + torch.stack([x, x], 1).sum(1) + F.glu(torch.cat([x, x], 1), 1)
    mixed = torch.einsum("nchw,ndhw->ncd", x, x).softmax(-1).mean(-1)[:, :, None, None]
    return mixed * F.log_softmax(x, 1)


def computed(net: Around, x: torch.Tensor) -> torch.Tensor:
    weight = net.head.weight
    weight = (weight - weight.mean()) / (weight.std() + 1e-5)
    mask = torch.tril(torch.ones(16, 16)).bool()
    tokens = x.flatten(2)
    x = F.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=mask).reshape(x.shape) + x
    return F.conv2d(x, weight.repeat(4, 1, 1, 1)) * torch.tensor(0.5) + torch.linspace(0, 1, 16).view(1, -1, 1, 1)


def volumes(_: Around, x: torch.Tensor) -> torch.Tensor:
    x = F.interpolate(x[:, :, None], scale_factor=(1, 2, 2), mode="trilinear")
    x = F.max_pool3d(x, (1, 2, 2))[:, :, 0]
    return x + F.avg_pool1d(x.flatten(2), 3, 1, 1).reshape(x.shape) * F.adaptive_avg_pool1d(x.flatten(2), 1)[..., None]


def written(_: Around, x: torch.Tensor) -> torch.Tensor:
    y, z = torch.zeros_like(x), torch.empty_like(x)
    y[:, 3:8] = x[:, :5]
    y[:, 9:, 1:, ::3] = 1.0
    y[:, :8, :, :-1] = x[:, :8, :, 1:]
    z[:, ::2], z[:, 1::2] = x[:, ::2], -x[:, 1::2]
    z[:, 5] = x[:, 1] * 2
    mask = torch.zeros(x.shape[0], 1, *x.shape[2:], dtype=torch.bool)
    mask[..., -3:] = True
    y = y.masked_fill(mask, 0.5) + torch.cat([z]) * torch.full_like(x, 2)
    return y + torch.cat([x[:, :13], x.new_ones(x.shape[0], 3, *x.shape[2:])], 1)


def casts(_: Around, x: torch.Tensor) -> torch.Tensor:
    seen = ~torch.zeros(x.shape[0], *x.shape[2:]).to(torch.bool)  # sine positions are counted so
    rows = seen.cumsum(1, dtype=torch.float32)
    rows = rows / rows[:, -1:] + x.relu().bool().cumsum(3).long()[:, 0] / 8
    return x + rows[:, None] + (4 * x).int().float() + (-9 * x).to(torch.int64) * (x > 0).to(torch.uint8)


def windows(net: Around, x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    columns = F.unfold(x, 3, padding=1).view(n, c, 9, h, w)  # as involution and CARAFE do
    weights = F.softmax(columns.mean(1, keepdim=True), 2)
    x = (columns * weights).sum(2) + F.fold(F.unfold(x, (4, 2), stride=(4, 2)).square(), (h, w), (4, 2), stride=(4, 2))
    parts = x.unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5)) + F.pad(x, (1, 0, 0, 0)).unfold(3, 3, 2).mean(4)[:, :, ::2]
    places = x[:, torch.tensor([[3, 1, 0, 2], [7, 6, 5, 4]])].flatten(1, 2).repeat(1, 2, 1, 1)
    position = F.interpolate(net.slopes.view(1, 4, 2, 2), size=(h, w), mode="bicubic").repeat(1, 4, 1, 1)
    same = F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=float("-inf")), 3, 2)  # as TensorFlow pads
    return x + F.interpolate(parts, (h, w)) + places + position + F.interpolate(same, (h, w))


def positions(_: Around, x: torch.Tensor) -> torch.Tensor:
    largest = x.argmax(1, keepdim=True) + (-x).argmin(1)[:, None].float() / 2
    return x - x.logsumexp(1, keepdim=True) + x.logsumexp((2, 3))[..., None, None] / 4 + largest / 64


FUNCTIONS: dict[str, Function] = {
    each.__name__: each
    for each in (statistics, choices, elementwise, places, computed, volumes, written, casts, windows, positions)
}


@pytest.mark.parametrize("name", sample(FUNCTIONS, every=3))
def test_operators_agree_with_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Around(FUNCTIONS[name]).eval(), torch.randn(2, 3, 8, 8)
    fd.pack(model, tmp_path / "own.fp4", example_inputs=x, verify=False)
    network = PackedNetwork(read_packed(tmp_path / "own.fp4"))
    other = torch.randn(1, 3, *((12, 16) if 2 in network.graph.inputs[0].free else (8, 8)))
    with torch.inference_mode():
        expected, given = fd.open_runtime(tmp_path / "own.fp4").infer(other.numpy()), network(other)
        reference = deployed(model)(other)
    assert isinstance(given, torch.Tensor)
    assert torch.equal(torch.from_numpy(expected), given)
    assert (given - reference).norm() <= 2e-3 * reference.norm()


def deployed(model: nn.Module) -> nn.Module:
    from fp4deploy.qat import deployed as rounded

    return rounded(model)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda _, x: x * torch.linalg.inv(x @ x.mT + torch.eye(8))[..., :1], "linalg_inv"),
        (lambda _, x: x + torch.view_as_real(x.to(torch.complex64))[..., 0], "a cast to complex64"),
        (lambda _, x: torch.where(x == float("inf"), x, -x), "number is inf"),
        (
            lambda _, x: F.conv2d(x, x.mean((0, 2, 3)).expand(16, 16)[..., None, None]),
            "its weight is what other nodes compute",
        ),
    ],
    ids=["inverse", "complex numbers", "infinity", "computed weight"],
)
def test_what_no_node_computes_is_named(function: Function, operator: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(), pytest.raises(InputError, match=operator) as caught:
        warnings.simplefilter("error", UserWarning)  # a fixed size is no remedy, and none is announced
        fd.pack(Around(function), tmp_path / "own.fp4", example_inputs=torch.zeros(1, 3, 8, 8))
    assert "test_packed_operators.py, line" in str(caught.value)
    assert not (tmp_path / "own.fp4").exists()


def test_positions_of_pixels_follow_the_size(tmp_path: Path) -> None:
    def ramp(_: Around, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[3]) + torch.arange(0, 2 * x.shape[2], 2, dtype=torch.float32)[:, None]

    torch.manual_seed(0)
    model = Around(ramp).eval()
    fd.pack(model, tmp_path / "own.fp4", example_inputs=torch.rand(1, 3, 8, 8))
    network, x = PackedNetwork(read_packed(tmp_path / "own.fp4")), torch.rand(3, 3, 10, 12)
    with torch.no_grad():
        assert torch.allclose(network(x), deployed(model)(x), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def warped(_: Around, x: torch.Tensor) -> torch.Tensor:
    flow = torch.tanh(x[:, :2]).permute(0, 2, 3, 1)
    return F.grid_sample(x, flow, align_corners=False) + F.grid_sample(x, flow, "nearest", "border", True)


def largest(_: Around, x: torch.Tensor) -> torch.Tensor:
    found, places = x.topk(4, 1)
    again = torch.gather(x, 1, places) - found
    return x * found.mean(1, keepdim=True) + torch.cat([again, found] * 2, 1) + x.sort(1, descending=True)[0]


def spectrum(_: Around, x: torch.Tensor) -> torch.Tensor:
    low = torch.fft.rfft2(x) * 0.5
    kept = torch.cat([low[..., :2], torch.zeros_like(low[..., 2:])], -1)
    return torch.fft.irfft2(kept, s=x.shape[-2:]) + torch.fft.rfft(x).abs().mean(-1, keepdim=True)


def curves(_: Around, x: torch.Tensor) -> torch.Tensor:
    return torch.atan2(x, x + 1) + torch.trunc(3 * x) + torch.fmod(x, 0.3) + torch.log2(x + 1) + x.prod(1, keepdim=True)


@pytest.mark.parametrize("function", sample([warped, largest, spectrum, curves], every=2))
def test_operators_of_the_list(function: Function, tmp_path: Path) -> None:
    """In every way of running: packed, compared with torch when it is written, as one graph for a compiler."""
    torch.manual_seed(3)
    x = torch.randn(2, 3, 8, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a transform fixes the size
        result = fd.pack(Around(function), tmp_path / "own.fp4", example_inputs=x)
    file = read_packed(tmp_path / "own.fp4")
    assert result.verification is not None
    assert any(isinstance(node, Aten) for node in file.graph.nodes)
    expected = PackedNetwork(file)(x)
    assert isinstance(expected, torch.Tensor)
    module, tensors, _ = trace(Writer(file, torch.device("cpu"), torch.float32), [x])
    torch.testing.assert_close(module(*tensors, x)[0], expected, rtol=1e-5, atol=1e-6)


def test_positions_beyond_float16_are_refused(tmp_path: Path) -> None:
    def far(_: Around, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return x + flat.gather(1, flat.topk(4, 1)[1]).mean()

    with pytest.raises(InputError, match="positions that FP16 does not hold"):
        fd.pack(Around(far), tmp_path / "own.fp4", example_inputs=torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda _, x: F.silu(x), "packed/3"),
        (statistics, "packed/4"),
        (curves, "packed/5"),
        (lambda _, x: (x * 1e6).tanh(), "packed/6"),
    ],
)
def test_the_older_format_is_written_where_it_has_all_nodes(function: Function, expected: str, tmp_path: Path) -> None:
    fd.pack(Around(function), tmp_path / "own.fp4", example_inputs=torch.randn(1, 3, 8, 8))
    with safe_open(tmp_path / "own.fp4", "pt") as file:
        assert f'"format": "{expected}"' in file.metadata()[KEY]


def test_a_module_with_two_names(tmp_path: Path) -> None:
    """As in networks that keep their blocks in a list and in a chain of skip connections."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Conv2d(32, 4, 1)
            self.chain = nn.ModuleDict({"inner": nn.Sequential(self.body, nn.ReLU(), self.head), "outer": self.first})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.chain["inner"](torch.relu(self.chain["outer"](x)))

    torch.manual_seed(0)
    model, x = Chain().eval(), torch.randn(1, 3, 8, 8)
    fd.prepare(model, include="body")
    fd.calibrate(model, x)
    assert fd.pack(model, tmp_path / "own.fp4", example_inputs=x).verification is not None


class Spatial(nn.Module):
    """Quantised convolutions over one or three axes."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 3: nn.Conv3d}[axes]
        up = {1: nn.ConvTranspose1d, 3: nn.ConvTranspose3d}[axes]
        norm = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[axes]
        self.stem, self.norm, self.body = conv(3, 16, 3, padding=1), norm(16), conv(16, 32, 3, stride=2, padding=1)
        self.up, self.head = up(32, 16, 2, stride=2), conv(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.up(torch.relu(self.body(torch.relu(self.norm(self.stem(x))))))))


@pytest.mark.parametrize(("axes", "size"), [(1, (24,)), (3, (4, 6, 8))])
def test_convolutions_over_one_or_three_axes(axes: int, size: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Spatial(axes).eval(), torch.randn(2, 3, *size)
    fd.prepare(model)
    fd.calibrate(model, x)
    result = fd.pack(model, tmp_path / "own.fp4", example_inputs=x)
    assert result.verification is not None
    assert result.verification.share >= 0.999
    (body,) = [node for node in result.file.graph.nodes if getattr(node, "layer", None) == "body"]
    assert (body.op, getattr(body, "precision", None)) == (f"conv{axes}d", "nvfp4")
    assert fd.verify(model, fd.export_graph(model, x), x).passed


class Queries(nn.Module):
    """Learned queries, projected by a layer that no input of the network reaches, select channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 1), nn.Conv2d(8, 4, 1)
        self.queries, self.project = nn.Parameter(torch.randn(8, 32)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(torch.relu(self.stem(x)))
        return self.head(torch.einsum("qc,bchw->bqhw", self.project(self.queries), x))


@pytest.mark.parametrize("computed", [False, True])
def test_a_quantised_layer_of_parameters_alone_is_quantised_in_the_file(computed: bool, tmp_path: Path) -> None:
    """Its product is no constant of the plain layer: the network was trained with the quantised one."""
    torch.manual_seed(0)
    model, x = Queries().eval(), torch.randn(2, 3, 8, 8)
    if computed:
        nn.utils.parametrizations.weight_norm(model.project)
    fd.prepare(model, include=["body", "project"])
    fd.calibrate(model, x)
    file = fd.pack(model, tmp_path / "own.fp4", example_inputs=x).file
    layers = {node.layer: node.precision for node in file.graph.nodes if isinstance(node, Layer)}
    assert layers == {"stem": "fp16", "body": "nvfp4", "project": "nvfp4", "head": "fp16"}
    with torch.inference_mode():
        torch.testing.assert_close(PackedNetwork(file)(x), deployed(model)(x), rtol=1e-4, atol=1e-5)


def test_positions_that_fp16_does_not_hold_are_refused(tmp_path: Path) -> None:
    model = Around(lambda _, x: x + x.flatten(1).argmax(1)[:, None, None, None])
    with pytest.raises(InputError, match="an axis of 4096 has positions that FP16 does not hold"):
        fd.pack(model, tmp_path / "own.fp4", example_inputs=torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x * F.avg_pool2d(x, x.shape[2:]),
        lambda _, x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1) + torch.zeros(8, 16),
        lambda _, x: x / len(x[0, 0]) + torch.zeros(8, 16),
    ],
    ids=["window", "fold", "number"],
)
def test_a_network_that_holds_its_size_takes_no_other(function: Function, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Around(function).eval(), torch.randn(2, 3, 8, 16)
    fd.pack(model, tmp_path / "own.fp4", example_inputs=x)
    network = PackedNetwork(read_packed(tmp_path / "own.fp4"))
    with torch.inference_mode():
        torch.testing.assert_close(network(x), deployed(model)(x), rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match=r"\[N, 3, 8, 16\]"):
        network(torch.randn(2, 3, 16, 8))
