"""Frames to masks beside the network: what lies around a network is part of how fast it is.

    frames uint8 [N, H, W, 3] -> copied -> resized, normalised -> network -> enlarged, argmax -> copied: masks [N, H, W]

`Predictor` resizes by Pillow and decides classes on the host, one image after another. Here both are computed on the
device of a checkpoint or a packed network: on a GPU resizing is compiled and classes are one kernel, no logits are
copied, and frames of the next batch are copied and prepared, and masks of the last one copied, on streams of their own.
ONNX Runtime and engines take arrays: of them both are computed on the CPU, and nothing is overlapped.

Resizing is Pillow's: antialiased bilinear weights along one axis and then along the other (`_taps_of`), rounded to 8
bits after each, in whole numbers, so that a network reads the bytes that it was evaluated on. Classes are those of
`predict` of the same logits, bit for bit (`plugins.classes.class_map`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fp4deploy.bench.environment import cpu_name
from fp4deploy.bench.runtimes.protocol import Runtime
from fp4deploy.data.augmentation.transforms import scale_and_offset
from fp4deploy.data.sample import Pixels, class_type
from fp4deploy.errors import InputError
from fp4deploy.plugins.classes.class_map import class_map
from fp4deploy.system.processors import cores

SLEEP = 1_000_000  # cycles of a GPU: longer than it takes to launch a part
AHEAD = 2  # batches whose work is queued while the host waits for an earlier one
Taps = tuple[list[Tensor], list[Tensor]]  # places and weights of each tap
SAMPLED = 4  # batches of images among which frames of one size are looked for
BITS = 22  # of a weight below one, as Pillow has it
PARTS = ("copy in", "prepare", "network", "classes", "copy out")


class OnDevice(Protocol):
    """A runtime that also takes tensors: `PackedRuntime`, `TorchRuntime`."""

    @property
    def where(self) -> torch.device:
        """What it computes on."""
        ...

    def on_device(self, images: Tensor) -> Tensor:
        """Logits of images that lie there; the next call may overwrite them."""
        ...


@dataclass(frozen=True)
class PartTimes:
    """Milliseconds of a batch by part, one after another, each to its end; and of the same parts overlapped.

    overlapped: None where nothing is: outside of a GPU.
    """

    parts: dict[str, float]
    overlapped: float | None
    batch: int

    def to_json(self) -> dict[str, Any]:
        """As `bench --pipeline --json` writes it; `over_network`: the pipeline's time over that of its network."""
        total = sum(self.parts.values())
        whole = total if self.overlapped is None else self.overlapped
        return {
            "batch": self.batch,
            "ms": {**self.parts, "overlapped": self.overlapped},
            "share": {part: value / total for part, value in self.parts.items()},
            "images_per_s": 1e3 * self.batch / whole,
            "over_network": whole / self.parts["network"],
        }


