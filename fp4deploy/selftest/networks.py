"""Whole networks: exported and packed against torch on the CPU, then node by node and by name on the GPU.

On a GPU each node gets the inputs that the CPU computed, so that FP4 amplifies no difference from one node to the next
(`export.verify.packed`). The CPU rounds where a kernel rounds: activations are FP16 on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp4deploy.errors import GateError, UnavailableError
from fp4deploy.export.verify.nodes import largest
from fp4deploy.export.verify.outputs import ALLOWED_ELEMENTS
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.packed import PackedFile, PackedNetwork
from fp4deploy.packed.graph import Concat, Layer, Node, named
from fp4deploy.selftest.context import Context
from fp4deploy.selftest.kernels import moved, require_gemm_kernels
from fp4deploy.selftest.proof import Proof, relative_error

KERNELS = ("implicit_gemm_kernel", "decoded_conv_kernel", "direct_conv", "warpgroup_conv")


def exported(context: Context) -> Proof:
    """The decomposed ONNX graph in ONNX Runtime against torch.

    Raises:
        GateError: they disagree.
    """
    result = context.exported
    assert result.verification is not None
    figures = {"images": result.verification.images, "agreement": result.verification.share}
    return Proof(f"{result.verification.sentence()} ({result.fp4_layers} FP4 layers)", figures)


def packed_on_cpu(context: Context) -> Proof:
    """The packed network, decoded on the CPU, against torch.

    Raises:
        GateError: they disagree.
    """
    found = context.packed.verification
    assert found is not None
    return Proof(found.sentence(), {"images": found.images, "agreement": found.share})


def packed_on_gpu(context: Context) -> Proof:
    """Every node of the packed network on the GPU against the reference on the CPU, from the same inputs.

    Raises:
        GateError: a node differs by more than rounding explains.
        UnavailableError: kernels do not run here.
    """
    require_gemm_kernels(context.device)
    file = context.packed.file
    network = PackedNetwork(file, context.device)

    def run(node: Node, inputs: list[object]) -> list[Any]:
        return network.run_node(node, [moved(x, context.device) for x in inputs])

    errors = node_errors(file, context.images[:1], run)
    wrong = {name: error for name, error in errors.items() if not error <= ALLOWED_ELEMENTS}
    if wrong:
        name, error = next(iter(wrong.items()))
        raise GateError(
            f"{len(wrong)} of {len(errors)} nodes differ from the reference, the first is {name}: {error:.3g}"
        )
    worst = max(errors, key=errors.__getitem__)
    return Proof(
        f"{len(errors)} nodes; the largest difference is {errors[worst]:.2g}, of {worst}; at most {ALLOWED_ELEMENTS:g}",
        {"nodes": len(errors), "largest": errors[worst]},
    )


def node_errors(
    file: PackedFile, images: torch.Tensor, run: Callable[[Node, list[object]], list[object]]
) -> dict[str, float]:
    """What `run` makes of each node, against the reference, from the reference's inputs.

    Returns:
        By layer: the share of packed elements that differ, or the relative error of plain activations.
    """
    reference = PackedNetwork(file)
    image = reference.graph.inputs[0]
    names, read = [form.name for form in image.outputs], reference.read_input(image, images)
    held: dict[str, Any] = dict(zip(names, map(half, read), strict=True))
    errors: dict[str, float] = {}
    for node in reference.graph.nodes:
        inputs = [held[name] for name in node.inputs]
        expected = on_cpu(reference, node, inputs)
        if not isinstance(node, Concat):
            found = run(node, inputs)
            errors[named(node)] = largest(*(difference(*pair) for pair in zip(found, expected, strict=True)))
        held.update(zip([form.name for form in node.outputs], map(half, expected), strict=True))
    return errors


def on_cpu(reference: PackedNetwork, node: Node, inputs: list[Any]) -> list[Any]:
    """What one node writes, by the reference, with activations in FP16; a plain convolution computes in FP32."""
    plain = isinstance(node, Layer) and node.precision != "nvfp4"
    reference.dtype = torch.float32 if plain else torch.float16
    return reference.run_node(node, [x.float() if plain and isinstance(x, torch.Tensor) else x for x in inputs])


def half(x: object) -> object:
    """A plain activation rounded to FP16; a packed one as it is."""
    return x.half() if isinstance(x, torch.Tensor) else x


def difference(found: Any, expected: Any) -> float:
    """Share of packed elements that differ, or the relative error of a plain activation."""
    if isinstance(found, Nvfp4Tensor) and isinstance(expected, Nvfp4Tensor):
        return float((moved(found, torch.device("cpu")).dequantize() != expected.dequantize()).float().mean())
    return relative_error(found, expected)


def kernels_that_ran(context: Context) -> Proof:
    """What the profiler saw, against the packed file: one FP4 kernel launch for each FP4 convolution.

    Raises:
        GateError: there were more or fewer.
        UnavailableError: kernels do not run here, or the profiler sees no kernels.
    """
    require_gemm_kernels(context.device)
    network = PackedNetwork(context.packed.file, context.device)
    planned = sum(isinstance(node, Layer) and node.precision == "nvfp4" for node in network.graph.nodes)
    names = profiled(network, context.images[:1].to(context.device))
    if not names:
        raise UnavailableError("torch's profiler recorded no kernel; on some systems that needs more permissions")
    ran = [kernel for kernel in KERNELS if any(name.startswith(kernel) for name in names)]
    launched = sum(count for name, count in names.items() if name.startswith(KERNELS))
    if launched != planned:
        raise GateError(
            f"the file has {planned} FP4 convolutions, and {launched} kernels named {' or '.join(KERNELS)} ran"
        )
    return Proof(
        f"{launched} launches of {' and '.join(ran)} for {planned} FP4 convolutions, "
        f"among {sum(names.values())} kernels",
        {"FP4 convolutions": planned, "kernels": sum(names.values()), "different kernels": len(names)},
    )


def profiled(network: PackedNetwork, images: torch.Tensor) -> dict[str, int]:
    """Kernels of one forward pass, by name, and how often each was launched."""
    from torch.profiler import ProfilerActivity, profile

    network(images)  # compiles
    torch.cuda.synchronize(network.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        network(images)
        torch.cuda.synchronize(network.device)
    kernels = [event for event in seen.events() if event.device_type.name == "CUDA"]
    names: dict[str, int] = {}
    for event in kernels:
        if not event.name.startswith(("Memcpy", "Memset")):
            names[event.name] = names.get(event.name, 0) + 1
    return names
