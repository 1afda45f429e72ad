"""Networks of one input or several, called like the module: what a file takes, and how arrays are given to it.

    runtime = fd.open_runtime("model.onnx")
    runtime.inputs                                      Port("image", float32, ("N", 3, 64, 64)), Port("depth", ...)
    runtime(image, depth)                               in the order of the file's inputs
    runtime({"depth": depth, "image": image})           or by their names

Arrays or torch tensors go in. Out comes an array of a network of one output, else a dict by the names of the outputs.
Floating point inputs take any floating point type; integers are never converted to one, and bools to nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp4deploy.errors import InputError
from fp4deploy.graph.nested import flat_inputs

Extent = int | str | tuple[int, int] | None  # fixed; one size for all axes of this name; least and most; any
NEVER_EMPTY = ("N", "C", "D", "H", "W")  # axes of images; one of another name, such as of a cache, may have no element
Outputs = NDArray[Any] | dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Port:
    """One input of a file: its name, the type that it is fed as, and its extents, None where they are not known."""

    name: str
    dtype: np.dtype[Any]
    extents: tuple[Extent, ...] | None

    @property
    def described(self) -> str:
        """ "depth float32 [N, 1, 8..64, 64]", for messages."""
        return f"{self.name} {self.form}"

    @property
    def form(self) -> str:
        """ "float32 [N, 1, 8..64, 64]"."""
        if self.extents is None:
            return str(self.dtype)
        return f"{self.dtype} [{', '.join(map(_text, self.extents))}]"

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape fits; axes of one name are compared by `fed`."""
        if self.extents is None:
            return True
        return len(shape) == len(self.extents) and all(map(_fits, self.extents, shape))


def image_port(channels: int = 3, axes: int = 2) -> Port:
    """Normalised images, or volumes of three spatial axes, of any size."""
    return Port("image", np.dtype(np.float32), ("N", channels, *"DHW"[-axes:]))


def fixed_batch(ports: Sequence[Port]) -> int | None:
    """The only number of images that a file takes, where its writer fixed it; else None."""
    extents = ports[0].extents if len(ports) == 1 else None
    return extents[0] if extents and isinstance(extents[0], int) else None


def in_batches(ports: Sequence[Port], images: Any, run: Callable[[Any], Any], source: object, advice: str) -> Any:
    """Run a file on images, an array or a tensor, in parts where its batch is fixed.

    The last image is repeated to fill a part; where there is one part, it is `images`.

    Raises:
        InputError: what it gives has not one entry for each image, or `images` are no array.
    """
    if not isinstance(images, np.ndarray | torch.Tensor):
        raise InputError(f"{source}: infer takes one array; call the runtime itself with several, or a dict of them.")
    batch = fixed_batch(ports) or len(images)

    def part(at: int) -> Any:
        own = images[at : at + batch]
        filled = own if len(own) == batch else _joined([own, *[own[-1:]] * (batch - len(own))])
        found = run(images if batch == len(images) else filled)
        if not isinstance(found, np.ndarray | torch.Tensor) or found.shape[:1] != (batch,):
            raise InputError(f"{source}: its first output is no array with one entry for each image. {advice}")
        return found[: len(images) - at]

    parts = [part(at) for at in range(0, len(images), batch)]
    return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def fed(ports: Sequence[Port], given: Sequence[object], source: object) -> dict[str, NDArray[Any]]:
    """Arrays by the names of a file's inputs, in its types.

    Args:
        given: arrays or tensors in the order of `ports`, or one dict by their names.

    Raises:
        InputError: another number, name, type or shape; `source` begins the message.

    >>> port = Port("x", np.dtype(np.float32), ("N", 3))
    >>> fed([port], [np.ones((1, 3), np.float16)], "f.onnx")["x"].dtype.name
    'float32'
    """
    arrays = {port.name: _array(port, value, source) for port, value in _paired(ports, given, source)}
    sizes: dict[str, tuple[str, int]] = {}
    for port in ports:
        for extent, size in zip(port.extents or (), arrays[port.name].shape, strict=False):
            if not isinstance(extent, str):
                continue
            other, known = sizes.setdefault(extent, (port.name, size))
            if known != size:
                raise InputError(
                    f"{source}: '{other}' and '{port.name}' share the axis {extent}, and have {known} and {size}."
                )
    return arrays