class Pipeline:
    """Batches of frames to masks.

    device: what frames are prepared and classes decided on; beside: its name.

    Raises:
        InputError: the model's output is no map of classes, here or once it is run; or it reads volumes.
    """

    def __init__(self, runtime: Runtime) -> None:
        card = runtime.card
        if card.head is not None or card.volume is not None:
            what = "another output" if card.volume is None else "volumes"
            raise InputError(f"A pipeline gives the class of each pixel of an image, and this model is of {what}.")
        on: OnDevice = runtime if hasattr(runtime, "on_device") else _ByHost(runtime)  # type: ignore[assignment]
        self._card, self.device, self._on_device = card, on.where, on.on_device
        self.beside = cpu_name() if isinstance(on, _ByHost) else runtime.device
        self._prepared = _prepared
        if self.device.type == "cuda":
            # Tiles by measurement.
            self._prepared = torch.compile(_prepared, options={"coordinate_descent_tuning": True})
            self._in, self._out = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    @torch.inference_mode()
    def __call__(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Masks [N, H, W] (`class_type`) on the host, of frames uint8 [N, H, W, 3] there, in order."""
        waiting: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        for frames in batches:
            waiting.append(self._begin(frames))
            if len(waiting) > AHEAD:
                yield _ended(*waiting.popleft())
        while waiting:
            yield _ended(*waiting.popleft())

    def _begin(self, frames: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return classes_of(self._network(self._prepare(frames)), _size(frames)), None
        main = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._in):
            given = (frames if frames.is_pinned() else frames.pin_memory()).to(self.device, non_blocking=True)
            ready = self._prepare(given)
        main.wait_stream(self._in)
        ready.record_stream(main)
        masks = classes_of(self._network(ready), _size(frames))
        self._out.wait_stream(main)
        with torch.cuda.stream(self._out):
            host = torch.empty(masks.shape, dtype=masks.dtype, pin_memory=True)
            host.copy_(masks, non_blocking=True)
            masks.record_stream(self._out)
            end = torch.cuda.Event()
            end.record(self._out)
        return host, end

    def _network(self, images: Tensor) -> Tensor:
        logits = self._on_device(images)
        if logits.ndim != 4:
            raise InputError(
                "A pipeline gives the class of each pixel of an image, [N, classes, H, W], and this model's output is "
                f"{list(logits.shape)}."
            )
        return logits

    def _prepare(self, frames: Tensor) -> Tensor:
        """Frames on the device as the network reads them, float32 [N, 3, *size]."""
        card = self._card
        taps = _taps_of(frames, (card.height, card.width))
        prepared: Tensor = self._prepared(frames, taps, *scale_and_offset(self.device, card.mean, card.std))
        return prepared

    @torch.inference_mode()
    def times(self, frames: Tensor, repeats: int = 5) -> PartTimes:
        """Median times over `repeats` passes of one batch, after one that is not counted.

        Overlapped: the mean of four times as many batches, after some that allocate the pinned memory of all in flight.
        """
        rows = []
        host = frames.pin_memory() if self.device.type == "cuda" else frames
        for _ in range(repeats + 1):
            row: dict[str, float] = {}
            given = self._timed(row, "copy in", partial(host.to, self.device))
            ready = self._timed(row, "prepare", partial(self._prepare, given))
            logits = self._timed(row, "network", partial(self._network, ready))
            masks = self._timed(row, "classes", partial(classes_of, logits, _size(frames)))
            self._timed(row, "copy out", masks.cpu)
            rows.append(row)
        parts = {part: float(torch.tensor([row[part] for row in rows[1:]]).median()) for part in PARTS}
        if self.device.type != "cuda":
            return PartTimes(parts, None, len(frames))
        count = 4 * repeats
        for number in (2 * AHEAD, count):
            start = time.perf_counter()
            for _ in self(host for _ in range(number)):
                pass
        return PartTimes(parts, 1e3 * (time.perf_counter() - start) / count, len(frames))

    def _timed(self, row: dict[str, float], part: str, call: Callable[[], Tensor]) -> Tensor:
        if self.device.type == "cuda":  # by the GPU's clock: neither launch nor wait are the part's
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP)  # meanwhile what follows is launched
            begin.record()
            found = call()
            end.record()
            end.synchronize()
            row[part] = begin.elapsed_time(end)
            return found
        start = time.perf_counter()
        found = call()
        row[part] = 1e3 * (time.perf_counter() - start)
        return found


class _ByHost:
    """A runtime that takes arrays alone: ONNX Runtime, an engine."""

    where = torch.device("cpu")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def on_device(self, images: Tensor) -> Tensor:
        """As of `OnDevice`."""
        return torch.from_numpy(self._runtime.infer(images.contiguous().numpy()))


def frames_of(read: Callable[[int], Pixels], count: int, batch: int) -> Tensor:
    """A batch of frames uint8 [batch, H, W, 3] of the size that most images have, repeated where they are fewer.

    Args:
        read: decodes one of `count` images; as many threads call it as there are processors.

    Raises:
        InputError: there is no image, or one cannot be decoded.
    """
    if not count:
        raise InputError("There is no image to measure on. Name a data set, a folder with images or one: --data PATH")
    with ThreadPoolExecutor(cores()) as threads:
        pixels = list(threads.map(read, range(min(count, SAMPLED * batch))))
    ((size, _),) = Counter(each.shape for each in pixels).most_common(1)
    chosen = [each for each in pixels if each.shape == size]
    return torch.from_numpy(np.stack([chosen[at % len(chosen)] for at in range(batch)]))


def resized(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Frames uint8 [N, H, W, 3] at `size`, uint8 [N, *size, 3], byte for byte as Pillow resizes them bilinearly."""
    return _weighted(frames, _taps_of(frames, size))


def _weighted(frames: Tensor, taps: Sequence[tuple[int, Taps]]) -> Tensor:
    x = frames.int()
    for axis, (places, weights) in taps:
        shape = [-1 if other == axis else 1 for other in range(4)]
        total = torch.zeros((), dtype=torch.int32, device=x.device)
        for at, weight in zip(places, weights, strict=True):
            total = total + x.index_select(axis, at) * weight.view(shape)
        x = (total + (1 << BITS - 1)) >> BITS
    return x.to(torch.uint8)


def _taps_of(frames: Tensor, size: tuple[int, int]) -> list[tuple[int, Taps]]:
    """Of each axis that changes its number and its taps, in Pillow's order.

    That is the width first; of Pillow 13 the height, where it loses pixels, and more than twice as many as the width.
    """
    (height, width), (rows, columns) = _size(frames), size
    lost = height - rows
    changed = [(2, width, columns), (1, height, rows)]
    if lost > 0 and lost > 2 * (width - columns) and _height_may_be_first():
        changed.reverse()
    return [(axis, _taps(n, to, frames.device)) for axis, n, to in changed if n != to]


@cache
def _height_may_be_first() -> bool:
    """Whether the Pillow that is installed does so, by a trial: earlier ones always begin with the width."""
    pixels = (np.arange(40 * 7 * 3) * 97 % 251).astype(np.uint8).reshape(40, 7, 3)
    cpu = torch.device("cpu")
    found = _weighted(torch.from_numpy(pixels)[None], [(1, _taps(40, 9, cpu)), (2, _taps(7, 5, cpu))])[0].numpy()
    theirs = Image.fromarray(pixels).resize((5, 9), Image.Resampling.BILINEAR)
    return np.array_equal(found, np.asarray(theirs))


@lru_cache(maxsize=64)
def _taps(source: int, target: int, device: torch.device) -> Taps:
    """Of each tap of a triangle filter, as wide as a target pixel: places int64 [target] and weights int32 [target]."""
    scale = source / target
    width = max(scale, 1.0)
    centre = (torch.arange(target, dtype=torch.float64) + 0.5) * scale
    first = (centre - width + 0.5).clamp(min=0).floor()
    last = (centre + width + 0.5).floor().clamp(max=source)
    at = first[:, None] + torch.arange(int((last - first).max()), dtype=torch.float64)
    weights = (1 - ((at - centre[:, None] + 0.5) / width).abs()).clamp(min=0) * (at < last[:, None])
    weights = (weights / weights.sum(1, keepdim=True) * (1 << BITS) + 0.5).int()
    places = at.long().clamp(max=source - 1)
    return tuple([each.to(device) for each in values.T.contiguous()] for values in (places, weights))  # type: ignore[return-value]


def _prepared(frames: Tensor, taps: Sequence[tuple[int, Taps]], scale: Tensor, offset: Tensor) -> Tensor:
    return (_weighted(frames, taps).float() * scale + offset).movedim(-1, 1).contiguous()


def classes_of(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """The most likely class of each pixel of frames of `size`, of `class_type`."""
    return class_map(logits, size, getattr(torch, class_type(logits.shape[1]).__name__))


def _size(frames: Tensor) -> tuple[int, int]:
    return frames.shape[1], frames.shape[2]


def _ended(masks: Tensor, end: torch.cuda.Event | None) -> Tensor:
    if end is not None:
        end.synchronize()
    return masks
