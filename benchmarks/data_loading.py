"""Images a second of the data loader by number of workers, compared with what a training step needs.

    python benchmarks/data_loading.py --config configs/camvid.yaml --data CAMVID --workers 0,4,8,12 [--json FILE]

Reads, decodes (unless the set fits the cache of the configuration), augments and batches exactly as `fp4deploy train`
does, and does nothing with the result. What a step needs is read from benchmarks/results/training_step_h200.json:
batch 16, 352 x 480, on an H200; a loader that gives less leaves that GPU waiting. For other image sizes give the
duration of a step by --step-ms. The first batches, in which workers start and queues fill, are not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

from fp4deploy.data import cache_dataset, open_dataset
from fp4deploy.system.processors import cores
from fp4deploy.train import load_config
from fp4deploy.train.batches import make_loaders
from fp4deploy.train.estimate import loader_speed

STEPS = Path(__file__).parent / "results" / "training_step_h200.json"
CASES = ("fp16 fused", "nvfp4 fused")


def needs(scale: float, batch: int, step_ms: float | None) -> dict[str, float]:
    """Images a second that a step takes, by case; empty where none was measured."""
    if step_ms is not None:
        return {f"a step of {step_ms:g} ms": 1000 * batch / step_ms}
    rows = json.loads(STEPS.read_text())["rows"]
    return {row["case"]: 1000 * 16 / row["ms"] for row in rows if row["scale"] == scale and row["case"] in CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", default="0,2,4,8,12")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = load_config(arguments.config, [f"data.root={json.dumps(str(arguments.data))}"])
    budget = int(config.data.cache_gib * 2**30)
    train, val = (cache_dataset(open_dataset(arguments.data, split), budget) for split in ("train", "val"))
    needed = needs(config.model.scale, config.train.batch_size, arguments.step_ms)
    for case, rate in needed.items():
        print(f"{case}: takes {rate:.0f} images/s")
    rows = []
    for workers in map(int, arguments.workers.split(",")):
        section = config.data.model_copy(update={"workers": workers})
        loader, _ = make_loaders(config.model_copy(update={"data": section}), train, val)
        rate = loader_speed(loader, arguments.batches)
        enough = {case: rate >= need for case, need in needed.items()}
        rows.append({"workers": workers, "images_per_s": rate, "enough_for": enough})
        verdict = ", ".join(f"{'enough' if yes else 'too slow'} for {case}" for case, yes in enough.items())
        print(f"{workers:3d} workers  {rate:8.1f} images/s  {verdict}", flush=True)
    if arguments.json:
        report = {
            "command": "python benchmarks/data_loading.py",
            "config": arguments.config.name,
            "cached": type(train).__name__ == "CachedDataset",
            "cpu_cores": cores(),
            "python": platform.python_version(),
            "takes_images_per_s": needed,
            "rows": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
