"""Of export, graphs, models and quantisation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from fp4deploy.audit.operands import Multiplication, Operand
from fp4deploy.audit.targets import TARGETS
from fp4deploy.export.ledger import shares
from fp4deploy.graph import sizes
from fp4deploy.models import boxes as head_boxes
from fp4deploy.models import meaning
from fp4deploy.models.unet import channel_widths
from fp4deploy.native import arena
from fp4deploy.ptq import gptq, grid, reconstruct
from fp4deploy.qat import selection
from fp4deploy.qat.operators.learned import fake_quantize_learned
from fp4deploy.qat.recipes import RECIPES, QuantSpec
from fp4deploy.qat.telemetry import statistics
from fp4deploy.rest import RESTS
from tests.contract.results.arguments import (
    real,
)
from tests.contract.results.plain import Answer, each


def operands() -> Iterable[Operand]:
    fp4 = {
        "format": "FP4",
        "scaling": "block of 16",
        "scales": "E4M3",
        "contracted": True,
        "axis": -1,
        "rank": 3,
        "extent": 64,
    }
    changes: list[dict[str, Any]] = [
        {}, {"dynamic": True}, {"scales": "E8M0"}, {"scaling": "block of 32"}, {"axis": -3}, {"contracted": False},
        {"contracted": None}, {"dynamic": True, "rank": 4}, {"dynamic": True, "extent": 24}, {"tensorrt": True},
    ]  # fmt: skip
    yield from (Operand(**{**fp4, **change}) for change in changes)
    yield from (Operand(form, scaling) for form in ("FP8", "INT8", "INT4", "FP16", "BF16", "FP32", "")
                for scaling in ("", "tensor", "channel"))  # fmt: skip


def verdicts(name: str) -> Answer:
    def answers() -> list[Any]:
        target, found = TARGETS[name], []
        layers = itertools.product(("Conv", "ConvTranspose", "MatMul", "MatMulNBits", "ConvInteger"), operands(),
                                   (Operand("FP16"), *operands()), ((8, 8, 3, 3), (8, 8, 1, 1), (64, 8)), ("", "FP32"))  # fmt: skip
        for operator, weight, activation, shape, bias in itertools.islice(layers, 0, None, 7):
            layer = Multiplication("a", operator, weight, activation, shape, bias)
            verdict = target.rule(layer)
            found.append(
                (layer.requested, verdict.runs, verdict.fell_back(layer.requested), target.refuses(activation))
            )
        counts: dict[str, int] = {}
        for requested, runs, fell_back, refused in found:
            key = f"{requested} -> {runs}{' fell back' * fell_back}{' refused' * bool(refused)}"
            counts[key] = counts.get(key, 0) + 1
        return [counts]

    return answers


HESSIAN = real(40, 32).T @ real(40, 32) / 40
SPECS = [QuantSpec(), QuantSpec(four_over_six=RECIPES["nvfp4_4o6_qat"].weight.four_over_six)]  # type: ignore[union-attr]

RESULTS: dict[str, Answer] = {
    **{f"audit for {name}": verdicts(name) for name in TARGETS},
    "layer shares": each(lambda layers: (found := shares.shares_of(layers), shares.in_words(found)),
                         ([("FP4", 30), ("FP8", 10), ("FP4", 60)], [], [("FP16", 1), ("FP4", 999)])),
    "output size": each(sizes.output_size, (7, 32), (1, 3), (1, 2), (0, 1), (1, 2)),
    "transposed size": each(sizes.transposed_size, (7, 32), (2, 3), (1, 2), (0, 1), (1, 2), (0, 1)),
    "map sizes": each(head_boxes.map_sizes, ((4, 8, 16),), (24, 33), (40, 17)),
    "anchors": each(head_boxes.anchor_sizes, (4, 8, 128)),
    "widths": each(channel_widths, (0.125, 0.25, 1.0, 0.3)),
    "meanings": each(lambda bound, axis, noise: meaning.Values(bound, axis).agreeing(
        real(2, 3, 5, 6), real(2, 3, 5, 6) + noise * real(2, 3, 5, 6, seed=1)), (0.01, 0.2), (None, 1), (0.01, 0.1, 1.0)),
    "few values": each(lambda shape: meaning.Values(0.1, 1).agreeing(real(*shape), 1.1 * real(*shape)), ((3, 4), (20, 2), (2, 3, 1, 5))),
    "both meanings": lambda: meaning.ClassesAndValues(meaning.Classes(1), meaning.Values(0.05, 1)).agreeing(
        real(2, 3, 5, 6), real(2, 3, 5, 6) + 0.2 * real(2, 3, 5, 6, seed=1)),
    "class axes": each(meaning.class_axis, range(6)),
    "memory": lambda: arena.place([arena.Lifetime(*values) for values in ((100, 0, 3), (700, 1, 2), (256, 2, 5), (900, 4, 6), (1, 0, 6))]),
    "scales chosen": lambda: [grid.choose_scales(rows := 0.3 * real(6, 32), rows.abs().amax(), hessian)
                              for hessian in (None, grid.diagonal_blocks(HESSIAN))],
    "block errors": lambda: [grid.block_error(real(3, 2, 16), hessian) for hessian in (None, grid.diagonal_blocks(HESSIAN))],
    "amax held": lambda: grid.hold_amax(grid.encode(0.9 * real(4, 32), torch.tensor(0.5)), real(4, 32), real(4, 32).abs().amax()),
    "gptq": each(lambda damping: gptq.gptq(0.3 * real(6, 32), (0.3 * real(6, 32)).abs().amax(), HESSIAN, damping), (0.01, 0.5)),
    "neighbours": lambda: reconstruct.neighbours(torch.tensor([-7, -6, -5.2, -0.3, 0, 0.25, 0.3, 2.4, 2.5, 5, 6, 6.1])),
    "learned amax": each(lambda spec, axis, groups, scale: fake_quantize_learned(real(4, 32, 3), spec, axis, torch.tensor(scale), groups),
                         SPECS, (1,), (1, 2), (0.5, 3.0, 20.0)),
    "statistics": lambda: [statistics.raw_row(real(4, 32)).finish(statistics.raw_row(real(4, 32)).sums.tolist()),
                           *((row := statistics.coded_row(statistics.encode(real(4, 32), spec, (1,)))).finish(row.sums.tolist()) for spec in SPECS)],
    "code moments": each(statistics.code_moments, (range(16), [0] * 16, [9, 0, 1] + [2] * 13)),
    "matching": each(selection.matching, ("*", "a.*", "a.?", "b", "[ab]*", "z"), (("a.1", "a.22", "b", "c.a.1"),)),
    "range of the rest": lambda: [(rest.name, rest.largest, str(rest.dtype)) for rest in RESTS.values()],
}  # fmt: skip
