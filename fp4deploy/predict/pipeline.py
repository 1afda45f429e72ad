"""Frames to masks beside the network: what lies around a network is part of how fast it is.

    frames uint8 [H, W, 3] -> copied -> resized, normalised -> network -> enlarged, argmax -> copied: masks [H, W]

Both are computed on the device of a checkpoint or a packed network: on a GPU by one kernel each, no logits are copied,
and frames of the next batch are copied and prepared, and masks of the last one copied, on streams of their own. Where a
packed network reads its image as FP4 terms, the first kernel writes that operand. On the CPU, which is also what
prepares for ONNX Runtime and engines, since they take arrays, Pillow resizes, and nothing is overlapped. Either way a
network reads the same bytes, and masks are the same bit for bit (`plugins.frames`).

Outputs that are no map of classes, such as of a detector, come as they are.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4deploy.bench.environment import cpu_name
from fp4deploy.bench.runtimes.protocol import NotFinite, Runtime
from fp4deploy.data.augmentation.transforms import EvalTransform, expand, scale_and_offset
from fp4deploy.data.sample import Pixels, Sample, class_type
from fp4deploy.errors import InputError
from fp4deploy.plugins.frames.class_map import class_map
from fp4deploy.plugins.frames.prepare import prepare, prepare_and_pack
from fp4deploy.plugins.quantize.input_encoding import joined, parts
from fp4deploy.plugins.quantize.norm_pack import FeatureMap
from fp4deploy.plugins.runtime.availability import device_index
from fp4deploy.system.processors import cores
from fp4deploy.tasks import task_of

SLEEP = 1_000_000  # cycles of a GPU: longer than it takes to launch a part
AHEAD = 2  # batches whose work is queued while the host waits for an earlier one
SAMPLED = 4  # batches of images among which frames of one size are looked for
PARTS = ("copy in", "prepare", "network", "classes", "copy out")
Frame = Pixels | Tensor  # uint8 [H, W, 3]; a tensor lies on the pipeline's device, and what wrote it has ended
Frames = Tensor | Sequence[Frame]  # uint8 [N, H, W, 3] on the host, or one by one
Size = tuple[int, int]
Found = TypeVar("Found")


class OnDevice(Protocol):
    """A runtime that also takes tensors: `PackedRuntime`, `TorchRuntime`.

    One that takes what `packed_image` makes of images has an `image_amax`, which they are packed with, or None.
    """

    @property
    def where(self) -> torch.device:
        """What it computes on."""
        ...

    def on_device(self, images: Any) -> Tensor:
        """Logits of images that lie there; the next call may overwrite them."""
        ...


@dataclass(frozen=True)
class Answer:
    """What a network answers for a batch of frames.

    outputs: of each frame the class of each pixel [H, W] (`class_type`), or of a model with a head in its card what the
        network gives, float32; None where that holds NaN or Inf.
    sizes: of the frames, (H, W). channels: of the network's output.
    """

    outputs: list[NDArray[Any] | None]
    sizes: list[Size]
    channels: int


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
    """Batches of frames to masks, or to other outputs. Threads may share one.

    device: what frames are prepared and classes decided on; beside: its name.

    Raises:
        InputError: the model reads volumes; or, once it is run, its card names no head and its output is no map.
    """

    def __init__(self, runtime: Runtime) -> None:
        card = runtime.card
        if card.volume is not None:
            raise InputError("A pipeline is of images, and this model reads volumes.")
        on: OnDevice = runtime if hasattr(runtime, "on_device") else _ByHost(runtime)  # type: ignore[assignment]
        self._card, self._on_device, self._amax = card, on.on_device, getattr(on, "image_amax", None)
        index = device_index(on.where)
        self.device = on.where if index is None else torch.device("cuda", index)
        self.beside = cpu_name() if isinstance(on, _ByHost) else runtime.device
        transform = task_of(card).transform(card.size, card.mean, card.std)
        assert isinstance(transform, EvalTransform)
        self._transform = transform
        self._lock = threading.Lock()  # of a network's input and output, which the next call overwrites
        if self.device.type == "cuda":
            self._in, self._out = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self._read = torch.cuda.Event()  # a thread may have a stream of its own

    @torch.inference_mode()
    def __call__(self, batches: Iterable[Frames]) -> Iterator[Answer]:
        """What the network answers for each batch, in order; frames of a batch may differ in size."""
        waiting: deque[_Begun] = deque()
        ahead = AHEAD if self.device.type == "cuda" else 0
        for frames in batches:
            waiting.append(self._begin(frames))
            if len(waiting) > ahead:
                yield waiting.popleft().end()
        while waiting:
            yield waiting.popleft().end()

    @torch.inference_mode()
    def logits(self, frames: Sequence[Pixels]) -> NDArray[np.float32]:
        """What the network gives for frames of one size, float32 [N, channels, ...].

        Raises:
            NotFinite: it holds NaN or Inf.
        """
        found = [each for each in self._begin(frames, classes=False).end().outputs if each is not None]
        if len(found) < len(frames):
            raise NotFinite("The network")
        return np.stack(found)

    def _begin(self, frames: Frames, classes: bool = True) -> _Begun:
        if not len(frames):
            return _Begun([], torch.empty(0, dtype=torch.bool), [], 0, None)
        if self.device.type == "cuda":
            try:
                with self._lock:
                    return self._launched(frames, classes)
            except torch.OutOfMemoryError as error:
                largest = max(each.shape[0] * each.shape[1] for each in frames)
                raise InputError(
                    f"{len(frames)} images of up to {largest:,} pixels do not fit into the memory of {self.device}. "
                    "Give it fewer at a time (--batch), or tiles (--tile)."
                ) from error
        runs = _runs(frames)
        logits = self._network(self._prepare(runs))
        outputs = self._outputs(logits, runs, classes)
        return _Begun(outputs, _are_finite(logits), [*map(_size, runs)], logits.shape[1], None)

    def _launched(self, frames: Frames, classes: bool) -> _Begun:
        main = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._in):
            runs = _runs(frames, pinned=True)
            ready = self._prepare([run.to(self.device, non_blocking=True) for run in runs])
        main.wait_stream(self._in)
        for each in parts(ready):
            each.record_stream(main)
        main.wait_event(self._read)
        try:
            logits = self._network(ready)
            found = [_are_finite(logits), *self._outputs(logits, runs, classes)]
        finally:
            self._read.record(main)
        self._out.wait_stream(main)
        with torch.cuda.stream(self._out):
            finite, *outputs = [_on_host(each, self._out) for each in found]
            end = torch.cuda.Event()
            end.record(self._out)
        return _Begun(outputs, finite, [*map(_size, runs)], logits.shape[1], end)

    def _network(self, images: FeatureMap) -> Tensor:
        logits = self._on_device(images)
        if self._card.head is None and logits.ndim != 4:
            raise InputError(
                "A pipeline gives the class of each pixel of an image, [N, classes, H, W], and this model's output is "
                f"{list(logits.shape)}."
            )
        return logits if logits.is_floating_point() else logits.float()

    def _prepare(self, runs: list[Tensor]) -> FeatureMap:
        """Frames on the device as the network reads them: images float32 [N, 3, *size], or their operand."""
        card, transform = self._card, self._transform
        if self.device.type != "cuda":
            samples = (Sample(each, np.zeros(each.shape[:2], np.uint8), "") for run in runs for each in run.numpy())
            compact = torch.stack([transform.compact(sample)[0] for sample in samples])
            return expand(compact, torch.zeros(0), card.mean, card.std)[0].contiguous()
        normalisation = scale_and_offset(self.device, card.mean, card.std)
        size = (card.height, card.width)
        given = [(run, size, transform.part(_size(run)), transform.padding, *normalisation) for run in runs]
        if self._amax is None:
            images = [prepare(*each) for each in given]
            return images[0] if len(images) == 1 else torch.cat(images)
        return joined([prepare_and_pack(*each, self._amax) for each in given])

    def _outputs(self, logits: Tensor, runs: list[Tensor], classes: bool = True) -> list[Tensor]:
        """What is copied to the host of each run."""
        parts = logits.split([len(run) for run in runs])
        if self._card.head is not None or not classes:
            return [part.to(torch.float32, copy=True) for part in parts]  # the next call overwrites logits
        return [classes_of(part, _size(run)) for part, run in zip(parts, runs, strict=True)]

    @torch.inference_mode()
    def times(self, frames: Tensor, repeats: int = 5) -> PartTimes:
        """Median times over `repeats` passes of one batch of frames, uint8 [N, H, W, 3], after one that is not counted.

        Overlapped: the mean of four times as many batches, after some that allocate the pinned memory of all in flight.

        Raises:
            InputError: the model's output is no map of classes.
        """
        if self._card.head is not None:
            raise InputError("What is timed ends with the class of each pixel, and this model is of another output.")
        host = frames.pin_memory() if self.device.type == "cuda" else frames
        rows = [self.timed(host)[0] for _ in range(repeats + 1)]
        parts = {part: float(torch.tensor([row[part] for row in rows[1:]]).median()) for part in PARTS}
        if self.device.type != "cuda":
            return PartTimes(parts, None, len(frames))
        count = 4 * repeats
        for number in (2 * AHEAD, count):
            start = time.perf_counter()
            for _ in self(host for _ in range(number)):
                pass
        return PartTimes(parts, 1e3 * (time.perf_counter() - start) / count, len(frames))

    @torch.inference_mode()
    def timed(self, frames: Tensor, launches: bool = False) -> tuple[dict[str, float], Answer]:
        """Milliseconds of each of `PARTS` of one batch, one after another, and what it gives.

        launches: on a GPU with what the host needs to launch a part, by its clock.
        """
        row: dict[str, float] = {}

        def timed(part: str, call: Callable[[], Found]) -> Found:
            if self.device.type == "cuda" and not launches:  # by its clock: neither launch nor wait are the part's
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
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            row[part] = 1e3 * (time.perf_counter() - start)
            return found

        given = timed("copy in", lambda: [frames.to(self.device)])
        ready = timed("prepare", lambda: self._prepare(given))
        logits = timed("network", lambda: self._network(ready))
        found = timed("classes", lambda: [_are_finite(logits), *self._outputs(logits, given)])
        finite, *outputs = timed("copy out", lambda: [each.cpu() for each in found])
        return row, _Begun(outputs, finite, [_size(frames)], logits.shape[1], None).end()


class _ByHost:
    """A runtime that takes arrays alone: ONNX Runtime, an engine."""

    where = torch.device("cpu")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def on_device(self, images: Tensor) -> Tensor:
        """As of `OnDevice`."""
        try:
            return torch.from_numpy(self._runtime.infer(images.numpy()))
        except NotFinite as error:  # perhaps of one frame
            if error.outputs is None:
                raise
            return torch.from_numpy(error.outputs)


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


def classes_of(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """The most likely class of each pixel of frames of `size`, of `class_type`."""
    return class_map(logits, size, getattr(torch, class_type(logits.shape[1]).__name__))


def _size(frames: Tensor) -> tuple[int, int]:
    return frames.shape[1], frames.shape[2]


def _runs(frames: Frames, pinned: bool = False) -> list[Tensor]:
    """Consecutive frames of one size that lie in one place, uint8 [n, H, W, 3] each."""
    if isinstance(frames, Tensor):
        return [frames.pin_memory() if pinned else frames]
    runs = []
    for (on_device, shape), run in groupby(frames, lambda each: (isinstance(each, Tensor), each.shape)):
        same: list[Any] = list(run)
        if on_device:
            runs.append(torch.stack(same))
            for each in same if pinned else []:  # whoever made it may use its memory again
                each.record_stream(torch.cuda.current_stream(each.device))
            continue
        runs.append(torch.empty((len(same), *shape), dtype=torch.uint8, pin_memory=pinned))
        np.stack(same, out=runs[-1].numpy())
    return runs


def _are_finite(outputs: Tensor) -> Tensor:
    """Whether those of each frame are, bool [N]; by one reduction, which reads them once."""
    largest = torch.linalg.vector_norm(outputs, torch.inf, tuple(range(1, outputs.ndim)))
    return largest.isfinite()


def _on_host(values: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """A copy in pinned memory, once `stream` has come to it."""
    values.record_stream(stream)
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


@dataclass(frozen=True)
class _Begun:
    """A batch whose work is queued: outputs of each run of frames of one size, and when they are on the host."""

    outputs: list[Tensor]
    finite: Tensor
    sizes: list[Size]
    channels: int
    done: torch.cuda.Event | None

    def end(self) -> Answer:
        """Wait for it. What is handed on is copied: pinned memory is dear, and is used again."""
        if self.done is not None:
            self.done.synchronize()
        each = [output for run in self.outputs for output in run]
        found = [output.clone().numpy() if good else None for output, good in zip(each, self.finite, strict=True)]
        sizes = [size for run, size in zip(self.outputs, self.sizes, strict=True) for _ in run]
        return Answer(found, sizes, self.channels)
