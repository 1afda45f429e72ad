"""The network as a flat list of nodes, each reading and writing named activations; the JSON inside a packed file.

Every node writes its result in one or more forms: plain, packed for the layers that read it (with their `input_amax`,
in blocks along the channels or along the last axis), or pooled 2 x 2. Two readers with the same scale share a form.

| node | what it computes | where |
|---|---|---|
| `conv2d`, `conv_transpose2d`, `linear` | the layer, of packed or plain activations | kernels; see `precision` below |
| `conv1d`, `conv3d`, `conv_transpose1d`, `conv_transpose3d` | the same over one or three axes | kernels, torch |
| `group_norm_relu` | relu(norm(x + bias)), one pass for all forms | kernel |
| `affine` | x scale + shift of each channel: a BatchNorm | torch |
| `group_norm`, `instance_norm`, `layer_norm` | the normalisation | torch |
| `activation`, `prelu` | relu, silu, gelu, hardswish, ..., abs, exp, sqrt, ... | torch |
| `add`, `sub`, `mul`, `div`, `pow`, `maximum`, `minimum` | two activations, or one and a number | torch |
| `greater`, `less`, `equal`, ..., `where` | comparisons, which give 0 or 1, and the choice by them | torch |
| `concat`, `slice`, `select`, `reshape`, `expand`, `permute`, `pad`, `constant` | layout | torch |
| `roll`, `flip`, `repeat`, `take` | positions of an axis in another order, or several times | torch |
| `max_pool`, `avg_pool`, `adaptive_pool`, `resize`, `pixel_shuffle` | sizes | torch |
| `unfold`, `fold` | windows as columns, and columns added up | torch |
| `reduce`, `variance`, `cumulative_sum`, `argmax` | over axes | torch |
| `matmul`, `softmax`, `log_softmax`, `attention` | products of activations | torch |
| `aten` | an operator of ATen on the list `operators.ATEN`: grid_sampler_2d, topk, _fft_r2c, ... | torch, in FP32 |

Where a GPU runs several nodes as one kernel, `producers` says which.

A plain activation is of `Graph.rest` on a GPU, FP16 if nothing else was asked for, and FP32 on a CPU, with torch's axes
(NCHW); a packed one has its blocks along the last axis (NHWC). No shape is stored but the inputs' example: `shapes`
derives the others, for any size that the inputs may have. Sizes that a node must know (`reshape`, `resize`) are
numbers, or expressions of the inputs' axes (`graph.sizes`).

`precision` "nvfp4": both operands are packed. A convolution of one group, of equal dilations and at most 49 taps, is a
kernel; so is a transposed one whose kernel is its stride, 1 or 2 along each axis. Any other is decoded and computed in
FP16, or where the rest is another in FP32; before Blackwell so are those over one axis, and over three or of unequal
strides those of channels that `decoded_weight.supports` does not take. A convolution of two packed inputs reads them as
their concatenation, which is never written.

`precision` "w4a8": the weight is packed MXFP4, and the layer quantises a plain activation to MXFP8 (scale rule `ceil`)
in blocks along the axis that it contracts. On Blackwell, and from SM90 with weights="packed", a kernel multiplies them,
of linear layers and of images where there is one group; elsewhere operands are decoded to FP32, and on a GPU multiplied
in TF32, in which both formats are exact.

`precision` "fp8" and "int8": the layer quantises a plain activation with one scale, that of an amax, and its weight has
one for each output channel. The codes, exact in TF32, are multiplied in it on a GPU and in FP32 on a CPU, and the sum
with both scales.

A layer's weight is `<layer>.weight`, of the rest's type O,KH,KW,C (O,C of a linear layer; FP32 where the module's code
computes it from its parameters, as a standardised weight), or where the layer is quantised `<layer>.weight.codes`,
`.scales` and `.amax`, the FP32 global amax A; E is the layer's `e4m3_max`. Of W4A8 scales are E8M0 bytes (U8), and
there is no amax; of FP8 and INT8 codes are E4M3 or I8, scales FP32 [O], and the amax is that of the input. Weights of
experts, `experts`, are tensors as of NVFP4 with an amax each, [E, 1]; they are decoded when a network is opened, and
multiplied in the rest.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fp4deploy.formats import EIGHT_BITS
from fp4deploy.graph.operators import UNARY
from fp4deploy.precisions import LABELS
from fp4deploy.rest import FP16, FP32, RestName

MAX_NODES = 4096
MAX_PORTS = 512  # inputs, or outputs: keys and values of each layer of a decoder are one each
MAX_FORMS = 64
Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=1, le=1 << 16)]
Extent = Annotated[int, Field(ge=0, le=1 << 12)]
Steps = Annotated[int, Field(ge=1, le=1 << 10)]
Axis = Annotated[int, Field(ge=0, le=7)]
Number = Annotated[float, Field(ge=-FP32.largest, le=FP32.largest)]
Epsilon = Annotated[float, Field(gt=0, lt=1)]
MIN_EPSILON = 1e-12  # up to packed/7, and excluded
Whole = Annotated[int, Field(ge=-(1 << 31), le=1 << 31)]
Tokens = Annotated[list[Whole | Name], Field(min_length=1, max_length=64)]
Size = Whole | Tokens
Shape = Annotated[list[Size], Field(min_length=1, max_length=6)]
Extents = Annotated[list[Extent], Field(min_length=1, max_length=3)]  # one for each spatial axis
Strides = Annotated[list[Steps], Field(min_length=1, max_length=3)]
Pair = Annotated[list[Steps], Field(min_length=2, max_length=2)]  # height and width
PairOfExtents = Annotated[list[Extent], Field(min_length=2, max_length=2)]
Spatial = Annotated[list[Size], Field(min_length=1, max_length=3)]
One = Annotated[list[Name], Field(min_length=1, max_length=1)]
OneOrTwo = Annotated[list[Name], Field(min_length=1, max_length=2)]


class Strict(BaseModel):
    """No unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TensorInfo(Strict):
    """A tensor of the file, with the type names of safetensors, and the SHA-256 of its bytes."""

    dtype: Literal["U8", "I8", "F8_E4M3", "F16", "BF16", "F32"]
    shape: list[Annotated[int, Field(ge=0, le=1 << 31)]]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Form(Strict):
    """One form of an activation, under its own name; packed where `amax` names the tensor that it is packed with."""

    name: Name
    amax: Name | None = None
    axis: Literal["channels", "last"] = "channels"
    pooled: bool = False


