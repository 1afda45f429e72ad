"""Layer-wise comparison of the decomposed graph with torch, each layer with reference inputs from torch.

FP4 amplifies rounding: accumulating in another order changes the last bit of a sum, now and then that moves an element
over a rounding boundary of E2M1, the element changes by a whole E2M1 step, and the sums of the next layer change by far
more than a last bit. In a large network the difference reaches a floor that has nothing to do with the export: on a
UNet of scale 1.0 at 352 x 480 the classes of 0.36 % of the pixels differ between torch and the decomposed graph, and of
as many between torch's own NCHW and channels_last kernels.

Therefore each GEMM of the decomposed graph reads torch's fake-quantised activation of that layer, while the graph's own
quantiser still runs on what the graph computed, and its result is compared with torch's. Every operator between two
quantisers is checked on exact operands, so that nothing is amplified. A few elements in a million still differ by last
bits; an error appears in the first quantised layer that reads it.

A layer that reads a small map, or pixels of equal values that were normalised, may still differ in more than a
thousandth of its elements. Then the comparison is made anew without those that last bits decide about (`last_bits`).

Limit: an error in less than a thousandth of a layer's elements (for example one channel of a thousand) passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import nn

from fp4deploy.export.onnx.canonical import GEMM_OPS, rest_of_file
from fp4deploy.export.onnx.layers import planned_layers
from fp4deploy.export.onnx.session import verifying_session
from fp4deploy.export.verify.agreement import OutputAgreement, compare_outputs, least_share, unsettled
from fp4deploy.export.verify.last_bits import movements, settled
from fp4deploy.export.verify.tensors import call, feed, floats
from fp4deploy.formats import NVFP4_BLOCK, pad_to_blocks
from fp4deploy.graph.capture import Inputs
from fp4deploy.models.meaning import UNKNOWN, OutputMeanings
from fp4deploy.qat import QuantizedLayer, quantized_layers
from fp4deploy.qat.plan import eight_bits
from fp4deploy.rest import Rest

REFERENCE = ".from_torch"

Operands = dict[str, list[torch.Tensor]]  # of each layer, one for each use
Reads = Callable[[str, int, torch.Tensor], torch.Tensor]  # (layer, use, what it is given) -> what it reads


@dataclass(frozen=True)
class LayerwiseAgreement:
    """outputs: as in the end-to-end comparison, every GEMM with reference inputs.

    layers: share of differing quantised input elements by layer, in the order of the graph.
    blocks: in how many blocks of 16 they lie: one last bit of a block's amax can change its scale, and all of it. In an
        FP8 layer, whose scale is static, each element counts.
    sources: the layers whose outputs each layer's input is computed from; none where it comes from the network's input.
    unmatched: layers that torch and the graph run a different number of times; with any, nothing was compared.
    """

    outputs: tuple[OutputAgreement, ...]
    layers: dict[str, float]
    sources: dict[str, tuple[str, ...]]
    unmatched: tuple[str, ...] = ()
    blocks: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share on which both agree, 0..1, of the output that agrees least; 0 where nothing was compared."""
        return least_share(self.outputs)

    @property
    def worst(self) -> float:
        """The largest share of differing elements of any layer, 0..1."""
        return max(self.layers.values(), default=0.0)


@dataclass(frozen=True)
class CutGraph:
    """The decomposed graph with an input in place of each GEMM's activation, which becomes an output.

    values: layer -> names of its quantised activations, one for each use, in the graph's order; the inputs append
    `REFERENCE`. sources: layer -> layers whose outputs they are computed from.
    """

    graph: onnx.ModelProto
    values: dict[str, list[str]]
    sources: dict[str, tuple[str, ...]]


def compare_layerwise(
    model: nn.Module,
    portable: onnx.ModelProto,
    images: Iterable[Inputs],
    meanings: OutputMeanings = UNKNOWN,
    last_bits: float = 0.0,
) -> LayerwiseAgreement:
    """Compare on `images`, float32 [N, C, H, W] each, or several inputs; holds the activations of one batch.

    last_bits: leave out what differs where these decide, if it is this share, 0..1, of a layer or output at most.
    """
    planned, layers = planned_layers(portable), quantized_layers(model)
    layers = {name: layer for name, layer in layers.items() if not planned or name in planned}  # others: nobody reads
    cut = with_reference_inputs(portable, list(layers))
    session, rest = verifying_session(cut.graph), rest_of_file(portable)
    names = [value.name for value in session.get_inputs() if not value.name.endswith(REFERENCE)]
    names_of_outputs = [value.name for value in session.get_outputs()]
    compared: tuple[OutputAgreement, ...] = ()
    wrong, seen, blocks = (dict.fromkeys(cut.values, 0) for _ in range(3))
    for image in images:
        expected, operands = _run_torch(model, layers, image, rest)
        unmatched = [name for name in layers if len(operands[name]) != len(cut.values.get(name, ()))]
        if unmatched:
            return LayerwiseAgreement((), {}, cut.sources, tuple(unmatched))
        references = [
            (name, value, x) for name, uses in cut.values.items() for value, x in zip(uses, operands[name], strict=True)
        ]
        fed = feed(image, names) | {value + REFERENCE: x.numpy() for _, value, x in references}
        found = [floats(torch.from_numpy(each)) for each in session.run(None, fed)]
        given, own = found[: len(expected)], found[len(expected) :]
        outputs = names_of_outputs[: len(expected)]
        moved = _moved(model, layers, cut, image, rest, len(expected), last_bits) if last_bits else None
        compared = compare_outputs(expected, given, outputs, meanings, compared, moved and moved[: len(expected)])
        for at, ((name, _, x), y) in enumerate(zip(references, own, strict=True), len(expected)):
            finite = bool(y.isfinite().all())  # one block may differ by its scale, and never by NaN
            y = y if moved is None else settled(x, y, moved[at])
            differs = (y != x if finite else torch.ones_like(x, dtype=torch.bool)).numpy()
            wrong[name] += int(differs.sum())
            seen[name] += x.numel()
            blocks[name] += _blocks_with(differs, layers[name]) if finite else x.numel()
    shares = {name: wrong[name] / max(seen[name], 1) for name in cut.values}
    return LayerwiseAgreement(compared, shares, cut.sources, blocks=blocks)