def named(names: Sequence[str], values: Sequence[NDArray[Any]]) -> Outputs:
    """What a call gives: the only output, or all of them by name."""
    return values[0] if len(values) == 1 else dict(zip(names, values, strict=True))


def warn_of_others(names: Sequence[str], source: object) -> None:
    """Say that what takes the first output of several leaves the others out; Python shows it once a place."""
    if len(names) > 1:
        warnings.warn(
            f"{source} has {len(names)} outputs ({', '.join(names)}), and infer gives the first, {names[0]}. All of "
            "them, in a dict by these names: runtime(images)",
            stacklevel=3,
        )


def require_one_input(ports: Sequence[Port], source: object) -> None:
    """Refuse a network of several inputs, where images are all that there is to feed.

    Raises:
        InputError: with its inputs; `source` begins the message.
    """
    if len(ports) != 1:
        raise InputError(
            f"{source} takes {len(ports)} inputs ({', '.join(each.described for each in ports)}), and this command "
            "feeds images alone. Call it in Python: fp4deploy.open_runtime(FILE)(first, second), or with a dict by "
            "these names."
        )


def _paired(ports: Sequence[Port], given: Sequence[object], source: object) -> list[tuple[Port, Any]]:
    wanted = ", ".join(each.described for each in ports)
    if len(given) == 1 and isinstance(given[0], Mapping):
        by_name = dict(flat_inputs(given[0]))
        if set(by_name) != {each.name for each in ports}:
            raise InputError(f"{source} takes {wanted}; the dict has {', '.join(map(str, by_name)) or 'nothing'}.")
        return [(port, by_name[port.name]) for port in ports]
    if len(given) != len(ports):
        count = "1 input" if len(ports) == 1 else f"{len(ports)} inputs"
        raise InputError(
            f"{source} takes {count} ({wanted}), and {len(given)} {'was' if len(given) == 1 else 'were'} given. Give "
            "one array for each, or a dict by these names."
        )
    return list(zip(ports, given, strict=True))


def _array(port: Port, value: object, source: object) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
        value = value.numpy()
    array = np.asarray(value)
    require_fitting(port, array.dtype, array.shape, source)
    return np.ascontiguousarray(array, port.dtype)


def require_fitting(port: Port, dtype: np.dtype[Any], shape: Sequence[int], source: object) -> None:
    """Refuse a type or shape that does not fit.

    Raises:
        InputError: with what would; `source` begins the message.
    """
    if not _same_kind(dtype, port.dtype):
        raise InputError(f"{source}: the input '{port.name}' takes {port.form}, and was given {dtype}.")
    if not port.takes(shape):
        raise InputError(f"{source}: the input '{port.name}' takes {port.form}, and was given {list(shape)}.")


def _same_kind(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Floating point types are rounded to one another; an integer type has to hold the other's values."""
    if given.kind == wanted.kind == "f":
        return True
    kinds = "iu" if wanted.kind in "iu" else wanted.kind
    return given.kind in kinds and np.can_cast(given, wanted, "safe")


def _fits(extent: Extent, size: int) -> bool:
    if isinstance(extent, tuple):
        return extent[0] <= size <= extent[1]
    if isinstance(extent, int):
        return size == extent
    return size > 0 or (isinstance(extent, str) and extent not in NEVER_EMPTY)


def _text(extent: Extent) -> str:
    if isinstance(extent, tuple):
        return f"{extent[0]}..{extent[1]}"
    return "any" if extent is None else str(extent)
