"""Networks of token ids: exported, packed and opened; what torch.export cannot take says why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.graph import capture
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.packed.graph import Aten
from fp4deploy.packed.program import trace
from fp4deploy.packed.writer import Writer
from fp4deploy.qat import deployed


class Tokens(nn.Module):
    """A transformer of one block: grouped queries, a mask by comparison, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(96, 32), nn.LayerNorm(32, eps=1e-12)
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        n, length = ids.shape
        x = self.norm(self.embed(ids.view(-1, length)))
        q = self.q(x).view(n, length, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(n, length, 4, 8).transpose(1, 2).split(2, 1)
        row = torch.arange(n)[:, None, None, None]
        columns = torch.arange(length)
        seen = (columns[:, None] >= columns) & mask.bool()[row, columns[None, None, None]]
        y = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, 32))
        return {"logits": self.head(x)}


@pytest.fixture(scope="module")
def prepared() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    inputs = {"ids": torch.randint(96, (2, 6)), "mask": mask}
    model = fd.prepare(Tokens().eval(), example_inputs=inputs)
    fd.calibrate(model, inputs)
    return model, inputs


@pytest.mark.parametrize("suffix", [".onnx", ".fp4"])
def test_token_ids_go_in_as_whole_numbers(prepared: Any, tmp_path: Path, suffix: str) -> None:
    model, inputs = prepared
    path = tmp_path / f"net{suffix}"
    if suffix == ".onnx":
        assert fd.export_onnx(model, inputs, path).fp4_layers == 3
        assert fd.verify(model, path, inputs).passed
    else:
        assert fd.pack(model, path, example_inputs=inputs).verification.passed
    runtime = fd.open_runtime(path)
    assert [port.dtype for port in runtime.inputs] == [np.int64, np.int64]
    with torch.no_grad():
        expected = deployed(model)(**inputs)["logits"]
    assert torch.allclose(torch.from_numpy(runtime(inputs)), expected, atol=5e-3)
    one = {name: x[1:] for name, x in inputs.items()}
    assert torch.allclose(torch.from_numpy(runtime(one)), expected[1:], atol=5e-3)
    with pytest.raises(InputError, match="'ids' takes int64"):
        runtime({**inputs, "ids": inputs["ids"].float()})


def test_queries_of_padding_on_the_left_see_nothing_and_give_what_torch_gives(prepared: Any, tmp_path: Path) -> None:
    model, inputs = prepared
    inputs = {**inputs, "mask": inputs["mask"].flip(1)}
    assert fd.pack(model, tmp_path / "net.fp4", example_inputs=inputs).verification.passed
    with torch.no_grad():
        expected = deployed(model)(**inputs)["logits"]
    assert torch.allclose(torch.from_numpy(fd.open_runtime(tmp_path / "net.fp4")(inputs)), expected, atol=5e-3)


def test_the_packed_file_is_of_the_format_that_has_whole_inputs(prepared: Any, tmp_path: Path) -> None:
    model, inputs = prepared
    fd.pack(model, tmp_path / "net.fp4", example_inputs=inputs, verify=False)
    graph = read_packed(tmp_path / "net.fp4").graph
    assert graph.format() == 9
    functions = {node.function for node in graph.nodes if isinstance(node, Aten)}
    assert functions == {"embedding.default", "index.Tensor", "arange.start_step"}
    image = graph.model_copy(update={"inputs": [each.model_copy(update={"dtype": "float32"}) for each in graph.inputs]})
    assert '"dtype"' not in image.model_copy(update={"tensors": {}}).to_json()


class DynamicCache:
    pass


class Cached(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": x + 1, "past_key_values": DynamicCache()}


def test_a_cache_of_keys_and_values_is_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"Cached returns a DynamicCache, which is no tensor.*use_cache = False"):
        capture(Cached(), torch.zeros(2, 3))


@dataclass
class Sample:
    sample: torch.Tensor
    more: tuple[torch.Tensor, ...] = ()


class Large(nn.Module):
    """Goes another way for large batches, as diffusers' upsampling does, and gives a class registered without names."""

    def forward(self, x: torch.Tensor) -> Sample:
        if x.shape[0] >= 64:
            x = x.contiguous()
        return Sample(torch.relu(x), (x + 1,))


def test_outputs_of_a_class_without_names_and_a_batch_up_to_which_one_way_is_gone() -> None:
    torch.utils._pytree.register_pytree_node(
        Sample, lambda each: ([each.sample, each.more], None), lambda values, _: Sample(*values)
    )
    with pytest.warns(UserWarning, match="Large goes another way for a batch above 63"):
        graph = capture(Large(), torch.zeros(2, 3))
    assert [name for name, _ in graph.outputs] == ["sample", "more.0"]


