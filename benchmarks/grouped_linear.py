"""Grouped GEMM of experts in NVFP4, forward and backward, beside BF16.

    python benchmarks/grouped_linear.py --json benchmarks/results/grouped_linear_h200.json

M tokens of ragged experts (K 7168, N 2048), BF16, a row for every way to choose block scales: `plain`, and 4/6
with the error MAE or MSE, computed strictly (as dequantised values have it) or fast. Milliseconds, medians by CUDA
events (on a CPU, with small sizes, of a clock, to try the script):

| column | what is timed |
|---|---|
| forward | `qat.grouped_linear`: X and W [E, N, K] packed, one launch |
| backward | its dgrad and wgrad, four operands packed |
| cached | `fp4_grouped_linear`: weights packed before, X packed with its own amax |
| GEMM | the launch of `cached` alone, both operands packed before |
| BF16 forward, backward | `torch.nn.functional.grouped_mm` and its autograd; `BF16 loop`: a matmul an expert |

error: of the output and of both gradients, relative to those of the BF16 loop. What refuses says why in `refused`.
On Hopper codes are decoded to FP16 in registers: there is no FP4 tensor core, and what FP4 can win is memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import command, machine, median_ms, origin

from fp4deploy.formats import FourOverSix
from fp4deploy.plugins import fp4_grouped_linear, fp4_quantize
from fp4deploy.plugins.gemm.grouped import grouped_matmul, runs_grouped, spans, stacked
from fp4deploy.plugins.gemm.operands import pack
from fp4deploy.qat import QuantSpec, Recipe, grouped_linear

CHOICES: dict[str, FourOverSix | None] = {"plain": None} | {
    f"{metric} {'fast' if fast else 'strict'}": FourOverSix(metric.lower(), fast=fast)
    for metric in ("MAE", "MSE")
    for fast in (False, True)
}
PEERS = ("BF16", "BF16 loop")
Step = tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536, 98304])
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--k", type=int, default=7168)
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = machine() if device == "cuda" else {**origin(), "gpu": None, "torch": torch.__version__}
    rows = []
    for tokens in arguments.tokens:
        for experts in arguments.experts:
            for row in measure(tokens, experts, arguments.k, arguments.n, device):
                print(json.dumps(row), flush=True)
                rows.append(row)
                if arguments.json:
                    content = {"command": command(), "machine": where, "rows": rows}
                    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def measure(tokens: int, experts: int, k: int, n: int, device: str) -> list[dict[str, Any]]:
    """A row of each choice, and of each peer."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    x = torch.randn(tokens, k, **options).requires_grad_()
    weight = (torch.randn(experts, n, k, **options) / k**0.5).requires_grad_()
    gradient = torch.randn(tokens, n, **options)
    ends = ragged(tokens, experts, device)
    shape = {"tokens": tokens, "experts": experts, "k": k, "n": n}
    peers: dict[str, Step] = {
        "BF16": (lambda: F.grouped_mm(x, weight.mT, offs=ends.int()), (x, weight)),
        "BF16 loop": (lambda: loop(x, weight, ends), (x, weight)),
    }
    exact = numbers(*peers["BF16 loop"], gradient)
    rows = [shape | {"what": name} | timed(*step, gradient, exact) for name, step in peers.items()]
    for name, four_over_six in CHOICES.items():
        recipe = Recipe(name, *[QuantSpec(four_over_six=four_over_six)] * 6)
        step = (lambda recipe=recipe: grouped_linear(x, weight, ends, recipe=recipe)), (x, weight)
        rows.append(shape | {"what": name} | timed(*step, gradient, exact))
        if four_over_six is None or not four_over_six.fast:
            rows[-1] |= inference(x.detach(), weight.detach(), ends, four_over_six)
    return rows


def ragged(tokens: int, experts: int, device: str) -> torch.Tensor:
    """Ends of experts with shares of tokens between one and three."""
    shares = 1 + 2 * torch.rand(experts, generator=torch.Generator().manual_seed(0))
    ends = (shares.cumsum(0) / shares.sum() * tokens).long()
    ends[-1] = tokens
    return ends.to(device)


def loop(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[start:stop] @ weight[e].T for e, (start, stop) in enumerate(spans(ends, len(x)))])


def numbers(run: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> Any:
    """The output and the gradients."""
    y = run()
    return y.detach(), *torch.autograd.grad(y, leaves, gradient)


def timed(
    run: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], gradient: torch.Tensor, exact: Any
) -> dict[str, Any]:
    """Forward and backward, and the errors of what they compute."""
    try:
        found = numbers(run, leaves, gradient)
    except (RuntimeError, AttributeError) as error:
        return {"refused": f"{type(error).__name__}: {str(error)[:300]}"}
    errors = {
        name: round(((a.float() - b.float()).norm() / b.float().norm()).item(), 5)
        for name, a, b in zip(("y", "dx", "dw"), found, exact, strict=True)
    }
    del found
    backward = milliseconds(partial(torch.autograd.grad, run(), leaves, gradient, retain_graph=True), gradient)
    with torch.no_grad():
        forward = milliseconds(run, gradient)
    return {"forward_ms": forward, "backward_ms": backward, "error": errors}


def inference(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, four_over_six: FourOverSix | None
) -> dict[str, Any]:
    """Weights packed before, and the launch alone where there is one."""
    caches = [fp4_quantize(each, four_over_six=four_over_six) for each in weight]
    found: dict[str, Any] = {"cached_ms": milliseconds(lambda: fp4_grouped_linear(x, caches, ends, "dynamic"), x)}
    a, b = pack(x, "dynamic"), stacked([cache.weight for cache in caches])
    if runs_grouped(a, b, x.dtype):
        found["gemm_ms"] = milliseconds(lambda: grouped_matmul(a, b, ends, None, x.dtype), x)
        found["tflops"] = round(2 * x.numel() * weight.shape[1] / found["gemm_ms"] / 1e9, 1)
    return found


def milliseconds(run: Callable[[], Any], on: torch.Tensor) -> float:
    if on.is_cuda:
        return round(median_ms(run, repeats=11), 4)
    run()
    start = time.perf_counter()
    run()
    return round(1e3 * (time.perf_counter() - start), 4)


if __name__ == "__main__":
    main()
