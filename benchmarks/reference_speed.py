"""How much faster the torch reference is than the transcription of the contract one would write first.

    python benchmarks/reference_speed.py --compile --json benchmarks/results/reference_speed_cpu.json

NVFP4 fake quantisation of a float32 [4096, 4096] on the CPU, 1-D blocks, on one thread and on all. The naive version is
docs/numerics.md line by line over the whole tensor: nested `torch.where` for the element thresholds, every intermediate
result in memory. Both give the same bits (the sign of a zero excepted), asserted on hard cases before timing. Runs
alternate, so that a busy machine slows both; the ratio is that of the medians. The reference runs many short
operations: on several threads it suffers more from other work on the machine. `--compile` adds torch.compile of the
naive version, timed last and alone: it brings an OpenMP runtime of its own, whose waiting threads take the cores from
torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fp4deploy.bench.environment import environment
from fp4deploy.formats import fake_quantize_nvfp4

FLT_MAX = torch.finfo(torch.float32).max
# (largest magnitude of the interval, belongs to it, value): RNE to E2M1 as the contract writes it.
INTERVALS = ((0.25, True, 0.0), (0.75, False, 0.5), (1.25, True, 1.0), (1.75, False, 1.5), (2.5, True, 2.0))
INTERVALS += ((3.5, False, 3.0), (5.0, True, 4.0))


def naive(x: torch.Tensor) -> torch.Tensor:
    """NVFP4 quantise and dequantise, blocks of 16 along the last axis; float32 [..., K], K a multiple of 16, finite."""
    amax = x.abs().max()
    if amax == 0:
        return torch.zeros_like(x)
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    block_amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.clamp(torch.tensor(448.0 * 6.0) / amax, max=FLT_MAX)
    scale = torch.where(scale == 0, torch.tensor(1.0), scale)
    d8 = torch.clamp(block_amax * (scale * torch.tensor(1 / 6)), max=448.0).to(torch.float8_e4m3fn).float()
    encode = torch.where(d8 > 0, torch.clamp(1 / (d8 * (1 / scale)), max=FLT_MAX), torch.tensor(0.0))
    u = torch.clamp(blocks * encode, -6.0, 6.0)
    magnitude, q = u.abs(), torch.full_like(u, 6.0)
    for bound, closed, value in reversed(INTERVALS):
        q = torch.where(magnitude <= bound if closed else magnitude < bound, torch.tensor(value), q)
    q = torch.where(u < 0, -q, q)
    return ((d8 * amax) * torch.tensor(1 / (6 * 448.0)) * q).reshape(x.shape)


def reference(x: torch.Tensor) -> torch.Tensor:
    """The same by `fp4deploy.formats`."""
    return fake_quantize_nvfp4(x)[0]


def assert_equal_bytes(run: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    """Compare with the reference on normal values, rows of very different scale, ties, zeros, and 1e-30 to 1e30."""
    torch.manual_seed(1)
    normal = torch.randn(size, size)
    rows = normal * torch.logspace(-8, 8, size).unsqueeze(1)
    ties = torch.randint(-24, 25, (size, size)) * 0.25
    heavy = normal / torch.rand(size, size).clamp(min=1e-6)
    for name, x in {
        "normal": normal,
        "rows": rows,
        "ties": ties,
        "heavy tails": heavy,
        "zeros": torch.zeros(size, size),
        "1e-30": normal * 1e-30,
        "1e30": normal * 1e30,
    }.items():
        different = run(x) + 0.0 != reference(x) + 0.0  # the sign of a zero does not count
        if different.any():
            at = tuple(different.nonzero()[0].tolist())
            raise SystemExit(f"{name}: {int(different.sum())} elements differ, first at {at}: {run(x)[at]}")


def alternate(
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each run, taken in turns after a first one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(x)
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def measure(threads: int, repeats: int, x: torch.Tensor, compiled: bool) -> dict[str, list[float]]:
    """Milliseconds by name, on so many threads."""
    torch.set_num_threads(threads)
    times = alternate({"naive": naive, "reference": reference}, x, repeats)
    if compiled:
        run = torch.compile(naive)
        assert torch.equal(run(x), reference(x))
        times |= alternate({"naive, torch.compile": run}, x, repeats)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns, a multiple of 16 (default 4096)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--compile", action="store_true", help="torch.compile of the naive version, last")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    assert_equal_bytes(naive, min(arguments.size, 1024))
    torch.manual_seed(0)
    x = torch.randn(arguments.size, arguments.size)
    assert torch.equal(naive(x), reference(x))
    rows: list[dict[str, Any]] = []
    for threads in arguments.threads:
        compiled = arguments.compile and threads == arguments.threads[-1]
        times = measure(threads, arguments.repeats, x, compiled)
        slow = statistics.median(times["naive"])
        for name, values in times.items():
            median = statistics.median(values)
            rows.append({"threads": threads, "name": name, "median_ms": median, "ratio_to_naive": slow / median})
            rows[-1]["ms"] = values
            spread = f"{min(values):7.1f} to {max(values):7.1f}"
            print(f"threads {threads}  {name:21s} {median:7.1f} ms ({spread})  {slow / median:5.2f} x naive")
    if arguments.json:
        _write(arguments, rows)


def _write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    machine = environment() | {"packages": {"torch": torch.__version__}}
    del machine["platform"], machine["threads"]
    content = {
        "command": "python benchmarks/reference_speed.py" + (" --compile" if arguments.compile else ""),
        "date": date.today().isoformat(),
        "machine": machine,
        "shape": [arguments.size, arguments.size],
        "bytes_equal": True,
        "rows": rows,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
