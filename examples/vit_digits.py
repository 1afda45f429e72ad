"""A vision transformer of one block on scikit-learn's digits: FP32 and every recipe.

    python examples/vit_digits.py                                    all recipes, 5 seeds
    python examples/vit_digits.py --recipes nvfp4_train --seeds 1    one of them, once

    8 x 8 image -> 16 patches of 2 x 2 -> 64 features + position -> block -> mean over patches -> 10 logits
    block: x + proj(attention(qkv(norm x))), then x + contract(gelu(expand(norm x)))

Quantised are the four linear layers of the block: qkv, proj, expand, contract. The patch embedding reads the image and
the head writes the logits; both stay in FP32 unless --all-layers is given. The two products inside attention have no
weights and stay in FP32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import Settings, main
from torch import nn

WIDTH, HEADS, PATCH, PATCHES, CLASSES = 64, 4, 2, 16, 10


class Attention(nn.Module):
    """Self-attention, its projections plain Linear layers: [N, T, C] -> [N, T, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers and a GELU: [N, T, C] -> [N, T, C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(F.gelu(self.expand(x)))


class Block(nn.Module):
    """Attention and MLP, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Image [N, 1, 8, 8] -> logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(torch.randn(PATCHES, WIDTH))
        self.block = Block(WIDTH, HEADS)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.block(x)).mean(1))


SETTINGS = Settings(epochs=25)

if __name__ == "__main__":
    main("vit", VisionTransformer, SETTINGS)
