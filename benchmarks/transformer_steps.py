"""What a training step of a transformer reads and minimises, for `training_models.py`.

| network | batch | loss |
|---|---|---|
| `timm:vit_small_patch16_224` | 64 images of 224 x 224 | cross-entropy of 1000 classes |
| `transformers:gpt2` | 8 sequences of 1024 tokens, without dropout | cross-entropy of the next token |

Random weights and input. The loss is compiled in every case, so that it is no part of the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_step import step_of

from fp4deploy.qat import RECIPES

NETWORKS = ("timm:vit_small_patch16_224", "transformers:gpt2")
IMAGES, SIZE, LABELS = 64, 224, 1000
SEQUENCES, LENGTH, TOKENS = 8, 1024, 50257
CASES = [
    f"{network},{recipe},{way}"
    for network in NETWORKS
    for recipe, way in (
        ("fp16", "compiled"),
        ("fp16", "eager"),
        *((name, "default") for name, each in RECIPES.items() if each.precision == "FP4" and each.fp8 == "none"),
    )
]


class _Logits(nn.Module):
    """A language model whose output is its logits [N, T, tokens] alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.model(input_ids=tokens, use_cache=False).logits)


def build(network: str) -> nn.Module:
    """Of random weights."""
    torch.manual_seed(0)
    if network.startswith("timm:"):
        import timm

        return cast(nn.Module, timm.create_model(network.removeprefix("timm:"), num_classes=LABELS))
    from transformers import GPT2Config, GPT2LMHeadModel

    return _Logits(GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)))


def make_step(network: str, model: nn.Module, autocast: str) -> Callable[[], None]:
    """A whole training step of `model` on one random batch, where its parameters are."""
    device = next(model.parameters()).device
    random: Any = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    loss = cast(Callable[[Tensor, Tensor], Tensor], torch.compile(_cross_entropy))
    if network.startswith("timm:"):
        x = torch.randn(IMAGES, 3, SIZE, SIZE, **random)
        targets = torch.randint(0, LABELS, (IMAGES,), **random)
    else:
        tokens = torch.randint(0, TOKENS, (SEQUENCES, LENGTH + 1), **random)
        x, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    return step_of(model, lambda: cast(Tensor, model(x)), lambda logits: loss(logits, targets), autocast)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets)
