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
