"""Image files to pixels: by Pillow on the CPU, or by nvJPEG on the GPU where the frames stay.

    Pillow    what a network was trained and measured on: the default
    nvJPEG    JPEG files, a batch at a time, on a stream of its own; torchvision brings it

Decoders of JPEG differ in how they round the inverse cosine transform, and in how they enlarge colours, which most
files store at half the size. So pixels of nvJPEG differ, at edges of colours most, and masks where two classes are
nearly as likely. Their geometry is the same: what EXIF turns is turned here. What nvJPEG may read otherwise (grey,
CMYK, stored RGB, files that end early) or refuses, and files of other formats, go to Pillow, which has the last word.

Source: nvJPEG documentation, https://docs.nvidia.com/cuda/nvjpeg.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from fp4deploy.data.images import TRANSPOSED, Jpeg, common_jpeg, upright_image
from fp4deploy.data.sample import Pixels
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.predict.pipeline import Frame
from fp4deploy.requirements import ZOO

# That decode images by Pillow, and that write them (`predict.write`). Of images some more are in memory than these
# hold: those that wait for the network, three batches on a GPU, and for the threads that write.
THREADS = 4
PILLOW = f"Pillow {PIL.__version__}"
# Of an image [channels, H, W] with its sides exchanged from orientation 5 on: axes to flip.
FLIPS = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}


@dataclass(frozen=True)
class Decoded:
    """An image as a network is given it, and what decoded it."""

    pixels: Frame
    decoder: str


Found = Decoded | InputError


@dataclass(frozen=True)
class Decoder:
    """Decodes files. `threads`: that do so at once, up to `at_once` files each."""

    name: str
    decode: Callable[[Sequence[Path]], list[Found]]
    threads: int
    at_once: int = 1

    def __call__(self, paths: Sequence[Path]) -> Iterator[Found]:
        """Each file decoded, or why it is not, in order; some are decoded ahead."""
        parts = (paths[at : at + self.at_once] for at in range(0, len(paths), self.at_once))
        with ThreadPoolExecutor(self.threads) as threads:
            begun: deque[Future[list[Found]]] = deque()
            try:
                for part in parts:
                    begun.append(threads.submit(self.decode, part))
                    if len(begun) > self.threads:
                        yield from begun.popleft().result()
                while begun:
                    yield from begun.popleft().result()
            finally:
                for each in begun:
                    each.cancel()


def by_pillow(path: Path) -> Found:
    """The pixels of a file, or why there are none."""
    try:
        return Decoded(upright_image(path), PILLOW)
    except InputError as error:
        return error


CPU = Decoder(PILLOW, lambda paths: [by_pillow(path) for path in paths], THREADS)


def gpu(device: torch.device, batch: int = 1, on_host: bool = False) -> Decoder:
    """nvJPEG on a GPU, `batch` files at once, and Pillow for what is no ordinary JPEG.

    Args:
        on_host: copy what is decoded to the host.

    Raises:
        UnavailableError: no GPU, no torchvision, or one without nvJPEG.
    """
    user = "--decode gpu"
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UnavailableError(f"{user} needs an NVIDIA GPU, and torch sees none. Leave it out: Pillow decodes.")
    vision = ZOO["torchvision"].require(user, "leave it out")
    name, lock, stream = f"nvJPEG (torchvision {vision.__version__})", threading.Lock(), torch.cuda.Stream(device)

    def decoded(jpegs: Sequence[Jpeg]) -> list[Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg

        contents = [torch.frombuffer(each.content, dtype=torch.uint8) for each in jpegs]
        with lock, torch.cuda.device(device), torch.cuda.stream(stream):
            # torchvision decodes on a stream of its own into memory that is free on this one, or will be.
            stream.synchronize()
            found = decode_jpeg(contents, ImageReadMode.RGB, device)
            frames = [upright(image, each.orientation) for image, each in zip(found, jpegs, strict=True)]
            stream.synchronize()
        return frames

    sample = io.BytesIO()
    Image.new("RGB", (16, 16)).save(sample, format="JPEG")
    try:
        decoded([Jpeg(bytearray(sample.getvalue()), (16, 16), 1)])
    except RuntimeError as error:
        cause = str(error).splitlines()[0]
        raise UnavailableError(
            f"{user} needs a torchvision with nvJPEG, and version {vision.__version__} cannot decode here ({cause}). "
            "Leave it out: Pillow decodes."
        ) from error
    return Decoder(name, lambda paths: with_fallback(paths, decoded, name, on_host), 2, batch)


def with_fallback(
    paths: Sequence[Path], decode: Callable[[Sequence[Jpeg]], list[Tensor]], name: str, on_host: bool = False
) -> list[Found]:
    """Files by `decode` where they are common JPEGs and it gives frames of their size, and by Pillow otherwise."""
    jpegs = [common_jpeg(path) for path in paths]
    frames = iter(_each([jpeg for jpeg in jpegs if jpeg is not None], decode))
    found: list[Found] = []
    for path, jpeg in zip(paths, jpegs, strict=True):
        frame = next(frames) if jpeg is not None else None
        if frame is None:
            found.append(by_pillow(path))
        else:
            found.append(Decoded(host_pixels(frame) if on_host else frame, name))
    return found


def _each(jpegs: Sequence[Jpeg], decode: Callable[[Sequence[Jpeg]], list[Tensor]]) -> list[Tensor | None]:
    """Of each file its frame, None where it is refused or of another size than its header says."""
    if not jpegs:
        return []
    try:
        found = decode(jpegs)
    except torch.AcceleratorError:
        raise  # a fault of the GPU, and none of a file
    except RuntimeError:  # of one of them or of memory, for all
        return [None] if len(jpegs) == 1 else [frame for jpeg in jpegs for frame in _each([jpeg], decode)]
    sizes = [jpeg.size[::-1] if jpeg.orientation in TRANSPOSED else jpeg.size for jpeg in jpegs]
    return [frame if frame.shape == (*size, 3) else None for frame, size in zip(found, sizes, strict=True)]


def upright(image: Tensor, orientation: int) -> Tensor:
    """Pixels [3, H, W] as stored, turned as EXIF says: [H, W, 3], or [W, H, 3] where it exchanges the sides.

    >>> upright(torch.arange(6).view(1, 2, 3).expand(3, 2, 3), 6)[..., 0].tolist()
    [[3, 0], [4, 1], [5, 2]]
    """
    image = image.mT if orientation in TRANSPOSED else image
    axes = FLIPS.get(orientation)
    return (image.flip(axes) if axes else image).permute(1, 2, 0).contiguous()


def host_pixels(frame: Frame) -> Pixels:
    """A frame as an array, wherever it lies."""
    return np.asarray(frame.cpu() if isinstance(frame, Tensor) else frame)
