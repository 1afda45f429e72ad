"""The actual precision of each layer: the plan of a lowering matched with the kernels of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from fp4deploy.export.ledger.build_log import EngineLayer
from fp4deploy.export.ledger.ledger import UNKNOWN, LedgerRow, PlannedLayer
from fp4deploy.precisions import OF_ENGINES


def match_kernels(planned: Iterable[PlannedLayer], engine: Iterable[EngineLayer]) -> tuple[LedgerRow, ...]:
    """Match the plan with the engine's kernels: one row a torch layer, in the plan's order."""
    by_node: dict[str, list[EngineLayer]] = {}
    for kernel in engine:
        for node in kernel.onnx_nodes:
            by_node.setdefault(node, []).append(kernel)
    return tuple(_match_layer(layer, by_node) for layer in planned)


def _match_layer(layer: PlannedLayer, by_node: Mapping[str, list[EngineLayer]]) -> LedgerRow:
    kernels = _unique(kernel for node in layer.nodes for kernel in by_node.get(node, []))
    computing = _unique(kernel for node in layer.compute_nodes for kernel in by_node.get(node, []))
    actual = _compute_precision(computing if layer.compute_nodes else kernels)
    weights = _weight_storage(layer, kernels, computing if layer.compute_nodes else kernels)
    if layer.form == "plugin" and any(kernel.is_plugin for kernel in computing):
        actual, weights = layer.compute, layer.weights
    fell_back = layer.requested in OF_ENGINES and (actual, weights) != (layer.compute, layer.weights)
    reason = _fallback_reason(layer, actual, weights) if fell_back else layer.reason
    return LedgerRow(
        layer=layer.name,
        kind=layer.kind,
        requested=layer.requested,
        planned=layer.compute,
        actual=actual,
        weights=weights,
        form=layer.form,
        reason=reason,
        macs=layer.macs,
        fell_back=fell_back,
        kernels=tuple(kernel.name for kernel in kernels),
        onnx_nodes=layer.nodes,
        input=layer.input,
        largest=layer.largest,
    )


def _unique(kernels: Iterable[EngineLayer]) -> list[EngineLayer]:
    return list({kernel.name: kernel for kernel in kernels}.values())


def _compute_precision(kernels: list[EngineLayer]) -> str:
    """Precision of the kernels that multiply; of generated code where none does (normalisation, fused layers)."""
    chosen = [kernel for kernel in kernels if kernel.multiplies] or kernels
    found = list(dict.fromkeys(kernel.precision for kernel in chosen if kernel.precision and kernel.outputs))
    found = [precision for precision in found if not precision.startswith("Int")] or found
    if not found:
        return UNKNOWN
    if not any(kernel.multiplies for kernel in chosen):  # FP32 statistics with an FP16 result, codes with scales
        return next((precision for precision in ("FP16", "BF16", "FP32") if precision in found), UNKNOWN)
    return found[0] if len(found) == 1 else " + ".join(found)


def _weight_storage(layer: PlannedLayer, kernels: list[EngineLayer], computing: list[EngineLayer]) -> str:
    """Type of the layer's largest constant in the plan, or FP4 where any of its constants is.

    Constants count from kernels that serve this layer alone, from the kernel that multiplies, and by name, so that a
    kernel fused over two layers does not lend one layer's weights to the other.
    """
    nodes = set(layer.nodes)
    constants = []
    for kernel in kernels:
        own = kernel in computing or nodes.issuperset(kernel.onnx_nodes)
        constants += [tensor for tensor in kernel.constants if own or tensor.name.startswith(f"{layer.name}.")]
    if any(tensor.precision == "FP4" for tensor in constants):
        return "FP4"
    weights = [tensor for tensor in constants if len(tensor.shape) >= 2]
    return max(weights, key=lambda tensor: math.prod(tensor.shape)).precision if weights else UNKNOWN


def _fallback_reason(layer: PlannedLayer, actual: str, weights: str) -> str:
    if layer.form == "plain":
        return layer.reason
    if actual == UNKNOWN:
        return "no kernel of the engine names this layer, so its precision is unknown"
    parts = []
    if actual != layer.compute:
        parts.append(f"the compiler chose {actual} where {layer.compute} was planned")
    if weights != layer.weights:
        parts.append(f"the plan stores the weights as {weights}, not {layer.weights}")
    return "fell back: " + " and ".join(parts)
