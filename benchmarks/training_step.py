"""One training step of the UNet: FP16 and NVFP4, in every form that a reader may compare with, in one process.

    python benchmarks/training_step.py --json benchmarks/results/training_step_h200.json

Batch 16, 352 x 480, 12 classes, FP16 autocast over FP32 weights, the loss and the optimiser of `fp4deploy train`,
gradients clipped. Medians of whole steps by CUDA events after a warm-up; the input is random and stays on the GPU. With
`--autocast fp16 bf16` each row is also measured under BF16 autocast, which has no loss scaler; `over_fp16` is its time
over that under FP16, in CUDA graphs where there are both.

| in a name | |
|---|---|
| `NCHW`, `channels_last` | memory format of the plain forward; the fused one is channels_last |
| `compiled`, `max-autotune` | the model by `torch.compile` in that mode; the rest of the step as in the other rows |
| `general` | by torch.compile with the passes of `qat.fusion`, as every other network |
| `fused` | our forward and backward (`qat.fused_unet`), FP16 and NVFP4 alike |
| `recomputed` | inputs of convolutions computed again in the backward (`train.recompute`) |
| `torch's loss` | instead of the kernels of `plugins.losses` torch's operators, `compiled` by `torch.compile` |
| `reference` | quantised by the torch reference instead of the kernels |
| `delayed`, `dynamic`, `learned`, `2-D`, `4/6` | instead of nvfp4_qat the recipe of `RECIPES` |
| `ModelOpt` | its NVFP4 default configuration (blocks along the width of the image), where it is installed |

Each row is timed launched from Python, `ms`, and as one CUDA graph of the whole step, `graph_ms`, where it can be
captured; what refuses says so in `graph_error`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import captured, command, machine, torch_loss
from torch import nn

from fp4deploy.models import build_unet
from fp4deploy.qat import prepare
from fp4deploy.qat.fused_unet import fuse_unet
from fp4deploy.qat.fusion.compiler import backend
from fp4deploy.qat.fusion.fuse import mark_fusible
from fp4deploy.rest import rest_of
from fp4deploy.train.losses.segmentation import SegmentationLoss
from fp4deploy.train.optimizer import skip_where

BATCH, HEIGHT, WIDTH, CLASSES = 16, 352, 480, 12
RECIPES = {
    "delayed": "nvfp4_qat_delayed",
    "dynamic": "nvfp4_qat+dynamic",
    "learned": "nvfp4_qat+learned",
    "2-D": "nvfp4_qat_2d",
    "4/6": "nvfp4_4o6_qat",
}
OURS, TORCH, COMPILED = "kernels", "torch", "torch.compile"  # the loss
AUTOCAST = ("fp16", "bf16")


def make_step(
    model: nn.Module,
    layout: torch.memory_format,
    batch: int = BATCH,
    compiled_loss: bool = False,
    autocast: str = "fp16",
    size: Sequence[int] = (HEIGHT, WIDTH),
    channels: int = 3,
    classes: int = CLASSES,
) -> Callable[[], None]:
    """A whole training step of `model` on one random batch of images or volumes, where its parameters are."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(batch, channels, *size, device=device, generator=generator).to(memory_format=layout)
    masks = torch.randint(0, classes, (batch, *size), device=device, generator=generator)
    loss: Any = torch.compile(SegmentationLoss().of) if compiled_loss else SegmentationLoss()

    def logits() -> torch.Tensor:
        found = model(images)
        return found["out"] if isinstance(found, dict) else found  # type: ignore[no-any-return]

    return step_of(model, logits, lambda found: loss(found, masks), autocast)


