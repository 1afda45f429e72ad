"""What is seen of the calls of modules: the first one, as it was before it changed its input."""

from __future__ import annotations

import torch
from torch import nn

from fp4deploy.ptq.forward import call_of, order_of


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> dict[str, object]:
        x *= 2
        by += 1
        return {"sum": [x + by], "count": 3}


class Returning(nn.Module):
    """Calls its modules in the order b, a, c, b, a; d never. What catches every exception may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Doubled() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by = torch.zeros(1)
        for layer in (self.b, self.a, self.c, self.b, self.a):
            x = layer(x.clone(), by=by)["sum"][0]
        return x


def test_modules_are_in_the_order_of_their_first_calls() -> None:
    assert order_of(Returning(), ["a", "c", "d", "b"], torch.ones(2, 3)) == ["b", "a", "c"]


def test_a_call_is_the_first_and_can_be_made_again() -> None:
    model = Returning()
    call = call_of(model, "a", torch.ones(2, 3))
    (given,), by = call.arguments, call.keywords["by"]
    assert (given.unique().item(), by.item()) == (3.0, 1.0)  # 2 * 1 + 1 of b, and its count
    for _ in range(2):
        (again,) = call.again(model.a)
        assert torch.equal(again, call.outputs[0])
        assert again.unique().item() == 8.0
    assert (given.unique().item(), by.item()) == (3.0, 1.0)