class Input(Strict):
    """An input of the network.

    shape: an example, batch 1 where it is free; free: the axes that may have another size than there. dtype: what is
    given; whole numbers, such as token ids, keep their values until a node computes with them.
    """

    name: Name
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 20)]], Field(min_length=1, max_length=6)]
    free: list[Axis]
    dtype: Literal["float32", "int64", "bool"] = "float32"
    outputs: Annotated[list[Form], Field(min_length=1, max_length=MAX_FORMS)]


class Output(Strict):
    """An output: the key of a dict, the position in a tuple, or "" for a single tensor; and the activation it is."""

    name: Annotated[str, Field(max_length=200)]
    activation: Name


class Step(Strict):
    """What all nodes share."""

    inputs: One
    outputs: Annotated[list[Form], Field(min_length=1, max_length=MAX_FORMS)]


class Layer(Step):
    """A layer that multiplies: whose weight it reads, and the bias that is added."""

    layer: Name
    precision: Literal["nvfp4", "w4a8", "fp8", "int8"] | RestName
    e4m3_max: Literal[448, 256] = 448
    bias: Name | None = None


class Conv2d(Layer):
    """A convolution over as many axes as its name says, and relu after it."""

    op: Literal["conv2d", "conv1d", "conv3d"] = "conv2d"
    inputs: OneOrTwo
    stride: Strides = [1, 1]
    padding: Extents = [0, 0]
    dilation: Strides = [1, 1]
    groups: Count = 1
    relu: bool = False


class ConvTranspose2d(Layer):
    """A transposed convolution over as many axes as its name says."""

    op: Literal["conv_transpose2d", "conv_transpose1d", "conv_transpose3d"] = "conv_transpose2d"
    stride: Strides = [2, 2]
    padding: Extents = [0, 0]
    output_padding: Extents = [0, 0]
    dilation: Strides = [1, 1]
    groups: Count = 1


