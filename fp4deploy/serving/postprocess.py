"""Logits to masks, inside Triton Inference Server's Python backend.

Each channel is resized bilinearly to the size of the original image, between two values along each axis as `fp4deploy
predict` does, and each pixel takes the class with the largest value. The mask is an indexed PNG: pixel values are class
ids, the palette in config.pbtxt shows them in colour. Where there are more classes than a palette holds, it is empty,
and the mask a greyscale PNG of 16 bits.
"""

import io
import json

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image


class TritonPythonModel:
    """logits [N, classes, H, W], SIZE int32 [N, 2] -> MASK, PNG bytes [N, 1]."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the palette."""
        config = json.loads(args["model_config"])
        self.palette = json.loads(config["parameters"]["palette"]["string_value"])

    def execute(self, requests: list) -> list:  # type: ignore[type-arg]
        """Answer each request; logits that are not finite are an error of their own request, and no mask of class 0."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):  # type: ignore[no-untyped-def]
        logits = pb_utils.get_input_tensor_by_name(request, "logits").as_numpy().astype(np.float32)
        if not np.isfinite(logits).all():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("The network answers NaN or Inf."))
        sizes = pb_utils.get_input_tensor_by_name(request, "SIZE").as_numpy()
        masks = [
            self._encoded(output, int(height), int(width))
            for output, (height, width) in zip(logits, sizes, strict=True)
        ]
        answer = np.array(masks, dtype=np.object_).reshape(-1, 1)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("MASK", answer)])

    def _encoded(self, output: np.ndarray, height: int, width: int) -> bytes:
        classes = np.argmax(_resized(_resized(output, height, 1), width, 2), axis=0)
        image = Image.fromarray(classes.astype(np.uint8 if self.palette else np.uint16))
        if self.palette:
            image.putpalette(self.palette)
        target = io.BytesIO()
        image.save(target, format="PNG")
        return target.getvalue()


def _resized(values: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Float32 values at `size` places along an axis, each between its two neighbours."""
    count = values.shape[axis]
    place = np.clip((np.arange(size) + 0.5) * (count / size) - 0.5, 0, count - 1)
    first = np.floor(place).astype(np.int64)
    share = np.expand_dims(place - first, tuple(other for other in range(values.ndim) if other != axis))
    one, other = (values.take(at, axis) for at in (first, np.minimum(first + 1, count - 1)))
    return one + (other - one) * share.astype(np.float32)
