"""Convolutions of a training step and their gradients: torch's kernel beside that of this package, FP16 and BF16.

    python benchmarks/training_convolutions.py --json benchmarks/results/training_convolutions_h200.json

The fused step of our UNet (`training_step.py`), whose products are kept with their operands where a kernel of this
package computes them (`plugins.gemm.convolution.fastest`), and timed one by one afterwards, in CUDA graphs. `saves`:
what the faster one saves. `difference`: of both results, in the norm over that of torch's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peers import captured, command, machine, median_ms
from training_step import AUTOCAST, cases, make_step

from fp4deploy.plugins.gemm.convolution import fastest


def products(scale: float, autocast: str) -> list[dict[str, Any]]:
    """The products of one step that have a choice, equal ones once, with how often they occur."""
    found: dict[Any, dict[str, Any]] = {}

    def keep(name: tuple[Any, ...], by_torch: Any, own: Any, *_: Any) -> torch.Tensor:
        row = found.setdefault(
            name, {"scale": scale, "autocast": autocast, "name": name, "count": 0, "runs": (by_torch, own)}
        )
        row["count"] += 1
        return by_torch()  # type: ignore[no-any-return]

    model = cases(scale)[0][1]()
    with mock.patch.object(fastest, "_faster", keep):
        make_step(model.train(), torch.channels_last, autocast=autocast)()
    return list(found.values())


def measure(row: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of both; the row without its operands."""
    name, (by_torch, own) = row.pop("name"), row.pop("runs")
    kind, *shapes = name[0], *(tuple(each) for each in name[1:] if isinstance(each, torch.Size))
    row |= {"product": kind, "shapes": shapes}
    with torch.no_grad():
        expected, y = by_torch().float(), own().float()
        row["difference"] = float((y - expected).norm() / expected.norm())
        row["torch_us"], row["own_us"] = (1e3 * median_ms(captured(run)) for run in (by_torch, own))
    row["saves"] = row["count"] * max(0.0, row["torch_us"] - row["own_us"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 0.25])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = []
    for scale in arguments.scales:
        for autocast in AUTOCAST:
            for row in map(measure, products(scale, autocast)):
                rows.append(row)
                times = f"torch {row['torch_us']:7.1f} us, own {row['own_us']:7.1f}"
                print(
                    f"{scale} {autocast} {row['product']:8s} {row['shapes']} x{row['count']} {times}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"command": command(), "machine": machine(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
