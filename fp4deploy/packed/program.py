"""A packed network compiled by Inductor, for one set of input shapes.

    program = compile_program(network.file, [image])
    outputs = program(image)

`trace` writes the nodes of the file down as one graph of ATen operators (`writer`), with every size a number, and
computes once what depends on tensors of the file alone. Inductor generates the kernels between the layers; what it
compiled is kept for later processes (`program_cache`).

**Choice.** Where kernels of this package cover a network (`producers`), as our UNet, it stays with them. Of any other
both are run, and the faster one is used and remembered for the network, the shapes, the GPU and the versions: the
choice is made once, so that later processes give the same bits. FP4DEPLOY_COMPILE says otherwise:

| value | on a GPU |
|---|---|
| `auto` | the faster one, as above |
| `on` | the compiled program |
| `off` | the kernels of this package, and torch's between them; nothing is compiled by Inductor |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from fp4deploy.errors import Fp4DeployError, InputError, UnavailableError, named_cause
from fp4deploy.formats.constants import MXFP8_BLOCK, NVFP4_BLOCK
from fp4deploy.fusion import values, windows
from fp4deploy.fusion.concatenate import register_lowering
from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.graph import Conv2d, GroupNormReLU, Layer, Linear, Pool, Reshape, quantizes_itself
from fp4deploy.packed.producers import Move, Produce, Step
from fp4deploy.packed.program_cache import keep_program, program_key, read_program
from fp4deploy.packed.shapes import shapes_of
from fp4deploy.packed.writer import Key, Writer
from fp4deploy.plugins.aot.compile import versions
from fp4deploy.plugins.runtime.cache import keep_compiled_private, key
from fp4deploy.tracing import make_no_folder

EXPANSIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.fp4deploy.nvfp4_values.default: values.elementary_values,
    torch.ops.fp4deploy.depthwise_conv2d.default: windows.elementary_depthwise_conv2d,
}
COMPILE = "FP4DEPLOY_COMPILE"
CHOICES = ("program", "kernels")
SMALL = 1 << 16  # elements of a tensor that is computed once even if it is larger than what it is made of
OPTIONS: dict[str, Any] = {
    "assert_indirect_indexing": False,  # indices are the graph's own: positions of a resize, of a table
    # An activation is written where a node of the file ends, not within one: the sum of a depthwise convolution.
    "realize_acc_reads_threshold": 256,
    "realize_opcount_threshold": 1024,
    # Blocks of a quantiser are reductions of 16, of which four tilings are timed one launch at a time. Below 10 us the
    # launch is what is timed, and the choice is luck: 20.9 us instead of 3.7 for a map of 32768 blocks, 8.6 instead of
    # 4.2 for a GELU (one H200, torch 2.11, 2026-11-29). By rule it is the same in every process, and so are the bits.
    "test_configs.force_filter_reduction_configs": True,
}


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled network: `program(*inputs)` gives its outputs in the order of the graph.

    tensors: everything that it reads besides its inputs.
    """

    compiled: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(self.compiled(*self.tensors, *inputs))

    @property
    def weights_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in self.tensors)


def compile_mode() -> str:
    """What FP4DEPLOY_COMPILE says.

    Raises:
        InputError: it says none of auto, on and off.
    """
    value = os.environ.get(COMPILE) or "auto"
    if value not in ("auto", "on", "off"):
        raise InputError(f"{COMPILE} is '{value}'. Valid: auto (the default), on, off.")
    return value


def left_to_torch(steps: Sequence[Step]) -> bool:
    """Whether single operators of torch compute some of the steps: then a compiler may join them."""
    return not all(map(_is_covered, steps))


def _is_covered(step: Step) -> bool:
    """By kernels of this package, or a library's that nothing is fused with."""
    if isinstance(step, Layer) and quantizes_itself(step):
        return False
    if isinstance(step, Pool):
        return step.op == "max_pool"
    if isinstance(step, Conv2d):
        return step.groups == 1
    return isinstance(step, Layer | Produce | Move | GroupNormReLU | Reshape)


