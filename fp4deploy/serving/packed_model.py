"""A packed network from pixels to masks or objects, inside Triton Inference Server's Python backend: as `predict`.

This needs fp4deploy in the server's Python. Frames of all requests that the server hands over go through the network
together; what is wrong with a request is an error of its own response.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from fp4deploy.bench.runtimes.packed import PackedRuntime
from fp4deploy.errors import InputError
from fp4deploy.packed.capture import SHAPES
from fp4deploy.predict.predictor import Predictor, as_pixels

OUTPUTS = {
    "MASK": lambda found: np.stack([each.mask for each in found]),
    "FOUND": lambda found: np.array([[json.dumps(each.to_json())] for each in found], np.object_),
}
PARAMETERS = ("tile", "overlap", "min_score")


def graph_sizes(most: int) -> list[int]:
    """Sizes of batches up to `most`, no more than a packed network keeps CUDA graphs of: of 64 1, 4, 16 and 64."""
    return sorted({round(most ** (step / (SHAPES - 1))) for step in range(SHAPES)})


class TritonPythonModel:
    """FRAMES, RGB uint8 [N, H, W, 3] -> MASK [N, H, W], the class of each pixel; of a model with a head FOUND [N, 1].

    FOUND is JSON: what predictions.json and instances.json have of a frame. Instance models give both, detectors and
    classifiers FOUND alone.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Open the network and run it once, so that what is missing is an error here."""
        config = json.loads(args["model_config"])
        stated = config["parameters"]  # the server's own among them, such as EXECUTION_ENV_PATH
        settings = {name: json.loads(stated[name]["string_value"]) for name in PARAMETERS if name in stated}
        device = {"GPU": f"cuda:{args['model_instance_device_id']}", "CPU": "cpu"}.get(args["model_instance_kind"])
        path = Path(args["model_repository"]) / args["model_version"] / "model.fp4"
        self.most = config["max_batch_size"]
        runtime = PackedRuntime(path, device)
        self.predictor = Predictor(runtime, **settings, batch=self.most)
        self.outputs = [output["name"] for output in config["output"]]
        if runtime.cuda and not self.predictor.tile:  # tiles are batched by themselves
            self.predictor.sizes = graph_sizes(self.most)
        blank = np.zeros((*self.predictor.card.size, 3), np.uint8)
        list(self.predictor.predict_batches([blank] * size for size in self.predictor.sizes or [1]))

    def execute(self, requests: list) -> list:  # type: ignore[type-arg]
        """Answer each request."""
        frames = [self._frames(request) for request in requests]
        good = [each for each in frames if not isinstance(each, InputError)]
        answers = iter(self._predicted(good))
        return [self._response(each if isinstance(each, InputError) else next(answers)) for each in frames]

    def _frames(self, request):  # type: ignore[no-untyped-def]
        """A request's frames, or what is wrong with them."""
        tensor = pb_utils.get_input_tensor_by_name(request, "FRAMES")
        frames = None if tensor is None else tensor.as_numpy()
        try:
            if frames is None or frames.ndim != 4 or not len(frames):
                given = "nothing" if frames is None else f"{frames.dtype} {list(frames.shape)}"
                raise InputError(f"FRAMES is {given}; RGB pixels uint8 [N, H, W, 3] are needed, N from 1.")
            return [as_pixels(frame) for frame in frames]
        except InputError as error:
            return error

    def _predicted(self, requests):  # type: ignore[no-untyped-def]
        """Predictions of the frames of each request, or its error."""
        frames = [frame for request in requests for frame in request]
        batches = [frames[at : at + self.most] for at in range(0, len(frames), self.most)]
        try:
            found = [each for answer in self.predictor.predict_batches(batches) for each in answer]
        except InputError as error:  # of all together, such as of memory
            return [error] if len(requests) == 1 else [each for one in requests for each in self._predicted([one])]
        each = iter(found)
        return [[next(each) for _ in request] for request in requests]

    def _response(self, found):  # type: ignore[no-untyped-def]
        """Of an error, of predictions with an error among them, or of predictions."""
        errors = [found] if isinstance(found, InputError) else [each for each in found if isinstance(each, InputError)]
        if errors:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(errors[0])))
        tensors = [pb_utils.Tensor(name, OUTPUTS[name](found)) for name in self.outputs]
        return pb_utils.InferenceResponse(output_tensors=tensors)
