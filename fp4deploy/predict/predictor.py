"""An artefact as a function of an image.

    image, any size -> resized and normalised as the model card says -> runtime -> outputs -> enlarged to the image's
    own size -> class of each pixel (argmax), or objects

Preprocessing is that of `bench` (the `transform` of its task), so that what is drawn is what was measured. It, and the
class of each pixel, are computed where the network is (`predict.pipeline`); objects and tiles are put together here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fp4deploy.bench.runtimes.open import open_for_images
from fp4deploy.bench.runtimes.protocol import NotFinite, Runtime
from fp4deploy.data.images import upright_image
from fp4deploy.data.palette import colours
from fp4deploy.data.sample import ClassIds, Pixels, class_type
from fp4deploy.data.tiles import tiled
from fp4deploy.detection import Detections, decode_boxes
from fp4deploy.errors import InputError
from fp4deploy.instances.decode import Instances, decode
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.heads import ClassHead, InstanceHead
from fp4deploy.predict.pipeline import Answer, Frame, Pipeline
from fp4deploy.predict.prediction import Prediction
from fp4deploy.tasks import task_of

if TYPE_CHECKING:
    from fp4deploy.system.progress import Phase

Picture = Path | str | Image.Image | Pixels
LARGEST_INSTANCES = 2**28  # elements of an instance model's outputs at the size of the image (1 GiB)


def load(
    path: Path | str, tile: bool = False, overlap: int | None = None, min_score: float = 0.0, batch: int = 1
) -> Predictor:
    """Open an artefact for prediction.

    Args:
        path: a checkpoint (.safetensors), .onnx, .fp4 or .plan file.
        tile: cut an image that is larger than the network's input into tiles, instead of making it smaller.
        overlap: pixels that neighbouring tiles share at least; a quarter of a tile's shorter side by default.
        min_score: objects with a lower score are left out, 0..1 (instance models).
        batch: tiles given to the network at once.

    Raises:
        InputError: the file is missing, of another kind, or broken.
        UnavailableError: this machine cannot run it.

    >>> predictor = load(checkpoint)
    >>> prediction = predictor.predict(np.zeros((48, 64, 3), np.uint8))
    >>> prediction.mask.shape, prediction.mask.dtype.name
    ((48, 64), 'uint8')
    """
    return Predictor(open_for_images(Path(path)), tile, overlap, min_score, batch)


class Predictor:
    """A runtime with preprocessing before it and decoding after it.

    pipeline: what a network reads and answers; None of volumes.
    sizes: of batches that are not cut into tiles: one of another size goes through the network with its last frame
        repeated up to the next of these, whose answers nobody reads.
    progress: is called while one large image or video is predicted, with what is counted, how much is done, and of how
        much, where that is known.
    """

    sizes: Sequence[int] = ()
    progress: Phase = staticmethod(lambda phase, done, of: None)

    def __init__(
        self,
        runtime: Runtime,
        tile: bool = False,
        overlap: int | None = None,
        min_score: float = 0.0,
        batch: int = 1,
    ) -> None:
        card = runtime.card
        self.runtime, self.card = runtime, card
        self.tile, self.batch = tile, batch
        self.overlap = min(card.height, card.width) // 4 if overlap is None else overlap
        self.min_score = min_score
        task = task_of(card)
        self.background = card.background or task.counts_objects
        self.pipeline = Pipeline(runtime) if card.volume is None else None
        if tile and (untiled := task.untiled(card)):
            raise InputError(f"{untiled} Leave out --tile.")

    def __repr__(self) -> str:
        return f"Predictor({self.runtime!r}, {len(self.card.class_names)} classes)"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by id; "class 3" where the file does not name them."""
        head = self.card.head
        return self.card.class_names or tuple(f"class {number}" for number in range(head.classes if head else 0))

    def predict(self, image: Picture) -> Prediction:
        """Predict one image.

        Args:
            image: a file, a PIL image, or RGB pixels uint8 [H, W, 3]. Files and PIL images are turned upright as their
                EXIF orientation says.

        Raises:
            InputError: the file cannot be decoded, or the array is no RGB image.
        """
        return self.predict_batch([image])[0]

    def predict_batch(self, images: Sequence[Picture]) -> list[Prediction]:
        """Predict several images in one call of the network (tiled ones one after the other, `batch` tiles a call).

        Raises:
            InputError: as of `predict`, or of the first image without an answer, with its name or number.
        """
        (found,) = self.predict_batches([[as_pixels(image) for image in images]]) if images else ([],)
        for number, (image, each) in enumerate(zip(images, found, strict=True), start=1):
            if isinstance(each, InputError):
                own = f"{image}: " if isinstance(image, str | Path) else f"Image {number}: " if len(images) > 1 else ""
                raise InputError(f"{own}{each}") from each
        return [each for each in found if not isinstance(each, InputError)]

    def predict_batches(self, batches: Iterable[Sequence[Frame]]) -> Iterator[list[Prediction | InputError]]:
        """As `predict_batch` of each batch, in order; on a GPU some are read ahead, and copied and computed meanwhile.

        An image that the network does not answer, or that is too large, is an error in its place.

        Raises:
            InputError: the model reads volumes, or its output is of no known meaning.
        """
        if self.pipeline is None:
            raise InputError("This model reads volumes, and these are images. Give it .nii or .nii.gz files.")
        if not self.tile:
            counts: deque[int] = deque()

            def filled(batch: Sequence[Frame]) -> Sequence[Frame]:
                counts.append(len(batch))
                size = min((size for size in self.sizes if size >= len(batch)), default=len(batch))
                return [*batch, *[batch[-1]] * (size - len(batch))] if batch else batch

            for answer in self.pipeline(map(filled, batches)):
                yield self.predictions(answer, counts.popleft())
            return
        for batch in batches:
            whole = [pixels for pixels in batch if not self._needs_tiles(pixels)]
            (found,) = map(self.predictions, self.pipeline([whole])) if whole else ([],)
            others = iter(found)
            yield [self._or_error(self._tiled, each) if self._needs_tiles(each) else next(others) for each in batch]

    def predictions(self, answer: Answer, count: int | None = None) -> list[Prediction | InputError]:
        """What was predicted for each frame of a batch, or for the first `count`."""

        def prediction(output: NDArray[Any] | None, size: tuple[int, int]) -> Prediction:
            if output is None:
                raise NotFinite("The network")
            return self._semantic(output, answer.channels) if self.card.head is None else self.decoded(output, size)

        asked = [*zip(answer.outputs, answer.sizes, strict=True)][:count]
        return [self._or_error(prediction, *each) for each in asked]

    @staticmethod
    def _or_error(predict: Callable[..., Prediction], *given: object) -> Prediction | InputError:
        """What one image gives: others may have no error."""
        try:
            return predict(*given)
        except InputError as error:
            return error

    def _needs_tiles(self, pixels: Frame) -> bool:
        return self.tile and (pixels.shape[0] > self.card.height or pixels.shape[1] > self.card.width)

    def decoded(self, output: NDArray[np.float32], size: tuple[int, int]) -> Prediction:
        """The prediction of an image of `size` from its outputs [channels, h, w], of a model with a head.

        Raises:
            InputError: the image is too large to find objects in.
        """
        logits = torch.from_numpy(np.ascontiguousarray(output))
        assert self.card.head is not None
        if isinstance(self.card.head, DetectionHead):
            return self._boxes(decode_boxes(logits, self.card.head, (self.card.height, self.card.width), size), size)
        if isinstance(self.card.head, ClassHead):
            return self._label(logits, size)
        if logits.shape[0] * size[0] * size[1] > LARGEST_INSTANCES:
            raise InputError(
                f"An image of {size[1]}x{size[0]} pixels is too large to find objects in. Make it smaller first."
            )
        return self._instances(decode(logits, self.card.head, size))

    def _tiled(self, pixels: Pixels) -> Prediction:
        size = (pixels.shape[0], pixels.shape[1])
        channels = self.card.channels
        bands = self._bands(pixels)
        if self.card.head is None:
            parts = [(len(band), band.argmax(0).astype(class_type(len(band)))) for _, band in bands]
            return self._semantic(np.concatenate([part for _, part in parts]), parts[0][0])
        if channels * size[0] * size[1] > LARGEST_INSTANCES:
            raise InputError(
                f"An image of {size[1]}x{size[0]} pixels is too large to find objects in. Cut it into parts first."
            )
        outputs = np.concatenate([band for _, band in bands], axis=1)
        return self.decoded(outputs, size)

    def _bands(self, pixels: Pixels) -> Iterator[tuple[int, NDArray[np.float32]]]:
        height = pixels.shape[0]
        self.progress("rows of pixels", 0, height)
        tile = (self.card.height, self.card.width)
        assert self.pipeline is not None
        for row, band in tiled(pixels, tile, self.overlap, self.pipeline.logits, self.batch):
            yield row, band
            self.progress("rows of pixels", row + band.shape[1], height)

    def _semantic(self, mask: ClassIds, channels: int) -> Prediction:
        names = self.class_names or tuple(f"class {number}" for number in range(channels))
        return Prediction(mask, names, colours(names, self.background))

    def _label(self, logits: torch.Tensor, size: tuple[int, int]) -> Prediction:
        scores = logits.float().softmax(0).numpy()
        mask = np.full(size, scores.argmax(), class_type(len(scores)))
        return Prediction(mask, self.class_names, colours(self.class_names, self.background), scores=scores)

    def _boxes(self, found: Detections, size: tuple[int, int]) -> Prediction:
        names = self.class_names
        empty = np.zeros(size, np.uint8)
        return Prediction(empty, names, colours(names, True), detections=found.above(self.min_score))

    def _instances(self, found: Instances) -> Prediction:
        kept = int((found.scores >= self.min_score).sum())  # scores descend
        ids = np.where(found.ids <= kept, found.ids, 0)
        shown = Instances(ids, found.classes[:kept], found.scores[:kept], found.semantic)
        classes = np.concatenate([[0], shown.classes]).astype(found.semantic.dtype)
        mask = found.semantic.copy()
        if isinstance(self.card.head, InstanceHead):
            things = ~np.isin(mask, (0, *self.card.head.stuff))
            mask[things] = 0
        mask = np.where(ids > 0, classes[ids], mask)
        return Prediction(mask, self.class_names, colours(self.class_names, self.background), shown)


def as_pixels(image: Picture) -> Pixels:
    """RGB pixels uint8 [H, W, 3] of a file, a PIL image or an array.

    Raises:
        InputError: the file cannot be decoded, or the array is no RGB image.
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise InputError(
                f"An array of {image.dtype} {list(image.shape)} is no image; RGB pixels uint8 [H, W, 3] are needed."
            )
        return image
    return upright_image(image)
