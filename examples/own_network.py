"""An own network, loss and training loop: only `prepare`, `calibrate` and `fuse` come from fp4deploy, then export.

    python examples/own_network.py --out own            a plain PyTorch loop
    python examples/own_network.py --out own --lightning    the same network in a Lightning module

The network has no place in any library, two outputs, and a loss that fp4deploy knows nothing of. It leaves
`model.onnx`, `model.portable.onnx`, `model.fp4` and, where TensorRT-RTX is installed, `model.plan` with its ledger.
Scenes are generated: bright discs on noise, to be found, and the distance to their edges.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fp4deploy as fd

SIZE = 48
Outputs = dict[str, torch.Tensor]


class Discs(Dataset[tuple[torch.Tensor, Outputs]]):
    """Images [3, 48, 48], masks [48, 48] of class ids, and distances [1, 48, 48] to the edge of the disc."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Outputs]:
        generator = torch.Generator().manual_seed(self.seed * 10_000 + index)
        centre, radius = torch.randint(12, SIZE - 12, (2, 1, 1), generator=generator), 6 + index % 6
        places = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
        inside = radius - (places - centre).float().norm(dim=0)
        image = 0.5 * torch.randn(3, SIZE, SIZE, generator=generator) + (inside > 0) * 1.5
        return image, {"classes": (inside > 0).long(), "edges": inside.clamp(min=0)[None] / radius}


class TwoHeads(nn.Module):
    """A residual encoder with squeeze-excitation, and two heads: classes and distances."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 5, 2, 2, bias=False), nn.BatchNorm2d(width), nn.SiLU())
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, width)
        self.second = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.gate = nn.Sequential(nn.Conv2d(width, 16, 1), nn.ReLU(), nn.Conv2d(16, width, 1), nn.Sigmoid())
        self.up = nn.Conv2d(width, 4 * width, 1)
        self.classes, self.edges = nn.Conv2d(width, 2, 1), nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> Outputs:
        x = self.stem(x)
        y = self.second(F.silu(self.norm(self.first(x))))
        x = torch.relu(x + y * self.gate(y.mean((2, 3), keepdim=True)))
        x = F.pixel_shuffle(self.up(x), 2)
        return {"classes": self.classes(x), "edges": self.edges(x)}


def loss_of(outputs: Outputs, wanted: Outputs) -> torch.Tensor:
    """Cross-entropy of the classes and a smooth distance of the edges."""
    edges = F.smooth_l1_loss(outputs["edges"], wanted["edges"])
    return F.cross_entropy(outputs["classes"], wanted["classes"]) + edges


def loaders(images: int) -> tuple[DataLoader[tuple[torch.Tensor, Outputs]], torch.Tensor]:
    """Batches to learn, and images to verify on."""
    torch.manual_seed(0)
    return DataLoader(Discs(images, 0), batch_size=8, shuffle=True), next(iter(DataLoader(Discs(4, 1), 4)))[0]


def train(model: nn.Module, batches: DataLoader[tuple[torch.Tensor, Outputs]], epochs: int) -> Iterator[float]:
    """A plain loop; the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(epochs):
        for images, wanted in batches:
            loss = loss_of(model(images), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()


def train_with_lightning(model: nn.Module, batches: DataLoader[tuple[torch.Tensor, Outputs]], epochs: int) -> float:
    """The same in Lightning: the prepared network is an ordinary module. Returns the last loss."""
    import lightning

    class Segmenter(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: tuple[torch.Tensor, Outputs], number: int) -> torch.Tensor:
            self.loss = loss_of(self.network(batch[0]), batch[1])
            return self.loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=2e-3)

    segmenter = Segmenter()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(segmenter, batches)
    return float(segmenter.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("own"))
    parser.add_argument("--images", type=int, default=64, help="to learn")
    parser.add_argument("--epochs", type=int, default=4, help="in full precision, and again in NVFP4")
    parser.add_argument("--lightning", action="store_true", help="let Lightning run the loop")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    batches, images = loaders(options.images)

    model = TwoHeads()
    before = list(train(model, batches, options.epochs))
    fd.prepare(model, "nvfp4_qat", exclude=["classes", "edges"])  # both heads stay in FP16
    fd.calibrate(model, batches)
    fd.fuse(model)  # on a GPU; nothing without one
    last = (
        train_with_lightning(model, batches, options.epochs)
        if options.lightning
        else list(train(model, batches, options.epochs))[-1]
    )
    print(f"loss: {before[0]:.3f}, {before[-1]:.3f} in full precision, {last:.3f} in NVFP4")

    exported = fd.export_onnx(model, images, options.out / "model.onnx", portable=True)
    packed = fd.pack(model, options.out / "model.fp4", example_inputs=images)
    assert exported.verification is not None
    assert packed.verification is not None
    print(f"ONNX: {exported.fp4_layers} layers in FP4, {exported.verification.sentence()}")
    print(f"packed: {packed.verification.sentence()}")
    if find_spec("tensorrt_rtx") is not None:
        print(fd.build_engine(options.out / "model.onnx", options.out / "model.plan", conv="gemm").ledger.summary())
    for name in ("model.portable.onnx", "model.fp4"):
        classes = fd.open_runtime(options.out / name).infer(images.numpy())
        print(f"{name}: {(classes.argmax(1) > 0).mean():.1%} of the pixels are in discs")


if __name__ == "__main__":
    main()
