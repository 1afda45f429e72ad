"""How much of every network of the whole picture is in FP4: layers, multiply-accumulates, bytes of the weights.

    python -m benchmarks.fp4_share --data camvid=CAMVID --data dsb2018=DSB2018 --data coco_samples=COCO_SAMPLES \
        --data hippocampus=HIPPOCAMPUS --json benchmarks/results/fp4_share_cpu.json

The rows are those of `docs/tables/picture.py`. Each network is built as its sweep trains it, for the classes and the
size of its data set, and counted for one image. Bytes are those of the weights over FP16's: 4.5 bits a weight in FP4,
16 bits for the rest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.sweep_result import machine, macs_in_fp4
from docs.tables.picture import WHOLE_PICTURE
from docs.tables.results import document
from fp4deploy.experiments.sweep.spec import load_sweep
from fp4deploy.graph.costs import MULTIPLYING
from fp4deploy.models.build import network_for
from fp4deploy.precisions import ELEMENT_BYTES
from fp4deploy.qat import prepare_as, quantized_layers
from fp4deploy.train.config import Config, with_settings
from fp4deploy.train.models import model_card, open_splits
from fp4deploy.train.volumes import sized

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
WITHOUT_VARIANTS = {"dsb2018_h200": ("sweep_dsb2018.yaml", "qat")}  # an older form of the file
NOT_OF_THE_NETWORK = ("model.init", "telemetry.")


def main() -> None:
    """Count every network whose data is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", default=[], metavar="SET=FOLDER")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    folders = dict(each.split("=", 1) for each in options.data)
    rows = {}
    for label, name, _, _, variant in WHOLE_PICTURE:
        file, config = configuration(name, variant)
        found = [folders[each] for each in folders if f"_{each}" in file]
        if not found:
            raise SystemExit(f"{label}: no --data of the set of {file}")
        rows[label] = counted(with_settings(config, [f"data.root={found[0]}"]))
        print(label, rows[label])
    sets = " ".join(f"--data {each}={each.upper()}" for each in folders)
    command = f"python -m benchmarks.fp4_share {sets} --json {options.json}"
    options.json.write_text(
        json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


def configuration(name: str, variant: str) -> tuple[str, Config]:
    """The sweep's file of a result, and the configuration of its variant."""
    found = document(name)
    file = found.get("file") or WITHOUT_VARIANTS[name][0]
    variant = variant if "variants" in found else WITHOUT_VARIANTS[name][1]
    sets = tuple(each for each in found.get("settings") or () if not each.startswith(NOT_OF_THE_NETWORK))
    sweep = load_sweep(CONFIGS / file, sets)
    return file, sweep.config(sweep.variant(variant), 0)


@torch.no_grad()
def counted(config: Config) -> dict[str, Any]:
    """Layers in FP4 and all, share of the multiply-accumulates, bytes over FP16's."""
    train, _ = open_splits(config)
    config = sized(config, train)
    card = model_card(config, "nvfp4", train)
    network = prepare_as(network_for(card, "The configuration"), card).eval()
    quantized = quantized_layers(network)
    layers = [each for each in network.modules() if isinstance(each, MULTIPLYING)]
    weights = sum(layer.weight.numel() for layer in quantized.values())
    total = sum(value.numel() for value in network.parameters())
    return {
        "layers": [len(quantized), len(layers)],
        "macs": macs_in_fp4(network, card.input_shape),
        "bytes": round((ELEMENT_BYTES["nvfp4"] * weights + 2 * (total - weights)) / (2 * total), 4),
    }


if __name__ == "__main__":
    main()
