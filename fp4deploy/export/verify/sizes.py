"""Files of open size at other sizes than the one that they were made at.

A graph with open axes may hold numbers that are right at the example's size only, such as the windows of a pooling, and
nothing in the file says so. It is therefore compared with torch at two more sizes, small ones, at which torch itself
runs: an odd one and one that no stride of the network divides, where there are such.

    33x51;  34x54, 36x60, 40x72, 48x80, 96x160, 64x192;  twice the example's        candidates of two axes, in order

What differs is refused, with the operator from which on the file differs (`first_difference`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4deploy.errors import GateError, first_line
from fp4deploy.export.onnx.canonical import rest_of_file
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.session import verifying_session
from fp4deploy.export.verify.agreement import OutputAgreement, described
from fp4deploy.export.verify.first_difference import CLOSER, first_difference, onnx_values
from fp4deploy.export.verify.outputs import Agreement, verify_decomposed
from fp4deploy.export.verify.packed import PackedAgreement, packed_values, positional, verify_packed
from fp4deploy.export.verify.tensors import call, feed, leaves, named
from fp4deploy.graph.capture import Inputs
from fp4deploy.graph.copies import copied
from fp4deploy.models.meaning import CLOSE, UNKNOWN, OutputMeanings
from fp4deploy.packed import PackedFile, PackedNetwork
from fp4deploy.qat import quantized_layers, unquantized
from fp4deploy.rest import Rest, rest_of

STEPS = (1, 2, 4, 8, 16, 32, 64)  # what divides the extents of a candidate; 1: odd ones
LEAST = {1: 33, 2: 33, 3: 17}  # number of open axes -> the smallest extent of most candidates
SAMPLES = 2  # of a batch
Axes = Mapping[str, Mapping[int, str]]  # input -> its open axes but the batch; those of one extent share a name


@dataclass(frozen=True)
class OtherSize:
    """Inputs of another size, what torch gives for them, and the size as people write it."""

    inputs: Inputs
    outputs: list[torch.Tensor]
    text: str


def require_open_sizes(
    model: nn.Module,
    portable: onnx.ModelProto,
    example: Inputs,
    name: str,
    meanings: OutputMeanings = UNKNOWN,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    batch: int | None = None,
) -> None:
    """Pass a decomposed graph of open size only if it computes what torch computes at two other sizes, too.

    Args:
        model: as deployed.
        example: inputs at which the graph was compared.
        dynamic: as of `export_graph`, where these axes are open, and not height and width.
        batch: likewise.

    Raises:
        GateError: it does not, with the operator and the layer from which on it differs.
    """
    session, quantized = verifying_session(portable), bool(quantized_layers(model))
    names, rest = [each.name for each in session.get_inputs()], rest_of_file(portable)
    run = partial(_outputs, model, rest=rest)
    for other in other_sizes(run, example, _open_axes(portable), batch or SAMPLES):
        try:
            given = session.run(None, feed(other.inputs, names))
        except Exception as error:  # ONNX Runtime's own
            cause = f"ONNX Runtime ends with an error ({first_line(error)})"
        else:
            cause = _other_shapes(other.outputs, given)
        place = ""
        if not cause:
            found = verify_decomposed(model, portable, [other.inputs], meanings=meanings, flat=False)
            place = found.place
            largest = max(float(each.abs().max()) for each in other.outputs)
            if not found.passed:
                cause = _differing(found)
            elif not quantized and found.largest > CLOSE * largest:
                cause = f"outputs of up to {largest:.3g} differ by up to {found.largest:.3g}"
        if cause:
            plain = _plain(model)
            form: Any = {"dynamic_size": not dynamic, "dynamic": dynamic, "batch": batch, "rest": rest.name}
            graph = to_portable(export_graph(plain, example, **form)) if quantized else portable
            where = _because(plain, other.inputs, onnx_values(graph, other.inputs), rest, place)
            raise GateError(
                f"{name}: as a graph of open size it would be another network at {other.text}: {cause}{where}. "
                "Nothing was written. Export it for one size, without "
                f"{'dynamic' if dynamic else '--dynamic-size (dynamic_size=False)'}."
            )


def packed_differs(
    model: nn.Module,
    file: PackedFile,
    example: Inputs,
    pack: Callable[[nn.Module], PackedFile],
    meanings: OutputMeanings | None = None,
) -> str:
    """Why a packed network of open size computes something else than torch at another size, as a sentence; "" if not.

    Args:
        model: as deployed.
        pack: the packed network of a module of the same form, whose layers are not quantised.
    """
    axes = {each.name: {axis: f"{each.name}.{axis}" for axis in each.free if axis} for each in file.graph.inputs}
    network, rest = PackedNetwork(file), rest_of(file.graph)
    for other in other_sizes(partial(_outputs, model, rest=rest), example, axes, file.graph.batch or SAMPLES):
        try:
            given = leaves(network(*positional(other.inputs, file)))
        except Exception as error:  # torch's own, of an operator
            cause = f"it ends with an error ({first_line(error)})"
        else:
            cause = _other_shapes(other.outputs, given)
        place = ""
        if not cause:
            found = verify_packed(model, file, [other.inputs], meanings, flat=False)
            cause, place = "" if found.passed else _differing(found), found.place
        if cause:
            plain = _plain(model)
            where = _because(plain, other.inputs, packed_values(pack(plain), other.inputs), rest, place)
            return f"At {other.text} it would be another network: {cause}{where}."
    return ""


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Inputs, rest: Rest) -> list[torch.Tensor]:
    return [each.float() for each in call(model, inputs, rest)]


def _differing(found: Agreement | PackedAgreement) -> str:
    return described([each for each in found.outputs if not each.passed], OutputAgreement.difference)


def _because(plain: nn.Module, inputs: Inputs, values: Collection[torch.Tensor], rest: Rest, place: str) -> str:
    """The operator from which on networks without quantised layers differ, or the layer: `place`, what differs with
    reference inputs.
    """
    where = first_difference(plain, inputs, values, rest)
    if not where and place:
        return f"; {place}"
    where = where or first_difference(plain, inputs, values, rest, CLOSER)
    return f", from {where} on" if where else ""


def _other_shapes(expected: Sequence[torch.Tensor], given: Sequence[Any]) -> str:
    ours, theirs = ([list(each.shape) for each in outputs] for outputs in (given, expected))
    return "" if ours[: len(theirs)] == theirs else f"its outputs are {ours}, and torch's are {theirs}"


def _plain(model: nn.Module) -> nn.Module:
    """A copy whose layers are not quantised."""
    return unquantized(copied(model))


def _open_axes(model: onnx.ModelProto) -> dict[str, dict[int, str]]:
    return {
        each.name: {
            axis: size.dim_param or f"{each.name}.{axis}"
            for axis, size in enumerate(each.type.tensor_type.shape.dim)
            if axis and not size.HasField("dim_value")
        }
        for each in model.graph.input
    }


def other_sizes(
    run: Callable[[Inputs], object], example: Inputs, axes: Axes, samples: int = SAMPLES
) -> list[OtherSize]:
    """Two sizes at which torch runs, one of them odd if it takes odd ones; fewer where it takes no others.

    Args:
        run: torch's network, which raises at a size that it does not take.
        example: whose values are repeated or cut.
        axes: what is open, for each input in order.
        samples: most of a batch.

    >>> found = other_sizes(lambda x: x, torch.zeros(1, 3, 16, 24), {"image": {2: "H", 3: "W"}})
    >>> [each.text for each in found]
    ['33x51', '34x54']
    """
    found: list[OtherSize] = []
    tensors = named(example, list(axes))
    odd = False
    for step, extents in _candidates(tensors, axes):
        if len(found) == 2:
            break
        sized = {name: _resized(x[:samples], axes[name], extents) for name, x in tensors.items()}
        if (step == 1 and odd) or all(x.shape[1:] == tensors[name].shape[1:] for name, x in sized.items()):
            continue
        inputs = _as(example, sized)
        try:
            outputs = tree_leaves(run(inputs))
        except Exception:  # whatever a network says of a size that it does not take
            continue
        if any(not each.numel() for each in outputs):
            continue
        odd = odd or step == 1
        first = next(name for name in axes if axes[name])
        found.append(OtherSize(inputs, outputs, "x".join(str(sized[first].shape[axis]) for axis in axes[first])))
    return found


def _as(example: Inputs, tensors: Mapping[str, torch.Tensor]) -> Inputs:
    """Inputs in the form in which a network takes those of an example."""
    if isinstance(example, torch.Tensor):
        return next(iter(tensors.values()))
    return dict(tensors) if isinstance(example, Mapping) else tuple(tensors.values())


def _candidates(example: Mapping[str, torch.Tensor], axes: Axes) -> Iterator[tuple[int, dict[str, int]]]:
    """(what divides them, the extent of each open axis by its name); at the end twice the example's."""
    sizes = {(name, axis): example[name].shape[axis] for name in axes for axis in axes[name]}
    if not sizes:
        return
    first = {axis: size for (_, axis), size in reversed(sizes.items())}
    for step in STEPS:
        count = -(-LEAST[min(len(first), 3)] // step) | 1
        pair = step * count, step * ((count + count // 2 + 1) | 1)
        sides = {axis: pair[at % 2] for at, axis in enumerate(sorted(first))}
        # Half the extent of an input that is half as large as the first.
        yield (
            step,
            {axes[name][axis]: max(1, sides[axis] * size // first[axis]) for (name, axis), size in sizes.items()},
        )
    yield 0, {axes[name][axis]: 2 * size for (name, axis), size in sizes.items()}


def _resized(x: torch.Tensor, axes: Mapping[int, str], extents: Mapping[str, int]) -> torch.Tensor:
    """The first elements of each open axis, repeated where there are too few."""
    for axis, name in axes.items():
        x = x.index_select(axis, torch.arange(extents[name]) % x.shape[axis])
    return x
