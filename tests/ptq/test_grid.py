"""Weights on the grid are fixed points of quantisation, scales are the best of all, and matrices are undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4deploy.formats import FourOverSix, fake_quantize_nvfp4
from fp4deploy.ptq.gptq import gptq
from fp4deploy.ptq.grid import (
    block_error,
    choose_scales,
    diagonal_blocks,
    e4m3_values,
    encode,
    hold_amax,
    is_fixed_point,
    steps,
)
from fp4deploy.ptq.matrix import WeightMatrix, blocks, has_hessian, input_rows
from fp4deploy.ptq.reconstruct import neighbours


def on_grid(rows: torch.Tensor, hessian: torch.Tensor | None = None) -> torch.Tensor:
    amax = rows.abs().max()
    step = steps(choose_scales(rows, amax, hessian), amax).unsqueeze(-1)
    return (encode(blocks(rows), step) * step).flatten(1)


def correlated(count: int, size: int) -> torch.Tensor:
    """H of inputs whose neighbours are alike."""
    x = torch.randn(count, size) + 2 * torch.randn(count, 1)
    return x.T @ x / count


@pytest.mark.parametrize("draw", ["normal", "heavy", "tiny"])
def test_the_recipe_quantises_to_the_same_scales_and_codes(draw: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(24, 64)
    if draw == "heavy":
        rows = rows / torch.rand(24, 64).clamp(min=0.01)
    if draw == "tiny":
        rows = rows * 1e-6
    found = on_grid(rows)
    again = fake_quantize_nvfp4(found, four_over_six=FourOverSix())[0]
    assert torch.allclose(found, again, rtol=1e-6, atol=0)
    assert float(found.abs().max()) == pytest.approx(float(rows.abs().max()), rel=1e-6)


def test_the_scale_is_the_best_of_all_fixed_points() -> None:
    """Against a loop over every E4M3 value, with and without H."""
    torch.manual_seed(1)
    rows = torch.randn(6, 32)
    amax = rows.abs().max()
    for hessian in (None, diagonal_blocks(correlated(200, 32))):
        chosen = choose_scales(rows, amax, hessian)
        best = torch.full_like(chosen, float("inf"))
        for scale in e4m3_values(rows.device):
            every = torch.full_like(chosen, float(scale))
            step = steps(every, amax).unsqueeze(-1)
            codes = encode(blocks(rows), step)
            error = block_error(blocks(rows) - codes * step, hessian)
            allowed = is_fixed_point(codes, every, blocks(rows).abs().amax(-1), amax)
            best = torch.minimum(best, torch.where(allowed, error, float("inf")))
        step = steps(chosen, amax).unsqueeze(-1)
        error = block_error(blocks(rows) - encode(blocks(rows), step) * step, hessian)
        assert torch.equal(error, best)


def test_free_scales_are_no_worse_than_four_over_six() -> None:
    torch.manual_seed(2)
    rows = torch.randn(64, 256)
    standard, four_over_six, free = (
        float((found - rows).square().mean())
        for found in (
            fake_quantize_nvfp4(rows)[0],
            fake_quantize_nvfp4(rows, four_over_six=FourOverSix("mse"))[0],
            on_grid(rows),
        )
    )
    assert free < four_over_six < standard


def test_block_error_is_the_error_of_the_output() -> None:
    torch.manual_seed(3)
    x, difference = torch.randn(50, 16), torch.randn(4, 16)
    hessian = (x.T @ x / 50).unsqueeze(0)
    expected = (difference @ x.T).square().mean(1)
    assert torch.allclose(block_error(difference.unsqueeze(1), hessian)[:, 0], expected, rtol=1e-4)


def test_gptq_is_column_by_column_compensation() -> None:
    """Against the formula with an inverse of H made anew for the columns that are left (no Cholesky factor)."""
    torch.manual_seed(4)
    rows = torch.randn(5, 16)
    rows[0, 0] = 4.0
    amax, hessian = rows.abs().max(), correlated(100, 16)
    found = gptq(rows, amax, hessian, damping=0.0)
    step = steps(choose_scales(rows, amax, diagonal_blocks(hessian)), amax)
    left, expected = rows.clone().double(), torch.zeros(5, 16).double()
    for column in range(16):
        expected[:, column] = encode(left[:, column].float(), step[:, 0]) * step[:, 0]
        rest = torch.linalg.inv(hessian[column:, column:].double())
        error = (left[:, column] - expected[:, column]) / rest[0, 0]
        left[:, column:] -= error[:, None] * rest[0][None]
    top = (expected.abs() / step.double()).amax(1)
    kept = ((top - 6).abs() < 1e-4) | ((top - 4).abs() < 1e-4)
    assert kept.sum() >= 3
    held = rows.abs().argmax() // 16
    same = [row for row in range(5) if kept[row] and row != int(held)]
    assert torch.allclose(found[same].double(), expected[same], atol=1e-5)


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """Sum over the rows of e H e^T: what GPTQ minimises."""
    return float((difference @ hessian * difference).sum())


def test_gptq_has_a_smaller_output_error_than_rounding() -> None:
    torch.manual_seed(5)
    rows, hessian = torch.randn(16, 512), correlated(2000, 512)
    amax = rows.abs().max()
    found = hold_amax(gptq(rows, amax, hessian), rows, amax)
    nearest = on_grid(rows, diagonal_blocks(hessian))
    assert output_error(found - rows, hessian) < 0.8 * output_error(nearest - rows, hessian)
    again = fake_quantize_nvfp4(found, four_over_six=FourOverSix())[0]
    assert torch.allclose(found, again, rtol=1e-5, atol=1e-7)


def test_an_input_that_is_always_zero_is_no_obstacle() -> None:
    hessian = correlated(100, 32)
    hessian[7], hessian[:, 7] = 0, 0
    found = gptq(torch.randn(4, 32), torch.tensor(4.0), hessian)
    assert found.isfinite().all()


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
def test_gptq_depends_on_no_unit_of_its_inputs_and_on_none_that_is_always_zero(scale: float) -> None:
    """Damping is a share of those that are there: small inputs beside dead ones are not rounded to nearest."""
    torch.manual_seed(6)
    rows, hessian, amax = torch.randn(6, 80), torch.zeros(80, 80), torch.tensor(4.0)
    live = [*range(32), *range(48, 80)]  # blocks around one whose inputs are always 0
    hessian[torch.tensor(live)[:, None], live] = correlated(300, 64)
    found = gptq(rows, amax, scale * hessian)
    assert not found[:, 32:48].any()
    assert torch.equal(found[:, live], gptq(rows[:, live], amax, hessian[live][:, live]))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(5, 7, 3, padding=1),
        nn.Conv2d(16, 4, (3, 5), stride=2, padding=(1, 2), dilation=(1, 2)),
        nn.Linear(20, 6),
        nn.ConvTranspose2d(6, 3, 2, stride=2),
        nn.Conv1d(5, 7, 3, 2, 1),
        nn.Conv3d(5, 4, (1, 3, 2), (2, 1, 2), (0, 1, 0), (1, 2, 1)),
        nn.ConvTranspose3d(6, 3, (1, 2, 2), (1, 2, 2)),
    ],
    ids=repr,
)
def test_rows_times_matrix_is_the_layer(layer: nn.Module) -> None:
    """A convolution at every output position; a transposed one tap by tap."""
    torch.manual_seed(6)
    matrix = WeightMatrix.of(layer)
    weight = layer.weight.detach()  # type: ignore[union-attr,operator]
    assert torch.equal(matrix.weight(matrix.rows(weight)), weight)
    axes = len(matrix.shape) - 2
    x = torch.randn(2, 20) if isinstance(layer, nn.Linear) else torch.randn(2, matrix.channels, *(3, 8, 9)[3 - axes :])
    rows = input_rows(layer, x, torch.Generator(), most=10_000)
    for dtype in (torch.float16, torch.bfloat16):  # of an autocast
        narrow = input_rows(layer, x.to(dtype), torch.Generator(), most=10_000)
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, rows.to(dtype).float())
    found = rows @ matrix.rows(weight).T
    expected = layer(x) - layer.bias.view(-1, *[1] * (x.ndim - 2))  # type: ignore[union-attr,operator]
    if matrix.transposed:
        taps = found.view(-1, 8, 9, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 16, 18)  # of each slice
        slices = expected if axes == 2 else expected.transpose(1, 2).flatten(0, 1)
        assert torch.allclose(taps, slices, atol=1e-5)
    else:
        flat = expected if x.ndim == 2 else expected.movedim(1, -1).flatten(0, -2)
        assert torch.allclose(found, flat, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        *(nn.Conv2d(16, 4, 3, padding=1, padding_mode=mode) for mode in ("zeros", "reflect", "replicate", "circular")),
        nn.Conv2d(16, 4, 3, padding="same"),
        nn.Conv2d(16, 4, 3, padding=1, groups=2),
        nn.Conv1d(16, 4, 3, padding=1, padding_mode="reflect"),
    ],
    ids=repr,
)
def test_a_layer_has_a_hessian_where_rows_give_what_it_does(layer: nn.Module) -> None:
    """Zeros around the input are no input of a layer that reflects it: its H would be another layer's."""
    torch.manual_seed(6)
    matrix, x = WeightMatrix.of(layer), torch.randn(2, 16, *(7, 9)[: layer.weight.ndim - 2])  # type: ignore[union-attr]
    try:
        rows = input_rows(layer, x, torch.Generator(), most=10_000)
        found = rows @ matrix.rows(layer.weight.detach()).T  # type: ignore[union-attr, operator]
        expected = (layer(x) - layer.bias.view(-1, *[1] * (x.ndim - 2))).movedim(1, -1).flatten(0, -2)  # type: ignore[operator, union-attr]
        gives = torch.allclose(found, expected, atol=1e-5)
    except (RuntimeError, TypeError, ValueError):
        gives = False
    assert has_hessian(layer) == gives


def test_neighbours_of_the_format() -> None:
    low, high = neighbours(torch.tensor([-6.0, -5.0, -0.3, 0.0, 0.5, 2.2, 3.5, 5.9]))
    assert low.tolist() == [-6, -6, -0.5, 0, 0.5, 2, 3, 4]
    assert high.tolist() == [-6, -4, 0, 0, 0.5, 3, 4, 6]
