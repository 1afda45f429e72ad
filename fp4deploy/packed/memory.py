"""Memory of a graph: bytes of its weights, and the largest number of bytes of activations that are live at once.

An activation is live from the node that writes it to the last one that reads it; while a node runs, its inputs and
outputs are all live. The peak is the largest sum over the nodes: what an allocator without fragmentation needs. The
logits count, the workspace of kernels (sums of GroupNorm, a few bytes a channel) does not. A network that reads its
input as multi-term FP4, or packed, starts with the RGB image, the encoded channels and their packed form; the FP32 in
which the terms are computed is workspace.

    plain, FP16       2 C                            bytes a pixel
    packed, NVFP4     ceil16(C) / 2 + ceil16(C) / 16
"""

from __future__ import annotations

from fp4deploy.errors import InputError
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.packed.graph import INPUT, RGB, Activation, Concat, Conv2d, Convolution, Graph, Node, outputs_of

FP16_BYTES = 2


def last_reads(graph: Graph) -> dict[str, int]:
    """The number of the last node that reads each activation."""
    return {name: number for number, node in enumerate(graph.steps) for name in node.inputs}


def feature_map_bytes(activation: Activation, height: int, width: int, batch: int = 1) -> int:
    """Bytes of one activation for inputs of `height` x `width` pixels."""
    pixels = batch * (height // activation.stride) * (width // activation.stride)
    blocks = -(-activation.channels // NVFP4_BLOCK)
    return pixels * (FP16_BYTES * activation.channels if activation.amax is None else blocks * (NVFP4_BLOCK // 2 + 1))


def activation_bytes(graph: Graph, height: int, width: int, batch: int = 1) -> int:
    """The largest number of bytes of activations that are live at once.

    Raises:
        InputError: the size is not a multiple of the graph's stride.
    """
    check_size(graph, height, width)
    last = last_reads(graph)
    sizes = {name: feature_map_bytes(activation, height, width, batch) for name, activation in graph.images.items()}
    logits = feature_map_bytes(Activation(channels=_classes(graph), stride=1), height, width, batch)
    live, peak = {INPUT}, _reading_bytes(graph, height, width, batch)
    for number, node in enumerate(graph.steps):
        live.update(outputs_of(node))
        ends = number == len(graph.steps) - 1
        peak = max(peak, sum(sizes[name] for name in live) + (logits if ends else 0))
        live = {name for name in live if last.get(name, -1) > number}
    return peak


def _reading_bytes(graph: Graph, height: int, width: int, batch: int) -> int:
    """The input image and the forms of it up to the one that the first node reads."""
    read = graph.images[INPUT]
    forms = [RGB, read.model_copy(update={"amax": None}) if graph.digits else None, read if read.amax else None]
    return sum(feature_map_bytes(activation, height, width, batch) for activation in forms if activation is not None)


def check_size(graph: Graph, height: int, width: int) -> None:
    """Refuse sizes that the network cannot downsample as often as it must.

    Raises:
        InputError: naming the nearest size.
    """
    stride = graph.stride
    if height % stride or width % stride or min(height, width) < stride:
        nearest = tuple(max(stride, round(size / stride) * stride) for size in (height, width))
        raise InputError(
            f"Images of {height} x {width} pixels do not fit this network: height and width must be multiples "
            f"of {stride}, such as {nearest[0]} x {nearest[1]}."
        )


def plain_bytes(graph: Graph) -> int:
    """Bytes of the same parameters in FP16."""
    total = 0
    for node in graph.steps:
        if isinstance(node, Convolution) and node.precision == "nvfp4":
            out, *kernel, _ = graph.tensors[f"{node.layer}.weight.codes"].shape
            channels = sum(graph.images[name].channels for name in node.inputs)
            total += FP16_BYTES * out * kernel[0] * kernel[1] * channels
    return total + sum(FP16_BYTES * _count(info.shape) for info in graph.tensors.values() if info.dtype == "F16")


def full_precision(graph: Graph) -> Graph:
    """The same network with plain activations and written concatenations: what its FP16 model needs. Not to be run."""
    activations = {name: activation.model_copy(update={"amax": None}) for name, activation in graph.images.items()}
    steps: list[Node] = []
    for node in graph.steps:
        if isinstance(node, Conv2d) and len(node.inputs) == 2:
            joined = f"{node.output}.concat"
            channels = sum(activations[name].channels for name in node.inputs)
            activations[joined] = Activation(channels=channels, stride=activations[node.inputs[0]].stride)
            steps += [
                Concat(inputs=node.inputs, output=joined),
                node.model_copy(update={"inputs": [joined], "precision": "fp16"}),
            ]
        else:
            steps.append(node.model_copy(update={"precision": "fp16"}) if isinstance(node, Convolution) else node)
    return graph.model_copy(update={"images": activations, "steps": steps})


def _classes(graph: Graph) -> int:
    layer = graph.steps[-1].layer  # type: ignore[union-attr]  # the head, see `check`
    name = f"{layer}.weight"
    return graph.tensors[name if name in graph.tensors else f"{name}.codes"].shape[0]


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
