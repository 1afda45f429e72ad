"""Encoded images to the network's input, inside Triton Inference Server's Python backend.

Height, width, mean and std come from the parameters in config.pbtxt. The image is turned upright as its EXIF
orientation says, resized bilinearly and normalised: (x / 255 - mean) / std. Pillow decodes the formats of
`FORMATS`, whatever a client sends: some others it decodes with the help of other programs (EPS: Ghostscript).
"""

import io
import json

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "BMP", "DIB", "WEBP", "TIFF", "GIF", "PPM")  # as fp4deploy.data.images


class TritonPythonModel:
    """IMAGE, bytes [N, 1] -> image float [N, 3, H, W], SIZE int32 [N, 2] (height, width of the original)."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters."""
        config = json.loads(args["model_config"])
        given = {name: json.loads(value["string_value"]) for name, value in config["parameters"].items()}
        self.height, self.width = given["height"], given["width"]
        self.mean, self.std = (np.array(given[name], np.float32) for name in ("mean", "std"))
        self.dtype = np.float16 if given["half"] else np.float32

    def execute(self, requests: list) -> list:  # type: ignore[type-arg]
        """Answer each request; an image that cannot be decoded is an error of its own request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):  # type: ignore[no-untyped-def]
        encoded = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)
        try:
            decoded = [
                ImageOps.exif_transpose(Image.open(io.BytesIO(content), formats=FORMATS)).convert("RGB")
                for content in encoded
            ]
        except Exception as error:  # Pillow's decoders raise of many kinds
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"IMAGE cannot be decoded: {error}"))
        sizes = np.array([(image.height, image.width) for image in decoded], np.int32)
        resized = [image.resize((self.width, self.height), Image.Resampling.BILINEAR) for image in decoded]
        pixels = (np.stack([np.asarray(image, np.float32) for image in resized]) / 255 - self.mean) / self.std
        tensors = [
            pb_utils.Tensor("image", np.ascontiguousarray(pixels.transpose(0, 3, 1, 2).astype(self.dtype))),
            pb_utils.Tensor("SIZE", sizes),
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)
