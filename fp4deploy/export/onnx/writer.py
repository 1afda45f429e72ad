"""Writing named nodes and constants into an onnx-ir graph; every pass of `export` that adds nodes uses this writer.

onnx-ir's own `Tape` appends nodes to the end of a graph and numbers the values it makes. Here a pass replaces one node
in the middle of a graph, and names are part of the result: build logs and ledgers quote them, and the same model must
give the same bytes. So a writer has a place, the node before which everything is inserted, and a prefix:

    writer = NodeWriter(graph, "encoder.0.conv1.weight", before=marker)
    half = writer.add("Mul", "half", x, writer.constant("factor", np.float32(0.5)))
    writer.replace(marker.outputs[0], half)

Node and value are then named "encoder.0.conv1.weight.half", until the value takes the name of the one it replaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


class NodeWriter:
    """Inserts nodes before the node `before`, or at the end of the graph.

    Names begin with `prefix`; values have `dtype` unless told otherwise.
    """

    def __init__(self, graph: ir.Graph, prefix: str, before: ir.Node | None, dtype: ir.DataType | None = None) -> None:
        self.graph, self.prefix, self.before, self.dtype = graph, prefix, before, dtype

    def constant(
        self, role: str, content: NDArray[Any] | np.generic | ir.TensorProtocol, prefix: str | None = None
    ) -> ir.Value:
        """The initialiser `prefix.role`, shared by all that write the same bytes; others get a number."""
        tensor = ir.tensor(np.asarray(content)) if isinstance(content, (np.ndarray, np.generic)) else content
        first = name = f"{self.prefix if prefix is None else prefix}.{role}"
        number = 1
        while (known := self.graph.initializers.get(name)) is not None:
            if known.const_value is not None and known.const_value.tobytes() == tensor.tobytes():
                return known
            number += 1
            name = f"{first}_{number}"
        tensor.name = name
        value = ir.val(name, tensor.dtype, tensor.shape.numpy(), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def integers(self, role: str, *values: int) -> ir.Value:
        """A constant int64 vector, such as a shape."""
        return self.constant(role, np.array(values, np.int64))

    def value(self, role: str, dtype: ir.DataType | None = None, shape: Iterable[Any] | None = None) -> ir.Value:
        """An output for `add_node`."""
        return ir.val(f"{self.prefix}.{role}", dtype, None if shape is None else tuple(shape))

    def add(
        self,
        op: str,
        role: str,
        *inputs: ir.Value,
        dtype: ir.DataType | None = None,
        shape: Iterable[object] | None = None,
        **attributes: object,
    ) -> ir.Value:
        """Insert a node of one output; both are named `prefix.role`."""
        output = self.value(role, dtype or self.dtype, shape)
        return self.add_node(op, role, inputs, [output], attributes)[0]

    def add_node(
        self,
        op: str,
        role: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        attributes: dict[str, Any],
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Insert a node named `prefix.role` with these outputs, and return them."""
        name = f"{self.prefix}.{role}"
        node = ir.node(op, list(inputs), attributes, domain=domain, outputs=list(outputs), name=name)
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        return node.outputs

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let all readers of `old` read `new`, which takes its name, and its type and shape where they are unknown."""
        new.type = old.type if new.type is None else new.type
        new.shape = old.shape if new.shape is None else new.shape
        new.name, old.name = old.name, f"{old.name}.replaced"
        old.replace_all_uses_with(new, replace_graph_outputs=True)