def compile_program(file: PackedFile, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> Program:
    """What computes the outputs for inputs of these sizes, in a dtype (that of the first) and on the device of the
    first.

    Raises:
        UnavailableError: the compiler is missing something (Triton, a C compiler), or fails on the network; on a CPU,
            a network with parts of blocks, which torch 2.13 compiles to wrong code there (its loops are split, and the
            last part is left out).
    """
    keep_compiled_private()
    device, dtype = inputs[0].device, dtype or inputs[0].dtype
    if device.type == "cpu" and _has_partial_blocks(file):
        raise UnavailableError("A packed network whose channels are no multiples of 16 is compiled for GPUs alone.")
    try:
        from torch._inductor import standalone_compile

        from fp4deploy.fusion.expand import Expand

        register_lowering()
        writer, name = Writer(file, device, dtype), program_key(file, inputs, dtype)
        kept = read_program(name, writer.tensors(), device)
        if kept is not None:
            return Program(kept[0], tuple(kept[1]))
        module, tensors, keys = trace(writer, inputs)
        patches = {"config_patches": {**OPTIONS, "post_grad_custom_pre_pass": Expand(EXPANSIONS, values, windows)}}
        with torch.no_grad():
            arguments: list[Any] = [*tensors, *inputs]
            compiled = standalone_compile(module, arguments, dynamic_shapes="from_example_inputs", options=patches)
        keep_program(name, compiled, keys, tensors)
    except Fp4DeployError:
        raise
    except Exception as error:
        raise UnavailableError(f"The packed network was not compiled ({named_cause(error)}).") from error
    return Program(compiled, tuple(tensors))


def _has_partial_blocks(file: PackedFile) -> bool:
    shapes = shapes_of(file.graph)
    packed = [form for form in file.graph.forms().values() if form.amax]
    mixed = [node for node in file.graph.nodes if isinstance(node, Layer) and node.precision == "w4a8"]
    read = {name: -1 if isinstance(node, Linear) else 1 for node in mixed for name in node.inputs}
    partial = any(shapes[form.name][1 if form.axis == "channels" else -1] % NVFP4_BLOCK for form in packed)
    return partial or any(shapes[name][axis] % MXFP8_BLOCK for name, axis in read.items())


def choice_key(file: PackedFile, inputs: Sequence[torch.Tensor], graphs: bool) -> str:
    """What a choice depends on: the network without the numbers of its weights, shapes, GPU, versions, CUDA graphs."""
    graph = file.graph.to_json(exclude={"tensors": {"__all__": {"sha256"}}})
    shapes = f"{[tuple(x.shape) for x in inputs]} {graphs}"
    return key(["packed program 1", graph, shapes, torch.cuda.get_device_name(inputs[0].device), versions()])


def trace(
    writer: Writer, inputs: Sequence[torch.Tensor], mode: Literal["real", "fake"] = "real"
) -> tuple[fx.GraphModule, list[torch.Tensor], list[Key | None]]:
    """The graph of a network for inputs of these sizes, the tensors that it takes before them, and their keys.

    A key is that of `Writer.tensors`, or None for a tensor that was computed here. mode: "fake" computes no activation.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = writer.tensors()
    names: list[Key] = list(tensors)

    def run(*arguments: torch.Tensor) -> list[torch.Tensor]:
        read = dict(zip(names, arguments[: len(names)], strict=True))
        return writer.outputs(read, arguments[len(names) :])

    make_no_folder()
    # Each node remembers its sizes as a fake tensor; without a mode at hand torch makes one, with a stack trace.
    one_mode = TracingContext(FakeTensorMode()) if mode == "real" else None
    with torch.no_grad():
        with tracing(one_mode):
            module = make_fx(run, pre_dispatch=True, tracing_mode=mode)(*tensors.values(), *inputs)
        return module, *_folded(module, tensors)


def _folded(module: fx.GraphModule, tensors: Mapping[Key, torch.Tensor]) -> tuple[list[torch.Tensor], list[Key | None]]:
    """Compute once what depends on tensors of the file alone; what is left, in the order of placeholders, with keys.

    Casts of biases, positions of a resize, tables of relative positions: a compiler would compute them in every pass,
    in kernels of their own where a library's GEMM reads them.
    """
    graph = module.graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    known: dict[fx.Node, torch.Tensor] = dict(zip(places, tensors.values(), strict=False))
    keys = dict(zip(places, tensors, strict=False))
    for node in graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(module, node.target)
        if node.op != "call_function" or any(each not in known for each in node.all_input_nodes):
            continue
        read = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        value = node.target(*read[0], **read[1])
        most = max(SMALL, *(known[each].numel() for each in node.all_input_nodes), 0)
        if isinstance(value, torch.Tensor) and value.numel() <= most:
            known[node] = value
    first = next(node for node in places if node not in known)
    needed = [node for node in known if any(user not in known for user in node.users)]
    kept: dict[fx.Node, torch.Tensor] = {}
    while needed:
        node = needed.pop()
        if node in kept or node not in known:
            continue
        if _is_view(node, known):
            del known[node]  # stays in the graph: what it is a view of is taken instead
            needed += node.all_input_nodes
        else:
            kept[node] = known[node]
    for number, node in enumerate(kept):
        with graph.inserting_before(first):
            place = graph.placeholder(f"tensor_{number}")
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in known)
    for node in reversed(list(known)):
        graph.erase_node(node)
    module.recompile()
    return list(kept.values()), [keys.get(node) for node in kept]


def _is_view(node: fx.Node, known: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Whether a known tensor shares the memory of what it is made of."""
    memory = known[node].untyped_storage().data_ptr()
    return any(known[each].untyped_storage().data_ptr() == memory for each in node.all_input_nodes)
