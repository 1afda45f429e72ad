"""The first hour with data and weights of one's own, command by command, and what each takes.

    python -m benchmarks.first_hour [--json benchmarks/results/first_hour_cpu.json]

In a temporary folder lie what docs/first-hour.md begins with: photos, masks of 0 and 255 under other names, a network
in a file, and its state dict, which a plain loop of torch trains here. Every command is a process of its own. Seconds
are by the clock; the processor's time is what remains the same on a machine that does other things meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.peers import origin

COMMANDS = (
    "fp4deploy data import --images photos --masks labels --mask-suffix _L --classes floor,ball --val-share 0.2 "
    "--out ball",
    "fp4deploy data check ball",
    "fp4deploy check net.py:make",
    "fp4deploy quantize best.pth --model net.py:make --data photos --size 96",
    "fp4deploy export best.nvfp4-gptq.safetensors --model net.py:make --data photos --portable",
    "fp4deploy bench best.nvfp4-gptq.onnx --baseline best.fp16.safetensors --model net.py:make --data ball "
    "--max-drop 1",
    "fp4deploy build best.nvfp4-gptq.onnx",
    "fp4deploy predict photos --model best.nvfp4-gptq.portable.onnx",
    "fp4deploy train --data ball --model net.py:make --init best.pth --size 96 --epochs 2 "
    "--set train.finetune_epochs=1",
)
PHOTOS = 60
NETWORK = '''"""A small network of two levels."""

import torch
from torch import nn


def block(inputs, outputs):
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.end = block(3, 32), block(32, 64), block(64, 32)
        self.up, self.head = nn.ConvTranspose2d(64, 32, 2, stride=2), nn.Conv2d(32, 2, 1)

    def forward(self, x):
        skip = self.down(x)
        y = self.up(self.middle(nn.functional.max_pool2d(skip, 2)))
        return self.head(self.end(torch.cat([skip, y], 1)))


def make():
    return Net()
'''
TRAINING = '''"""Train the network in a plain loop, and keep its state dict."""

import numpy as np
import torch
from PIL import Image

from net import make

torch.manual_seed(0)
mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
images, masks = [], []
for number in range(48):
    image = Image.open(f"photos/{number:03}.jpg").resize((96, 96))
    mask = Image.open(f"labels/{number:03}_L.png").resize((96, 96), Image.Resampling.NEAREST)
    images.append((torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std)
    masks.append(torch.from_numpy(np.array(mask) > 127).long())
images, masks = torch.stack(images), torch.stack(masks)
network = make()
optimizer = torch.optim.Adam(network.parameters(), 3e-3)
for _ in range(40):
    chosen = torch.randperm(len(images))[:8]
    loss = torch.nn.functional.cross_entropy(network(images[chosen]), masks[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save({"state_dict": network.state_dict(), "loss": loss.item()}, "best.pth")
'''


def main() -> None:
    """Run every command, and print and write what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from fp4deploy.bench.environment import environment

    with tempfile.TemporaryDirectory() as folder:
        begin(Path(folder), PHOTOS)
        run([sys.executable, "train.py"], Path(folder))
        rows = [measured(command, Path(folder)) for command in COMMANDS]
    said = {"command": "python -m benchmarks.first_hour", "machine": environment(), "photos": PHOTOS}
    found = {**origin(), **said, "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def begin(folder: Path, count: int) -> None:
    """Photos of a ball on a noisy floor, their masks, the network and the loop that trains it."""
    draw = np.random.default_rng(0)
    for name in ("photos", "labels"):
        (folder / name).mkdir()
    for number in range(count):
        width, height = draw.integers(110, 160), draw.integers(90, 130)
        photo = Image.fromarray(draw.integers(0, 90, (height, width, 3), dtype=np.uint8))
        mask = Image.new("L", photo.size)
        x, y, radius = draw.integers(20, width - 20), draw.integers(20, height - 20), draw.integers(10, 30)
        for image, colour in ((photo, (200, 180, 40)), (mask, 255)):
            ImageDraw.Draw(image).ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)
        photo.save(folder / "photos" / f"{number:03}.jpg")
        mask.save(folder / "labels" / f"{number:03}_L.png")
    (folder / "net.py").write_text(NETWORK, encoding="utf-8")
    (folder / "train.py").write_text(TRAINING, encoding="utf-8")


def measured(command: str, folder: Path) -> dict[str, float | str]:
    """Seconds and processor seconds of one command."""
    start = time.perf_counter()
    used = run([sys.executable, "-m", "fp4deploy.cli", *shlex.split(command)[1:]], folder)
    row: dict[str, float | str] = {
        "command": command,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(used, 1),
    }
    print(row, flush=True)
    return row


def run(command: list[str], folder: Path) -> float:
    """Processor seconds of a command and its children; the end of this program where it fails."""
    before = os.times()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    main()
