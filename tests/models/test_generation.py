"""Decoders with their cache as tensors: files that generate the tokens of torch."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.bench.runtimes.ports import Port, fed
from fp4deploy.errors import InputError
from fp4deploy.models.generation import _require_no_window
from fp4deploy.qat import deployed

MISSING = "transformers is not installed: pip install -e '.[transformers]'"
COUNT = 8
TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, torch.Tensor, Any]:
    """A decoder in FP4, two texts to begin with, and what `generate` of transformers adds."""
    transformers = pytest.importorskip("transformers", reason=MISSING)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            **TOKENS,
        )
    )
    fd.prepare(model)
    fd.calibrate(model, {"input_ids": torch.randint(3, 96, (4, 24))})
    ids = torch.randint(3, 96, (2, 5))
    return model, ids, deployed(model).generate(ids, max_new_tokens=COUNT, do_sample=False).numpy()  # type: ignore[operator]


@pytest.mark.parametrize("length", [None, 16])
def test_an_onnx_file_generates_the_tokens_of_torch(length: int | None, llama: Any, tmp_path: Path) -> None:
    model, ids, expected = llama
    step = fd.with_cache(model, length)
    file = tmp_path / "step.onnx"
    fd.export_onnx(step, step.example(batch=2, tokens=3), file, dynamic=step.open_axes)
    runtime = fd.open_runtime(file)
    extents = {port.name: port.extents for port in runtime.inputs}
    assert extents["past_0_value"] == ("N", 1, length or "P", 16)
    assert np.array_equal(fd.generate(runtime, ids.numpy(), COUNT), expected)  # the first five in one call


def test_a_packed_network_generates_the_tokens_of_torch_with_a_static_cache(llama: Any, tmp_path: Path) -> None:
    model, ids, expected = llama
    step = fd.with_cache(model, length=12)
    fd.pack(step, tmp_path / "step.fp4", example_inputs=step.example())
    runtime = fd.open_runtime(tmp_path / "step.fp4")
    assert np.array_equal(fd.generate(runtime, ids[:1].numpy(), COUNT), expected[:1])
    with pytest.raises(InputError, match="5 tokens and 9 more do not fit into a cache of 12"):
        fd.generate(runtime, ids.numpy(), 9)


@pytest.mark.parametrize("length", [None, 12])
def test_a_token_sees_none_of_those_behind_it(length: int | None, llama: Any) -> None:
    model, ids, _ = llama
    plain = fd.restore(copy.deepcopy(model)).eval()
    step = fd.with_cache(plain, length)
    assert plain.train() is step.model
    fd.with_cache(plain, length)
    assert plain.training  # which is not lost by the call that finds the shapes of the cache
    step.eval()
    given = step.example(batch=2, tokens=5, before=0) | {"input_ids": ids}
    torch.testing.assert_close(step(**given)["logits"], plain(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_samples_of_a_static_cache_have_positions_of_their_own(llama: Any) -> None:
    model, _, _ = llama
    step = fd.with_cache(deployed(model), length=12)
    both = step.example(batch=2, before=3)
    both["position"][1] = 7
    together = step(**both)
    for sample in range(2):
        alone = step(**{name: x[sample : sample + 1] for name, x in both.items()})
        for name, x in alone.items():
            torch.testing.assert_close(together[name][sample : sample + 1], x, msg=name)
    changed = (together["present_0_key"] != both["past_0_key"]).any(-1).nonzero().tolist()
    assert changed == [[0, 0, 3], [1, 0, 7]]


def test_a_decoder_of_an_encoder_reads_its_keys_and_values_as_inputs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=MISSING)
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
             {"layers": 1, "attention_heads": 2, "ffn_dim": 64}.items()}  # fmt: skip
    config = transformers.WhisperConfig(d_model=32, max_source_positions=16, max_target_positions=32, **sizes, **TOKENS)
    model = transformers.WhisperForCausalLM(config).eval()
    encoded, ids = torch.randn(2, 16, 32), torch.randint(3, 96, (2, 3))
    fd.prepare(model, example_inputs={"input_ids": ids, "encoder_outputs": encoded})
    fd.calibrate(model, {"input_ids": ids, "encoder_outputs": encoded})
    expected, plain = ids, deployed(model)
    for _ in range(COUNT):
        logits = plain(input_ids=expected, encoder_outputs=encoded, use_cache=False).logits
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    step = fd.with_cache(model, length=16, encoder_outputs=encoded)
    fd.export_onnx(step.crossing(), encoded, tmp_path / "crossing.onnx")
    fd.export_onnx(step, step.example(), tmp_path / "step.onnx")
    cross = fd.open_runtime(tmp_path / "crossing.onnx")(encoded)
    found = fd.generate(fd.open_runtime(tmp_path / "step.onnx"), ids.numpy(), COUNT, **cross)
    assert np.array_equal(found, expected.numpy())


def test_what_has_no_cache_is_refused() -> None:
    with pytest.raises(InputError, match="Linear takes no input_ids with a cache"):
        fd.with_cache(nn.Linear(4, 4))
    image = SimpleNamespace(inputs=[Port("image", np.dtype(np.float32), ("N", 3, 8, 8))])
    with pytest.raises(InputError, match="takes image, and no input_ids with a cache"):
        fd.generate(image, np.zeros((1, 1), np.int64), 1)  # type: ignore[arg-type]


def test_an_axis_of_a_cache_may_be_empty_and_one_of_an_image_not() -> None:
    cache = np.zeros((2, 1, 0, 16), np.float32)
    assert fed([Port("past", cache.dtype, ("N", 1, "P", 16))], [cache], "f")["past"].shape == cache.shape
    with pytest.raises(InputError, match="was given"):
        fed([Port("image", cache.dtype, ("N", 1, "H", "W"))], [cache], "f")


class Windowed(nn.Module):
    """The settings of a decoder with a window."""

    config = SimpleNamespace(sliding_window=8, layer_types=None)

    def forward(self, input_ids: torch.Tensor, cache: Any) -> None:
        """Not called."""


@pytest.mark.parametrize("length", [None, 9])
def test_a_window_shorter_than_the_cache_is_refused(length: int | None) -> None:
    with pytest.raises(InputError, match="length=8 or less"):
        fd.with_cache(Windowed(), length)
    _require_no_window(Windowed(), 8)
