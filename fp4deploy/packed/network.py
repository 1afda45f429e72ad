"""Running a packed network: one pass over its nodes; an activation is freed after its last reader.

On a GPU activations are FP16, or what else the rest is (`Graph.rest`), or packed, convolutions and linear layers of
packed operands come from `plugins.gemm.dispatch`, GroupNorm with ReLU from `plugins.quantize.norm_pack`, and groups of
affine maps, norms, residual additions and activation functions from `plugins.quantize.pointwise_pack` (`producers`
finds them); everything else is torch (`operators`). On the CPU everything is FP32, as in every runtime of this project
that computes on a CPU, and a packed activation is what it decodes to (`formats.round_trip_nvfp4`): the numbers are
those of the quantised model, bit for bit those of codes and scales, and nobody makes the codes. `run_node` and
`read_input` make them unless told otherwise, since that is what a comparison reads.

    network = PackedNetwork(read_packed("unet.fp4"), "cuda")
    logits = network(images)                       [N, 3, H, W] -> [N, classes, H, W]

**Weights.** Tensor cores before Blackwell take no FP4. With `weights="decoded"`, the default there, convolution weights
are decoded to FP16 once, at load, for kernels that decode activations only (`plugins.gemm.convolution.decoded`):
faster, and 16 bits an element of GPU memory instead of 4.5. `weights="packed"` keeps the codes. Both compute with the
same elements.

**Layers in FP16.** Convolutions whose sum has few elements, the first and the last layer of most networks, come from
`plugins.gemm.convolution.small_k` on a GPU; torch (cuDNN) computes the others. With `plain="kernel"` convolutions of
one group come from `plugins.gemm.convolution.plain`, whose bytes do not depend on a library: those that the C library
gives (`fp4deploy.native`). Packed convolutions of SM120 are Triton's then, whichever was measured to be faster.

With FP4DEPLOY_NVTX=on every node is an NVTX range, for Nsight Systems; FP4DEPLOY_GRAPHS=off launches node by node, so
that kernels lie in their ranges.

What is computed with numbers that the rest does not hold is FP32 on a GPU, too, up to the next layer (`wide`).

**Rest in BF16 or FP32.** All kernels write BF16 as well. A packed layer without a kernel is decoded to FP32, where its
operands are exact. With an FP32 rest torch computes everything, layers of decoded operands in FP32 and without TF32.

Plain activations have torch's axes, feature maps in channels_last: the views that kernels take (NHWC) cost nothing.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.formats.round_trip import round_trip_nvfp4
from fp4deploy.graph.sizes import output_size, transposed_size
from fp4deploy.models.input_encoding import encode_input
from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.graph import (
    Affine,
    Conv2d,
    ConvTranspose2d,
    Form,
    GroupNormReLU,
    Input,
    Layer,
    Linear,
    Node,
    Norm,
    axes_of,
    constants_of,
    quantizes_itself,
    weight_names,
)
from fp4deploy.packed.on_cpu import convolution
from fp4deploy.packed.operators import Context, as_numbers, channels_last, compute, convolve, positions_of, read_tensors
from fp4deploy.packed.own_quantizer import KernelWeight, OwnWeight, kernel_weight, multiply, own_weight
from fp4deploy.packed.plain_layers import convolve_small_k, plain_geometry, plain_kernel, read_as_given, small_k_kernel
from fp4deploy.packed.producers import Move, Produce, Step, label, moved, normalized, plan
from fp4deploy.packed.shapes import Shape, expected, fitting, shapes_of, weight_order, weight_shape
from fp4deploy.packed.wide import wide_activations
from fp4deploy.plugins.aot.compile import triton_version
from fp4deploy.plugins.gemm.arguments import capability_of
from fp4deploy.plugins.gemm.convolution import decoded, plain, warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import DecodedWeight, decode_weight, supports
from fp4deploy.plugins.gemm.dispatch import TAPS, conv2d, conv_transpose2d, matmul
from fp4deploy.plugins.gemm.reference import matmul_reference
from fp4deploy.plugins.gemm.training import POINTWISE, Window, gather_gemm
from fp4deploy.plugins.gemm.triton.variants import VOLUMES
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.quantize.input_encoding import image_shape, packed_image
from fp4deploy.plugins.quantize.norm_pack import FeatureMap, OutputForm, coefficients, norm_relu_pack
from fp4deploy.plugins.quantize.pointwise_pack import Pointwise, pointwise_pack
from fp4deploy.plugins.quantize.statistics import Moments, pop_moments
from fp4deploy.plugins.runtime.availability import available
from fp4deploy.precisions import LABELS
from fp4deploy.rest import rest_of

Result = torch.Tensor | tuple[torch.Tensor, ...] | dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor, torch.Tensor], FeatureMap]
SIZES = 16  # shapes of inputs whose fit is remembered
_FLAGS = threading.RLock()  # of `allowing_tf32`


def packed_form(y: torch.Tensor, amax: torch.Tensor) -> FeatureMap:
    """Codes and scales of `y` [..., K]."""
    return quantize_nvfp4(y, amax=amax)


class PackedNetwork:
    """A packed file on a device.

    weights: "decoded" or "packed", see above; None chooses. Ignored on the CPU and on Blackwell.
    plain: "torch" or "kernel", see above; ignored on the CPU.
    dtype: of plain activations; None: that of the rest on a GPU, float32 on the CPU.

    Raises:
        InputError: another choice of weights or of `plain`; `plain="kernel"` where the rest is FP32.
    """

    def __init__(
        self,
        file: PackedFile,
        device: str | torch.device = "cpu",
        weights: str | None = None,
        plain: str = "torch",
        dtype: torch.dtype | None = None,
    ) -> None:
        if weights not in (None, "decoded", "packed"):
            raise InputError(f"weights is '{weights}'. Valid: decoded, packed.")
        if plain not in ("torch", "kernel"):
            raise InputError(f"plain is '{plain}'. Valid: torch, kernel.")
        rest = rest_of(file.graph)
        if plain == "kernel" and rest.name == "fp32":
            raise InputError("plain='kernel' is for networks whose rest is FP16 or BF16; this one's is FP32.")
        self.file = file
        self.graph = file.graph
        self.device = torch.device(device)
        on_cpu = self.device.type == "cpu"
        self.dtype = dtype or (torch.float32 if on_cpu else rest.dtype)
        # The multi-term FP4 encoding reads the image in FP16; BF16 would round it before.
        self.input_dtype = torch.float32 if self.graph.digits and self.dtype != torch.float16 else self.dtype
        self.decoded_dtype = self.dtype if self.dtype == torch.float16 else torch.float32  # of layers without a kernel
        self.wide = wide_activations(self.graph, file.tensors, rest_of(self.dtype))
        self.has_kernels = on_cpu or self.dtype != torch.float32
        on_gpu = self.device.type == "cuda" and available(self.device) and self.has_kernels
        inputs, steps = plan(self.graph, self.wide) if on_gpu else (self.graph.inputs, list(self.graph.nodes))
        self.schedule(inputs, steps)
        marks = os.environ.get("FP4DEPLOY_NVTX", "off") == "on" and self.device.type == "cuda"
        self._range: Callable[[Step], AbstractContextManager[Any]] = _nvtx_range if marks else nullcontext
        decodes = on_cpu and self.dtype == torch.float32
        self.pack: Pack = round_trip_nvfp4 if decodes else packed_form  # between two nodes
        # Nobody asked for a form of its kernels, nor for marks of its nodes: a compiled program may stand for them.
        self.by_default = on_gpu and weights is None and plain == "torch" and not marks
        self._decodes = weights != "packed" and self.has_kernels and decoded.available(self.device)
        self._compiles = on_cpu or triton_version() is not None
        self.has_mixed_kernels = on_gpu and triton_version() is not None and capability_of(self.device) >= 90
        self._own = plain == "kernel" and self.device.type == "cuda"
        self._packed: dict[str, Nvfp4Tensor] = {}
        self._own_weights: dict[str, OwnWeight] = {}  # of layers that quantise what they read
        self._codes: dict[str, KernelWeight] = {}  # or as a kernel reads them
        self._decoded: dict[str, DecodedWeight] = {}
        self._wide: dict[tuple[str, torch.dtype], torch.Tensor] = {}  # decoded, in the file's order of axes
        self._taps: dict[str, list[int]] = {}
        self._plain: dict[str, torch.Tensor] = {}
        self._affines: dict[str, torch.Tensor] = {}
        self._fits: dict[tuple[Shape, ...], dict[str, int]] = {}
        shapes, names = shapes_of(self.graph), set[str]()
        for node in self.graph.nodes:
            if isinstance(node, Layer):
                names.update(weight_names(node))
                self._load_weight(node, tuple(shapes[name][_axis(node)] for name in node.inputs))
        # Some layers' packed operands no kernel of this device takes; of volumes cuDNN may be the faster one.
        volumes = any(len(taps) == 3 for taps in self._taps.values())
        self.decodes_layers = bool(self._wide) or (self._decodes and volumes)
        small_k = partial(small_k_kernel, weights=self._plain, device=self.device)
        self._as_given = set[str]() if self._own else read_as_given(self.graph, inputs, steps, small_k)
        names -= constants_of(self.graph)  # an embedding may share the weight of the output layer
        self._vectors = read_tensors(self.graph, file.tensors, names, self.device, self.dtype)
        self._positions = positions_of(self.graph, self.device)

    def __call__(self, *inputs: FeatureMap) -> Result:
        """The outputs for inputs in the order of the graph: of one RGB input [N, 3, H, W] usually [N, classes, H, W].

        A network of several outputs gives a tuple or a dict, as its module did.

        Args:
            inputs: images as tensors; with an `image_amax` also as what `packed_image` makes of them with it.

        Raises:
            InputError: inputs that are not the graph's, or of a size that the network cannot take.
        """
        sizes = self.sizes(inputs)
        with torch.inference_mode(), self._tf32(False) if self.dtype == torch.float32 else nullcontext():
            live: dict[str, FeatureMap] = {}
            moments: dict[str, Moments] = {}
            for each, x in zip(self.inputs, inputs, strict=True):
                read = self.read_input(each, x, self.pack)
                live.update(zip([form.name for form in each.outputs], read, strict=True))
            for number, step in enumerate(self.steps):
                with self._range(step):
                    results = self.run_step(step, [live[name] for name in step.inputs], sizes, moments)
                for name in self._last_read[number]:
                    live.pop(name, None)
                live.update(zip([form.name for form in step.outputs], results, strict=True))
        return self.named([cast(torch.Tensor, live[each.activation]) for each in self.graph.outputs])

    @property
    def image_amax(self) -> torch.Tensor | None:
        """What the only image is packed with, where one operand of multi-term FP4 is all that is read of it.

        That operand may be given in the image's place. None: nothing else than an image may.
        """
        forms = [form for each in self.inputs for form in each.outputs]
        alone = len(forms) == 1 and forms[0].axis == "channels" and self.pack is packed_form
        return self.amax(forms[0]) if self.graph.digits and alone else None

    def _tf32(self, allowed: bool) -> AbstractContextManager[None]:
        """`allowing_tf32`; a CPU has none."""
        return allowing_tf32(allowed) if self.device.type == "cuda" else nullcontext()

    def named(self, outputs: Sequence[torch.Tensor]) -> Result:
        """Outputs in the structure that the module had: one tensor, a tuple, or a dict."""
        names = [each.name for each in self.graph.outputs]
        if names == [""]:
            return outputs[0]
        if names == [str(at) for at in range(len(names))]:
            return tuple(outputs)
        return dict(zip(names, outputs, strict=True))

    def read(self, images: torch.Tensor) -> FeatureMap:
        """What the first node reads of the first input: RGB or multi-term FP4, packed or plain."""
        return self.read_input(self.graph.inputs[0], images)[0]

    def schedule(self, inputs: Sequence[Input], steps: Sequence[Step]) -> None:
        """Run these steps from now on: those of `producers.plan`, or the nodes of the graph."""
        self.inputs, self.steps = inputs, steps
        self._normed = normalized(steps)
        last = {name: number for number, step in enumerate(steps) for name in step.inputs}
        last |= {each.activation: len(steps) for each in self.graph.outputs}
        self._last_read = [  # by each step; freed after it
            [name for name in dict.fromkeys(step.inputs) if last[name] == number] for number, step in enumerate(steps)
        ]

    def read_input(self, each: Input, x: FeatureMap, pack: Pack = packed_form) -> list[FeatureMap]:
        """An input in the forms that nodes read; `pack` makes the packed ones.

        An image that only kernels of any strides read stays as it is, NCHW and FP32 or 16 bits.
        """
        if isinstance(x, Nvfp4Tensor):
            return [x]
        if each.outputs[0].name in self._as_given and x.dtype in (torch.float32, torch.float16, self.dtype):
            return [x.to(self.device)] * len(each.outputs)
        if each.dtype == "int64":
            return [x.to(self.device, torch.int64)] * len(each.outputs)
        x = x.to(self.device, self.input_dtype)
        if self.graph.digits:
            amaxes = [self.amax(form) for form in each.outputs if form.axis == "channels"]
            known = [amax for amax in amaxes if amax is not None]
            if pack is packed_form and len(known) == len(each.outputs):
                return [packed_image(x, amax) for amax in known]
            x = encode_input(x).to(self.dtype)
        return self.forms(channels_last(x), each.outputs, pack)

    def run_step(
        self, step: Step, inputs: list[FeatureMap], sizes: dict[str, int], moments: dict[str, Moments] | None = None
    ) -> list[FeatureMap]:
        """`run_node` for what this device runs instead of nodes."""
        if isinstance(step, Produce):
            return self._produce(step, cast("list[torch.Tensor]", inputs), moments)
        if isinstance(step, Move):
            context = self._context(sizes, self.dtype)
            return [moved(step.node, cast("list[Nvfp4Tensor]", inputs), context)]
        return self.run_node(step, inputs, sizes, moments, self.pack)

    def run_node(
        self,
        node: Node,
        inputs: list[FeatureMap],
        sizes: dict[str, int] | None = None,
        moments: dict[str, Moments] | None = None,
        pack: Pack = packed_form,
    ) -> list[FeatureMap]:
        """The forms that one node writes, from the activations it reads.

        Args:
            inputs: packed ones as codes and scales, or on the CPU as `round_trip_nvfp4` makes them.
            sizes: of the network's inputs ("<input>.<axis>"); needed where a node has a size that depends on them.
            moments: by activation; a convolution adds those of what a norm reads in `steps`, the norm takes them.
            pack: makes the packed forms on the CPU.
        """
        given = pop_moments(moments, node.inputs[0]) if isinstance(node, (GroupNormReLU, Norm)) else None
        dtype = self._dtype_of(node)
        if self.wide:
            inputs = [_typed(x, dtype) for x in inputs]
        if isinstance(node, (GroupNormReLU, Layer)):
            inputs = [as_numbers(x, dtype) if isinstance(x, torch.Tensor) else x for x in inputs]
        if isinstance(node, GroupNormReLU):
            return self._norm(node, cast(torch.Tensor, inputs[0]), given, pack)
        if isinstance(node, Layer):
            return self._layer(node, inputs, moments, pack)
        y = compute(node, cast("list[torch.Tensor]", inputs), self._context(sizes or {}, dtype))
        return self.forms(y if y.is_complex() or y.dtype == torch.int64 else y.to(dtype), node.outputs, pack)

    def _dtype_of(self, node: Step) -> torch.dtype:
        """What a node computes with: FP32 where the rest does not hold its numbers."""
        return torch.float32 if any(form.name in self.wide for form in node.outputs) else self.dtype

    def _context(self, sizes: dict[str, int], dtype: torch.dtype) -> Context:
        return Context(self._vectors.__getitem__, sizes, self._positions, dtype, self.device)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights of layers on the device, and of everything else that the file holds."""
        layers = {node.layer: node for node in self.graph.nodes if isinstance(node, Layer)}
        stored = {name for node in layers.values() for name in weight_names(node)}
        others = sum(tensor.nbytes for name, tensor in self.file.tensors.items() if name not in stored)
        return others + sum(self.weight_bytes(node) for node in layers.values())

    def weight_bytes(self, node: Layer) -> int:
        """Bytes of a layer's weight on the device."""
        if node.layer in self._decoded:
            return self._decoded[node.layer].nbytes
        if node.layer in self._plain:
            return self._plain[node.layer].nbytes
        if node.layer in self._own_weights:
            return self._own_weights[node.layer].nbytes
        if node.layer in self._codes:
            return self._codes[node.layer].nbytes
        if node.layer not in self._packed:
            return self._wide[node.layer, self.decoded_dtype].nbytes
        weight = self._packed[node.layer]
        return weight.codes.nbytes + weight.scales.nbytes

    def precision_of(self, node: Step) -> str:
        """What a node or step computes with on this device, for a table: "FP4, weight decoded at load"."""
        plain = rest_of(self._dtype_of(node)).label
        if isinstance(node, Layer) and quantizes_itself(node):
            decoded_as = "TF32" if self.device.type == "cuda" else "FP32"
            name = LABELS[node.precision]
            return name if node.layer in self._codes else f"{name} as {decoded_as}"
        if not isinstance(node, Layer) or node.precision != "nvfp4":
            return plain
        if node.layer in self._decoded:
            return "FP4, weight decoded at load"
        by_kernel = self.device.type == "cuda" and self._has_kernel(node)
        return "FP4" if by_kernel else f"FP4 as {rest_of(self.decoded_dtype).label}"

    def forms(self, y: torch.Tensor, wanted: Sequence[Form], pack: Pack = packed_form) -> list[FeatureMap]:
        """A plain activation in each of these forms."""
        found: list[FeatureMap] = []
        for form in wanted:
            axis = 1 if form.axis == "channels" else -1
            amax = self.amax(form)
            found.append(y if amax is None else pack(y.to(self.dtype).movedim(axis, -1), amax))
        return found

    def amax(self, form: Form) -> torch.Tensor | None:
        """What a form is packed with; None for a plain one."""
        return self._vectors[form.amax] if form.amax else None

    def _produce(
        self, step: Produce, inputs: list[torch.Tensor], moments: dict[str, Moments] | None
    ) -> list[FeatureMap]:
        shape = inputs[0].movedim(1, -1).shape
        x, *others = [_rows_of_slices(channels_last(x).movedim(1, -1)) for x in inputs]
        other_ab = None if step.second is None else self._affine(step.second)
        ab = self._affine(step.first) if isinstance(step.first, Affine) else None
        if isinstance(step.first, Norm):
            ab = self._normalizing(step.first, x, pop_moments(moments, step.inputs[0]))
        work = Pointwise(ab, others[0] if others else None, other_ab, step.activation, step.slope)
        if any(form.pooled for form in step.outputs) and (x.shape[1] % 2 or x.shape[2] % 2):
            (y,) = cast("list[torch.Tensor]", pointwise_pack(x, work, [OutputForm()]))
            return self._pooled_of_odd_size(y.permute(0, 3, 1, 2), step.outputs, packed_form)
        written = pointwise_pack(x, work, [OutputForm(self.amax(form), form.pooled) for form in step.outputs])
        if len(shape) == 5:
            written = [_slices(y, shape) for y in written]
        return [y if isinstance(y, Nvfp4Tensor) else y.movedim(-1, 1) for y in written]

    def _affine(self, node: Affine) -> torch.Tensor:
        """Scale and shift, float32 [1, 2, C], made at the first call."""
        if node.layer not in self._affines:
            pair = [self._vectors[f"{node.layer}.{part}"] for part in ("scale", "shift")]
            self._affines[node.layer] = torch.stack(pair)[None]
        return self._affines[node.layer]

    def _normalizing(self, node: Norm, x: torch.Tensor, moments: Moments | None) -> torch.Tensor:
        """The affine map, float32 [N, 2, C], that normalises `x` [N, H, W, C]; from its moments if they are given."""
        channels = x.shape[-1]
        groups = channels if node.op == "instance_norm" else node.groups
        if node.layer is None:
            ones = torch.ones(channels, device=x.device)
            weight, bias = ones, torch.zeros_like(ones)
        else:
            weight, bias = (self._vectors[f"{node.layer}.{part}"] for part in ("weight", "bias"))
        return coefficients(x, None, weight, bias, groups, node.eps, moments)

    def _norm(
        self, node: GroupNormReLU, x: torch.Tensor, moments: Moments | None = None, pack: Pack = packed_form
    ) -> list[FeatureMap]:
        bias = self._vectors[node.bias] if node.bias else None
        weight, beta = (self._vectors[f"{node.layer}.{part}"] for part in ("weight", "bias"))
        if any(form.pooled for form in node.outputs) and (x.shape[2] % 2 or x.shape[3] % 2):
            return self._norm_of_odd_size(node, x, pack)
        x = channels_last(x).permute(0, 2, 3, 1)
        on_cpu = self.device.type == "cpu"
        forms = [OutputForm(None if on_cpu else self.amax(form), form.pooled) for form in node.outputs]
        written = norm_relu_pack(x, bias, weight, beta, node.groups, node.eps, forms, moments)
        results = [y if isinstance(y, Nvfp4Tensor) else y.permute(0, 3, 1, 2) for y in written]
        if not on_cpu:
            return results
        if pack is round_trip_nvfp4:
            pack = partial(round_trip_nvfp4, rectified=True)
        return self._each_form(cast("list[torch.Tensor]", results), node.outputs, pack)

    def _norm_of_odd_size(self, node: GroupNormReLU, x: torch.Tensor, pack: Pack) -> list[FeatureMap]:
        """Pooling that leaves out a last row or column: not in the pass of the normalisation."""
        once = node.model_copy(update={"outputs": [Form(name=node.outputs[0].name)]})
        return self._pooled_of_odd_size(cast(torch.Tensor, self._norm(once, x)[0]), node.outputs, pack)

    def _pooled_of_odd_size(self, y: torch.Tensor, wanted: Sequence[Form], pack: Pack) -> list[FeatureMap]:
        pooled = torch.nn.functional.max_pool2d(y, 2)
        return self._each_form([pooled if form.pooled else y for form in wanted], wanted, pack)

    def _each_form(self, written: Sequence[torch.Tensor], wanted: Sequence[Form], pack: Pack) -> list[FeatureMap]:
        """Plain activations, one for each form, in their forms."""
        return [self.forms(y, [form], pack)[0] for y, form in zip(written, wanted, strict=True)]

    def _layer(
        self, node: Layer, inputs: list[FeatureMap], moments: dict[str, Moments] | None, pack: Pack
    ) -> list[FeatureMap]:
        bias = self._vectors[node.bias] if node.bias else None
        if node.layer in self._decoded:
            return self._multiply_decoded(node, cast("list[Nvfp4Tensor]", inputs), bias, moments)
        if node.layer in self._packed and self._has_kernel(node):
            if self.device.type == "cpu":
                return self._multiply_on_cpu(node, inputs, bias, pack)
            return self._multiply(node, cast("list[Nvfp4Tensor]", inputs), bias)
        if self._own and plain_kernel(node):
            return self.forms(
                self._convolve(cast(Conv2d, node), cast("list[torch.Tensor]", inputs), bias), node.outputs
            )
        if not self._own and small_k_kernel(node, self._plain, self.device):
            y = self._convolve_small_k(cast(Conv2d, node), cast(torch.Tensor, inputs[0]), bias, moments)
            if y is not None:
                return self.forms(y, node.outputs)
        if node.layer in self._codes:
            return self.forms(self._multiply_mixed(node, cast(torch.Tensor, inputs[0]), bias), node.outputs, pack)
        if node.layer in self._own_weights:
            with self._tf32(True):
                y = multiply(node, cast("list[torch.Tensor]", inputs), self._own_weights[node.layer], bias)
            y = y.to(self.dtype)
            return self.forms(y if isinstance(node, Linear) else channels_last(y), node.outputs, pack)
        if node.precision == "nvfp4":
            axis = _axis(node)
            dtype = self.decoded_dtype
            sources = [decoded_form(x, dtype).movedim(-1, axis) for x in inputs]
            weight = self._decoded_weight(node, dtype)
            weight = weight.permute(weight_order(node, weight.ndim))
        else:
            dtype = self.dtype
            sources, weight = cast("list[torch.Tensor]", inputs), self._plain[node.layer]
            if node.inputs[0] in self._as_given:
                sources = [channels_last(sources[0].to(self.dtype))]
        y = convolve(node, sources, weight, None if bias is None else bias.to(dtype)).to(self.dtype)
        return self.forms(y if isinstance(node, Linear) else channels_last(y), node.outputs, pack)

    def _multiply_mixed(self, node: Layer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """A layer in W4A8 or FP8 by the kernel: the activation is quantised, the weight stays packed."""
        weight, linear = self._codes[node.layer], isinstance(node, Linear)
        taps = weight.values.codes.shape[1:3]
        rows = x.flatten(0, -2)[None, None] if linear else channels_last(x).movedim(1, -1)
        window, sizes = POINTWISE, rows.shape[1:3]
        if not linear:
            place = cast("Conv2d | ConvTranspose2d", node)
            steps = (place.stride, place.padding, place.dilation)
            window = Window(*(cast(Any, tuple(each)) for each in (taps, *steps)))
            sizes = torch.Size(fitted_size(place, rows.shape[1:3], taps))
        inverse = isinstance(node, ConvTranspose2d)
        packed = weight.quantized(rows)
        y = gather_gemm(packed, weight.values, window, (sizes[0], sizes[1]), self.dtype, bias, inverse)
        y = y.relu_() if getattr(node, "relu", False) else y
        return y.reshape(*x.shape[:-1], -1) if linear else y.movedim(-1, 1)

    def _convolve(self, node: Conv2d, inputs: list[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """A layer in 16 bits by the kernel of this package."""
        x, weight = channels_last(inputs[0]).permute(0, 2, 3, 1), self._plain[node.layer].permute(0, 2, 3, 1)
        y = plain.conv2d(x, weight, bias, *plain_geometry(node), node.relu)
        return y.permute(0, 3, 1, 2)

    def _convolve_small_k(
        self, node: Conv2d, x: torch.Tensor, bias: torch.Tensor | None, moments: dict[str, Moments] | None
    ) -> torch.Tensor | None:
        """A layer in FP16 by the kernel for small K, if it runs; with the moments of what a norm reads next."""
        wanted = moments is not None and len(node.outputs) == 1 and node.outputs[0].name in self._normed
        result = convolve_small_k(node, x, self._plain[node.layer], bias, wanted)
        if result is not None and result[1] is not None and moments is not None:
            moments[node.outputs[0].name] = result[1]
        return None if result is None else result[0]

    def _multiply(self, node: Layer, inputs: list[Nvfp4Tensor], bias: torch.Tensor | None) -> list[FeatureMap]:
        """By kernels; one packed form is written by the kernel itself."""
        weight = self._packed[node.layer]
        fused = len(node.outputs) == 1 and node.outputs[0].axis == ("last" if isinstance(node, Linear) else "channels")
        amax = self.amax(node.outputs[0]) if fused else None
        if isinstance(node, Linear):
            y = matmul(inputs[0], weight, bias, node.relu, self.dtype, amax)
        elif isinstance(node, ConvTranspose2d):
            y = conv_transpose2d(inputs[0], weight, bias, dtype=self.dtype, out_amax=amax)
        else:
            place = cast(Conv2d, node)
            geometry = (place.stride, place.padding, dilation_of(place, self._taps[node.layer]))
            y = conv2d(tuple(inputs), weight, bias, *geometry, place.relu, self.dtype, amax, measured=not self._own)
        if isinstance(y, Nvfp4Tensor):
            return [y]
        return self.forms(y if isinstance(node, Linear) else y.movedim(-1, 1), node.outputs)

    def _multiply_on_cpu(
        self, node: Layer, inputs: list[FeatureMap], bias: torch.Tensor | None, pack: Pack
    ) -> list[FeatureMap]:
        """By torch, of operands decoded to FP32, which loses nothing; the output is rounded once."""
        weight = self._decoded_weight(node, torch.float32)
        y: Any
        if isinstance(node, Linear):
            y = matmul_reference(inputs[0], weight, bias, node.relu, self.dtype)
        else:
            place = cast("Conv2d | ConvTranspose2d", node)
            sources = [decoded_form(x, torch.float32).float() for x in inputs]
            y = convolution(place, sources, weight, bias).to(self.dtype)
        return self.forms(y, node.outputs, pack)

    def _decoded_weight(self, node: Layer, dtype: torch.dtype) -> torch.Tensor:
        """A weight in the file's order of axes, decoded once: at load where no kernel reads the codes."""
        key = node.layer, dtype
        if key not in self._wide:
            self._wide[key] = self._packed[node.layer].dequantize(dtype)
        return self._wide[key]

    def _multiply_decoded(
        self,
        node: Layer,
        inputs: list[Nvfp4Tensor],
        bias: torch.Tensor | None,
        moments: dict[str, Moments] | None,
    ) -> list[FeatureMap]:
        """By the kernel of decoded weights, with the moments of what a norm reads next."""
        amax = self.amax(node.outputs[0]) if len(node.outputs) == 1 else None
        wanted = moments is not None and amax is None and node.outputs[0].name in self._normed
        transposed = isinstance(node, ConvTranspose2d)
        place: dict[str, Any] = {"transposed": True}
        if isinstance(node, Conv2d):
            dilation = dilation_of(node, self._taps[node.layer])
            place = {"stride": node.stride, "padding": node.padding, "dilation": dilation}
        y, found = decoded.conv2d(
            tuple(inputs), self._decoded[node.layer], bias, **place, relu=not transposed and cast(Conv2d, node).relu,
            dtype=self.dtype, out_amax=amax, moments=wanted, tensor_maps=not self._own,
        )  # fmt: skip
        if found is not None and moments is not None:
            moments[node.outputs[0].name] = found
        return [y] if isinstance(y, Nvfp4Tensor) else self.forms(y.movedim(-1, 1), node.outputs)

    def _has_kernel(self, node: Layer) -> bool:
        taps = self._taps[node.layer]
        if not (self.has_kernels and has_kernel(node, taps)):
            return False
        if is_flat(node, taps):
            return True
        return not self._decodes and (self._compiles or compiled_ahead(node, taps))

    def _load_weight(self, node: Layer, sources: tuple[int, ...]) -> None:
        names, tensors = weight_names(node), self.file.tensors
        if quantizes_itself(node):
            parts = [tensors[name].to(self.device) for name in names]
            shape = torch.Size(weight_shape(self.graph, node, sum(sources)))
            if not self._decodes and self.has_mixed_kernels and has_mixed_kernel(node):
                self._codes[node.layer] = kernel_weight(node, parts, shape)
            else:
                self._own_weights[node.layer] = own_weight(node, parts, shape)
            return
        if node.precision != "nvfp4":
            kept = tensors[names[0]].to(self.device, self.dtype)
            self._plain[node.layer] = kept.permute(weight_order(node, kept.ndim))
            return
        codes, scales, amax = (tensors[name].to(self.device) for name in names)
        shape = torch.Size(weight_shape(self.graph, node, sum(sources)))
        weight = Nvfp4Tensor(codes, scales, amax, shape, node.e4m3_max)
        taps = self._taps[node.layer] = list(shape[1:-1])
        if self._decodes and is_decoded(node, sources, taps):
            transposed = isinstance(node, ConvTranspose2d)
            pairs = warpgroup.pairs(sources, shape[0], tuple(taps), transposed)
            if not (any(pairs) and warpgroup.is_available(self.device)):
                pairs = (False, False)
            self._decoded[node.layer] = decode_weight(weight, sources, transposed, pairs)
            return
        if not self._has_kernel(node):
            self._wide[node.layer, self.decoded_dtype] = weight.dequantize(self.decoded_dtype)
            return
        self._packed[node.layer] = weight

    def sizes(self, inputs: Sequence[FeatureMap]) -> dict[str, int]:
        """Sizes of the inputs' axes ("<input>.<axis>"), after they were found to fit.

        Raises:
            InputError: inputs that are not the graph's, or of a size that the network cannot take; one that is packed,
                and not with `image_amax`.
        """
        wanted = self.graph.inputs
        if len(inputs) != len(wanted):
            raise InputError(f"The network takes {len(wanted)} inputs, not {len(inputs)}.")
        if any(isinstance(x, Nvfp4Tensor) and x.amax is not self.image_amax for x in inputs):
            raise InputError(
                "The network takes no image that is packed, or only one that is packed with its image_amax."
            )
        shapes = tuple(tuple(image_shape(x)) for x in inputs)
        for each, shape in zip(wanted, shapes, strict=True):
            if len(shape) != len(each.shape):
                raise InputError(f"The network takes {expected(self.graph, each)}, not {list(shape)}.")
        if shapes not in self._fits:
            given = {each.name: shape for each, shape in zip(wanted, shapes, strict=True)}
            fitting(self.graph, given)
            if len(self._fits) >= SIZES:
                self._fits.clear()
            self._fits[shapes] = {f"{name}.{axis}": size for name, s in given.items() for axis, size in enumerate(s)}
        return self._fits[shapes]


@contextmanager
def allowing_tf32(allowed: bool) -> Iterator[None]:
    """Inside, operands of products in FP32 may be rounded to TF32, or may not; cuDNN does so by default.

    The flags are the process's, so that one thread at a time is inside.
    """
    with _FLAGS:
        before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _nvtx_range(step: Step) -> AbstractContextManager[object]:
    return cast("AbstractContextManager[Any]", torch.cuda.nvtx.range(label(step)))


def decoded_form(x: FeatureMap, dtype: torch.dtype) -> torch.Tensor:
    """What a packed activation stands for; on the CPU it may be decoded already."""
    return x.dequantize(dtype) if isinstance(x, Nvfp4Tensor) else x


def _typed(x: FeatureMap, dtype: torch.dtype) -> FeatureMap:
    """A plain activation of numbers in a type; a packed one as it is."""
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def has_kernel(node: Layer, taps: Sequence[int]) -> bool:
    """Whether a kernel multiplies the packed operands of a layer; otherwise they are decoded."""
    if isinstance(node, Linear):
        return True
    place = cast("Conv2d | ConvTranspose2d", node)
    dilations = _dilations(place, taps)
    if place.groups != 1 or len(dilations) > 1:
        return False
    if isinstance(place, ConvTranspose2d):
        whole = not any((*place.padding, *place.output_padding)) and dilations <= {1}
        return whole and place.stride == list(taps) and {*taps} <= {1, 2}
    return math.prod(taps) <= TAPS


def has_mixed_kernel(node: Layer) -> bool:
    """Whether a kernel multiplies a layer in W4A8 or FP8: linear ones, and of images those of one group."""
    if node.precision not in ("w4a8", "fp8"):
        return False
    if isinstance(node, Linear):
        return True
    place = cast("Conv2d | ConvTranspose2d", node)
    return place.groups == 1 and axes_of(place) == 2


def fitted_size(node: Conv2d | ConvTranspose2d, sizes: Sequence[int], taps: Sequence[int]) -> list[int]:
    """Pixels of a convolution's output along each axis."""
    steps = list(zip(sizes, taps, node.stride, node.padding, node.dilation, strict=True))
    if not isinstance(node, ConvTranspose2d):
        return [output_size(*each) for each in steps]
    return [transposed_size(*each, more) for each, more in zip(steps, node.output_padding, strict=True)]


def is_decoded(node: Layer, sources: tuple[int, ...], taps: Sequence[int]) -> bool:
    """Whether a kernel multiplies packed sources of so many channels with a weight that was decoded."""
    if isinstance(node, Linear) or len(taps) == 1 or not has_kernel(node, taps):
        return False
    transposed = isinstance(node, ConvTranspose2d)
    return supports(sources, 1 if transposed else math.prod(taps)) and (not transposed or [*taps[-2:]] == [2, 2])


def is_flat(node: Layer, taps: Sequence[int]) -> bool:
    """Whether a layer that has a kernel is linear, or convolves images by equal strides, paddings and dilations."""
    if isinstance(node, Linear):
        return True
    place = cast("Conv2d | ConvTranspose2d", node)
    equal = all(len(set(pair)) == 1 for pair in (place.stride, place.padding, place.dilation))
    return len(taps) == 2 and equal


def compiled_ahead(node: Layer, taps: Sequence[int]) -> bool:
    """Whether kernels of a layer are among those that are compiled ahead of time: others are decoded without Triton."""
    if is_flat(node, taps):
        return True
    return tuple(taps) in (((1, 2, 2), (2, 2, 2)) if isinstance(node, ConvTranspose2d) else VOLUMES)


def dilation_of(node: Conv2d, taps: Sequence[int]) -> int:
    """The dilation of the axes along which a filter has more than one tap."""
    return max(_dilations(node, taps), default=1)


def _dilations(node: Conv2d | ConvTranspose2d, taps: Sequence[int]) -> set[int]:
    return {dilation for dilation, count in zip(node.dilation, taps, strict=True) if count > 1}


def _rows_of_slices(x: torch.Tensor) -> torch.Tensor:
    """[N, H, W, C]; of a volume [N, D, H, W, C] the rows of all slices, which layers of single voxels do not tell."""
    return x.flatten(1, 2) if x.ndim == 5 else x


def _slices(y: FeatureMap, shape: torch.Size) -> FeatureMap:
    """The inverse of `_rows_of_slices`."""
    if isinstance(y, torch.Tensor):
        return y.view(shape)
    codes, scales = (part.view(*shape[:-1], -1) for part in (y.codes, y.scales.view(torch.uint8)))
    return replace(y, codes=codes, scales=scales.view(torch.float8_e4m3fn), shape=shape)


def _axis(node: Layer) -> int:
    """The axis of a layer's input that its product contracts."""
    return -1 if isinstance(node, Linear) else 1