class Linear(Layer):
    """A linear layer over the last axis, and relu after it."""

    op: Literal["linear"] = "linear"
    relu: bool = False


class GroupNormReLU(Step):
    """relu(GroupNorm(x + bias)), `bias` being that of the convolution before."""

    op: Literal["group_norm_relu"] = "group_norm_relu"
    layer: Name
    groups: Count
    eps: Epsilon
    bias: Name | None = None


class Affine(Step):
    """x scale + shift, `<layer>.scale` and `<layer>.shift` being FP32 of each channel."""

    op: Literal["affine"] = "affine"
    layer: Name


class Norm(Step):
    """A normalisation; with `layer` its weight and bias are applied. shape: of a layer norm, the last axes."""

    op: Literal["group_norm", "instance_norm", "layer_norm"]
    layer: Name | None = None
    groups: Count = 1
    shape: Annotated[list[Count], Field(max_length=4)] = []
    eps: Epsilon


class Activation(Step):
    """An activation function; `parameters` are its numbers in torch's order (`operators.NUMBERS`)."""

    op: Literal["activation"] = "activation"
    function: Literal[
        "relu", "relu6", "leaky_relu", "elu", "selu", "silu", "gelu", "gelu_tanh", "hardswish", "hardsigmoid", "clamp",
        "sigmoid", "tanh", "softplus", "mish", "abs", "neg", "sign", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt",
        "reciprocal", "square", "erf", "sin", "cos", "floor", "ceil", "round",
    ]  # fmt: skip
    parameters: Annotated[list[Number], Field(max_length=2)] = []


class PReLU(Step):
    """x where it is positive, else x times a slope: `tensor`, one number or one a channel."""

    op: Literal["prelu"] = "prelu"
    tensor: Name


class Arithmetic(Step):
    """Two activations, or one and a number; alpha: what the second is multiplied with before."""

    op: Literal["add", "sub", "mul", "div", "pow", "maximum", "minimum"]
    inputs: OneOrTwo
    number: Number | None = None
    alpha: Number = 1.0


class Compare(Step):
    """1 where a comparison of two activations, or of one and a number, holds, else 0."""

    op: Literal["greater", "greater_equal", "less", "less_equal", "equal", "not_equal"]
    inputs: OneOrTwo
    number: Number | None = None


class Where(Step):
    """The second activation where the first is not 0, else the third."""

    op: Literal["where"] = "where"
    inputs: Annotated[list[Name], Field(min_length=3, max_length=3)]


class Constant(Step):
    """A tensor of the file."""

    op: Literal["constant"] = "constant"
    inputs: Annotated[list[Name], Field(max_length=0)] = []
    tensor: Name


class Experts(Step):
    """Weights [E, N, K] of experts in NVFP4, decoded; blocks along K."""

    op: Literal["experts"] = "experts"
    inputs: Annotated[list[Name], Field(max_length=0)] = []
    tensor: Name
    e4m3_max: Literal[448, 256] = 448


class Concat(Step):
    """Plain activations, concatenated."""

    op: Literal["concat"] = "concat"
    inputs: Annotated[list[Name], Field(min_length=2, max_length=256)]
    dim: Axis = 1


class Pool(Step):
    """Maximum or average over windows."""

    op: Literal["max_pool", "avg_pool"]
    kernel: Strides
    stride: Strides
    padding: Extents = [0, 0]
    dilation: Strides = [1, 1]
    ceil_mode: bool = False
    count_padding: bool = True


class AdaptivePool(Step):
    """Maximum or average over as many windows as the output has pixels."""

    op: Literal["adaptive_pool"] = "adaptive_pool"
    function: Literal["max", "avg"]
    size: Spatial


class Reduce(Step):
    """Mean, sum, extreme or Euclidean norm over axes."""

    op: Literal["reduce"] = "reduce"
    function: Literal["mean", "sum", "amax", "amin", "norm"]
    dims: Annotated[list[Axis], Field(min_length=1, max_length=6)]
    keep: bool


