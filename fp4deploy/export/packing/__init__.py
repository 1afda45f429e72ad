"""A captured graph and its trained layers -> the nodes and tensors of a packed network.

Each value is written in the forms that its readers need, and in no other:

| read by | form |
|---|---|
| a layer in NVFP4 | packed with its `input_amax`, along the axis that it contracts |
| several of them with equal scales | one packed form |
| anything else (W4A8, FP8 and INT8 as well), or an output of the network | plain |

Three patterns become one node each:

* GroupNorm and the ReLU that alone reads it: `group_norm_relu`. The bias of a convolution that only this norm reads is
  added there, and a max pooling 2 x 2 of the ReLU becomes pooled forms of the same node.
* A ReLU that alone reads a convolution or linear layer: its epilogue.
* A concatenation of two values along the channels, where the first has whole blocks of 16: a quantised convolution that
  reads it takes both, packed with its own scale. Nothing is concatenated then.

BatchNorm becomes `affine`, y = x scale + shift with scale = gamma / sqrt(var + eps) and shift = beta - mean scale,
computed in FP64 and kept in FP32. It is not folded into the weight: the codes are those that were trained.

Weights have the bytes of the canonical ONNX file (`layer_constants`); other parameters are of the rest's precision.
"""

from fp4deploy.export.packing.capture import packed_graph
from fp4deploy.export.packing.writer import Tensors

__all__ = ["Tensors", "packed_graph"]
