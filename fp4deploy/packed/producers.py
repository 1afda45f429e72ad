"""What a GPU runs instead of the nodes of a graph: fewer steps, each of which writes what convolutions read.

    produce    affine or norm, + residual branch, activation, 2x2 maximum   one kernel: x is read once
               pooling, packing
    resize     nearest, of codes and scales                                  0.56 bytes an element instead of 2
    concat     of codes and scales, where no block of 16 spans two parts     the same

A graph has one node for each of these layers, and a node on its own reads and writes a feature map in FP16. `plan`
goes over the nodes four times. First, paddings of no pixels are left out. Then packing moves in front of nearest
resizing and concatenation, which only move elements: a block is 16 channels of one pixel. Pooling by 2x2 becomes a form
of what it reads. Last, every activation function, addition and affine map takes in the nodes before it whose result
nobody else reads. The values are those of the nodes one by one, bit for bit, but for the sums of a norm.

The file and its graph are as before; a plan is made when a network is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor
from fp4deploy.packed.graph import (
    Activation,
    Affine,
    Arithmetic,
    Concat,
    Form,
    Graph,
    GroupNormReLU,
    Input,
    Node,
    Norm,
    Pad,
    Pool,
    Resize,
    named,
)
from fp4deploy.packed.operators import Context
from fp4deploy.packed.shapes import Shapes, shapes_of
from fp4deploy.plugins.quantize.channels_last import channels_fit
from fp4deploy.plugins.quantize.pointwise_pack import ACTIVATIONS
from fp4deploy.plugins.quantize.window import resize_nearest


@dataclass(frozen=True, eq=False)
class Produce:
    """y = f(first(x) + second(other)) in the forms of `outputs`, of which some may be pooled by 2 x 2.

    node: the last of the nodes that this is, for messages.
    inputs: x, and where there is a residual branch the other.
    """

    node: Node
    inputs: list[str]
    outputs: list[Form]
    first: Affine | Norm | None = None
    second: Affine | None = None
    activation: str = ""
    slope: float = 0.0


@dataclass(frozen=True, eq=False)
class Move:
    """A node that only moves pixels or channels, done to codes and scales."""

    node: Resize | Concat
    inputs: list[str]
    outputs: list[Form]


Step = Node | Produce | Move


def plan(graph: Graph, wide: Collection[str] = ()) -> tuple[list[Input], list[Step]]:
    """The inputs, with the forms that steps read, and the steps; wide: activations in FP32, which no kernel takes."""
    # Of a batch of two: what a file holds once for all items has another shape than a feature map then.
    shapes = shapes_of(graph, {each.name: (2, *each.shape[1:]) for each in graph.inputs})
    shapes |= dict.fromkeys(wide, ())
    kept = {each.activation for each in graph.outputs}
    moved = _pack_early(_without_copies([*graph.inputs, *graph.nodes], kept), shapes, kept)
    moved = _pool_early(moved, shapes, kept)
    inputs = [each for each in moved if isinstance(each, Input)]
    return inputs, _fuse(moved[len(inputs) :], shapes, kept)


def moved(node: Resize | Concat, inputs: Sequence[Nvfp4Tensor], context: Context) -> Nvfp4Tensor:
    """The result of a `Move` from packed inputs [N, H, W, C]."""
    if isinstance(node, Resize):
        size = None if node.size is None else context.sizes_of(node.size)
        return resize_nearest(inputs[0], size, node.scale, node.mode == "nearest-exact")
    shape = (*inputs[0].shape[:-1], sum(x.shape[-1] for x in inputs))
    codes = torch.cat([x.codes for x in inputs], -1)
    scales = torch.cat([x.scales.view(torch.uint8) for x in inputs], -1).view(torch.float8_e4m3fn)
    return replace(inputs[0], codes=codes, scales=scales, shape=torch.Size(shape))


def normalized(steps: Sequence[Step]) -> set[str]:
    """Activations whose statistics a kernel takes: what wrote one may give its moments."""
    norms = [step for step in steps if isinstance(step, GroupNormReLU) or _has_norm(step)]
    return {step.inputs[0] for step in norms}


def _has_norm(step: Step) -> bool:
    return isinstance(step, Produce) and isinstance(step.first, Norm)


def label(step: Step) -> str:
    """The layer of a step, or the first activation it writes."""
    return named(step.node if isinstance(step, (Produce, Move)) else step)


def operation(step: Step) -> str:
    """What a step computes, for a table: "conv2d", "affine+add+relu"."""
    if not isinstance(step, Produce):
        return step.node.op if isinstance(step, Move) else step.op
    parts = (step.first.op if step.first else "", "add" if len(step.inputs) == 2 else "", step.activation)
    return "+".join(filter(None, parts))


def nodes_of(step: Step) -> list[Node]:
    """The nodes whose tensors a step reads."""
    if not isinstance(step, Produce):
        return [step.node if isinstance(step, Move) else step]
    found = {id(node): node for node in (step.first, step.second, step.node) if node is not None}
    return list(found.values())


def _without_copies(writers: Sequence[Any], kept: set[str]) -> list[object]:
    """Without paddings of no pixels: what writes their source writes it in their forms as well."""
    found = list(writers)
    for place in reversed(range(len(found))):
        node = found[place]
        if not isinstance(node, Pad) or any(node.pad):
            continue
        plain = {form.name for form in node.outputs if form.amax is None}
        packed = [form for form in node.outputs if form.amax is not None]
        if plain & kept or any(form.axis != "channels" for form in packed):
            continue
        (source,) = node.inputs
        at = next(at for at, each in enumerate(found) if any(form.name == source for form in each.outputs))
        pooled = next(form.pooled for form in found[at].outputs if form.name == source)
        more = [form.model_copy(update={"pooled": pooled}) for form in packed]
        found[at] = _with_forms(found[at], [*found[at].outputs, *more])
        found[place:] = [_reading(each, source, plain) for each in found[place + 1 :]]
    return found


def _reading(node: Node, source: str, names: set[str]) -> Node:
    """A node that reads `source` where it read one of these names."""
    if not names & {*node.inputs}:
        return node
    return node.model_copy(update={"inputs": [source if name in names else name for name in node.inputs]})


def _pack_early(writers: list[Any], shapes: Shapes, kept: set[str]) -> list[object]:
    """Move packing in front of the nodes that only move elements, from the last to the first."""
    found = list(writers)
    for at in reversed(range(len(found))):
        node = found[at] = _without_unread(found[at], found, kept)
        if not isinstance(node, (Resize, Concat)) or not _only_moves(node, shapes):
            continue
        steps = []
        for form in node.outputs:
            names = []
            for source in node.inputs:
                before = next(each for each in found if any(one.name == source for one in each.outputs))
                wanted = Form(name=f"{source}|{form.name}", amax=form.amax)
                shapes[wanted.name] = shapes[source]
                found[found.index(before)] = _with_forms(before, [*before.outputs, wanted])
                names.append(wanted.name)
            steps.append(Move(node, names, [form]))
        found[at : at + 1] = steps
    return found


def _pool_early(writers: list[Any], shapes: Shapes, kept: set[str]) -> list[object]:
    """Without 2x2 maximum pooling of what a `Produce` writes: the step writes that as well."""
    found = list(writers)
    for place in reversed(range(len(found))):
        node = found[place]
        if not isinstance(node, Pool) or not _halves(node) or any(form.axis != "channels" for form in node.outputs):
            continue
        (source,) = node.inputs
        at = next(at for at, each in enumerate(found) if any(form.name == source for form in each.outputs))
        read = next(form for form in found[at].outputs if form.name == source)
        if read.pooled or not _fusible(found[at], shapes):
            continue
        forms = [form.model_copy(update={"pooled": True}) for form in node.outputs]
        found[at] = _with_forms(found[at], [*found[at].outputs, *forms])
        del found[place]
        found[at] = _without_unread(found[at], found, kept)
    return found


def _halves(node: Pool) -> bool:
    pairs = (node.kernel, node.stride, node.padding, node.dilation)
    return node.op == "max_pool" and pairs == ([2, 2], [2, 2], [0, 0], [1, 1]) and not node.ceil_mode


def _without_unread(writer: Any, writers: list[Any], kept: set[str]) -> object:
    """A writer without the forms that nobody reads any more; all its readers come after it and were seen."""
    read = {name for each in writers if not isinstance(each, Input) for name in each.inputs} | kept
    return _with_forms(writer, [form for form in writer.outputs if form.name in read])


def _with_forms(writer: Any, forms: Sequence[Form]) -> object:
    if list(forms) == list(writer.outputs) or not forms:
        return writer
    if isinstance(writer, Move):
        return replace(writer, outputs=list(forms))
    return writer.model_copy(update={"outputs": list(forms)})


def _only_moves(node: Resize | Concat, shapes: Shapes) -> bool:
    """All that is read of its result is packed along the channels, and no block spans two sources."""
    if any(form.amax is None or form.axis != "channels" for form in node.outputs):
        return False
    sources = [shapes[name] for name in node.inputs]
    if () in sources:
        return False
    if isinstance(node, Resize):
        return node.mode in ("nearest", "nearest-exact") and len(sources[0]) == 4
    return node.dim == 1 and len(sources[0]) == 4 and all(shape[1] % NVFP4_BLOCK == 0 for shape in sources)


def _fuse(nodes: list[Any], shapes: Shapes, kept: set[str]) -> list[Step]:
    """Every group of nodes that one kernel computes becomes a `Produce`, in the place of its last node."""
    writers = {form.name: node for node in nodes for form in node.outputs}
    reads: dict[str, int] = {}
    for node in nodes:
        for name in node.inputs:
            reads[name] = reads.get(name, 0) + 1
    taken: set[int] = set()
    steps: list[Step] = []

    def before(name: str, *kinds: type[object]) -> Any:
        """The node that writes an activation, if it is of these kinds and nobody else reads what it writes."""
        node: Any = writers.get(name)
        alone = node is not None and len(node.outputs) == 1 and reads[name] == 1 and name not in kept
        if not alone or any(form.pooled for form in node.outputs):
            return None
        return node if isinstance(node, kinds) and id(node) not in taken and _fusible(node, shapes) else None

    for node in reversed(nodes):
        if id(node) in taken:
            continue
        group = _group(node, before) if _fusible(node, shapes) else None
        if group is None:
            steps.append(node)
            continue
        taken.update(id(each) for each in group[1])
        steps.append(group[0])
    return steps[::-1]


def _group(node: Any, before: Any) -> tuple[Produce, list[object]] | None:
    """A step that ends with `node` and the other nodes in it; None where the kernel would do nothing but this node."""
    inside: list[Any] = []
    last, x = node, node.inputs[0]
    activation, slope, first, second, other = "", 0.0, None, None, None
    if isinstance(last, Activation):
        activation, slope = last.function, (last.parameters or [0.0])[0]
        last = before(x, Arithmetic, Affine, Norm)
    if isinstance(last, Arithmetic):
        inside.append(last)
        x, other = last.inputs
        second = before(other, Affine)
        first = before(x, Affine, Norm)
        if first is None and second is not None:
            x, other, first, second = other, x, second, None
        inside += [each for each in (first, second) if each is not None]
    elif isinstance(last, (Affine, Norm)):
        inside.append(last)
        first = last
    x = first.inputs[0] if first is not None else x
    other = second.inputs[0] if second is not None else other
    inside = [each for each in inside if each is not node]
    more = any(form.amax or form.pooled for form in node.outputs)
    if not inside and not more and not isinstance(node, (Affine, Norm)):
        return None
    inputs = [x] if other is None else [x, other]
    return Produce(node, inputs, list(node.outputs), first, second, activation, slope), inside


def _fusible(node: object, shapes: Shapes) -> bool:
    """The kernel computes this node."""
    if not isinstance(node, (Activation, Arithmetic, Affine, Norm)):
        return False
    result = shapes[node.inputs[0]]
    if any(shapes[name] == () for name in (*node.inputs, *(form.name for form in node.outputs))):
        return False
    if (
        len(result) not in (4, 5)
        or not channels_fit(result[1])
        or any(form.axis != "channels" for form in node.outputs)
    ):
        return False
    if isinstance(node, Activation):
        return node.function in ACTIVATIONS
    if isinstance(node, Arithmetic):
        same = all(shapes[name] == result for name in node.inputs)
        return node.op == "add" and len(node.inputs) == 2 and node.alpha == 1 and same
    return isinstance(node, Affine) or node.op in ("instance_norm", "group_norm")
