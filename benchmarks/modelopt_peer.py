"""NVIDIA ModelOpt's PTQ, QAT and QAD beside this project's: one FP16 checkpoint, one training loop, one evaluation.

    python -m benchmarks.modelopt_peer --data CAMVID --config configs/camvid.yaml --set seed=0 --json seed0.json
    python -m benchmarks.ptq --gather seed0.json seed1.json seed2.json --command COMMAND --json FILE

Trains FP16 first (`--epochs`, the settings of `--config`), or takes `--checkpoint`. Placements:

| placement | trained |
|---|---|
| `ptq` | no |
| `qat` | `train.finetune_epochs` on the labels |
| `qad` | the same, and the divergence from the FP16 model's softmax with weight 1 |
| `control` | as `qat`, without quantisation |

Methods quantise the same layers, those that `nvfp4_qat` chooses, and calibrate on the same images of the training
split: `nvfp4_qat`; `sweep` with the correction of norms; `modelopt`, with the quantisers of its NVFP4_DEFAULT_CFG; and
`imported`, which is what `modelopt` gave, taken over by `from_modelopt`: its weights and amaxes, blocked along the
input channels. ModelOpt 0.47 cuts the blocks of a convolution along the kernel's and the image's width, so that
`modelopt` is the accuracy of a simulation which no tensor core can run. All are trained by `train.Trainer` with the
settings of `--config`, without the fused kernels, since ModelOpt's layers have none.

A drop is FP16 minus the row, points of mIoU on `--split`, with the 95 % interval of the gate's bootstrap over images.
The file is written after every row. ModelOpt's NVFP4 needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.ptq import add_arguments, measure, opened, train, write
from fp4deploy.bench.environment import environment
from fp4deploy.bench.gate.bootstrap import paired_drop, value
from fp4deploy.data import cache_dataset
from fp4deploy.interop.modelopt import OPERANDS, from_modelopt, quantizers_in
from fp4deploy.models import load_weights, read_card
from fp4deploy.models.checkpoint import network_of
from fp4deploy.ptq import quantize
from fp4deploy.qat import calibrate, layer_plan, prepare
from fp4deploy.requirements import MODELOPT
from fp4deploy.runs import create_run
from fp4deploy.train import load_config
from fp4deploy.train.batches import make_loaders
from fp4deploy.train.config import with_settings
from fp4deploy.train.distillation import make_auxiliary_losses
from fp4deploy.train.loop import Trainer
from fp4deploy.train.models import open_splits
from fp4deploy.train.schedule import training_job
from fp4deploy.train.tasks import class_weights, make_task

ROWS = (  # placement, method, correction
    ("ptq", "nvfp4_qat", "none"),
    ("ptq", "sweep", "norm"),
    ("ptq", "modelopt", "none"),
    ("qat", "modelopt", "none"),
    ("qat", "nvfp4_qat", "none"),
    ("qad", "modelopt", "none"),
    ("qad", "nvfp4_qat", "none"),
    ("control", "fp16", "none"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    options = parser.parse_args()
    MODELOPT.require("this benchmark")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or train(options, Path(folder))
        card, test, images = opened(options, checkpoint, device)
        fine_tune = fine_tuning(options, checkpoint, Path(folder))

        def fp16() -> nn.Module:
            model = network_of(checkpoint, card)
            load_weights(model, checkpoint)
            return model.to(device).eval()

        counts = measure(fp16(), test, card.class_names, device)
        document: dict[str, Any] = {
            "command": " ".join(["python -m benchmarks.modelopt_peer", *sys.argv[1:]]),
            "split": options.split,
            "images": len(test),
            "calibration_images": sum(map(len, images)),
            "scale": card.scale,
            "epochs": options.epochs if options.checkpoint is None else None,
            "environment": environment(),
            "fp16_miou": value(counts),
            "rows": [],
        }
        for placement, method, correction in ROWS:
            start = time.monotonic()
            models = {method: fp16()}
            QUANTIZE[method](models[method], images)
            if placement != "ptq":
                fine_tune(models[method], f"{placement}_{method}", placement == "qad")
            seconds = round(time.monotonic() - start, 1)
            if method == "modelopt":
                models["imported"] = fp16()
                from_modelopt(models["imported"], quantizers_in(models[method]))
            for name, model in models.items():
                drop = paired_drop(counts, measure(model, test, card.class_names, device)).metric
                row = {"placement": placement, "method": name, "correction": correction, "seconds": seconds}
                row |= {key: round(100 * getattr(drop, key), 3) for key in ("drop", "low", "high")}
                document["rows"].append(row)
                print(row, flush=True)
            write(options.json, document)


def prepared(model: nn.Module, images: list[torch.Tensor]) -> None:
    """The layers of `nvfp4_qat`, in place, with static amaxes of the images."""
    calibrate(prepare(model, "nvfp4_qat"), images)


def modelopt_prepared(model: nn.Module, images: list[torch.Tensor]) -> None:
    """The same layers with ModelOpt's default quantisers for NVFP4, in place, with static amaxes of the images."""
    import modelopt.torch.quantization as mtq

    default: Any = mtq.NVFP4_DEFAULT_CFG
    by_name = {entry["quantizer_name"]: entry.get("cfg") for entry in default["quant_cfg"]}
    names = [plan.name for plan in layer_plan(model) if plan.precision == "FP4"]
    chosen = [
        {"quantizer_name": f"{name}.{operand}_quantizer", "cfg": by_name[f"*{operand}_quantizer"]}
        for name in names
        for operand in OPERANDS
    ]
    config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *chosen], "algorithm": default["algorithm"]}
    mtq.quantize(model, config, lambda network: [network(batch) for batch in images])


QUANTIZE: dict[str, Callable[[nn.Module, list[torch.Tensor]], object]] = {
    "nvfp4_qat": prepared,
    "sweep": lambda model, images: quantize(model, images, "sweep", correction="norm"),
    "modelopt": modelopt_prepared,
    "fp16": lambda model, images: None,
}


def fine_tuning(options: argparse.Namespace, checkpoint: Path, folder: Path) -> Callable[[nn.Module, str, bool], None]:
    """A function that trains a model under a name, distilled or not, and leaves the weights of its best epoch in it."""
    config = load_config(options.config, [f"data.root={options.data}", "train.fused=false", *options.set])
    card, run = read_card(checkpoint), create_run(folder / "tuned")
    train_data, val_data = open_splits(config)
    budget = int(config.data.cache_gib * 2**30)
    loaders = make_loaders(config, cache_dataset(train_data, budget), cache_dataset(val_data, budget))
    task = make_task(config, card, val_data, class_weights(config, run, loaders[0].source))

    def fine_tune(model: nn.Module, name: str, distilled: bool) -> None:
        chosen = with_settings(config, [f"distill.weight={int(distilled)}"])
        auxiliary = make_auxiliary_losses(chosen, "nvfp4", card.class_names, lambda: checkpoint)
        torch.manual_seed(config.seed)
        job = replace(training_job(chosen, run, "fp16_control"), model=name, folder=run.model_dir(name))
        Trainer(job, model, card, chosen.train, loaders, task, auxiliary).run(resume=False)
        model.load_state_dict(load_file(job.checkpoint))

    return fine_tune


if __name__ == "__main__":
    main()