def _blocks_with(differs: NDArray[np.bool_], layer: QuantizedLayer) -> int:
    """The number of blocks that hold a differing element."""
    if eight_bits(layer.recipe):
        return int(differs.sum())
    last = np.moveaxis(differs, layer.gemms().input_axis, -1)
    return int(last.reshape(-1, _block_of(layer)).any(-1).sum())


def _block_of(layer: QuantizedLayer) -> int:
    return layer.recipe.activation.block_size if layer.recipe.activation is not None else NVFP4_BLOCK


def with_reference_inputs(portable: onnx.ModelProto, layers: list[str]) -> CutGraph:
    """Cut the graph at every quantised activation; a layer used twice is cut at each use."""
    graph = onnx.ModelProto()
    graph.CopyFrom(portable)
    values: dict[str, list[str]] = {}
    for node in graph.graph.node:
        layer = _layer_of(node, layers)
        if layer is None:
            continue
        value = node.input[0]
        values.setdefault(layer, []).append(value)
        node.input[0] = value + REFERENCE
    for value in (value for uses in values.values() for value in uses):
        graph.graph.input.append(helper.make_tensor_value_info(value + REFERENCE, TensorProto.FLOAT, None))
        graph.graph.output.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, None))
    return CutGraph(graph, values, _sources(graph.graph, values))


def _layer_of(node: onnx.NodeProto, layers: list[str]) -> str | None:
    """The quantised layer that `node` computes, or pads the input of: its activation is named after it."""
    if node.op_type not in (*GEMM_OPS, "Pad"):
        return None
    found = next((layer for layer in layers if node.input[0].startswith(f"{layer}.input.")), None)
    return None if found is not None and node.output[0].startswith(f"{found}.input.") else found


def _sources(graph: onnx.GraphProto, values: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    """Walk from each quantised activation back to the reference inputs that it is computed from."""
    references = {value + REFERENCE: layer for layer, uses in values.items() for value in uses}
    producers = {value: node for node in graph.node for value in node.output}

    def walk(uses: list[str]) -> Iterator[str]:
        left, known = list(uses), set(uses)
        while left:
            value = left.pop()
            if value in references:
                yield references[value]
            inputs = set(producers[value].input) - known if value in producers else set()
            known |= inputs
            left += inputs

    found = {layer: set(walk(uses)) for layer, uses in values.items()}
    return {layer: tuple(name for name in values if name in names) for layer, names in found.items()}


def _moved(
    model: nn.Module,
    layers: dict[str, QuantizedLayer],
    cut: CutGraph,
    image: Inputs,
    rest: Rest,
    count: int,
    most: float,
) -> list[torch.Tensor]:
    """How far `count` outputs, and the operands of GEMMs, move by last bits, each layer with reference inputs."""
    kept: Operands = {name: [] for name in layers}

    def keep(name: str, _: int, x: torch.Tensor) -> torch.Tensor:
        kept[name].append(x.clone())
        return x

    def run(image: Inputs, reads: Reads = lambda name, use, _: kept[name][use]) -> list[torch.Tensor]:
        outputs, operands = _run_torch(model, layers, image, rest, reads)
        return [*outputs, *(each for name in cut.values for each in operands[name])]

    def shares(moved: Sequence[torch.Tensor]) -> list[float]:
        pairs = list(zip(expected, moved, strict=True))[count:]
        operands = [float((x != y).float().mean()) for x, y in pairs]
        return unsettled(expected[:count], moved[:count]) + operands

    expected = run(image, keep)
    return movements(model, run, image, expected, shares, most)


def _run_torch(
    model: nn.Module,
    layers: dict[str, QuantizedLayer],
    image: Inputs,
    rest: Rest,
    reads: Reads = lambda _name, _use, x: x,
) -> tuple[list[torch.Tensor], Operands]:
    """Outputs, and each layer's quantised input at each use as the graph holds it: channels padded to whole blocks.

    reads: what a layer reads at a use in place of what it is given.
    """
    operands: Operands = {name: [] for name in layers}

    def hook(name: str, layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = layer.quantized_input(inputs[0])
        if not eight_bits(layer.recipe):  # whose channels are not padded
            x = pad_to_blocks(x, (layer.gemms().input_axis % x.ndim,), _block_of(layer))
        operands[name].append(x)
        return reads(name, len(operands[name]) - 1, inputs[0]), *inputs[1:]

    handles = [layer.register_forward_pre_hook(partial(hook, name)) for name, layer in layers.items()]
    try:
        with torch.inference_mode():
            return [floats(each) for each in call(model, image, rest)], operands
    finally:
        for handle in handles:
            handle.remove()
