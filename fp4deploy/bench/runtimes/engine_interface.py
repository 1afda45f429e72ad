"""From normalised images to what an engine takes, and from what it gives to logits.

Every runtime takes images float32 [N,3,H,W], normalised, and gives logits. An engine may have been built for bytes,
for channels last or with the argmax inside (`export.lowering.interface`). Bytes are the image before normalisation,
rounded; classes become logits of 1 for the class and 0 for the others, which have the same argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fp4deploy.export.lowering.interface import Interface
from fp4deploy.models.card import ModelCard


def assumed(input_kind: str, input_shape: Sequence[int], output_kind: str, output_shape: Sequence[int]) -> Interface:
    """The interface of an engine without a ledger, from the types ("fp16", "fp32", "uint8", "int32") and shapes.

    An image has 3 channels; where the second axis has another extent, they are the last. Those of logits are second.
    """
    last = len(input_shape) == 4 and input_shape[3] == 3 and input_shape[1] != 3
    classes = output_kind == "int32" and len(output_shape) == 3
    return Interface(input_kind, "nhwc" if last else "nchw", "argmax" if classes else output_kind)


@dataclass(frozen=True)
class EngineInterface:
    """Conversions of one engine."""

    interface: Interface

    def given(self, images: NDArray[np.float32], card: ModelCard) -> torch.Tensor:
        """What the engine takes, on the CPU, of images float32 [N,3,H,W]."""
        x = torch.from_numpy(images)
        if self.interface.input == "uint8":
            mean, std = (torch.tensor(values)[:, None, None] for values in (card.mean, card.std))
            x = (255 * (x * std + mean)).round().clamp(0, 255).to(torch.uint8)
        return x.permute(0, 2, 3, 1).contiguous() if self.interface.input_layout == "nhwc" else x.contiguous()

    def logits(self, output: torch.Tensor, card: ModelCard) -> Any:
        """float32 [N,C,H,W] on the CPU, of what the engine gave."""
        if self.interface.output == "argmax":
            classes = output.cpu().long()
            count = card.channels or int(classes.max()) + 1
            return F.one_hot(classes, count).permute(0, 3, 1, 2).float().contiguous().numpy()
        if self.interface.output_layout == "nhwc":
            output = output.movedim(-1, 1)
        return output.float().cpu().contiguous().numpy()
