"""A small language model trained with every recipe that quantises gradients, beside FP16 and BF16, over several seeds.

    python -m benchmarks.language_model --text gcide.dict.dz --json lm.json --curves lm.png
    python -m benchmarks.language_model --text gcide.dict.dz --json 1.json --recipes fp16 tetrajet --seeds 0 --minutes 8
    python -m benchmarks.language_model --json lm.json --merge 1.json 2.json

The text is the GNU Collaborative International Dictionary of English: 40 million bytes, each of which is a token.
Where the file is not there, it is taken from Debian's package dict-gcide (apt-get download). Of every twenty parts of
64 KiB one is for validation. The network is a decoder of the usual form (norms before, GELU, no dropout); quantised are
the four linear layers of every block. All recipes of a seed start from the same weights and read the same random
windows, as many tokens as the text has. AdamW, warm-up and half a cosine; gradients are emulated, autocast is FP16 (of
`bf16` BF16), on a CPU none. The score is the mean of -log2 p of the next byte at the end, on fixed windows.

Rows, gaps and pieces are as of `benchmarks.claim`; gaps are in hundredths of a bit. A training whose loss is not finite
in 30 evaluated steps in a row has ended, and its row has an error in place of the score.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import multiprocessing
import subprocess
import tarfile
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.claim import CONTROL, draw_curves, first_origin, gaps, merged, rounded, write
from fp4deploy.experiments.sweep.results import gap_text
from fp4deploy.qat import RECIPES, prepare, quantized_layers
from fp4deploy.qat.oscillation import OscillationResets
from fp4deploy.qat.outlier_selection import OutlierSelection
from fp4deploy.train.cuda_graph import CapturedStep
from fp4deploy.train.optimizer import make_optimizer, set_learning_rate, skip_where
from fp4deploy.train.schedule import learning_rate

PACKAGE, MEMBER = "dict-gcide", "./usr/share/dictd/gcide.dict.dz"
PART, EVERY = 1 << 16, 20
RECIPES_HERE = (
    CONTROL, "bf16", *(name for name, recipe in RECIPES.items() if recipe.dgrad_gradient or recipe.wgrad_gradient),
)  # fmt: skip
LABELS = {"decoder": "language model"}
DATA = "gcide"
MAX_NOT_FINITE = 30
SHOWN = (("loss", "loss of the training, bits per byte", 1.0), ("bits", "validation, bits per byte", 1.0))


@dataclass(frozen=True)
class Settings:
    """Sizes of network and training; the default reads 39 million tokens."""

    width: int = 384
    depth: int = 6
    heads: int = 6
    context: int = 256
    batch: int = 64
    steps: int = 2400
    lr: float = 1e-3
    weight_decay: float = 0.1
    warmup: float = 0.05
    evaluate_every: int = 200
    windows: int = 1024


def corpus(path: Path) -> torch.Tensor:
    """The text, uint8 [bytes]; fetched from the package of the system where there is no such file."""
    if not path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
            (package,) = Path(folder).glob("*.deb")
            files = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            found = archive.extractfile(MEMBER)
            assert found is not None
            path.write_bytes(found.read())
    content = path.read_bytes()
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def split(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation, uint8 [bytes] each."""
    parts = text.split(PART)
    return torch.cat([part for at, part in enumerate(parts) if at % EVERY]), torch.cat(parts[::EVERY])


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input: [N, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next [N, T, width]."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.contract(F.gelu(self.expand(self.norms[1](x))))
        return result


class Decoder(nn.Module):
    """Bytes int64 [N, T] -> logits of the next [N, T, 256]."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, settings.width)
        self.places = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.depth))
        self.norm, self.head = nn.LayerNorm(settings.width), nn.Linear(settings.width, 256)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # what is added to the sum of all blocks begins smaller
                deep = name.endswith(("proj.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * settings.depth) if deep else 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Training:
    """One training of one recipe and seed."""

    def __init__(self, recipe: str, seed: int, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        torch.manual_seed(seed)
        model: nn.Module = Decoder(settings)
        if recipe in RECIPES:
            prepare(model, recipe, include=["blocks.*"])
        self.model = model.to(device).train()
        layers = quantized_layers(self.model)
        self.resets = OscillationResets(layers, settings.steps)
        self.selection = OutlierSelection(layers, settings.steps)
        self.optimizer = make_optimizer(self.model, settings.lr, settings.weight_decay)
        self.dtype = torch.bfloat16 if recipe == "bf16" else torch.float16
        self.on_gpu = device.type == "cuda"
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.on_gpu and recipe != "bf16")
        self.loss = torch.zeros((), device=device)
        refusal = None if self.on_gpu else "there is no GPU"
        self.step = CapturedStep(self._compute, self._forget, refusal)

    def loss_of(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats of int64 [N, context + 1]."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.on_gpu):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def _compute(self, windows: torch.Tensor) -> None:
        loss = self.loss_of(windows)
        self.loss.copy_(loss.detach())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.on_gpu and not self.scaler.is_enabled():
            skip_where(self.optimizer, ~torch.isfinite(norm))
        if self.on_gpu or torch.isfinite(norm):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _forget(self) -> None:
        """After a capture that failed."""
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler._per_optimizer_states.clear()

    @torch.inference_mode()
    def bits(self, windows: torch.Tensor) -> float:
        """Bits per byte on validation windows."""
        self.model.eval()
        losses = [self.loss_of(part.to(self.device).long()) for part in windows.split(self.settings.batch)]
        self.model.train()
        return float(torch.stack(losses).mean()) / math.log(2)

    def run(self, seed: int, train: torch.Tensor, val: torch.Tensor) -> dict[str, Any]:
        """The curve, and the score or why there is none."""
        settings, draw = self.settings, torch.Generator().manual_seed(seed)
        span = torch.arange(settings.context + 1)
        fixed = val[torch.linspace(0, len(val) - len(span), settings.windows).long()[:, None] + span]
        data, span = train.to(self.device), span.to(self.device)
        curve: list[dict[str, Any]] = []
        start, wrong = time.perf_counter(), 0
        for step in range(settings.steps):
            set_learning_rate(self.optimizer, learning_rate(step, settings.steps, settings.lr, settings.warmup))
            if self.selection.update(step):
                self.step.release()
            starts = torch.randint(len(train) - len(span), (settings.batch, 1), generator=draw).to(self.device)
            self.step(data[starts + span].long())
            self.resets.update(step)
            if (step + 1) % 10 and step + 1 < settings.steps:
                continue
            loss = float(self.loss) / math.log(2)
            wrong = 0 if math.isfinite(loss) else wrong + 1
            last = step + 1 == settings.steps or wrong == MAX_NOT_FINITE
            if last or (step + 1) % settings.evaluate_every == 0:
                finite = {"loss": rounded(loss), "bits": rounded(self.bits(fixed))}
                curve.append({"epoch": step + 1} | {key: each for key, each in finite.items() if math.isfinite(each)})
            if wrong == MAX_NOT_FINITE:
                break
        end = {"seconds": round(time.perf_counter() - start, 1), "graph": self.step.refusal or "yes", "curve": curve}
        if "bits" not in curve[-1] or wrong:
            return {"error": f"the loss is not finite at step {curve[-1]['epoch']}", **end}
        return {"bits": self.bits(fixed), **end}


_device = torch.device("cpu")  # of this process


def _take(devices: Any) -> None:
    global _device
    _device = torch.device(devices.get())
    torch.set_num_threads(1)
    if _device.type == "cuda":
        torch.cuda.set_device(_device)


def _train(recipe: str, seed: int, settings: Settings, path: Path) -> dict[str, Any]:
    found: dict[str, Any]
    try:
        found = Training(recipe, seed, settings, _device).run(seed, *split(corpus(path)))
    except Exception as error:  # one that cannot run must not cost the others
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:300], "seconds": 0.0, "curve": []}
    gpu = torch.cuda.get_device_name(_device) if _device.type == "cuda" else None
    return {"data": DATA, "network": "decoder", "recipe": recipe, "seed": seed, **found, "gpu": gpu}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, and print the gaps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text, or where to keep what is fetched; none: no training")
    parser.add_argument("--json", type=Path, required=True, help="results, added to")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="JSON", help="take over the rows of these")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES_HERE, default=RECIPES_HERE, metavar="RECIPE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=1e6, help="what has not ended then is lost")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, shared out among the GPUs")
    parser.add_argument("--curves", type=Path, metavar="FILE.png")
    for name, value in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args(arguments)
    settings = Settings(**{name: getattr(options, name) for name in vars(Settings())})
    usual = vars(Settings())
    changed = [f"--{name.replace('_', '-')} {value}" for name, value in vars(settings).items() if value != usual[name]]
    command = " ".join(["python -m benchmarks.language_model --text gcide.dict.dz", *changed])
    for path in (options.json, *options.merge):
        known = json.loads(path.read_text(encoding="utf-8")).get("settings") if path.is_file() else None
        if known not in (None, vars(settings)):
            raise SystemExit(f"{path} is of other settings, {known}. Give them again, or write another file.")
    rows = merged([options.json, *options.merge])

    def keep() -> None:
        about = {"settings": vars(settings), "gaps_bits": gaps(rows, "bits")}
        about |= {} if options.text else first_origin([options.json, *options.merge])
        write(options.json, f"{command} --json {options.json.name}", rows, LABELS, **about)

    if options.text is not None:
        corpus(options.text)
        done = {(row["recipe"], row["seed"]) for row in rows}
        tasks = [(recipe, seed) for seed in options.seeds for recipe in options.recipes if (recipe, seed) not in done]
        for row in trained(tasks, settings, options.text, options.jobs, 60 * options.minutes):
            rows.append(row)
            result = row.get("bits", row.get("error"))
            print(f"{row['recipe']}, seed {row['seed']}: {result}, {row['seconds']} s", flush=True)
            keep()
    if options.text or options.merge:
        keep()
    for each in gaps(rows, "bits"):
        print(f"{each['recipe']}: hundredths of a bit more than FP16: {gap_text(each)}")
    if options.curves:
        draw_curves(rows, LABELS, options.curves, SHOWN, "step")


def trained(tasks: Sequence[tuple[str, int]], settings: Settings, path: Path, jobs: int, seconds: float) -> Any:
    """The row of each training as it ends; those that have not ended after so many seconds are killed."""
    context = multiprocessing.get_context("spawn")
    devices = context.Queue()
    for number in range(jobs):
        devices.put(f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
    pool = ProcessPoolExecutor(jobs, context, _take, (devices,))
    try:
        futures = [pool.submit(_train, *task, settings, path) for task in tasks]
        for future in as_completed(futures, timeout=seconds):
            yield future.result()
    except Late:
        print("The time is over; the same command goes on.")
    finally:
        processes = list(pool._processes.values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


if __name__ == "__main__":
    main()
