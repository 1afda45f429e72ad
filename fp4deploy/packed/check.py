"""Does a graph fit together? Every name exists, every shape fits, every image is written once and before it is read.

A network that passes cannot fail while it runs for a reason that lies in its file, whatever wrote the file.
"""

from __future__ import annotations

from fp4deploy.errors import InputError
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.models.input_encoding import ENCODED_CHANNELS
from fp4deploy.packed.graph import (
    INPUT,
    RGB,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Graph,
    GroupNormReLU,
    Head,
    Image,
    Product,
    Step,
    outputs_of,
    tensors_of,
)


def check_graph(graph: Graph, channels: int) -> None:
    """Check the whole graph.

    Args:
        channels: how many the model card says that the head gives.

    Raises:
        InputError: naming the step and what is wrong with it.
    """
    image = graph.images.get(INPUT)
    wanted = ENCODED_CHANNELS if graph.digits else RGB.channels
    if image is None or image.stride != RGB.stride or image.channels != wanted:
        kind = "digits" if graph.digits else "RGB"
        raise InputError(f"The graph has no input named '{INPUT}' of the {wanted} channels of {kind}.")
    if image.amax is not None:
        _require(image.amax in graph.tensors, f"the tensor '{image.amax}' that the input is packed with is missing")
        _tensor(graph, image.amax, "F32", [])
    written = {INPUT}
    for number, step in enumerate(graph.steps):
        try:
            _check_names(graph, step, written)
            _check_step(graph, step, channels)
        except InputError as error:
            layer = "" if isinstance(step, Concat) else f" '{step.layer}'"
            raise InputError(f"Step {number} of the graph ({step.op}{layer}): {error}") from None
        if isinstance(step, Head) != (number == len(graph.steps) - 1):
            raise InputError(f"Step {number} of the graph ({step.op}): the head is the last step, and only the last.")
        written.update(outputs_of(step))
    unused = [name for name in graph.images if name not in written]
    read = {name for step in graph.steps for name in tensors_of(step, graph.images)} | {image.amax}
    unused += [name for name in graph.tensors if name not in read]
    if unused:
        raise InputError(f"{len(unused)} names of the graph are never used (first '{unused[0]}').")


def _check_names(graph: Graph, step: Step, written: set[str]) -> None:
    for name in step.inputs:
        _require(name in written, f"it reads '{name}', which no step before it writes")
    outputs = outputs_of(step)
    for name in outputs:
        _require(name in graph.images, f"it writes '{name}', which the graph does not describe")
        _require(name not in written and outputs.count(name) == 1, f"it writes '{name}' a second time")
    for name in tensors_of(step, graph.images):
        _require(name in graph.tensors, f"the tensor '{name}' is missing")
    for name in outputs:
        amax = graph.images[name].amax
        if amax:
            _tensor(graph, amax, "F32", [])


def _check_step(graph: Graph, step: Step, out: int) -> None:
    inputs = [graph.images[name] for name in step.inputs]
    channels = sum(image.channels for image in inputs)
    _require(len({image.stride for image in inputs}) == 1, "its inputs differ in size")
    stride = inputs[0].stride
    packed = [image.amax is not None for image in inputs]
    if isinstance(step, Product):
        _require(all(packed) if step.precision == "nvfp4" else not any(packed), f"its input is not {step.precision}")
    else:
        _require(not any(packed), "its input is packed")
    if isinstance(step, GroupNormReLU):
        _check_norm(graph, step, channels, stride)
    elif isinstance(step, Concat):
        _image(graph.images[step.output], channels, stride)
    elif isinstance(step, Head):
        _weight(graph, step, out, channels, 1 + 2 * step.padding)
    elif isinstance(step, Conv2d):
        if len(inputs) == 2:
            _require(step.precision == "nvfp4", "only a packed convolution has two inputs")
            _require(
                inputs[0].channels % NVFP4_BLOCK == 0, f"its first input is not a multiple of {NVFP4_BLOCK} channels"
            )
        output = graph.images[step.output]
        _weight(graph, step, output.channels, channels, 1 + 2 * step.padding)
        _image(output, output.channels, stride)
    elif isinstance(step, ConvTranspose2d):
        output = graph.images[step.output]
        _weight(graph, step, output.channels, channels, 2)
        _require(stride % 2 == 0, "its input is not half the size of anything")
        _image(output, output.channels, stride // 2)


def _check_norm(graph: Graph, step: GroupNormReLU, channels: int, stride: int) -> None:
    _require(channels % step.groups == 0, f"{step.groups} groups do not divide {channels} channels")
    for name in (f"{step.layer}.weight", f"{step.layer}.bias", *([step.bias] if step.bias else [])):
        _tensor(graph, name, "F16", [channels])
    for form in step.outputs:
        _image(graph.images[form.output], channels, 2 * stride if form.pooled else stride)


def _image(image: Image, channels: int, stride: int) -> None:
    _require(
        (image.channels, image.stride) == (channels, stride),
        f"its output is described as {image.channels} channels at stride {image.stride}, not {channels} at {stride}",
    )


def _weight(graph: Graph, step: Product, out: int, channels: int, kernel: int) -> None:
    """OHWI, the channels of a packed one padded to whole blocks."""
    weight, shape = f"{step.layer}.weight", [out, kernel, kernel]
    if step.bias:
        _tensor(graph, step.bias, "F16", [out])
    if step.precision == "fp16":
        _tensor(graph, weight, "F16", [*shape, channels])
        return
    blocks = -(-channels // NVFP4_BLOCK)
    _tensor(graph, f"{weight}.codes", "U8", [*shape, blocks * NVFP4_BLOCK // 2])
    _tensor(graph, f"{weight}.scales", "F8_E4M3", [*shape, blocks])
    _tensor(graph, f"{weight}.amax", "F32", [])


def _tensor(graph: Graph, name: str, dtype: str, shape: list[int]) -> None:
    info = graph.tensors[name]
    _require(
        (info.dtype, info.shape) == (dtype, shape),
        f"the tensor '{name}' is {info.dtype} {info.shape}, and {dtype} {shape} is needed",
    )


def _require(condition: bool, cause: str) -> None:
    if not condition:
        raise InputError(f"{cause}. Export the model again: fp4deploy export --format packed")
