"""The networks of the published protocol (Du, Rybakov, "Not All NVFP4 QAT Recipes Are Equal", arXiv 2605.27616).

| published size | `cnn` | parameters | `swin` | parameters |
|---|---|---|---|---|
| 500K | stages 4, width 64 | 0.53 M | width 64, depth 10, heads 4, window 4 | 0.5 M |
| 4M | stages 6, width 128 | 3.7 M | width 192, depth 9, heads 6, window 8 | 3.8 M |
| 15M | stages 7, width 224 | 13.7 M | width 448, depth 8, heads 14, window 16, ratio 2 | 13.8 M |

Both are of one width. In FP16 stay first and last layer (which is the default of a preparation), the convolution of the
lowest resolution (`bottleneck`), and all of the Swin's decoder. Not as published: an output of softmax for two classes
instead of a sigmoid for one, and timm's blocks, which have no absolute positions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

SLOPE = 0.2  # of the leaky ReLU behind the first convolution


def _half(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)


class Cnn(nn.Module):
    """Encoder and decoder of 4x4 convolutions with stride 2: [N, 3, H, W] -> [N, classes, H, W].

    Args:
        stages: halvings of the resolution, at least 2; H and W are multiples of 2 ** stages.
        width: channels of every stage.
        dropout: share of the activations that a training step sets to 0, behind every stage.
    """

    def __init__(self, num_classes: int, stages: int = 4, width: int = 64, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.first = _half(3, width)
        self.encoder = nn.ModuleList(_half(width, width) for _ in range(stages - 2))
        self.bottleneck = _half(width, width)
        inputs = [width, *[2 * width] * (stages - 2)]
        self.decoder = nn.ModuleList(nn.ConvTranspose2d(each, width, 4, stride=2, padding=1) for each in inputs)
        self.last = nn.ConvTranspose2d(2 * width, num_classes, 4, stride=2, padding=1)
        self.encoder_norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(stages))
        self.decoder_norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(stages - 1))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        stages = [self.first, *self.encoder, self.bottleneck]
        skips: list[torch.Tensor] = []
        for layer, norm in zip(stages, self.encoder_norms, strict=True):
            x = norm(layer(x))
            x = F.relu(x) if skips else F.leaky_relu(x, SLOPE)
            x = F.dropout(x, self.dropout, self.training)
            skips.append(x)
        skips.pop()
        for layer, norm in zip(self.decoder, self.decoder_norms, strict=True):
            x = torch.cat([F.relu(norm(layer(x))), skips.pop()], 1)
            x = F.dropout(x, self.dropout, self.training)
        logits: torch.Tensor = self.last(x)
        return logits


class Swin(nn.Module):
    """Windowed attention at a stride of 16, then transposed convolutions: [N, 3, H, W] -> [N, classes, H, W].

    H and W are `size`. Args as in the table of this module.
    """

    def __init__(
        self,
        num_classes: int,
        width: int = 192,
        depth: int = 9,
        heads: int = 6,
        window: int = 8,
        ratio: float = 3.0,
        dropout: float = 0.1,
        size: int = 256,
    ) -> None:
        super().__init__()
        from timm.models.swin_transformer import SwinTransformer

        self.encoder = SwinTransformer(
            img_size=size, patch_size=16, embed_dim=width, depths=(depth,), num_heads=(heads,), window_size=window,
            mlp_ratio=ratio, drop_rate=dropout, proj_drop_rate=dropout, attn_drop_rate=dropout, drop_path_rate=dropout,
            num_classes=0, global_pool="",
        )  # fmt: skip
        widths = [width, *(max(8, width >> step) for step in range(1, 5))]
        blocks = []
        for inputs, outputs in pairwise(widths):
            groups = next(each for each in range(8, 0, -1) if outputs % each == 0)
            blocks += [nn.ConvTranspose2d(inputs, outputs, 2, stride=2), nn.GroupNorm(groups, outputs), nn.GELU()]
        self.decoder = nn.Sequential(*blocks)
        self.last = nn.Conv2d(widths[-1], num_classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.last(self.decoder(self.encoder(x).permute(0, 3, 1, 2)))
        return logits
