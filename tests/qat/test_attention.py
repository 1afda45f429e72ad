"""torch's attention modules: opened, equal to torch's; quantised, exported and packed under their own names."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.qat import layer_plan, prepare, quantized_layers, restore
from fp4deploy.qat.attention import OpenAttention, close_attention, open_attention
from fp4deploy.qat.computed import rest_tensors
from fp4deploy.rest import FP16

E, L, S, N = 32, 5, 7, 3
KINDS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False, "batch_first": True},
    {"kdim": 24, "vdim": 40, "batch_first": True},
    {"add_bias_kv": True, "batch_first": True},
    {"add_zero_attn": True},
]


def texts(attention: nn.MultiheadAttention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [N, L, E], key and value [N, S, ...], in the layout that the module takes."""
    found = torch.randn(N, L, E), torch.randn(N, S, attention.kdim), torch.randn(N, S, attention.vdim)
    return found if attention.batch_first else tuple(x.transpose(0, 1) for x in found)  # type: ignore[return-value]


def opened(model: nn.Module) -> Any:
    found = copy.deepcopy(model)
    open_attention(found)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_open_attention_gives_what_torch_gives(kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(E, 4, **kind).eval()
    if plain.in_proj_bias is not None:
        nn.init.normal_(plain.in_proj_bias)
    other = opened(plain)
    assert list(other.state_dict()) == list(plain.state_dict())
    projections = (other.q_proj, other.k_proj, other.v_proj)
    assert [each.in_features for each in projections] == [each.weight.shape[1] for each in projections]
    inputs = texts(plain)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1, 4:] = True
    later = torch.ones(L, S, dtype=torch.bool).triu(1)
    masks: list[dict[str, Any]] = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": later, "key_padding_mask": padding},
        {"attn_mask": later, "is_causal": True},
        {"attn_mask": torch.randn(N * 4, L, S)},
    ]
    for mask, weights, average in itertools.product(masks, (True, False), (True, False)):
        given = {**mask, "need_weights": weights, "average_attn_weights": average}
        expected, found = plain(*inputs, **given), other(*inputs, **given)
        if "is_causal" in given and not weights and {*kind} & {"add_bias_kv", "add_zero_attn"}:
            expected = plain(*inputs, **{**given, "need_weights": True})  # torch contradicts itself without
        torch.testing.assert_close(found[0], expected[0])
        assert (found[1] is None) == (not weights)
        if weights:
            torch.testing.assert_close(found[1], expected[1])
    single = [x[0] if plain.batch_first else x[:, 0] for x in inputs]
    torch.testing.assert_close(other(*single), plain(*single))


def test_gradients_reach_the_parameters_that_torch_has() -> None:
    plain = nn.MultiheadAttention(E, 4)
    other = opened(plain)
    x = torch.randn(L, N, E)
    for model in (plain, other):
        model(x, x, x)[0].square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(other.get_parameter(name).grad, parameter.grad, msg=name)


def test_an_encoder_computes_the_same_without_its_fast_path_and_has_it_back() -> None:
    layer = nn.TransformerEncoderLayer(E, 4, 64, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1, 3:] = True
    x = torch.randn(N, L, E)
    called: list[bool] = []
    model = opened(plain)
    model.layers[0].linear1.register_forward_hook(lambda *_: called.append(True))
    with torch.no_grad():
        expected, found = plain(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found[~padding], expected[~padding])
    assert called
    close_attention(model)
    assert [type(each) for each in model.modules()] == [type(each) for each in plain.modules()]
    assert model.use_nested_tensor
    assert model.layers[0].activation_relu_or_gelu == 1


