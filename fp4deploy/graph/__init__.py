"""One network as one graph: what export and packed networks read instead of Python code.

    model, example inputs  --capture-->  Graph  -->  packed network

| module | what it holds |
|---|---|
| `ir` | `Graph`, `Node`, `Value`: nodes in order, each with its operator, attributes, layer and shapes |
| `sizes` | sizes that depend on the sizes of the inputs |
| `capture` | torch.export of a module -> `Graph` |
| `rewrites` | calls in place, and calls to decompose, replaced one by one |
| `open_axes` | axes of open size divided into parts |
| `finite` | decisions by whether all values are finite |
| `growth` | an end to sizes whose formulas grow from layer to layer |
| `operators` | how each ATen operator is written as a node |
| `randomness` | networks that draw random numbers in evaluation, refused |
| `costs` | multiply-accumulates of layers |

torch.export (the functional training IR, before any decomposition) keeps a convolution as one `aten.conv2d`, whose
weight is a placeholder that names its parameter, so that every node knows its layer. torch.fx's symbolic tracing knows
no shapes and stops at code that asks for one. This room knows torch only: no file format, and quantised layers are
refused.
"""

from fp4deploy.graph.capture import capture
from fp4deploy.graph.growth import UnsettledSizes
from fp4deploy.graph.ir import Graph, Node, Value
from fp4deploy.graph.sizes import Size, evaluate

__all__ = ["Graph", "Node", "Size", "UnsettledSizes", "Value", "capture", "evaluate"]
