"""Scales of a network of transformers that was saved by the library and is read by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp4deploy as fd
from fp4deploy.errors import InputError

transformers = pytest.importorskip("transformers", reason="not installed: pip install -e '.[transformers]'")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Prepared(transformers.ViTForImageClassification):  # type: ignore[misc,name-defined]
    """As documentation has it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        fd.prepare(self)


def test_a_class_that_prepares_itself_reads_scales_that_the_library_wrote(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=4)
    x, trained = torch.randn(2, 3, 16, 16), transformers.ViTForImageClassification(config)
    fd.prepare(trained)
    fd.calibrate(trained, x)
    trained.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = trained.eval()(x).logits
        torch.testing.assert_close(Prepared.from_pretrained(tmp_path).eval()(x).logits, expected, rtol=0, atol=0)
        without = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
        fd.prepare(without)
        with pytest.raises(InputError, match="never calibrated"):
            without(x)


TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPT2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}),  # weights [in, out]
        ("Qwen2Moe", {**SIZES, **EXPERTS, "num_key_value_heads": 2}),  # which nothing executes without data
    ],
)
def test_so_does_a_decoder(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")

    class Own(kind):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            fd.prepare(self)

    ids, trained = torch.randint(3, 64, (2, 6)), kind(getattr(transformers, f"{name}Config")(**settings, **TOKENS))
    fd.prepare(trained)
    fd.calibrate(trained, {"input_ids": ids})
    trained.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = trained.eval()(input_ids=ids).logits
        assert torch.equal(Own.from_pretrained(tmp_path).eval()(input_ids=ids).logits, expected)
