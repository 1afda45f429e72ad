"""What is random in evaluation is refused by name and line; what only could be is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.export import export_onnx
from fp4deploy.export.to_packed import pack
from fp4deploy.graph.randomness import refuse_random


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()))


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "rand": lambda x: x * torch.rand(x.shape),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rrelu": lambda x: F.rrelu(x - 1, training=True),
    "randperm": lambda x: x[:, torch.randperm(8)],
    "uniform": lambda x: x + torch.empty_like(x).uniform_(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "rand_like": lambda x: x * (torch.rand_like(x[:, :1, :1, :1]) > 0.3),  # of two images often none is dropped
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_operation_is_named(name: str, tmp_path: Path) -> None:
    x = torch.rand(2, 3, 8, 8)
    said = re.compile(rf"Net is random in evaluation: it calls {name} \(test_randomness\.py, line \d+\)")
    with pytest.raises(InputError, match=said):
        export_onnx(Net(RANDOM[name]), x, str(tmp_path / "m.onnx"))
    with pytest.raises(InputError, match=said):
        pack(Net(RANDOM[name]), tmp_path / "m.fp4", example_inputs=x)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.mean()
        return x - self.mean


@pytest.mark.parametrize("middle", [Counter(), lambda x: x * np.random.default_rng().random()])
def test_what_gives_another_result_the_second_time_is_refused(middle: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(InputError, match="Net gives another result when it is called again on one input: .* a state"):
        refuse_random(Net(middle), [torch.rand(1, 3, 8, 8)], {})


@pytest.mark.parametrize(
    "middle",
    [
        nn.Dropout(0.3),
        nn.RReLU(),
        lambda x: F.dropout(x, 0.3, training=False),
        lambda x: x + torch.randn(8, 1, 1, generator=torch.Generator().manual_seed(1)),
        lambda x: x + 0 * torch.rand_like(x),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ],
)
def test_what_draws_nothing_that_counts_is_not_refused(middle: Callable[[Tensor], Tensor]) -> None:
    state = torch.get_rng_state()
    model = Net(middle).train()
    state = torch.get_rng_state()
    refuse_random(model, [torch.rand(2, 3, 8, 8, generator=torch.Generator())], {})
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
