"""The network as a flat list of steps, each reading and writing named images; the JSON inside a packed file.

| step | reads | writes |
|---|---|---|
| `conv2d` | one image, or two packed ones that count as their concatenation | its product, plain or packed |
| `conv_transpose2d` | one image; kernel 2, stride 2 | its product, plain or packed |
| `group_norm_relu` | a plain image | relu(norm(x + bias)) in any number of forms: plain, packed, pooled 2x2 |
| `concat` | two plain images | their concatenation, plain or packed |
| `head` | one image | the logits, by a convolution |

An image is NHWC, `channels` wide, and has one pixel for `stride` x `stride` pixels of the network's input. `amax` names
the float32 tensor that it is packed with; without one it is plain FP16.

The image named "image" is what the first step reads: the network's RGB input, or with `digits` its 13 digits
(`models.input_encoding`). It is packed as any other where the first layer is quantised.

`concat` is there for plain convolutions, and for skips whose channels are no multiple of 16: a block of 16 would hold
channels of both images, so that it can only be made of both. Everywhere else no concatenation is ever written.

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


class Image(Strict):
    """A named image between two steps."""

    channels: Size
    stride: Size
    amax: Name | None = None


class TensorInfo(Strict):
    """A tensor of the file, by the words safetensors has for types, and the SHA-256 of its bytes."""

    dtype: Literal["U8", "F8_E4M3", "F16", "F32"]
    shape: list[Annotated[int, Field(ge=0, le=1 << 31)]]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Product(Strict):
    """What the convolutions share: the layer whose weight it multiplies, and the bias added to the product."""

    layer: Name
    precision: Literal["nvfp4", "fp16"]
    e4m3_max: Literal[448, 256] = 448
    bias: Name | None = None


class Conv2d(Product):
    """A convolution of stride 1 that keeps the size of the image, by `padding` on each side."""

    op: Literal["conv2d"] = "conv2d"
    inputs: Annotated[list[Name], Field(min_length=1, max_length=2)]
    output: Name
    padding: Annotated[int, Field(ge=0, le=64)]


class ConvTranspose2d(Product):
    """A transposed convolution of kernel 2 and stride 2: twice the height and width."""

    op: Literal["conv_transpose2d"] = "conv_transpose2d"
    inputs: Annotated[list[Name], Field(min_length=1, max_length=1)]
    output: Name


class Head(Product):
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
    """Two plain images along their channels."""

    op: Literal["concat"] = "concat"
    inputs: Annotated[list[Name], Field(min_length=2, max_length=2)]
    output: Name


Step = Annotated[Conv2d | ConvTranspose2d | Head | GroupNormReLU | Concat, Field(discriminator="op")]


class Graph(Strict):
    """The whole network. `images` has every image by name, "image" being the input; the last step is the head.

    digits: the input is written as digits. A file of before this field has none.
    """

    images: dict[Name, Image]
    steps: Annotated[list[Step], Field(min_length=1, max_length=10000)]
    tensors: dict[Name, TensorInfo]
    digits: bool = False

    @property
    def stride(self) -> int:
        """What the height and width of an input must be multiples of."""
        return max(image.stride for image in self.images.values())


INPUT = "image"
RGB = Image(channels=3, stride=1)  # what a network is given, whatever it makes of it


def outputs_of(step: Step) -> list[str]:
    """Names of the images a step writes."""
    if isinstance(step, GroupNormReLU):
        return [form.output for form in step.outputs]
    return [] if isinstance(step, Head) else [step.output]


def tensors_of(step: Step, images: dict[str, Image]) -> list[str]:
    """Names of the tensors a step reads; an amax belongs to the steps that write an image with it."""
    names: list[str | None] = [] if isinstance(step, Concat) else [step.bias]
    if isinstance(step, GroupNormReLU):
        names += [f"{step.layer}.weight", f"{step.layer}.bias"]
    elif isinstance(step, Product):
        weight = f"{step.layer}.weight"
        parts = ("codes", "scales", "amax")
        names += [weight] if step.precision == "fp16" else [f"{weight}.{part}" for part in parts]
    names += [images[name].amax for name in outputs_of(step) if name in images]
    return [name for name in dict.fromkeys(names) if name]
