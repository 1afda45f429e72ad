"""TensorRT and TensorRT-RTX engines: load, bind torch CUDA tensors, run on a stream of our own.

Both libraries have the same Python interface (Runtime, ICudaEngine, IExecutionContext, `execute_async_v3`), so one
class serves both; they differ in the module's name and in what they run. An engine is tied to its library and GPU: its
ledger (`unet.ledger.json`) says which, and a machine that cannot run it gets one sentence, never a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fp4deploy.architecture import Architecture
from fp4deploy.bench.latency import time_cuda
from fp4deploy.bench.ledgers import TITLES, built_by
from fp4deploy.bench.runtimes.engine_interface import EngineInterface, assumed
from fp4deploy.bench.runtimes.ports import Extent, Outputs, Port, fed, named, require_one_input
from fp4deploy.bench.runtimes.precision import of_engine
from fp4deploy.bench.runtimes.protocol import TIMEOUT, Array, Given, checked, described
from fp4deploy.data import IMAGE_MEAN, IMAGE_STD
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine import build as engine
from fp4deploy.export.engine import caches
from fp4deploy.export.engine.adapter import refit, runtime_cache
from fp4deploy.export.ledger.ledger import Ledger, ledger_path
from fp4deploy.export.lowering.interface import Interface
from fp4deploy.models.card import ModelCard
from fp4deploy.requirements import LIBRARIES

POLL = 1e-4  # seconds between two looks at a stream
MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
KINDS = {"HALF": "fp16", "FLOAT": "fp32", "UINT8": "uint8", "INT32": "int32", "INT64": "int64", "BOOL": "bool"}
DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "fp16": (torch.float16, np.dtype(np.float16)),
    "fp32": (torch.float32, np.dtype(np.float32)),
    "uint8": (torch.uint8, np.dtype(np.uint8)),
    "int32": (torch.int32, np.dtype(np.int32)),
    "int64": (torch.int64, np.dtype(np.int64)),
    "bool": (torch.bool, np.dtype(np.bool_)),
}
HINT = "It runs on that GPU; here, take the ONNX file it was built from."


class TensorRtRuntime:
    """A deserialised engine with a dynamic batch, bound to CUDA tensors."""

    _where = "cuda"

    def __init__(
        self,
        path: Path,
        backend: str,
        ledger: Ledger | None,
        trt: ModuleType,
        loaded: Any,
        timeout: float = TIMEOUT,
    ) -> None:
        """`timeout`: most seconds that one inference may take."""
        self._trt, self._engine = trt, loaded
        self._path, self._timeout = path, timeout
        self._cached = caches.entry("runtime", backend, str(trt.__version__)) if backend == "tensorrt-rtx" else None
        self._before = caches.read(self._cached)
        self._cache: Any
        config, self._cache = runtime_cache(loaded, self._before) if self._cached is not None else (None, None)
        self._context = loaded.create_execution_context(*([config] if config is not None else []))
        if self._context is None:
            raise UnavailableError(f"{path} was loaded, but this GPU has no room to run it; free memory on it.")
        names = [loaded.get_tensor_name(i) for i in range(loaded.num_io_tensors)]
        inputs = [name for name in names if loaded.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        outputs = [name for name in names if loaded.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT]
        if not inputs or not outputs:
            raise InputError(f"{path} has {len(inputs)} inputs and {len(outputs)} outputs; it needs one of each.")
        self._input, self._outputs = inputs[0], outputs
        self.inputs = tuple(map(self._port, inputs))
        self._stream = torch.cuda.Stream()
        self._io = EngineInterface(self._interface(ledger))
        self.card = (ledger.model_card() if ledger else None) or self._assumed_card()
        self.name = f"{TITLES[backend]} {trt.__version__}"
        self.device = torch.cuda.get_device_name()
        self.precision = of_engine(ledger, self.card.precision)

    def __repr__(self) -> str:
        return described(self, self._path)

    def infer(self, images: Array) -> Array:
        """Logits float32 [N, classes, H, W]; more images than the engine's largest batch run batch by batch."""
        least, _, most = (shape[0] for shape in self._engine.get_tensor_profile_shape(self._input, 0))
        parts = [self._run_at_least(least, images[i : i + most]) for i in range(0, len(images), most)]
        return checked(np.concatenate(parts), images, self.card, self._path)

    def __call__(self, *inputs: object) -> Outputs:
        """The output of these inputs, or several by name (`ports`), in the engine's own types and layouts."""
        found = self._execute(self._fed(inputs))
        return named(self._outputs, [found[name].cpu().numpy() for name in self._outputs])

    def _run_at_least(self, least: int, images: Array) -> Array:
        """Run images that may be fewer than the smallest batch: the last one is repeated."""
        missing = max(0, least - len(images))
        return self._run(np.concatenate([images, images[-1:].repeat(missing, 0)]))[: len(images)]

    def _run(self, images: Array) -> Array:
        output = self._execute(self._images(images))[self._outputs[0]]
        logits: Array = self._io.logits(output, self.card)
        return logits

    def _execute(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        _given, outputs = self._bind(given)  # _given stays alive: the engine reads it by address
        self._launch()
        self._wait()
        if self._cache is not None:  # kernels are compiled by the first inference of a shape
            caches.keep(self._cached, bytes(self._cache.serialize()), self._before)
            self._cache = None
        return outputs

    def time(self, images: Given, warmup: int, iterations: int, max_seconds: float) -> list[float]:
        """Milliseconds between two CUDA events around `execute_async_v3`."""
        _given, _outputs = self._bind(self._fed([images]) if isinstance(images, Mapping) else self._images(images))
        self._launch()
        self._wait()  # an inference that ends once ends again on the same images
        return time_cuda(self._launch, self._stream, warmup, iterations, max_seconds)

    def profile(self, images: Array) -> dict[str, float]:
        """Milliseconds of each layer of the engine in one run, by the names that the library's profiler gives.

        Raises:
            UnavailableError: it names none.
        """
        images = images[: self._engine.get_tensor_profile_shape(self._input, 0)[2][0]]
        times = self._context.profiler = _layer_times(self._trt)
        self._run(images)
        if not times.milliseconds:
            raise UnavailableError(f"{self.name} names no layers in its profile.")
        return dict(times.milliseconds)

    def _images(self, images: Array) -> dict[str, torch.Tensor]:
        require_one_input(self.inputs, self._path)
        return {self._input: self._io.given(images, self.card)}

    def _fed(self, inputs: Sequence[object]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in fed(self.inputs, inputs, self._path).items()}

    def _bind(self, given: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        held = []
        for name, tensor in given.items():
            held.append(tensor.to(self._where, self._dtype(name)))
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                what = "images" if len(given) == 1 else f"'{name}'"
                raise InputError(
                    f"The engine does not take {what} of shape {list(tensor.shape)}; build it for that size."
                )
            self._context.set_tensor_address(name, held[-1].data_ptr())
        outputs = {}
        for name in self._outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            outputs[name] = torch.empty(shape, device=self._where, dtype=self._dtype(name))
            self._context.set_tensor_address(name, outputs[name].data_ptr())
        self._stream.wait_stream(torch.cuda.current_stream())
        return held, outputs

    def _port(self, name: str) -> Port:
        """An input with the extents of the first profile."""
        extents: tuple[Extent, ...] = tuple(self._engine.get_tensor_shape(name))
        if -1 in extents:
            least, _, most = map(tuple, self._engine.get_tensor_profile_shape(name, 0))
            extents = tuple(low if low == high else (low, high) for low, high in zip(least, most, strict=True))
        return Port(name, DTYPES[self._kind(name)][1], extents)

    def _launch(self) -> None:
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise UnavailableError("The engine failed while running; its library printed the reason above.")

    def _wait(self) -> None:
        """Wait for the stream as `synchronize` does, but no longer than the timeout: an engine can hold a loop."""
        done = torch.cuda.Event()
        done.record(self._stream)
        wait_for(done.query, self._timeout, self._path)

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._kind(name)][0]

    def _kind(self, name: str) -> str:
        types = self._trt.DataType
        known = {getattr(types, each): kind for each, kind in KINDS.items() if hasattr(types, each)}
        found = known.get(self._engine.get_tensor_dtype(name))
        if found is None:
            raise InputError(
                f"{self._path}: '{name}' is {self._engine.get_tensor_dtype(name)}; bench takes no such type."
            )
        return found

    def _interface(self, ledger: Ledger | None) -> Interface:
        if ledger is not None:
            fields: dict[str, Any] = ledger.interface or {}
            return Interface(**fields)
        names = self._input, self._outputs[0]
        kinds, shapes = map(self._kind, names), map(self._engine.get_tensor_shape, names)
        (given, made), (given_shape, made_shape) = kinds, shapes
        return assumed(given, tuple(given_shape), made, tuple(made_shape))

    def _assumed_card(self) -> ModelCard:
        shape = tuple(self._engine.get_tensor_shape(self._input))
        first = 1 if self._io.interface.input_layout == "nhwc" else 2
        height, width = shape[first : first + 2] if len(shape) == 4 else (1, 1)
        return ModelCard("unknown", 0.0, (), height, width, IMAGE_MEAN, IMAGE_STD, background=False)


def wait_for(finished: Callable[[], bool], seconds: float, path: Path) -> None:
    """Return once `finished` is true.

    Raises:
        InputError: it was not within `seconds`.
    """
    end = time.perf_counter() + seconds
    while not finished():
        if time.perf_counter() > end:
            raise InputError(
                f"{path} did not finish an inference within {seconds:g} seconds; a loop in it may have no end. If it "
                "only needs longer, give it more with --timeout."
            )
        time.sleep(POLL)


def _layer_times(trt: Any) -> Any:
    """A profiler that adds up the time of each layer; the base class exists only once the library is loaded."""

    class LayerTimes(trt.IProfiler):
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.milliseconds: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.milliseconds[layer_name] = self.milliseconds.get(layer_name, 0.0) + ms

    return LayerTimes()


def open_plan(path: Path, timeout: float = TIMEOUT) -> TensorRtRuntime:
    """Load an engine with the library that built it, as its ledger says; without a ledger, as its first bytes say.

    Raises:
        InputError: the file is not an engine, or not the one its ledger was written for.
        UnavailableError: no GPU, another GPU, or the library is missing.
    """
    ledger = engine.open_plan(path) if ledger_path(path).is_file() else None
    with path.open("rb") as file:
        backend = engine.PLAN_MAGIC.get(file.read(4))
    if backend is None:
        raise InputError(f"{path} is not an engine plan. Build one with: fp4deploy build")
    _require_gpu(path, ledger, backend)
    trt: Any = LIBRARIES[MODULES[backend]].require(str(path))
    logger = trt.Logger(trt.Logger.ERROR)
    runtime = trt.Runtime(logger)
    options = ledger.options if ledger is not None else ()
    if "version_compatible" in options:
        runtime.engine_host_code_allowed = True  # such a plan brings the code that runs it
    loaded = runtime.deserialize_cuda_engine(path.read_bytes())
    if loaded is None:
        raise UnavailableError(
            f"{path} cannot run here: {TITLES[backend]} {trt.__version__} refused it on "
            f"{torch.cuda.get_device_name()}; its reason is printed above. {HINT}"
        )
    if "stripped" in options:
        weights = engine.weights_path(path)
        if not weights.is_file():
            raise InputError(
                f"{path} has no weights inside, and {weights.name} is not in its folder. Keep them together."
            )
        refit(trt, loaded, logger, weights)
    return TensorRtRuntime(path, backend, ledger, trt, loaded, timeout)


def _require_gpu(path: Path, ledger: Ledger | None, backend: str) -> None:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if ledger is not None:
        try:
            engine.require_device(ledger, capability)
        except UnavailableError:
            here = f"{torch.cuda.get_device_name()} ({Architecture(*capability)})" if capability else "no CUDA GPU"
            raise UnavailableError(f"{path} was built by {built_by(ledger)}; this machine has {here}. {HINT}") from None
    elif capability is None:
        raise UnavailableError(f"{path} is an engine of {TITLES[backend]}; this machine has no CUDA GPU. {HINT}")
