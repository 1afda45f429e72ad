"""`libfp4deploy` called from Python: to compare the C library with `PackedNetwork` and to measure it.

    network = Library(Path("libfp4deploy.so")).network(Path("unet.fp4"), Path("unet-sm90.kernels"))
    run = network.run((1, 3, 352, 480))
    run.enqueue(images, logits)                 tensors on the GPU, on torch's current stream; a graph may capture it

Only what a comparison needs; programs use the C interface (`native/include/fp4deploy.h`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fp4deploy.errors import InputError, UnavailableError, counted

TYPES = {torch.float32: 0, torch.float16: 1, torch.uint8: 2}  # fp4d_type


class _Shape(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int32), ("size", ctypes.c_int64 * 8))


class Library:
    """A built library; its functions return None or raise.

    Raises:
        UnavailableError: it does not load.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.functions: Any = ctypes.CDLL(str(path))
        except OSError as error:
            raise UnavailableError(f"{path} does not load: {error}.") from error
        self.functions.fp4d_last_error.restype = ctypes.c_char_p
        for name in ("fp4d_model_close", "fp4d_network_close", "fp4d_run_close"):
            getattr(self.functions, name).restype = None
            getattr(self.functions, name).argtypes = (ctypes.c_void_p,)

    def call(self, name: str, *arguments: object) -> None:
        """One function that returns a status.

        Raises:
            InputError: the status is not 0; the message is the library's.
        """
        status = getattr(self.functions, name)(*arguments)
        if status:
            raise InputError(f"{name}: {self.functions.fp4d_last_error().decode(errors='replace')} (status {status}).")

    def check(self, content: bytes) -> None:
        """Read and check a packed network, and forget it.

        Raises:
            InputError: it is refused.
        """
        model = ctypes.c_void_p()
        self.call("fp4d_model_open_memory", content, ctypes.c_size_t(len(content)), ctypes.byref(model))
        self.functions.fp4d_model_close(model)

    def network(self, model: Path, kernels: Path, device: int = 0) -> Network:
        """A network on a GPU."""
        return Network(self, model, kernels, device)


class Network:
    """A model and its network; closed with the object."""

    def __init__(self, library: Library, model: Path, kernels: Path, device: int) -> None:
        self.library = library
        self.model, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        library.call("fp4d_model_open", str(model).encode(), ctypes.byref(self.model))
        library.call("fp4d_network_open", self.model, str(kernels).encode(), device, ctypes.byref(self.handle))
        self.inputs, self.outputs = (
            int(getattr(library.functions, f"fp4d_model_{name}")(self.model)) for name in ("inputs", "outputs")
        )

    def __del__(self) -> None:
        self.library.functions.fp4d_network_close(self.handle)
        self.library.functions.fp4d_model_close(self.model)

    def run(self, *shapes: Sequence[int]) -> Run:
        """Forward passes of one shape of each input.

        Raises:
            InputError: another number of shapes, or none has a plan.
        """
        if len(shapes) != self.inputs:
            raise InputError(f"The network has {self.inputs} inputs, and {len(shapes)} shapes were given.")
        return Run(self, shapes)


class Run:
    """Forward passes of one shape of each input; closed with the object."""

    def __init__(self, network: Network, shapes: Sequence[Sequence[int]]) -> None:
        self.network, self.handle = network, ctypes.c_void_p()
        wanted = (_Shape * len(shapes))(*(_Shape(len(shape), (ctypes.c_int64 * 8)(*shape)) for shape in shapes))
        network.library.call("fp4d_run_create", network.handle, wanted, None, ctypes.byref(self.handle))

    def __del__(self) -> None:
        self.network.library.functions.fp4d_run_close(self.handle)

    def enqueue(self, *tensors: torch.Tensor) -> None:
        """One forward pass on torch's current stream: inputs, then outputs; all contiguous, and on the GPU.

        Inputs are all float32 or all float16, whole numbers int64; outputs all float32, all float16, or one uint8 of
        classes.

        Raises:
            InputError: another number of tensors, or of types; or the library refuses them.
        """
        inputs, outputs = tensors[: self.network.inputs], tensors[self.network.inputs :]
        images = {x.dtype for x in inputs if x.is_floating_point()} or {torch.float32}
        types = {y.dtype for y in outputs}
        wanted = 1 if types == {torch.uint8} else self.network.outputs
        if len(outputs) != wanted or len(images) > 1 or len(types) > 1:
            raise InputError(
                f"The network has {counted(self.network.inputs, 'input')} and {counted(wanted, 'output')}, each of one "
                f"type; {counted(len(tensors), 'tensor')} were given."
            )
        device = tensors[0].device
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None)
        kinds = TYPES[images.pop()], TYPES[types.pop()]
        self.network.library.call(
            "fp4d_run_enqueue", self.handle, kinds[0], _pointers(inputs), kinds[1], _pointers(outputs), stream
        )

    def host(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One forward pass on tensors of the CPU: `x` float32, `y` of any type."""
        where = ctypes.c_void_p(x.data_ptr()), TYPES[y.dtype], ctypes.c_void_p(y.data_ptr())
        self.network.library.call("fp4d_run_host", self.handle, *where)


def _pointers(tensors: Sequence[torch.Tensor]) -> object:
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
