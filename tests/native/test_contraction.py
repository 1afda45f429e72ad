"""GEMMs, convolutions and attention in terms of one operator, and its kernel in the PTX emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fp4deploy.native import contraction
from fp4deploy.native.contraction import REPLACED
from tests.native import emulated

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def plain(x: torch.Tensor, w: torch.Tensor, *about: Any) -> torch.Tensor:
    """`fp4deploy::convolution` by torch."""
    stride, padding, dilation, more, groups, transposed, relu = about
    y = aten.convolution(x.movedim(-1, 1), w, None, stride, padding, dilation, transposed, more, groups).movedim(1, -1)
    return y.relu() if relu else y


VOLUMES = ([2, 1, 2], [1, 1, 0], [1, 2, 1], [0, 0, 0], 2)
CASES: dict[str, tuple[Any, Callable[..., torch.Tensor], Tensors, tuple[Any, ...]]] = {
    "mm": (aten.mm.default, torch.mm, (draw(5, 7), draw(7, 3)), ()),
    "bmm": (aten.bmm.default, torch.bmm, (draw(2, 5, 7), draw(2, 7, 3)), ()),
    "addmm": (aten.addmm.default, torch.addmm, (draw(3), draw(5, 7), draw(7, 3)), ()),
    "baddbmm": (aten.baddbmm.default, torch.baddbmm, (draw(2, 5, 3), draw(2, 5, 7), draw(2, 7, 3)), ()),
    "attention": (
        aten.scaled_dot_product_attention.default,
        F.scaled_dot_product_attention,
        (draw(2, 3, 5, 8), draw(2, 3, 6, 8), draw(2, 3, 6, 4)),
        (draw(5, 6) > 0,),
    ),
    "a row without keys": (
        aten.scaled_dot_product_attention.default,
        F.scaled_dot_product_attention,
        (draw(2, 5, 8), draw(2, 6, 8), draw(2, 6, 4)),
        (torch.arange(5)[:, None] > torch.arange(6),),
    ),
    "attention of matrices": (
        aten.scaled_dot_product_attention.default,
        F.scaled_dot_product_attention,
        (draw(5, 8), draw(6, 8), draw(6, 4)),
        (draw(5, 6),),
    ),
    "causal": (
        aten.scaled_dot_product_attention.default,
        F.scaled_dot_product_attention,
        (draw(2, 5, 8), draw(2, 5, 8), draw(2, 5, 4)),
        (None, 0.0, True),
    ),
    "volumes": (
        torch.ops.fp4deploy.convolution.default,
        lambda x, w, _, *about: plain(x, w, *about),
        (draw(2, 4, 5, 6, 8), draw(6, 4, 3, 2, 1)),
        (None, *VOLUMES, False, True),
    ),
    "transposed": (
        torch.ops.fp4deploy.convolution.default,
        lambda x, w, _, *about: plain(x, w, *about),
        (draw(2, 4, 5, 8), draw(8, 3, 3, 2)),
        (None, [2, 3], [1, 0], [1, 1], [1, 0], 2, True, False),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_of_aten_in_its_terms(name: str) -> None:
    operator, reference, tensors, about = CASES[name]
    found, expected = REPLACED[operator](*tensors, *about), reference(*tensors, *about)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


ONE, NONE = [1, 1, 1], [0, 0, 0]
KERNELS = {
    "a batch of products, in FP32": (
        (draw(3, 1, 1, 1, 70, 20), draw(3, 40, 1, 1, 1, 20), None),
        (ONE, NONE, ONE, [1, 1, 70], 0.5, False, False, True, True),
    ),
    "transposed, two groups, BF16": (
        (draw(2, 2, 2, 3, 3, 4, dtype=torch.bfloat16), draw(2, 5, 2, 3, 2, 4, dtype=torch.bfloat16), draw(2, 5)),
        ([2, 2, 2], [0, 1, 0], ONE, [4, 6, 6], 1.0, True, True, False, False),
    ),
}


@pytest.mark.parametrize("factors", [(1, 1), (0.5, 2.0), (0, 1.5), (2.0, 1), (1, 0.25)])
@pytest.mark.parametrize("added", [(3,), (1,), (1, 3), (5, 1), (5, 3)])
def test_what_is_added_has_its_factor(added: tuple[int, ...], factors: tuple[float, float]) -> None:
    beta, alpha = factors
    given, x, y = draw(*added), draw(5, 7), draw(7, 3)
    found = REPLACED[aten.addmm.default](given, x, y, beta=beta, alpha=alpha)
    torch.testing.assert_close(found, torch.addmm(given, x, y, beta=beta, alpha=alpha))
    found = REPLACED[aten.baddbmm.default](given, x[None], y[None], beta=beta, alpha=alpha)
    torch.testing.assert_close(found, torch.baddbmm(given, x[None], y[None], beta=beta, alpha=alpha))


def test_its_bias_is_contiguous() -> None:
    """The kernel has no stride for it."""
    given: list[torch.Tensor] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if called is torch.ops.fp4deploy.contract.default:
                given.append(args[2])
            return called(*args, **kwargs or {})

    bias, x, w = draw(12)[::2], draw(1, 4, 4, 3), draw(6, 3, 1, 1)
    with Calls():
        REPLACED[aten.addmm.default](bias, draw(5, 7), draw(7, 6))
        REPLACED[torch.ops.fp4deploy.convolution.default](x, w, bias, [1, 1], [0, 0], [1, 1], [0, 0], 1, False, False)
    assert [each.is_contiguous() for each in given] == [True, True]


def test_offsets_beyond_32_bits() -> None:
    """Of rows or columns of one item; their strides are small."""
    x = torch.empty(1, 1, 1, 1, 1 << 20, 4096, dtype=torch.float16, device="meta")
    w = torch.empty(1, 8, 1, 1, 1, 4096, dtype=torch.float16, device="meta")
    y = torch.empty(1, 1, 1, 1, 1 << 20, 8, dtype=torch.float16, device="meta")
    about = (ONE, NONE, ONE, [1, 1, 1 << 20], 1.0, False, False, True, False)
    kinds = dict(contraction.call((x, w, None, *about), y).launch.arguments)
    assert (kinds["xw"], kinds["xc"], kinds["ww"]) == ("i64", "i64", "i32")
    kinds = dict(contraction.call((x[..., :99, :], w, None, *about), y).launch.arguments)
    assert kinds["xw"] == "i32"


@pytest.mark.parametrize("name", KERNELS)
def test_its_kernel(name: str) -> None:
    pytest.importorskip("triton")
    tensors, about = KERNELS[name]
    expected = torch.ops.fp4deploy.contract(*tensors, *about)
    found = torch.full_like(expected, float("nan"))
    emulated.call(contraction.call((*tensors, *about), found))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
