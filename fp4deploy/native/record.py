"""Every launch of a packed network for one shape of its input, recorded for a GPU that need not be present.

The functions that launch kernels for `PackedNetwork` run here on torch's meta device, whose tensors have no data.
Triton calls and CUDA launches are recorded instead of made; every tensor that appears as an argument is a buffer: a
constant that the library makes from tensors of the `.fp4` file, the network's input or output, or a part of the arena.
What a plan holds is what `PackedNetwork(file, "cuda", plain="kernel")` launches on that GPU, in the same order, with
the same grids. What that one leaves to torch, before Blackwell a layer of unequal strides or paddings whose channels
`decoded_weight.supports` does not take, the kernel of packed weights computes here.

**What has such a plan.** One input, a feature map, and the nodes of `RUNS`, where kernels take their sizes. Any other
network has one of generated kernels (`program`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.native.plan import MAX_CLASSES, Gpu, Plan
from fp4deploy.native.program import record_program
from fp4deploy.native.recording import META, Recording
from fp4deploy.packed import PackedFile
from fp4deploy.packed.check import TYPES
from fp4deploy.packed.graph import Concat, Conv2d, ConvTranspose2d, Form, GroupNormReLU, Node, weight_names
from fp4deploy.packed.network import dilation_of, has_kernel, is_decoded
from fp4deploy.packed.plain_layers import plain_geometry, plain_kernel
from fp4deploy.packed.shapes import Shape, fitting, weight_shape
from fp4deploy.plugins.gemm.arguments import launch_gemm
from fp4deploy.plugins.gemm.convolution import decoded, plain
from fp4deploy.plugins.gemm.convolution.decoded_weight import DecodedWeight, planes_shape
from fp4deploy.plugins.gemm.reference import output_sizes
from fp4deploy.plugins.gemm.triton.tiles import NATIVE_FROM
from fp4deploy.plugins.quantize import operators
from fp4deploy.plugins.quantize.channels_last import channels_fit
from fp4deploy.plugins.quantize.norm_pack import FeatureMap, OutputForm, apply_kernels
from fp4deploy.plugins.quantize.statistics import Moments, chunk_moments, combine
from fp4deploy.plugins.runtime.launch import substituted
from fp4deploy.plugins.runtime.torch_library import THREADS
from fp4deploy.rest import rest_of

PLAIN_NVFP4 = [0, 448, 0, 0, 0, 0]  # the variant of `operators`: NVFP4, E = 448, nearest, no transform
RUNS = ("conv2d", "conv_transpose2d", "group_norm_relu", "concat")  # concat over channels


def record(file: PackedFile, gpu: Gpu, *shapes: Shape, weights: str | None = None) -> Plan:
    """The plan of a network: of kernels of this package where they cover all its nodes, else of generated ones.

    Args:
        shapes: of each input, such as [N, C, H, W].
        weights: "decoded" or "packed", as of `PackedNetwork`; None chooses as it does. Plans of generated kernels have
            them decoded in any case.

    Raises:
        InputError: the network does not take the shapes, or has an operator that nothing compiles.
        UnavailableError: Triton is missing, and kernels would be generated.
    """
    graph = file.graph
    if len(shapes) != len(graph.inputs):
        raise InputError(f"The network has {len(graph.inputs)} inputs, and {len(shapes)} shapes were given.")
    fitting(graph, {each.name: shape for each, shape in zip(graph.inputs, shapes, strict=True)})
    why = "kernels of this package do not compute all its nodes, or not with its inputs or its rest"
    if _is_covered(file):
        try:
            return _Network(file, gpu, weights).plan(shapes[0])
        except NoKernelError as error:
            why = str(error)
    return replace(record_program(file, gpu, shapes), generated=why)


def _is_covered(file: PackedFile) -> bool:
    """Whether kernels of this package compute every node."""
    graph = file.graph
    images = len(graph.inputs) == 1 and len(graph.inputs[0].shape) == 4
    ours = all(each.op in RUNS and getattr(each, "dim", 1) == 1 for each in graph.nodes)
    return images and ours and graph.rest != "fp32" and not graph.wide


class NoKernelError(InputError):
    """Kernels of this package do not compute a node."""


class _Network:
    def __init__(self, file: PackedFile, gpu: Gpu, weights: str | None) -> None:
        self.file, self.gpu = file, gpu
        self.decodes = weights != "packed" and gpu.arch.number < NATIVE_FROM
        self.recording = Recording()
        self.dtype = rest_of(file.graph).dtype
        norms = [node for node in file.graph.nodes if isinstance(node, GroupNormReLU)]
        self.normed = {name for node in norms for name in node.inputs}

    def plan(self, shape: Shape) -> Plan:
        graph = self.file.graph
        image = graph.inputs[0]
        shapes = fitting(graph, {image.name: shape})
        with substituted(self.recording.cuda, self.gpu.processors):
            live: dict[str, FeatureMap] = {}
            moments: dict[str, Moments] = {}
            x = self.read(shape)
            live.update(zip([form.name for form in image.outputs], self.forms(x, image.outputs), strict=True))
            for node in graph.nodes:
                results = self.run(node, [live[name] for name in node.inputs], moments)
                live.update(zip([form.name for form in node.outputs], results, strict=True))
            outputs = [shapes[each.activation] for each in graph.outputs]
            self.write([cast(torch.Tensor, live[each.activation]) for each in graph.outputs])
        stages, arena = self.recording.placed()
        constants = tuple(self.recording.constants)
        return Plan(self.gpu, (shape,), tuple(outputs), arena, constants, stages)

    def read(self, shape: Shape) -> torch.Tensor:
        """The input in the network's type, NHWC, from either of the caller's."""
        found: list[torch.Tensor] = []
        for dtype in (torch.float32, torch.float16):
            x = self.recording.role(torch.empty(shape, dtype=dtype, device=META), "input", 0)
            with self.recording.at(f"input.{_name(dtype)}"):
                found.append(plain.read_image(x, self.file.graph.digits, self.dtype))
        self.recording.same(found[1], found[0])
        return found[0]

    def write(self, outputs: list[torch.Tensor]) -> None:
        for number, y in enumerate(outputs):
            for dtype in (torch.float32, torch.float16):
                with self.recording.at(f"output.{_name(dtype)}"):
                    self.recording.role(plain.write_planes(y, dtype), "output", number)
        if outputs[0].shape[-1] <= MAX_CLASSES:
            with self.recording.at("output.classes"):
                self.recording.role(plain.class_map(outputs[0]), "output", 0)

    def run(self, node: Node, inputs: list[FeatureMap], moments: dict[str, Moments]) -> list[FeatureMap]:
        """What `PackedNetwork.run_node` does; plain feature maps are NHWC here."""
        if isinstance(node, GroupNormReLU):
            return self.norm(node, cast(torch.Tensor, inputs[0]), moments.pop(node.inputs[0], None))
        if isinstance(node, Concat):
            return self.forms(plain.concat(cast("list[torch.Tensor]", inputs)), node.outputs)
        return self.layer(cast("Conv2d | ConvTranspose2d", node), inputs, moments)

    def norm(self, node: GroupNormReLU, x: torch.Tensor, given: Moments | None) -> list[FeatureMap]:
        channels = x.shape[-1]
        if not channels_fit(channels) or channels > node.groups * THREADS:
            raise NoKernelError(f"its kernels take multiples of 16 channels, of a group at most {THREADS}")
        forms = [OutputForm(self.amax(form), form.pooled) for form in node.outputs]
        if any(form.pooled for form in forms) and (x.shape[1] % 2 or x.shape[2] % 2):
            raise NoKernelError(f"only torch pools {x.shape[1]} x {x.shape[2]} pixels")
        bias = self.vector(node.bias) if node.bias else None
        weight, beta = (self.vector(f"{node.layer}.{part}") for part in ("weight", "bias"))
        ab = combine(given or chunk_moments(x), x.shape, bias, weight, beta, node.groups, node.eps)
        return apply_kernels(x, ab, forms)

    def forms(self, y: torch.Tensor, wanted: Sequence[Form]) -> list[FeatureMap]:
        return [y if form.amax is None else self.packed(y, form) for form in wanted]

    def packed(self, y: torch.Tensor, form: Form) -> Nvfp4Tensor:
        if form.axis != "channels":
            raise NoKernelError("an activation is packed along its last axis")
        amax = cast(torch.Tensor, self.amax(form))
        codes, scales = operators._pack_along(y, 3, amax, None, PLAIN_NVFP4, False)
        return Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), amax, y.shape, 448)

    def layer(
        self, node: Conv2d | ConvTranspose2d, inputs: list[FeatureMap], moments: dict[str, Moments]
    ) -> list[FeatureMap]:
        bias = self.vector(node.bias) if node.bias else None
        if plain_kernel(node):
            place, x = cast(Conv2d, node), cast(torch.Tensor, inputs[0])
            weight = self.recording.constant("bytes", weight_names(node)[0], self.like(weight_names(node)[0]))
            return self.forms(plain.conv2d(x, weight, bias, *plain_geometry(place), place.relu), node.outputs)
        sources = cast("list[Nvfp4Tensor]", inputs)
        shape = weight_shape(self.file.graph, node, sum(x.shape[-1] for x in inputs))
        if node.precision != "nvfp4" or not has_kernel(node, shape[1:3]):
            raise NoKernelError("no kernel has its form")
        channels = tuple(x.shape[-1] for x in sources)
        if self.decodes and is_decoded(node, channels, shape[1:3]):
            return self.decoded(node, sources, channels, shape, bias, moments)
        y = self.multiply(node, sources, shape, bias)
        return [y] if isinstance(y, Nvfp4Tensor) else self.forms(y, node.outputs)

    def decoded(
        self,
        node: Conv2d | ConvTranspose2d,
        sources: list[Nvfp4Tensor],
        channels: tuple[int, ...],
        shape: list[int],
        bias: torch.Tensor | None,
        moments: dict[str, Moments],
    ) -> list[FeatureMap]:
        transposed = isinstance(node, ConvTranspose2d)
        planes = torch.empty(planes_shape(shape, channels, transposed), dtype=torch.float16, device=META)
        planes = self.recording.constant("planes", node.layer, planes, sources=channels, up=transposed)
        weight = DecodedWeight(planes, self.vector(weight_names(node)[2]), tuple(shape), channels, node.e4m3_max)
        amax = self.amax(node.outputs[0]) if len(node.outputs) == 1 else None
        wanted = amax is None and node.outputs[0].name in self.normed
        n, h, w = sources[0].shape[:3]
        stride, padding, dilation, taps = (1, 1), (0, 0), 1, (1, 1)
        if isinstance(node, Conv2d):
            stride, padding = (node.stride[0], node.stride[1]), (node.padding[0], node.padding[1])
            taps = (shape[1], shape[2])
            dilation = dilation_of(node, taps)
        oh, ow = output_sizes((h, w), taps, stride, padding, dilation)
        depths = tuple(x.codes.shape[-1] for x in sources)
        chosen = None
        direct = not transposed and stride[0] == stride[1]
        if not (direct and decoded.directly(weight, (n, oh, ow), stride[0], dilation, META)):
            shape_of_gemm = (n * oh * ow, shape[0], depths, taps[0] * taps[1], transposed)
            chosen = decoded.plan_for(self.gpu.name, self.gpu.processors, *shape_of_gemm)
        y, found = decoded.conv2d(
            tuple(sources), weight, bias, stride, padding, dilation, not transposed and cast(Conv2d, node).relu,
            dtype=self.dtype, out_amax=amax, moments=wanted, transposed=transposed, chosen=chosen,
            launch=self.recording.triton,
        )  # fmt: skip
        if found is not None:
            moments[node.outputs[0].name] = found
        return [y] if isinstance(y, Nvfp4Tensor) else self.forms(y, node.outputs)

    def multiply(
        self,
        node: Conv2d | ConvTranspose2d,
        sources: list[Nvfp4Tensor],
        shape: list[int],
        bias: torch.Tensor | None,
    ) -> FeatureMap:
        """By the kernel of packed weights: `conv_transpose2d` of `dispatch`, and `conv2d` that is not `measured`."""
        transposed, names = isinstance(node, ConvTranspose2d), weight_names(node)
        codes, scales = (self.recording.constant("bytes", name, self.like(name)) for name in names[:2])
        weight = Nvfp4Tensor(
            codes, scales.view(torch.float8_e4m3fn), self.vector(names[2]), torch.Size(shape), node.e4m3_max
        )
        fused = len(node.outputs) == 1 and node.outputs[0].axis == "channels"
        amax = self.amax(node.outputs[0]) if fused else None
        n, h, w = sources[0].shape[:3]
        place: dict[str, Any] = {"capability": self.gpu.arch.number, "launch": self.recording.triton}
        if transposed:
            grown, extent = (n, shape[1] * h, shape[2] * w, shape[0]), (n, h, w)
            return launch_gemm(
                tuple(sources), weight, bias, extent, extent, grown, self.dtype, amax, transposed=True, **place
            )
        taps, stride, padding = (shape[1], shape[2]), tuple(node.stride), tuple(node.padding)
        dilation, relu = dilation_of(cast(Conv2d, node), taps), cast(Conv2d, node).relu
        pixels = (n, *output_sizes((h, w), taps, stride, padding, dilation))
        place |= {"taps": taps, "stride": stride, "padding": padding, "dilation": dilation, "relu": relu}
        whole = (*pixels, shape[0])
        return launch_gemm(tuple(sources), weight, bias, (n, h, w), pixels, whole, self.dtype, amax, **place)

    def like(self, name: str) -> torch.Tensor:
        """A tensor of the file without data, bytes where it has codes or scales."""
        info = self.file.graph.tensors[name]
        dtype = {"F32": torch.float32, TYPES[self.dtype]: self.dtype}.get(info.dtype, torch.uint8)
        return torch.empty(info.shape, dtype=dtype, device=META)

    def vector(self, name: str) -> torch.Tensor:
        """A tensor of the file in float32."""
        like = torch.empty(self.file.graph.tensors[name].shape, device=META)
        return self.recording.constant("float32", name, like)

    def amax(self, form: Form) -> torch.Tensor | None:
        """What a form is packed with; None for a plain one."""
        return self.vector(form.amax) if form.amax else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
