"""The gate between torch and a packed network, on the CPU: outputs must mean the same.

First both run end to end on the same real images, as `verify.outputs` does for ONNX. FP4 amplifies last bits, so that a
large model differs from itself when a sum is accumulated in another order (see `verify.layerwise`). Where the
end-to-end comparison fails, every node is compared alone, with reference inputs from torch. At most 0.1 % of the
elements of a packed activation may differ or those of one block, 0.1 % of the norm of a plain one, and 0.1 % of what
the outputs mean that follow from them (`agreement`). What exceeds that is compared anew without the elements that last
bits decide about (`last_bits`): such as those of a convolution that reads one value at a rounding boundary of E2M1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from fp4deploy.errors import GateError, InputError
from fp4deploy.export.verify.agreement import Comparison, OutputAgreement, compare_outputs, described
from fp4deploy.export.verify.flat import flat_difference
from fp4deploy.export.verify.last_bits import MOST
from fp4deploy.export.verify.nodes import compare_nodes, largest
from fp4deploy.export.verify.outputs import ALLOWED_ELEMENTS, NOTHING_WRITTEN
from fp4deploy.export.verify.tensors import leaves
from fp4deploy.graph.capture import Inputs, file_names, of_batch
from fp4deploy.models.meaning import OutputMeanings, known_outputs
from fp4deploy.packed import PackedFile, PackedNetwork
from fp4deploy.qat.ranges import Ranges
from fp4deploy.rest import rest_of


@dataclass(frozen=True, repr=False)
class PackedAgreement(Comparison):
    """How far the packed network and torch agree.

    nodes: the error of each node with reference inputs from torch, by layer, and `referenced` the outputs that follow
    from these; None where the end-to-end comparison passed. Ranges are those of a GPU, which computes in `rest`.
    """

    nodes: dict[str, float] | None = None
    referenced: tuple[OutputAgreement, ...] = ()

    @property
    def passed_with_references(self) -> bool:
        """Whether every node, and every output that follows from its last ones, is within the limits."""
        compared = self.nodes is not None and bool(self.referenced)
        return compared and not self.wrong_nodes and all(each.passed for each in self.referenced)

    @property
    def wrong_nodes(self) -> list[tuple[str, float]]:
        """Nodes that differ by more than is allowed, and by how much, in the order of the graph."""
        return [(node, error) for node, error in (self.nodes or {}).items() if not error <= ALLOWED_ELEMENTS]

    @property
    def is_near(self) -> bool:
        """Whether so little differs with reference inputs that last bits may be the reason."""
        few = all(error**2 <= MOST for _, error in self.wrong_nodes)  # of a plain activation, the root of a share
        return few and all(each.is_near for each in self.referenced)

    @property
    def place(self) -> str:
        if self.wrong_nodes:
            node, error = self.wrong_nodes[0]
            return f"with reference inputs the first node to differ is {node}, by {error:.2g}"
        wrong = [each for each in self.referenced if not each.passed]
        return f"with reference inputs still {described(wrong, OutputAgreement.difference)}" if wrong else ""

    def sentence(self) -> str:
        text = super().sentence()
        if self.nodes is None:
            return text
        worst = float(np.max(list(self.nodes.values()), initial=0.0))
        text = f"{text} end to end, where FP4 amplifies last bits; no node differs by more than {worst:.2g}"
        undecided = sum(each.undecided for each in self.referenced)
        return f"{text} ({undecided} where last bits of float32 decide)" if undecided else text


@torch.no_grad()
def verify_packed(
    model: nn.Module,
    file: PackedFile,
    inputs: Iterable[Inputs],
    meanings: OutputMeanings | None = None,
    flat: bool = True,
) -> PackedAgreement:
    """Compare end to end on `inputs` (images float32 [N, 3, H, W] each); where that fails, node by node as well.

    meanings: by default as the file's card says; flat: compare images without contrast, too.
    """
    batches = list(inputs)
    network, kept = PackedNetwork(file), [positional(each, file) for each in batches]
    by_name = any(isinstance(each, Mapping) for each in batches)  # the forward may have arguments between them
    forward = partial(_by_name, model, [each.name for each in file.graph.inputs]) if by_name else model
    names = file_names([each.name for each in file.graph.outputs], [each.name for each in file.graph.inputs])
    meanings = known_outputs(file.card) if meanings is None else meanings
    ranges = Ranges(model, rest_of(file.graph))
    count, found = 0, tuple[OutputAgreement, ...]()
    with ranges:
        expected = [leaves(forward(*_copies(batch))) for batch in kept]
    of_file = [leaves(network(*_copies(batch))) for batch in kept]
    for batch, outputs, own in zip(kept, expected, of_file, strict=True):
        found = compare_outputs(outputs, own, names, meanings, found)
        count += len(batch[0])
    agreement = PackedAgreement(count, found, ranges=ranges.largest, rest=ranges.rest)
    if not all(each.passed for each in found):
        for most in (0.0, MOST):
            nodes, referenced = dict[str, float](), tuple[OutputAgreement, ...]()
            for batch, outputs in zip(kept, expected, strict=True):
                by_node = compare_nodes(model, network, *batch, forward=forward, last_bits=most)
                nodes |= {name: largest(nodes.get(name, 0.0), error) for name, error in by_node.errors.items()}
                referenced = compare_outputs(outputs, by_node.outputs, names, meanings, referenced, by_node.moved)
            agreement = replace(agreement, nodes=nodes, referenced=referenced)
            if agreement.passed or not agreement.is_near:
                break
    if not (agreement.passed and flat):
        return agreement

    def sized(x: Inputs) -> tuple[torch.Tensor, ...]:
        return _copies(of_batch(cast("tuple[torch.Tensor, ...]", x), file.graph.batch))

    def by_layer(x: Inputs) -> bool:
        measures = (partial(compare_nodes, forward=forward, last_bits=most) for most in (0.0, 1.0))
        return any(not compared(model, network, *sized(x)).wrong for compared in measures)

    runs = (lambda x: leaves(forward(*sized(x))), lambda x: leaves(network(*sized(x))))
    return replace(agreement, flat=flat_difference(model, *runs, kept[0], file.card, by_layer))


def _copies(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """For a network that may change its input in place."""
    return tuple(x.clone() for x in inputs)


def positional(inputs: Inputs, file: PackedFile) -> tuple[torch.Tensor, ...]:
    """Inputs in the order of the graph."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if isinstance(inputs, Mapping):
        return tuple(inputs[each.name] for each in file.graph.inputs)
    return tuple(inputs)