class Variance(Step):
    """Variance over axes; correction: the number of elements minus its divisor."""

    op: Literal["variance"] = "variance"
    dims: Annotated[list[Axis], Field(min_length=1, max_length=6)]
    keep: bool
    correction: Annotated[float, Field(ge=0, le=1)]


class CumulativeSum(Step):
    """Sums of all elements up to each, along an axis."""

    op: Literal["cumulative_sum"] = "cumulative_sum"
    dim: Axis


class ArgMax(Step):
    """The position of the largest element of an axis, as a number: of at most `rest.POSITIONS`, which FP16 holds."""

    op: Literal["argmax"] = "argmax"
    dim: Axis
    keep: bool


class Resize(Step):
    """Interpolation to a size, or by factors."""

    op: Literal["resize"] = "resize"
    mode: Literal["nearest", "nearest-exact", "bilinear", "bicubic", "linear", "trilinear"]
    size: Spatial | None = None
    scale: Annotated[list[Annotated[float, Field(gt=0, le=64)]], Field(min_length=1, max_length=3)] | None = None
    align_corners: bool = False


class PixelShuffle(Step):
    """Channels to pixels, or back."""

    op: Literal["pixel_shuffle", "pixel_unshuffle"]
    factor: Annotated[int, Field(ge=1, le=64)]


class Unfold(Step):
    """[N, C, H, W] -> [N, C x taps, windows]: the pixels of each window, as torch orders them."""

    op: Literal["unfold"] = "unfold"
    kernel: Pair
    stride: Pair
    padding: PairOfExtents
    dilation: Pair


class Fold(Step):
    """[N, C x taps, windows] -> [N, C, H, W] of this size: the sum of all windows at each pixel."""

    op: Literal["fold"] = "fold"
    size: Annotated[list[Size], Field(min_length=2, max_length=2)]
    kernel: Pair
    stride: Pair
    padding: PairOfExtents
    dilation: Pair


class Reshape(Step):
    """The same elements in another shape, or repeated to it."""

    op: Literal["reshape", "expand"]
    shape: Shape


class Permute(Step):
    """The axes in another order."""

    op: Literal["permute"] = "permute"
    dims: Annotated[list[Axis], Field(min_length=1, max_length=6)]


class Slice(Step):
    """Some positions of an axis."""

    op: Literal["slice"] = "slice"
    dim: Axis
    start: Size = 0
    end: Size | None = None
    step: Steps = 1


class Select(Step):
    """One position of an axis, which goes."""

    op: Literal["select"] = "select"
    dim: Axis
    index: Size


class Roll(Step):
    """Axes turned: the last `shift` positions come first."""

    op: Literal["roll"] = "roll"
    shifts: Annotated[list[Size], Field(min_length=1, max_length=6)]
    dims: Annotated[list[Axis], Field(min_length=1, max_length=6)]


class Flip(Step):
    """Axes in reverse order."""

    op: Literal["flip"] = "flip"
    dims: Annotated[list[Axis], Field(min_length=1, max_length=6)]


class Repeat(Step):
    """The whole tensor so many times along each axis."""

    op: Literal["repeat"] = "repeat"
    counts: Annotated[list[Size], Field(min_length=1, max_length=6)]


class Take(Step):
    """These positions of an axis, in this order."""

    op: Literal["take"] = "take"
    dim: Axis
    indices: Annotated[list[Annotated[int, Field(ge=0, le=1 << 20)]], Field(min_length=1, max_length=1 << 16)]


class Pad(Step):
    """Pixels around; `pad` as torch has it, the last axis first."""

    op: Literal["pad"] = "pad"
    pad: Annotated[list[Annotated[int, Field(ge=-4096, le=4096)] | Tokens], Field(min_length=2, max_length=8)]
    mode: Literal["constant", "reflect", "replicate", "circular"]
    value: Number = 0.0


class Matmul(Step):
    """The product of two activations, over the last two axes."""

    op: Literal["matmul"] = "matmul"
    inputs: Annotated[list[Name], Field(min_length=2, max_length=2)]


class Softmax(Step):
    """exp(x) / sum(exp(x)) along an axis, or its logarithm."""

    op: Literal["softmax", "log_softmax"] = "softmax"
    dim: Axis


