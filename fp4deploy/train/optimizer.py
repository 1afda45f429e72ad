"""The optimisers, and the exponential moving average (EMA) of the weights that is evaluated and kept.

After every step the average moves by

    average <- d average + (1 - d) weight,          d = min(decay, (1 + n) / (10 + n)) at step n

so that a short training does not average over its start. The mean of the weights along a noisy path is a better model
than its last point, and its score moves less from one evaluation to the next. The arithmetic is torch's
(`AveragedModel`, `get_ema_multi_avg_fn`); ours is the decay of the first steps and the exchange of weights, by which
a compiled or distributed model evaluates the average without a second wrapper.

Quantiser state. A tracked `input_amax` is a buffer, an upper bound that already moves slowly, and the average of upper
bounds is none: the averaged model takes the one of the trained model. A learned amax is a parameter and averaged like
one. The codes of the averaged model are made from the averaged weights; averaging codes would give values that FP4
does not have. Every process of a distributed training holds the same weights, and so the same average.

Source: Polyak, Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fp4deploy.models.checkpoint import QUANTIZER_BUFFERS
from fp4deploy.tracing import make_no_folder


class Adamax(torch.optim.Adamax):
    """torch's, which also skips a step of non-finite gradients without asking the CPU, as its fused AdamW does."""

    _step_supports_amp_scaling = True  # a loss scaler sets `found_inf`, and does not read it

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; none where `found_inf` holds."""
        found = getattr(self, "found_inf", None)
        before = {} if found is None else {id(each): each.clone() for each in self._moved()}
        result = super().step(closure)
        if found is not None:
            skipped = found.reshape(()) > 0
            for each in self._moved():
                old = before.get(id(each), torch.zeros_like(each))  # moments start from 0
                torch.where(skipped, old, each, out=each)
        return result

    def _moved(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield from (parameter, *self.state.get(parameter, {}).values())


OPTIMIZERS: dict[str, tuple[Any, dict[str, bool]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "adamax": (Adamax, {}),
}


def make_optimizer(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    clip_lr: float = 1.0,
    clip_decay: float = 0.0,
    name: str = "adamw",
) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS`; biases and normalisation parameters (one axis) are not decayed.

    Learned amaxes have a learning rate of `clip_lr` times the others' and a decay of their own.
    On a GPU the form that skips a step of non-finite gradients without asking the CPU (of AdamW one kernel), and reads
    the learning rate from memory, so that a CUDA graph of the step follows the schedule.
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
    make_no_folder()
    device = others[0].device
    kind, on_gpu = OPTIMIZERS[name]
    if device.type == "cuda":
        groups = [{**group, "lr": torch.tensor(lr, dtype=torch.float32, device=device)} for group in groups]
        on_gpu = {**on_gpu, "capturable": True}
    optimizer: torch.optim.Optimizer = kind(groups, lr=lr, **(on_gpu if device.type == "cuda" else {}))
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def skip_where(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """Let the form on a GPU skip its next step where `bad` holds, without asking the CPU: as a loss scaler tells it."""
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]


class WeightAverage:
    """The moving average of a model's parameters, in their own dtype."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start from the weights that `model` has now; `decay` in [0, 1)."""
        self.decay, self.model = decay, model
        self._averaged = AveragedModel(model, multi_avg_fn=self._move)
        self._averaged.n_averaged.fill_(1)  # the initial weights count, so that the first step averages, too
        self._step = 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average after the step with this number, counted from 0."""
        self._step = step
        self._averaged.update_parameters(self.model)

    def _move(self, averages: object, weights: object, averaged: object) -> None:
        decay = min(self.decay, (1 + self._step) / (10 + self._step))
        get_ema_multi_avg_fn(decay)(averages, weights, averaged)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the average; afterwards, and after an exception, its own weights again."""
        own = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self._put(self.state())
        try:
            yield
        finally:
            self._put(own)

    def state(self) -> dict[str, torch.Tensor]:
        """The averages by name of the parameter, which an exact resume needs."""
        return {name: value.detach() for name, value in self._averaged.module.named_parameters()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` gave.

        Raises:
            KeyError: a parameter has no average in it.
        """
        for name, average in self.state().items():
            average.copy_(state[name])

    @torch.no_grad()
    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        torch._foreach_copy_([p.detach() for p in parameters.values()], [values[name] for name in parameters])