def _by_name(model: nn.Module, names: Sequence[str], *inputs: torch.Tensor) -> object:
    return model(**dict(zip(names, inputs, strict=True)))


def require_packed(found: PackedAgreement, name: str) -> None:
    """Pass a network only if it computes what torch computes.

    Raises:
        GateError: more differs than FP4 explains, an output is not finite, or nothing was compared.
    """
    if found.passed:
        return
    if beyond := found.rest.beyond(found.ranges):
        raise GateError(f"{name}: {beyond} {NOTHING_WRITTEN}")
    cause = found.flat or described([each for each in found.outputs if not each.passed], OutputAgreement.difference)
    cause += f", and {found.place}" if found.place else ""
    raise GateError(f"{name}: the packed network and torch disagree: {cause}. {NOTHING_WRITTEN}")


def packed_values(file: PackedFile, inputs: Inputs) -> list[torch.Tensor]:
    """Every tensor that a packed network without quantised layers computes; those before a node that does not run."""
    network, given = PackedNetwork(file), positional(inputs, file)
    live: dict[str, Any] = {}
    try:
        sizes = network.sizes(given)
    except InputError:  # a size that it does not take
        return []
    for each, x in zip(network.graph.inputs, given, strict=True):
        live.update(zip([form.name for form in each.outputs], network.read_input(each, x), strict=True))
    for node in network.graph.nodes:
        try:
            got = network.run_node(node, [live[name] for name in node.inputs], sizes)
        except Exception:  # torch's own, of an operator
            break
        live.update(zip([form.name for form in node.outputs], got, strict=True))
    return [each for each in live.values() if isinstance(each, torch.Tensor)]
