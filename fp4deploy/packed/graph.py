"""The network as a flat list of nodes, each reading and writing named activations; the JSON inside a packed file.

| node | reads | writes |
|---|---|---|
| `conv2d` | one activation, or two packed ones, read as their concatenation | the convolution, plain or packed |
| `conv_transpose2d` | one activation; kernel 2, stride 2 | the transposed convolution, plain or packed |
| `group_norm_relu` | a plain activation | relu(norm(x + bias)) in any number of forms: plain, packed, pooled 2x2 |
| `concat` | two plain activations | their concatenation, plain or packed |
| `head` | one activation | the logits, by a convolution |

An activation is NHWC with `channels` channels, and has one pixel for `stride` x `stride` pixels of the network's input.
`amax` names the float32 tensor that it is packed with; without one it is plain FP16. The JSON keys of activations and
nodes are `images` and `steps`.

The activation named "image" is what the first node reads: the network's RGB input, or with `digits` its multi-term FP4
encoding of 13 channels (`models.input_encoding`). It is packed like any other where the first layer is quantised.

`concat` is for plain convolutions, and for skips whose channels are not a multiple of 16: a block of 16 would span
both inputs, so that it can only be packed after concatenation. No other concatenation is ever written.

A layer's weight is `<layer>.weight`, FP16 O,KH,KW,C, or where the layer is quantised `<layer>.weight.codes`, `.scales`
and `.amax`, the FP32 global amax A; E is the layer's `e4m3_max`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=200)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]


class Strict(BaseModel):
    """No unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Activation(Strict):
    """A named feature map between two nodes."""

    channels: Size
    stride: Size
    amax: Name | None = None


class TensorInfo(Strict):
    """A tensor of the file, with the type names of safetensors, and the SHA-256 of its bytes."""

    dtype: Literal["U8", "F8_E4M3", "F16", "F32"]
    shape: list[Annotated[int, Field(ge=0, le=1 << 31)]]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Convolution(Strict):
    """What the convolutions share: the layer whose weight they read, and the bias that is added."""

    layer: Name
    precision: Literal["nvfp4", "fp16"]
    e4m3_max: Literal[448, 256] = 448
    bias: Name | None = None


class Conv2d(Convolution):
    """A convolution of stride 1 with `padding` on each side; the size does not change."""

    op: Literal["conv2d"] = "conv2d"
    inputs: Annotated[list[Name], Field(min_length=1, max_length=2)]
    output: Name
    padding: Annotated[int, Field(ge=0, le=64)]


class ConvTranspose2d(Convolution):
    """A transposed convolution of kernel 2 and stride 2: twice the height and width."""

    op: Literal["conv_transpose2d"] = "conv_transpose2d"
    inputs: Annotated[list[Name], Field(min_length=1, max_length=1)]
    output: Name


class Head(Convolution):
    """The convolution that gives the logits, which are the network's result."""

    op: Literal["head"] = "head"
    inputs: Annotated[list[Name], Field(min_length=1, max_length=1)]
    padding: Annotated[int, Field(ge=0, le=64)]


class Form(Strict):
    """One output of a normalisation."""

    output: Name
    pooled: bool = False


class GroupNormReLU(Strict):
    """relu(GroupNorm(x + bias)), `bias` being that of the convolution before."""

    op: Literal["group_norm_relu"] = "group_norm_relu"
    layer: Name
    inputs: Annotated[list[Name], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[Form], Field(min_length=1)]
    groups: Size
    eps: Annotated[float, Field(gt=0, lt=1)]
    bias: Name | None = None


class Concat(Strict):
    """Two plain activations, concatenated along their channels."""

    op: Literal["concat"] = "concat"
    inputs: Annotated[list[Name], Field(min_length=2, max_length=2)]
    output: Name


Node = Annotated[Conv2d | ConvTranspose2d | Head | GroupNormReLU | Concat, Field(discriminator="op")]


class Graph(Strict):
    """The whole network. `images` has every activation by name, "image" is the input; the last of `steps` is the head.

    digits: the input is multi-term FP4. Files written before this field existed read RGB.
    """

    images: dict[Name, Activation]
    steps: Annotated[list[Node], Field(min_length=1, max_length=10000)]
    tensors: dict[Name, TensorInfo]
    digits: bool = False

    @property
    def stride(self) -> int:
        """What the height and width of an input must be multiples of."""
        return max(activation.stride for activation in self.images.values())


INPUT = "image"
RGB = Activation(channels=3, stride=1)  # the network's input, before any encoding


def outputs_of(node: Node) -> list[str]:
    """Names of the activations that a node writes."""
    if isinstance(node, GroupNormReLU):
        return [form.output for form in node.outputs]
    return [] if isinstance(node, Head) else [node.output]


def tensors_of(node: Node, activations: dict[str, Activation]) -> list[str]:
    """Names of the tensors that a node reads; an amax belongs to the nodes that write an activation with it."""
    names: list[str | None] = [] if isinstance(node, Concat) else [node.bias]
    if isinstance(node, GroupNormReLU):
        names += [f"{node.layer}.weight", f"{node.layer}.bias"]
    elif isinstance(node, Convolution):
        weight = f"{node.layer}.weight"
        parts = ("codes", "scales", "amax")
        names += [weight] if node.precision == "fp16" else [f"{weight}.{part}" for part in parts]
    names += [activations[name].amax for name in outputs_of(node) if name in activations]
    return [name for name in dict.fromkeys(names) if name]