def test_axes_are_open_by_name_and_the_batch_may_be_fixed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(96, (2, 6)), "mask": torch.ones(2, 6, dtype=torch.int64)}
    model = Tokens().eval()
    fd.prepare(model, example_inputs=inputs)
    fd.calibrate(model, inputs)
    dynamic = {name: {1: "L"} for name in inputs}
    fd.export_onnx(model, inputs, tmp_path / "open.onnx", dynamic=dynamic)
    runtime = fd.open_runtime(tmp_path / "open.onnx")
    assert [port.extents for port in runtime.inputs] == [("N", "L"), ("N", "L")]
    longer = {name: x.repeat(2, 3)[:3] for name, x in inputs.items()}
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(runtime(longer)), deployed(model)(**longer)["logits"], atol=5e-3)
    fd.export_onnx(model, inputs, tmp_path / "three.onnx", dynamic=dynamic, batch=3)
    assert [port.extents for port in fd.open_runtime(tmp_path / "three.onnx").inputs] == [(3, "L"), (3, "L")]
    with pytest.raises(InputError, match=r"dynamic names the axes \[2\] of 'ids'. Inputs: 'ids' with the axes 1 to 1"):
        fd.export_onnx(model, inputs, tmp_path / "no.onnx", dynamic={"ids": {2: "L"}})


class OneHead(nn.Module):
    """Queries of six heads, and one of keys and values, which torch repeats, as Falcon's."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(20, 96), nn.Linear(20, 16), nn.Linear(96, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = self.query(x).unflatten(-1, (6, 16)).transpose(1, 2), self.key(x)[:, None]
        y: torch.Tensor = self.head(F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2))
        return y


def test_one_head_of_keys_is_that_of_all_queries(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = OneHead().eval(), torch.randn(2, 7, 20)
    assert fd.export_onnx(model, x, tmp_path / "net.onnx").verification.passed
    assert fd.pack(model, tmp_path / "net.fp4", example_inputs=x).verification.passed


class Pooled(nn.Module):
    """Tokens that are not hidden, averaged; without a position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(96, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.inner(self.embed(ids))) * mask.unsqueeze(-1)
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


