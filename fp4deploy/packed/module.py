"""A packed network as a torch module, for programs that call one: a predictor of nnU-Net, MONAI's evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fp4deploy.packed.capture import CapturedNetwork, graphs_enabled
from fp4deploy.packed.file import PackedFile, read_packed
from fp4deploy.packed.network import PackedNetwork
from fp4deploy.packed.program import compile_mode
from fp4deploy.tracing import not_compiled


class PackedModule(nn.Module):
    """What a packed file computes; it has no parameters, and is in evaluation mode whatever is asked for.

    Args:
        file: or its path.
        device: by default the first GPU, else the CPU, where packed networks run decoded in torch.
        dtype: of outputs of real numbers; None: as the network computes them.
    """

    def __init__(
        self,
        file: PackedFile | Path | str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__()
        file = file if isinstance(file, PackedFile) else read_packed(Path(file))
        on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network = CapturedNetwork(PackedNetwork(file, on), graphs_enabled(), compile_mode())
        self.dtype = dtype

    @not_compiled
    def forward(self, *inputs: torch.Tensor) -> Any:
        """Outputs, in memory of their own; real inputs of any precision."""
        real = [x.as_subclass(torch.Tensor).float() if x.is_floating_point() else x for x in inputs]
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            outputs = self.network(*real)
        return tree_map(lambda y: y.to(self.dtype) if self.dtype and y.is_floating_point() else y, outputs)
