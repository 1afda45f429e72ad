"""Graphs of `packed/1` and `packed/2`, which knew one network, the UNet: read, and written as today's nodes.

They held every activation with its channels, its scale and its stride (one pixel for stride x stride pixels of the
input), and five nodes; `head` wrote the logits. Here a head is a `conv2d`, and channels and strides follow from the
nodes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fp4deploy.packed.graph import (
    MAX_NODES,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Epsilon,
    Form,
    Graph,
    GroupNormReLU,
    Input,
    Name,
    Node,
    Output,
    Strict,
    TensorInfo,
)

INPUT, LOGITS = "image", "logits"
Size = Annotated[int, Field(ge=1, le=1 << 16)]
Padding = Annotated[int, Field(ge=0, le=64)]
One = Annotated[list[Name], Field(min_length=1, max_length=1)]
Two = Annotated[list[Name], Field(min_length=2, max_length=2)]


class LegacyActivation(Strict):
    """A named activation."""

    channels: Size
    stride: Size
    amax: Name | None = None


class LegacyLayer(Strict):
    """What the convolutions shared."""

    layer: Name
    precision: Literal["nvfp4", "fp16"]
    e4m3_max: Literal[448, 256] = 448
    bias: Name | None = None


class LegacyConv2d(LegacyLayer):
    """A convolution of stride 1."""

    op: Literal["conv2d"]
    inputs: Annotated[list[Name], Field(min_length=1, max_length=2)]
    output: Name
    padding: Padding


class LegacyConvTranspose2d(LegacyLayer):
    """A transposed convolution of kernel 2 and stride 2."""

    op: Literal["conv_transpose2d"]
    inputs: One
    output: Name


class LegacyHead(LegacyLayer):
    """The convolution that wrote the logits."""

    op: Literal["head"]
    inputs: One
    padding: Padding


class LegacyForm(Strict):
    """One output of a normalisation."""

    output: Name
    pooled: bool = False


class LegacyGroupNormReLU(Strict):
    """relu(GroupNorm(x + bias))."""

    op: Literal["group_norm_relu"]
    layer: Name
    inputs: One
    outputs: Annotated[list[LegacyForm], Field(min_length=1, max_length=64)]
    groups: Size
    eps: Epsilon
    bias: Name | None = None


class LegacyConcat(Strict):
    """Two plain activations, concatenated."""

    op: Literal["concat"]
    inputs: Two
    output: Name


LegacyNode = Annotated[
    LegacyConv2d | LegacyConvTranspose2d | LegacyHead | LegacyGroupNormReLU | LegacyConcat, Field(discriminator="op")
]


class LegacyGraph(Strict):
    """The graph of `packed/1` and `packed/2`."""

    images: dict[Name, LegacyActivation]
    steps: Annotated[list[LegacyNode], Field(min_length=1, max_length=MAX_NODES)]
    tensors: dict[Name, TensorInfo]
    digits: bool = False

    def converted(self) -> Graph:
        """The same network as today's nodes.

        Raises:
            KeyError: it names an activation that it does not describe.
        """
        size = max(activation.stride for activation in self.images.values())
        image = Input(name=INPUT, shape=[1, 3, size, size], free=[0, 2, 3], outputs=[self._form(INPUT, False)])
        nodes = [self._node(step) for step in self.steps]
        outputs = [Output(name="", activation=LOGITS)]
        return Graph(inputs=[image], nodes=nodes, outputs=outputs, tensors=self.tensors, digits=self.digits)

    def _form(self, name: str, pooled: bool) -> Form:
        return Form(name=name, amax=self.images[name].amax, pooled=pooled)

    def _node(self, step: Any) -> Node:
        if isinstance(step, LegacyGroupNormReLU):
            forms = [self._form(form.output, form.pooled) for form in step.outputs]
            return GroupNormReLU(
                layer=step.layer, inputs=step.inputs, outputs=forms, groups=step.groups, eps=step.eps, bias=step.bias
            )
        outputs = [Form(name=LOGITS) if isinstance(step, LegacyHead) else self._form(step.output, False)]
        if isinstance(step, LegacyConcat):
            return Concat(inputs=step.inputs, outputs=outputs)
        kept: dict[str, Any] = {name: getattr(step, name) for name in ("layer", "precision", "e4m3_max", "bias")}
        if isinstance(step, LegacyConvTranspose2d):
            return ConvTranspose2d(inputs=step.inputs, outputs=outputs, **kept)
        return Conv2d(inputs=step.inputs, outputs=outputs, padding=[step.padding] * 2, **kept)