def step_of(
    model: nn.Module,
    forward: Callable[[], torch.Tensor],
    loss: Callable[[torch.Tensor], torch.Tensor],
    autocast: str = "fp16",
) -> Callable[[], None]:
    """A whole training step: `forward` under autocast, the loss of what it returns, backward and optimiser."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True, capturable=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=autocast == "fp16")

    def step() -> None:
        with torch.autocast(device.type, dtype=rest_of(autocast).dtype):
            logits = forward()
        value = loss(logits)
        del logits
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not scaler.is_enabled():
            skip_where(optimizer, ~torch.isfinite(norm))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def median_ms(step: Callable[[], Any], repeats: int = 21, warm: int = 8) -> float:
    for _ in range(warm):
        step()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def graph_ms(step: Callable[[], None], repeats: int) -> dict[str, Any]:
    """The same of a CUDA graph of the whole step, or why there is none."""
    try:
        return {"graph_ms": median_ms(captured(step), repeats, 2)}
    except Exception as error:
        torch.cuda.synchronize()
        return {"graph_error": f"{type(error).__name__}: {error}"[:200]}


def modelopt_model(scale: float) -> nn.Module:
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]

    model = build_unet(CLASSES, scale).cuda()
    images = torch.randn(2, 3, HEIGHT, WIDTH, device="cuda")
    return mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda quantized: quantized(images))


Case = tuple[str, Callable[[], nn.Module], str, torch.memory_format, str]


def cases(scale: float) -> list[Case]:
    """Rows: name, how its model is made, whose loss, memory format, FP4DEPLOY_KERNELS.

    Rows that take longest stand last: a run that is cut off lacks them.
    """

    def plain(
        precision: str,
        fused: bool,
        recipe: str = "nvfp4_qat",
        layout: torch.memory_format = torch.channels_last,
        recompute: bool = False,
    ) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = build_unet(CLASSES, scale)
        if precision == "nvfp4":
            prepare(model, recipe)
        model = model.cuda().to(memory_format=layout)  # type: ignore[call-overload]
        return fuse_unet(model, recompute) if fused else model

    def compiled(mode: str) -> nn.Module:
        return torch.compile(plain("fp16", False), mode=mode, dynamic=False)  # type: ignore[return-value]

    def general(precision: str) -> nn.Module:
        model = plain(precision, False)
        mark_fusible(model)
        model.compile(backend=backend(), dynamic=False)
        return model

    nhwc, nchw = torch.channels_last, torch.contiguous_format
    return [
        ("fp16 fused", lambda: plain("fp16", True), OURS, nhwc, "on"),
        ("fp16 fused, recomputed", lambda: plain("fp16", True, recompute=True), OURS, nhwc, "on"),
        ("nvfp4 fused", lambda: plain("nvfp4", True), OURS, nhwc, "on"),
        ("nvfp4 fused, recomputed", lambda: plain("nvfp4", True, recompute=True), OURS, nhwc, "on"),
        *(
            (f"nvfp4 fused, {name}", partial(plain, "nvfp4", True, recipe), OURS, nhwc, "on")
            for name, recipe in RECIPES.items()
        ),
        ("fp16 fused, torch's loss", lambda: plain("fp16", True), TORCH, nhwc, "on"),
        ("nvfp4 fused, torch's loss", lambda: plain("nvfp4", True), TORCH, nhwc, "on"),
        ("fp16 unfused, NCHW", lambda: plain("fp16", False, layout=nchw), OURS, nchw, "on"),
        ("fp16 unfused", lambda: plain("fp16", False), OURS, nhwc, "on"),
        ("fp16 compiled", lambda: compiled("default"), OURS, nhwc, "on"),
        ("fp16 general", lambda: general("fp16"), OURS, nhwc, "on"),
        ("nvfp4 general", lambda: general("nvfp4"), OURS, nhwc, "on"),
        ("nvfp4 unfused", lambda: plain("nvfp4", False), OURS, nhwc, "on"),
        ("nvfp4 unfused, delayed", lambda: plain("nvfp4", False, "nvfp4_qat_delayed"), OURS, nhwc, "on"),
        ("peer: ModelOpt NVFP4 QAT", lambda: modelopt_model(scale), OURS, nchw, "on"),
        ("peer: ModelOpt NVFP4 QAT, channels_last", lambda: modelopt_model(scale), OURS, nhwc, "on"),
        ("fp16 fused, torch's loss compiled", lambda: plain("fp16", True), COMPILED, nhwc, "on"),
        ("nvfp4 unfused, reference", lambda: plain("nvfp4", False), OURS, nhwc, "off"),
        ("peer: ModelOpt NVFP4 QAT, compiled", lambda: torch.compile(modelopt_model(scale)), OURS, nchw, "on"),
        ("fp16 max-autotune", lambda: compiled("max-autotune-no-cudagraphs"), OURS, nhwc, "on"),
    ]


def measure(scale: float, case: Case, repeats: int, autocast: str = "fp16") -> dict[str, Any]:
    """One row: times and peak memory. The model is freed at the end."""
    name, make, loss, layout, kernels = case
    os.environ["FP4DEPLOY_KERNELS"] = kernels
    how = nullcontext() if loss == OURS else torch_loss()
    row: dict[str, Any] = {"scale": scale, "case": name, "autocast": autocast}
    try:
        model = make().train().to(memory_format=layout)  # type: ignore[call-overload]
        step = make_step(model, layout, compiled_loss=loss == COMPILED, autocast=autocast)
        with how:
            row |= timed(step, repeats)
        graph = f"graph {row['graph_ms']:8.2f} ms" if "graph_ms" in row else row["graph_error"][:60]
        told = f"{row['ms']:8.2f} ms   peak {row['peak_gb']:.2f} GB   {graph}"
    except Exception as error:  # a peer may be missing; say so and go on
        row["error"] = told = f"{type(error).__name__}: {error}"[:300]
    print(f"scale {scale}  {name:28s} {autocast} {told[:160]}", flush=True)
    torch.cuda.empty_cache()
    return row


def timed(step: Callable[[], None], repeats: int) -> dict[str, Any]:
    """Milliseconds launched and in a graph, and peak gigabytes of the former, after the steps in which cuDNN tries."""
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    found = {"ms": median_ms(step, repeats), "peak_gb": torch.cuda.max_memory_allocated() / 1e9}
    return found | graph_ms(step, repeats)


def over_fp16(rows: Sequence[dict[str, Any]], *same: str) -> None:
    """Add to rows of another autocast their time over that of the FP16 row that is equal in the keys `same`."""
    fp16 = {tuple(row[key] for key in same): row for row in rows if row["autocast"] == "fp16"}
    for row in rows:
        beside = fp16.get(tuple(row[key] for key in same), {})
        key = next((key for key in ("graph_ms", "ms") if key in row and key in beside), None)
        if key and row["autocast"] != "fp16":
            row["over_fp16"] = row[key] / beside[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 0.25])
    parser.add_argument("--cases", nargs="+", default=[], help="names of rows; all by default")
    parser.add_argument("--autocast", nargs="+", choices=AUTOCAST, default=["fp16"], help="default: fp16")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun after so many")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    names = [case[0] for case in cases(1.0)]
    if unknown := set(arguments.cases) - set(names):
        raise SystemExit(f"No row {sorted(unknown)}. Rows: {', '.join(names)}.")
    chosen = [index for index, name in enumerate(names) if not arguments.cases or name in arguments.cases]
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for index, scale, autocast in itertools.product(chosen, arguments.scales, arguments.autocast):
        if time.perf_counter() - began > arguments.seconds:
            break
        rows.append(measure(scale, cases(scale)[index], arguments.repeats, autocast))
        over_fp16(rows, "scale", "case")
        if arguments.json:  # after each: a run that is cut off keeps what it has
            report = {"command": command("--seconds"), "machine": machine(), "rows": rows}
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        if "over_fp16" in row:
            print(f"scale {row['scale']}  {row['case']}  {row['autocast']} / fp16: {row['over_fp16']:.3f}")
    times = {(row["scale"], row["case"]): row.get("ms") for row in rows if row["autocast"] == "fp16"}
    for scale in arguments.scales:
        fp16, nvfp4 = times.get((scale, "fp16 fused")), times.get((scale, "nvfp4 fused"))
        if fp16 and nvfp4:
            print(f"scale {scale}  nvfp4 / fp16, fused: {nvfp4 / fp16:.3f}")


if __name__ == "__main__":
    main()