class OfThree(nn.Module):
    """Written for three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([F.gelu(self.inner(self.first(each[None]))) for each in x]))


def test_a_packed_network_has_free_axes_by_request_or_the_true_reason(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(96, (2, 6)), "mask": torch.ones(2, 6, dtype=torch.int64)}
    model = fd.prepare(Pooled().eval(), example_inputs=inputs)
    fd.calibrate(model, inputs)
    dynamic = {name: {1: "L"} for name in inputs}
    fd.pack(model, tmp_path / "open.fp4", example_inputs=inputs, dynamic=dynamic)
    runtime = fd.open_runtime(tmp_path / "open.fp4")
    assert [port.extents for port in runtime.inputs] == [("N", None), ("N", None)]
    longer = {name: x.repeat(2, 3)[:3] for name, x in inputs.items()}
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(runtime(longer)), deployed(model)(**longer), atol=5e-3)
    with pytest.raises(InputError, match=r"size of an axis \(axis 1 of x\) for a constant at linear in 'first'"):
        fd.pack(OfThree(), tmp_path / "no.fp4", example_inputs=torch.zeros(3, 32), dynamic={"x": {1: "C"}}, batch=3)
    assert [each.name for each in tmp_path.iterdir()] == ["open.fp4"]


class Rotated(nn.Module):
    """Queries and keys turned by angles of their positions, as in LLaMA, and a causal mask of counted positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.inner = nn.Embedding(96, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.places, self.head = nn.Embedding(4096, 32), nn.Linear(32, 8)
        self.register_buffer("frequency", 10.0 ** -torch.arange(0, 2, 0.25), persistent=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        places = torch.arange(ids.shape[1]) + 3
        x = self.inner(self.first(self.embed(ids) + self.places(places[None]))).unflatten(-1, (2, 16)).transpose(1, 2)
        angles = (self.frequency[None, :, None] @ places[None, None].float()).mT
        cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
        turned = x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin
        seen = places[:, None] >= places
        y = F.scaled_dot_product_attention(turned, turned, x, seen)
        return {"logits": self.head(y.transpose(1, 2).flatten(2)), "cos": cos}


def test_a_packed_network_takes_texts_of_any_length_with_positions_in_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(96, (2, 6))
    model = fd.prepare(Rotated().eval(), example_inputs={"ids": ids})
    fd.calibrate(model, {"ids": ids})
    file = fd.pack(model, tmp_path / "net.fp4", example_inputs={"ids": ids}, dynamic={"ids": {1: "L"}}).file
    network, half = PackedNetwork(file), PackedNetwork(file, dtype=torch.float16)
    ids = torch.randint(96, (1, 2100))  # beyond whole numbers of FP16
    with torch.no_grad():
        expected = deployed(model)(ids)
    plain, narrow = network(ids), half(ids)
    assert isinstance(plain, dict)
    assert isinstance(narrow, dict)
    assert (plain["logits"] - expected["logits"]).norm() < 1e-2 * expected["logits"].norm()
    assert (narrow["logits"] - expected["logits"]).norm() < 3e-2 * expected["logits"].norm()  # a code here and there
    assert (narrow["cos"] - expected["cos"]).abs().max() < 2e-3
    module, tensors, _ = trace(Writer(file, torch.device("cpu"), torch.float32), [ids[:, :9]])
    torch.testing.assert_close(module(*tensors, ids[:, :9])[0], plain["logits"][:, :9], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("suffix", [".onnx", ".fp4"])
def test_a_network_of_one_batch_goes_into_files_of_that_batch(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(0)
    path, x = tmp_path / f"three{suffix}", torch.randn(3, 32)
    model = fd.prepare(OfThree().eval(), example_inputs=x)
    fd.calibrate(model, x)
    with pytest.raises(InputError, match=r"the size of an axis \((N|batch)\) for a constant"):
        fd.pack(model, path, example_inputs=x) if suffix == ".fp4" else fd.export_onnx(model, x, path)
    if suffix == ".fp4":
        assert fd.pack(model, path, example_inputs=x[:2], batch=3).file.graph.format() == 8
    else:
        fd.export_onnx(model, x[:2], path, batch=3)
    runtime = fd.open_runtime(path)
    assert runtime.inputs[0].extents == (3, 32)
    with torch.no_grad():
        expected = deployed(model)(x)
    assert torch.allclose(torch.from_numpy(runtime(x)), expected, atol=5e-3)
    five = runtime.infer(torch.cat([x, x[:2]]).numpy())  # in two calls, the second one filled up
    assert np.allclose(five, torch.cat([expected, expected[:2]]).numpy(), atol=5e-3)
    with pytest.raises(InputError, match=r"takes float32 \[3, 32\], and was given \[2, 32\]"):
        runtime(x[:2])


class Hidden(nn.Module):
    """Attention whose mask has one row for all queries."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.inner(self.first(x)).unflatten(-1, (2, 16)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[:, None, None] != 0)
        return self.head(y.transpose(1, 2).flatten(2))


def test_a_mask_of_one_row_for_all_queries_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    inputs = {"x": torch.randn(2, 5, 32), "mask": mask}
    model = fd.prepare(Hidden().eval(), example_inputs=inputs)
    fd.calibrate(model, inputs)
    assert fd.export_onnx(model, inputs, tmp_path / "net.onnx").verification.passed


class Named(nn.Module):
    """Attention of three axes, its operands by name, behind guards that are written otherwise than those of BART."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if (~torch.isfinite(y)).any() or torch.isnan(y).any().item():
            y = y.clamp(-60000, 60000)
        return self.head(F.scaled_dot_product_attention(query=y, key=y, value=x))


def test_attention_by_name_behind_other_guards_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert fd.export_onnx(Named().eval(), torch.randn(2, 5, 32), tmp_path / "net.onnx").verification.passed


class Heads(nn.Module):
    """Two heads: `size` channels of queries and keys, `out` of values, as DeepSeek's."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.size, self.out = size, out
        self.first, self.value, self.last = nn.Linear(8, 4 * size), nn.Linear(8, 2 * out), nn.Linear(2 * out, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.first(x).unflatten(-1, (2, 2, self.size)).permute(2, 0, 3, 1, 4)
        v = self.value(x).unflatten(-1, (2, self.out)).transpose(1, 2)
        return self.last(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("size", "out", "padded"),
    [(24, 16, 1), pytest.param(16, 24, 2, marks=pytest.mark.variants), (4, 4, 3), (16, 16, 0)],
)
def test_heads_have_the_sizes_that_engines_take(size: int, out: int, padded: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, path = Heads(size, out).eval(), 3 * torch.randn(2, 5, 8), tmp_path / "net.onnx"
    assert fd.export_onnx(model, x, path).verification.passed
    assert [node.op_type for node in onnx.load(path).graph.node].count("Pad") == padded
    torch.testing.assert_close(torch.as_tensor(fd.open_runtime(path)(x)), model(x).detach(), rtol=0, atol=0.01)


class Guarded(nn.Module):
    """As T5 and BART are written: an argument between the inputs, a mask of numbers beyond FP16, which is -Inf there in
    a whole row, a guard against infinite values, and groups of experts chosen by scatter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, scale: float | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert mask is not None
        heads = self.inner(self.first(x)).unflatten(-1, (2, 16)).transpose(1, 2)
        bias = torch.where(mask[:, None, None] != 0, heads.mean((1, 3))[:, None, None], -1e9)
        y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)
        if not torch.isfinite(y).all():
            y = y.clamp(-60000, 60000)
        chosen = torch.zeros_like(y).scatter_(2, y.topk(8, -1).indices, 1)
        return self.head(torch.where(chosen == 0, 0, y) * (scale or 1))


@pytest.mark.parametrize("suffix", [".onnx", ".fp4"])
def test_masks_beyond_fp16_guards_and_scattered_choices_are_in_files(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(0)
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    inputs, path = {"x": torch.randn(2, 5, 32), "mask": mask}, tmp_path / f"net{suffix}"
    model = fd.prepare(Guarded().eval(), example_inputs=inputs)
    fd.calibrate(model, inputs)
    if suffix == ".fp4":
        file = fd.pack(model, path, example_inputs=inputs).file
        hidden = PackedNetwork(file, dtype=torch.float16)(inputs["x"], 0 * mask)  # as on a GPU
        assert isinstance(hidden, torch.Tensor)
        assert hidden.std(1).min() > 1e-3  # a softmax of -Inf is 0 here, whatever the token, and NaN elsewhere
    else:
        assert fd.export_onnx(model, inputs, path).fp4_layers == 1
        limits = [numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer if each.data_type == 1]
        assert any(each.size == 1 and each.item() == -65504 for each in limits)
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(fd.open_runtime(path)(inputs)), deployed(model)(**inputs), atol=5e-3)


class Windows(nn.Module):
    """Attention in windows of an image with a bias for each head, as Swin: what is viewed lies otherwise in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Conv2d(3, 32, 2, 2), nn.Linear(32, 32), nn.Linear(32, 4)
        self.bias = nn.Parameter(torch.randn(1, 2, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        x = x.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, c)
        heads = self.inner(x).view(*x.shape[:-1], -1, 16).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.bias)
        return self.head(y.transpose(1, 2).reshape(*x.shape[:-1], -1)).view(n, -1, 4).mean(1)


class Masked(nn.Module):
    """Two layers of attention that share a constant mask, in which the second query sees no key."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            y = layer(x)[:, None]
            x = x + F.scaled_dot_product_attention(y, y, y, attn_mask=self.mask)[:, 0]
        return x


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_a_query_that_sees_no_key_gives_0_as_in_torch(numbers: bool, empty: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    seen = torch.tensor([[True, False, True], [not empty, False, False], [True, True, True]])
    mask = torch.zeros(3, 3).masked_fill(~seen, float("-inf")) if numbers else seen
    model, x = Masked(mask).eval(), torch.randn(2, 3, 16)
    fd.pack(model, tmp_path / "net.fp4", example_inputs=x, rest="fp32", verify=False)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(fd.open_runtime(tmp_path / "net.fp4")(x)), model(x))


class MaskedTwice(Masked):
    """The mask is read outside of attention as well, before it or after."""

    def __init__(self, mask: torch.Tensor, before: bool) -> None:
        super().__init__(mask)
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(self.mask, x @ x.mT, 0.0) @ x if self.before else x
        y = super().forward(chosen)
        return y if self.before else torch.where(self.mask, y @ y.mT, 0.0) @ y


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_a_mask_of_attention_stays_what_it_is_for_other_readers(before: bool, empty: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    seen = torch.tensor([[True, False, True], [not empty, False, False], [True, True, True]])
    model, x = MaskedTwice(seen, before).eval(), 0.3 * torch.randn(2, 3, 16)
    fd.pack(model, tmp_path / "net.fp4", example_inputs=x, rest="fp32", verify=False)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(fd.open_runtime(tmp_path / "net.fp4")(x)), model(x))


def test_attention_in_windows_of_an_image_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 16, 16)
    model = fd.prepare(Windows().eval(), example_inputs=image)
    fd.calibrate(model, image)
    assert fd.export_onnx(model, image, tmp_path / "net.onnx").verification.passed
