"""Optimiser and learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fp4deploy.models.checkpoint import QUANTIZER_BUFFERS


def make_optimizer(
    model: nn.Module, lr: float, weight_decay: float, clip_lr: float = 1.0, clip_decay: float = 0.0
) -> torch.optim.AdamW:
    """AdamW; biases and normalisation parameters (one axis) are not decayed.

    Learned amaxes have a learning rate of `clip_lr` times the others' and a decay of their own.
    On a GPU the fused form: one kernel, which also skips a step of non-finite gradients without asking the CPU.
    """
    clips = [p for name, p in model.named_parameters() if name.endswith(QUANTIZER_BUFFERS)]
    others = [p for name, p in model.named_parameters() if not name.endswith(QUANTIZER_BUFFERS)]
    decayed = [p for p in others if p.ndim > 1]
    plain = [p for p in others if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if clips:
        groups.append({"params": clips, "weight_decay": clip_decay, "lr_factor": clip_lr})
    on_gpu = all(p.is_cuda for p in (*others, *clips))
    return torch.optim.AdamW(groups, lr=lr, fused=True if on_gpu else None)


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` share of `steps`, then half a cosine down to 0.

    A pure function of the step, so that a resumed training needs no scheduler state.
    """
    rising = max(1, round(steps * warmup)) if warmup else 0
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