class Widths(nn.Module):
    """Keys and values of other widths than queries: a weight for each of the three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, E), nn.Linear(E, 4)
        self.attention = nn.MultiheadAttention(E, 2, kdim=48, vdim=64, batch_first=True)

    def forward(self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.attention(self.first(x), key, value, need_weights=False)[0])
        return y


def test_projections_with_weights_of_their_own_are_packed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Widths().eval(), (torch.randn(2, L, 16), torch.randn(2, S, 48), torch.randn(2, S, 64))
    fd.prepare(model, include=["attention.*"], example_inputs=inputs)
    fd.calibrate(model, [inputs])
    file = fd.pack(model, tmp_path / "net.fp4", example_inputs=inputs).file
    names = {f"attention.{each}_proj" for each in ("q", "k", "v", "out")}
    assert names == {name.removesuffix(".weight.codes") for name in file.tensors if name.endswith(".codes")}


class Tokens(nn.Module):
    """Embedding, decoder layer over an encoder, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, E)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(E, 2, 64, batch_first=True), 1, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoderLayer(E, 2, 64, batch_first=True)
        self.head = nn.Linear(E, 16)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        hidden = padding == 0
        memory = self.encoder(self.embedding(ids), src_key_padding_mask=hidden)
        return self.head(self.decoder(self.embedding(ids), memory, memory_key_padding_mask=hidden))


@pytest.fixture(scope="module")
def tokens() -> tuple[Tokens, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    padding = torch.ones(2, 6, dtype=torch.int64)
    padding[1, 4:] = 0
    inputs = {"ids": torch.randint(16, (2, 6)), "padding": padding}
    model = prepare(Tokens())
    model(**inputs).square().sum().backward()
    return model.eval(), inputs


def test_projections_are_quantised_and_restore_gives_the_model_back(tokens: Any) -> None:
    plain = Tokens()
    before = [type(each) for each in plain.modules()]
    planned = {plan.name: plan.precision for plan in layer_plan(plain)}
    assert [type(each) for each in plain.modules()] == before
    for attention in ("encoder.layers.0.self_attn", "decoder.self_attn", "decoder.multihead_attn"):
        assert {planned[f"{attention}.{name}"] for name in ("q_proj", "k_proj", "v_proj", "out_proj")} == {"FP4"}
    assert planned["head"] == "FP16"
    model, _ = tokens
    keys = [key for key in model.state_dict() if not key.endswith("input_amax")]
    assert keys == list(plain.state_dict())
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = restore(copy.deepcopy(model))
    assert [type(each) for each in again.modules()] == before
    assert list(again.state_dict()) == list(plain.state_dict())


def test_only_rows_without_codes_are_deployed_in_fp16() -> None:
    model = prepare(nn.Sequential(nn.MultiheadAttention(E, 4, bias=False)), include=["q_proj", "out_proj"])
    assert list(quantized_layers(model)) == ["0.q_proj", "0.out_proj"]
    rest = list(rest_tensors(model, FP16))
    assert [(name, tuple(x.shape)) for name, x in rest] == [("0.in_proj_weight", (E, E))] * 2
    assert torch.equal(rest[0][1], model[0].in_proj_weight[E : 2 * E])
    assert isinstance(model[0], OpenAttention)


def test_a_subclass_of_attention_says_why_it_stays() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = nn.Sequential(Own(E, 4), nn.Linear(E, E))
    reasons = {plan.name: plan.reason for plan in layer_plan(model, include=["*"]) if plan.precision == "FP16"}
    assert "subclass of nn.MultiheadAttention" in reasons["0"]
    assert "multiplies its weight itself" in reasons["0.out_proj"]


def test_attention_alone_is_one_graph_for_torch_compile_and_names_its_layers_where_all_stay() -> None:
    with pytest.raises(InputError, match=r"q_proj: first layer.*out_proj: output layer"):
        prepare(nn.MultiheadAttention(E, 4))
    model = prepare(nn.MultiheadAttention(E, 4, batch_first=True), include=["*"])
    x = torch.randn(N, L, E)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, x, x)[0], eager(x, x, x)[0])


def test_attention_goes_into_both_files(tokens: Any, tmp_path: Path) -> None:
    model, inputs = tokens
    assert fd.export_onnx(model, inputs, tmp_path / "tokens.onnx").verification.passed
    assert fd.pack(model, tmp_path / "tokens.fp4", example_inputs=inputs).verification.passed
    expected = fd.open_runtime(tmp_path / "tokens.onnx")(inputs)
    found = fd.open_runtime(tmp_path / "tokens.fp4")(inputs)
    assert abs(found - expected).max() < 1e-2 * abs(expected).max()