class Attention(Step):
    """softmax(q k^T scale + mask) v of query, key, value and perhaps a mask; scale None: 1 / sqrt of its length."""

    op: Literal["attention"] = "attention"
    inputs: Annotated[list[Name], Field(min_length=3, max_length=4)]
    causal: bool = False
    scale: Annotated[float, Field(gt=0, le=1024)] | None = None


Argument = bool | int | float | str | list[bool | int | float | str | list[int | str]] | None


class Aten(Step):
    """An operator of ATen, one of `operators.ATEN`, computed in FP32.

    function: its name and overload. roles: the argument of its schema that each input is ("indices.0" of a list).
    arguments: the others; a list with a name in it is an expression of the inputs' axes. result: which of several.
    `arange` reads nothing, and gives whole numbers.
    """

    op: Literal["aten"] = "aten"
    function: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,60}\.[A-Za-z0-9_]{1,40}$")]
    inputs: Annotated[list[Name], Field(max_length=16)]
    roles: Annotated[list[Name], Field(max_length=16)]
    arguments: dict[Name, Argument] = {}
    result: Annotated[int, Field(ge=0, le=7)] = 0


Node = Annotated[
    Conv2d | ConvTranspose2d | Linear | GroupNormReLU | Affine | Norm | Activation | PReLU | Arithmetic | Compare
    | Where | Constant | Experts | Concat | Pool | AdaptivePool | Reduce | Variance | CumulativeSum | ArgMax | Resize
    | PixelShuffle | Unfold | Fold | Reshape | Permute | Slice | Select | Roll | Flip | Repeat | Take | Pad | Matmul
    | Softmax | Attention | Aten,
    Field(discriminator="op"),
]  # fmt: skip


class Graph(Strict):
    """The whole network.

    digits: its input is encoded as multi-term FP4 (`models.input_encoding`) before it is read. rest: what is not packed
    (`fp4deploy.rest`). wide: path of a module -> activations that its code writes, in FP32 whatever the rest is.
    """

    inputs: Annotated[list[Input], Field(min_length=1, max_length=MAX_PORTS)]
    nodes: Annotated[list[Node], Field(min_length=1, max_length=MAX_NODES)]
    outputs: Annotated[list[Output], Field(min_length=1, max_length=MAX_PORTS)]
    tensors: dict[Name, TensorInfo]
    digits: bool = False
    rest: RestName = "fp16"
    wide: dict[Annotated[str, Field(max_length=400)], Annotated[list[Name], Field(min_length=1)]] = {}

    def to_json(self, **options: Any) -> str:
        """Serialise; without `rest` of FP16, types of numbers and no `wide`, which older versions do not know."""
        usual = {"rest": self.rest == "fp16", "wide": not self.wide}
        exclude = options.pop("exclude", {}) | {name: True for name, unsaid in usual.items() if unsaid}
        if all(each.dtype == "float32" for each in self.inputs):
            exclude["inputs"] = {"__all__": {"dtype"}}
        return self.model_dump_json(exclude=exclude, **options)

    def format(self) -> int:
        """The oldest format `packed/N` that has all of it."""
        typed = any(each.dtype != "float32" or 1 in each.free or 0 not in each.free for each in self.inputs)
        beside = 7 if self.rest != "fp16" or self.wide else 3
        return max(8 if typed else beside, *map(format_of, self.nodes))

    @property
    def batch(self) -> int | None:
        """The only number of samples that it takes; None: any."""
        first = self.inputs[0]
        return None if 0 in first.free else first.shape[0]

    def forms(self) -> dict[str, Form]:
        """Every form that an input or a node writes, by name."""
        return {form.name: form for writer in (*self.inputs, *self.nodes) for form in writer.outputs}


