"""The network of `modelopt_0.47.pt`, which ModelOpt 0.47.0 quantised on a CPU and saved (`modelopt.torch.opt.save`).

Layer 2: NVFP4. 4: FP8. 5: INT8. 6: its weight alone, in NVFP4. 9: NVFP4, a linear layer. 0: not quantised.
"""

from __future__ import annotations

from torch import nn


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1),
        nn.Conv2d(16, 16, 1), nn.ConvTranspose2d(16, 4, 2, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 4),
    ).eval()  # fmt: skip
