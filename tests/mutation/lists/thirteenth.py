"""THIRTEENTH: by the hand of TWELFTH, in functions that TWELFTH has nothing of, before its answers were known."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "verify: a node that gives NaN is not wrong": Seeded(
        "fp4deploy/export/verify/nodes.py", "if not error <= ALLOWED_ELEMENTS}", "if error > ALLOWED_ELEMENTS}"
    ),
    "lowering: a convolution is padded alike on both sides": Seeded(
        "fp4deploy/export/lowering/gemm.py",
        "0, 0, top, left, 0, 0, bottom, right)",
        "0, 0, top, left, 0, 0, top, left)",
    ),
    "volumes: labels that are not learned are void": Seeded(
        "fp4deploy/data/volumes/dataset.py", "np.full(IGNORE + 1, 0, np.uint8)", "np.full(IGNORE + 1, IGNORE, np.uint8)"
    ),
    "volumes: labels of a window are resampled half a voxel away": Seeded(
        "fp4deploy/data/augmentation/volumes.py", 'self.size, mode="nearest-exact")', 'self.size, mode="nearest")'
    ),
    "boxes: the area of an object is that of its box": Seeded(
        "fp4deploy/data/coco/boxes.py",
        '"area": width * height if annotation.area is None else annotation.area',
        '"area": width * height',
    ),
    "splits: copies of an image go where their own name goes": Seeded(
        "fp4deploy/data/importing/splits.py",
        "{name: split_of(first) for name, first in",
        "{name: split_of(name) for name, first in",
    ),
    "estimate: one GPU validates": Seeded(
        "fp4deploy/train/estimate.py", "/ (speed.evaluation * gpus) / 3600", "/ speed.evaluation / 3600"
    ),
    "telemetry: samples of the running epoch are kept twice": Seeded(
        "fp4deploy/train/logging/jsonl_tracker.py",
        'line["epoch"] <= epoch if line["kind"] == EPOCH else line["step"] <= step',
        'line["epoch"] <= epoch',
    ),
    "statistics: skipped steps are consecutive with others between them": Seeded(
        "fp4deploy/train/logging/running_statistics.py",
        "torch.where(bad, self.values[CONSECUTIVE] + 1, 0.0)",
        "self.values[CONSECUTIVE] + bad",
    ),
    "sensitive: layers are chosen by their error alone": Seeded(
        "fp4deploy/qat/sensitive.py", "key=lambda name: errors[name] / macs[name]", "key=lambda name: errors[name]"
    ),
    "packing: an ELU may have a scale": Seeded(
        "fp4deploy/export/packing/operators.py",
        'node.op == "elu" and (node.attributes.get("scale", 1) != 1 or node.attributes.get("input_scale", 1) != 1)',
        'node.op == "elu" and node.attributes.get("input_scale", 1) != 1',
    ),
    "audit: milliseconds are those of all calls": Seeded(
        "fp4deploy/audit/ort_profile.py", 'total[name] / row["calls"] / 1000', "total[name] / 1000"
    ),
    "peaks: TF32 is as fast as FP16": Seeded(
        "fp4deploy/peaks.py", 'return self.rate("FP16") / 2', 'return self.rate("FP16")'
    ),
    "checker: a block may span two sources": Seeded(
        "fp4deploy/packed/check.py", "_require(first % NVFP4_BLOCK == 0,", "_require(first > 0,"
    ),
    "file: the card of a packed network is not signed": Seeded(
        "fp4deploy/packed/file.py",
        'SIGNED = ("format", "version", "card", "graph")',
        'SIGNED = ("format", "version", "graph")',
    ),
    "ort: boxes may be of the background": Seeded(
        "fp4deploy/bench/runtimes/ort.py",
        "((classes >= 1) & (classes <= most))",
        "((classes >= 0) & (classes <= most))",
    ),
    "initial: numbers are finite in the type of the file": Seeded(
        "fp4deploy/models/initial.py", "torch.isfinite(value.to(wanted[name].dtype))", "torch.isfinite(value)"
    ),
    "onnx: automatic padding has the odd pixel on the other side": Seeded(
        "fp4deploy/interop/onnx_operators.py", 'if kind == "SAME_UPPER" else', 'if kind == "SAME_LOWER" else'
    ),
    "onnx: a GroupNormalization has the usual epsilon": Seeded(
        "fp4deploy/interop/onnx_layers.py",
        'nn.GroupNorm(groups, len(weight), float(node.attributes.get("epsilon", 1e-5)))',
        "nn.GroupNorm(groups, len(weight))",
    ),
    "placement: a concatenation has the smallest scale": Seeded(
        "fp4deploy/interop/placement.py", "max(scales, key=lambda part", "min(scales, key=lambda part"
    ),
    "arena: buffers are not aligned": Seeded(
        "fp4deploy/native/arena.py",
        "at = max(at, _aligned(start + buffers[each].size))",
        "at = max(at, start + buffers[each].size)",
    ),
    "contraction: the factor of what is added is lost": Seeded(
        "fp4deploy/native/contraction.py",
        "return z if vector or beta == 0 else z + beta * added",
        "return z if vector or beta == 0 else z + added",
    ),
    "comparison: telemetry changes results": Seeded(
        "fp4deploy/report/comparison.py",
        'idle = key in NO_EFFECT or key.startswith("telemetry.")',
        "idle = key in NO_EFFECT",
    ),
    "plan: groups are whole blocks of 16 in every format": Seeded(
        "fp4deploy/qat/plan.py", "    if channels % _block(recipe):\n", "    if channels % NVFP4_BLOCK:\n"
    ),
    "boxes: anchors with an object count neither way": Seeded(
        "fp4deploy/train/losses/boxes.py",
        "return owner, found, (most >= UNMATCHED) & ~found",
        "return owner, found, most >= UNMATCHED",
    ),
    "export: of several failures the last kind is the exit code": Seeded(
        "cli/commands/stages/export.py", "raise type(min((error for", "raise type(max((error for"
    ),
    "bench: a drop of nothing is the default": Seeded(
        "cli/commands/stages/bench.py",
        "allowed = MAX_DROP if max_drop is None else max_drop",
        "allowed = max_drop or MAX_DROP",
    ),
    "gate: a baseline that says one class everywhere is beyond doubt": Seeded(
        "fp4deploy/bench/gate/decision.py",
        "if baseline.value > constant + ROUNDING:",
        "if baseline.value >= constant:",
    ),
    "serving: the size of an image is width and height": Seeded(
        "fp4deploy/serving/preprocess.py", "[(image.height, image.width) for", "[(image.width, image.height) for"
    ),
    "matrix: rows of inputs are padded with zeros whatever the layer does": Seeded(
        "fp4deploy/ptq/matrix.py", 'return plain and layer.padding_mode == "zeros" and not', "return plain and not"
    ),
}