def format_of(node: Node) -> int:
    """The oldest format `packed/N` that has a node of this kind, from 3 on."""
    if isinstance(node, Layer) and node.precision in EIGHT_BITS:
        return 11
    if isinstance(node, Layer) and node.precision == "w4a8":
        return 10
    if isinstance(node, Experts) or (isinstance(node, Aten) and function_of(node) in ("arange", "scatter")):
        return 9
    if isinstance(node, Norm | GroupNormReLU) and node.eps <= MIN_EPSILON:
        return 8
    if isinstance(node, Aten) and function_of(node) in ("embedding", "index", "index_select"):
        return 8
    if isinstance(node, Conv2d) and len(node.inputs) == 2 and axes_of(node) != 2:
        return 8
    if any(abs(number) > FP16.largest for number in numbers_of(node)):
        return 6
    return 5 if isinstance(node, Aten) else 3 if in_packed_3(node) else 4


def function_of(node: Aten) -> str:
    """The name of an operator without its overload."""
    return node.function.partition(".")[0]


def numbers_of(node: Node) -> list[float]:
    """The numbers of the module's code that a node computes with."""
    given: list[Any] = []
    if isinstance(node, Arithmetic | Compare):
        given = [node.number, getattr(node, "alpha", 1.0)]
    elif isinstance(node, Activation):
        given = list(node.parameters)
    elif isinstance(node, Pad):
        given = [node.value]
    elif isinstance(node, Aten):
        given = [each for each in node.arguments.values() if isinstance(each, float)]
    return [each for each in given if each is not None]


def in_packed_3(node: Node) -> bool:
    """Whether the format `packed/3` has a node of this kind."""
    later = (PReLU, Compare, Where, Variance, CumulativeSum, Roll, Flip, Repeat, Take, Unfold, Fold, ArgMax)
    if isinstance(node, later) or (isinstance(node, Activation) and node.function in UNARY):
        return False
    if isinstance(node, Conv2d | ConvTranspose2d):
        return axes_of(node) == 2
    if isinstance(node, Pool | AdaptivePool | Resize):
        places = node.kernel if isinstance(node, Pool) else node.size or getattr(node, "scale", None) or []
        return len(places) == 2
    if isinstance(node, Reduce):
        return node.function != "norm"
    if isinstance(node, Attention):
        return len(node.inputs) == 3
    return node.op not in ("pow", "maximum", "minimum", "log_softmax")


def axes_of(node: Conv2d | ConvTranspose2d) -> int:
    """How many spatial axes a convolution has."""
    return int(node.op[-2])


def weight_names(node: Layer) -> list[str]:
    """Names of the tensors that hold a layer's weight."""
    weight = f"{node.layer}.weight"
    if not is_quantized(node):
        return [weight]
    return parts_of(weight)[:2] if node.precision == "w4a8" else parts_of(weight)


def quantizes_itself(node: Layer) -> bool:
    """A layer that reads a plain activation and quantises it."""
    return node.precision in LABELS and node.precision != "nvfp4"


def is_quantized(node: object) -> bool:
    """A layer whose weight is codes and scales."""
    return isinstance(node, Layer) and node.precision in LABELS


def parts_of(weight: str) -> list[str]:
    """Names of the tensors of a quantised weight."""
    return [f"{weight}.{part}" for part in ("codes", "scales", "amax")]


def tensors_of(node: Node | Input) -> list[str]:
    """Names of the tensors that a node reads; an amax belongs to the nodes that write an activation with it."""
    names: list[str | None] = []
    if isinstance(node, Layer):
        names += [node.bias, *weight_names(node)]
    elif isinstance(node, GroupNormReLU):
        names += [node.bias, f"{node.layer}.weight", f"{node.layer}.bias"]
    elif isinstance(node, Norm) and node.layer is not None:
        names += [f"{node.layer}.weight", f"{node.layer}.bias"]
    elif isinstance(node, Affine):
        names += [f"{node.layer}.scale", f"{node.layer}.shift"]
    elif isinstance(node, Constant | PReLU):
        names.append(node.tensor)
    elif isinstance(node, Experts):
        names += parts_of(node.tensor)
    names += [form.amax for form in node.outputs]
    return [name for name in dict.fromkeys(names) if name]


def constants_of(graph: Graph) -> set[str]:
    """Names of the tensors that nodes read as activations."""
    return {node.tensor for node in graph.nodes if isinstance(node, Constant)}


def named(node: Node) -> str:
    """The layer of a node, or the first activation it writes; for messages and tables."""
    return getattr(node, "layer", None) or node.outputs[0].name
