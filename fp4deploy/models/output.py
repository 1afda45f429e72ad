"""The logits map among what a network returns, at the size of its input.

| a network returns | the logits are |
|---|---|
| a tensor | that |
| a dict, as {"out": ..., "aux": ...} | the entry that `output` names, else "out", else "logits", else the only one |
| a tuple or list | the entry of the number `output`, else the first |

Logits [N, channels, h, w] of another size than the image [N, C, H, W] are resized to it, bilinearly with
`align_corners=False`, as segmentation libraries do before they take the argmax. The resize is part of the network: it
is trained through, exported and measured.

`with_logits` changes the class of the network in place and keeps all names of its layers and tensors.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.errors import Fp4DeployError, InputError, named_cause

USUAL = ("out", "logits")


class LogitsOutput:
    """Mixed in before the network's own class by `with_logits`."""

    logits_output: str | None
    logits_channels: int | None  # None: any number
    logits_spec: str
    logits_maps: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] -> logits [N, channels, H, W]; volumes likewise, with D before H."""
        found = pick_logits(self._outputs(x), self.logits_spec, self.logits_output)
        if not self.logits_maps:
            return self._of_images(found, x)
        if (
            found.ndim != x.ndim
            or found.shape[0] != x.shape[0]
            or found.shape[1] != (self.logits_channels or found.shape[1])
        ):
            size = ", ".join("dhw"[5 - x.ndim :])
            raise InputError(
                f"The output of {self.logits_spec} has the shape {list(found.shape)}, and a logits map of this data "
                f"has [N, {self.logits_channels}, {size}]. Let the factory take the number of classes, or name the "
                "right output with --set model.output=NAME."
            )
        if found.shape[2:] == x.shape[2:]:
            return found
        mode = "bilinear" if x.ndim == 4 else "trilinear"
        return F.interpolate(found, x.shape[2:], mode=mode, align_corners=False)

    def _of_images(self, found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, classes] of a classifier."""
        if found.ndim != 2 or found.shape[0] != x.shape[0] or found.shape[1] != self.logits_channels:
            raise InputError(
                f"The output of {self.logits_spec} has the shape {list(found.shape)}, and logits of images have "
                f"[N, {self.logits_channels}]. Let the factory take the number of classes, or name the right output "
                "with --set model.output=NAME."
            )
        return found

    def _outputs(self, x: torch.Tensor) -> Any:
        """What the network's own forward returns; an error in it is named with the line of the user's code."""
        if torch.compiler.is_compiling():
            return super().forward(x)  # type: ignore[misc]
        try:
            return super().forward(x)  # type: ignore[misc]
        except (torch.OutOfMemoryError, Fp4DeployError):
            raise
        except Exception as error:
            from fp4deploy.graph.capture import place_of

            advice = "Try another size (--size HxW) or batch (--batch-size), or change the network."
            if isinstance(error, ImportError):
                advice = "Install the package that it imports."
            mode = "training" if self.training else "evaluation"  # type: ignore[attr-defined]
            raise InputError(
                f"{self.logits_spec} fails in {mode} on images {list(x.shape)}{place_of(error)}: "
                f"{named_cause(error, 300).rstrip('.')}. {advice}"
            ) from error


def with_logits(
    network: nn.Module, spec: str, channels: int, output: str | None = None, maps: bool = True
) -> nn.Module:
    """Let `network`, in place, return the logits map [N, channels, H, W] alone; names of layers and tensors stay.

    Args:
        spec: how messages name the network.
        output: key or number of the logits among several outputs.
        maps: the logits are a map; else [N, channels], one row an image.
    """
    kind = type(network)
    network.__class__ = type(
        kind.__name__, (LogitsOutput, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    if not hasattr(network, "output_layers"):
        network.output_layers = ()  # type: ignore[assignment]  # one output: that of the last layer, for qat
    network.logits_output, network.logits_channels, network.logits_spec = output, channels, spec  # type: ignore[assignment]
    network.logits_maps = maps  # type: ignore[assignment]
    return network


def pick_logits(found: object, spec: str, output: str | None = None) -> torch.Tensor:
    """The logits among what a network returned.

    Raises:
        InputError: there is no such entry, it is no tensor, or several could be meant.
    """
    value = found
    if isinstance(found, dict):
        names = [output] if output is not None else [name for name in USUAL if name in found] or list(found)
        if len(names) > 1 and output is None and names[0] not in USUAL:
            raise InputError(f"{spec} returns {', '.join(names)}. Name the logits: --set model.output={names[0]}")
        if not names or names[0] not in found:
            raise InputError(f"{spec} returns {', '.join(map(str, found)) or 'an empty dict'}, and no '{output}'.")
        value = found[names[0]]
    elif isinstance(found, list | tuple):
        text = "0" if output is None else output
        position = int(text) if re.fullmatch("-?[0-9]{1,9}", text) else len(found)
        if not -len(found) <= position < len(found):
            raise InputError(f"{spec} returns {len(found)} outputs; --set model.output takes a number from 0.")
        value = found[position]
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"{spec} returns {type(value).__name__} and no tensor, so that it is no segmentation network: it has to "
            "return a logits map [N, classes, h, w], or a dict or tuple that holds one."
        )
    return value
