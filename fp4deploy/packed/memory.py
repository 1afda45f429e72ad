"""How much memory a graph needs: bytes of its weights, and of the images that are alive at once.

An image lives from the step that writes it to the last one that reads it, and during a step its inputs and outputs are
all alive. The peak is the largest sum over the steps: what an allocator without waste needs. The logits count, the
scratch of kernels (sums of GroupNorm, a few bytes a channel) does not. A network that reads its input as digits, or
packed, begins with the RGB image, the digits and what is packed of them; the FP32 in which digits are found is scratch.

    plain, FP16       2 C                            bytes a pixel
    packed, NVFP4     ceil16(C) / 2 + ceil16(C) / 16
"""

from __future__ import annotations

from fp4deploy.errors import InputError
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.packed.graph import INPUT, RGB, Concat, Conv2d, Graph, Image, Product, Step, outputs_of

FP16_BYTES = 2


def last_reads(graph: Graph) -> dict[str, int]:
    """The number of the last step that reads each image."""
    return {name: number for number, step in enumerate(graph.steps) for name in step.inputs}


def image_bytes(image: Image, height: int, width: int, batch: int = 1) -> int:
    """Bytes of one image for inputs of `height` x `width` pixels."""
    pixels = batch * (height // image.stride) * (width // image.stride)
    blocks = -(-image.channels // NVFP4_BLOCK)
    return pixels * (FP16_BYTES * image.channels if image.amax is None else blocks * (NVFP4_BLOCK // 2 + 1))


def activation_bytes(graph: Graph, height: int, width: int, batch: int = 1) -> int:
    """The most bytes of images alive at once.

    Raises:
        InputError: the size is not a multiple of the graph's stride.
    """
    check_size(graph, height, width)
    last = last_reads(graph)
    sizes = {name: image_bytes(image, height, width, batch) for name, image in graph.images.items()}
    logits = image_bytes(Image(channels=_classes(graph), stride=1), height, width, batch)
    alive, peak = {INPUT}, _reading_bytes(graph, height, width, batch)
    for number, step in enumerate(graph.steps):
        alive.update(outputs_of(step))
        ends = number == len(graph.steps) - 1
        peak = max(peak, sum(sizes[name] for name in alive) + (logits if ends else 0))
        alive = {name for name in alive if last.get(name, -1) > number}
    return peak


def _reading_bytes(graph: Graph, height: int, width: int, batch: int) -> int:
    """The given image and what the first step reads of it, made one from the other."""
    read = graph.images[INPUT]
    forms = [RGB, read.model_copy(update={"amax": None}) if graph.digits else None, read if read.amax else None]
    return sum(image_bytes(image, height, width, batch) for image in forms if image is not None)


def check_size(graph: Graph, height: int, width: int) -> None:
    """Refuse sizes that the network cannot halve often enough.

    Raises:
        InputError: naming the nearest size.
    """
    stride = graph.stride
    if height % stride or width % stride or min(height, width) < stride:
        nearest = tuple(max(stride, round(size / stride) * stride) for size in (height, width))
        raise InputError(
            f"Images of {height} x {width} pixels do not go through this network: height and width must be multiples "
            f"of {stride}, such as {nearest[0]} x {nearest[1]}."
        )


def plain_bytes(graph: Graph) -> int:
    """Bytes of the same parameters in FP16."""
    total = 0
    for step in graph.steps:
        if isinstance(step, Product) and step.precision == "nvfp4":
            out, *kernel, _ = graph.tensors[f"{step.layer}.weight.codes"].shape
            channels = sum(graph.images[name].channels for name in step.inputs)
            total += FP16_BYTES * out * kernel[0] * kernel[1] * channels
    return total + sum(FP16_BYTES * _count(info.shape) for info in graph.tensors.values() if info.dtype == "F16")


def full_precision(graph: Graph) -> Graph:
    """The same network with every image plain, concatenations written: what its FP16 model needs. Not to be run."""
    images = {name: image.model_copy(update={"amax": None}) for name, image in graph.images.items()}
    steps: list[Step] = []
    for step in graph.steps:
        if isinstance(step, Conv2d) and len(step.inputs) == 2:
            joined = f"{step.output}.concat"
            channels = sum(images[name].channels for name in step.inputs)
            images[joined] = Image(channels=channels, stride=images[step.inputs[0]].stride)
            steps += [
                Concat(inputs=step.inputs, output=joined),
                step.model_copy(update={"inputs": [joined], "precision": "fp16"}),
            ]
        else:
            steps.append(step.model_copy(update={"precision": "fp16"}) if isinstance(step, Product) else step)
    return graph.model_copy(update={"images": images, "steps": steps})


def _classes(graph: Graph) -> int:
    layer = graph.steps[-1].layer  # type: ignore[union-attr]  # the head, see `check`
    name = f"{layer}.weight"
    return graph.tensors[name if name in graph.tensors else f"{name}.codes"].shape[0]


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
