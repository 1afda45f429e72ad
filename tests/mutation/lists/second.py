"""SECOND: written after the tests for FIRST, in other lines of the same packages."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "metrics: every image of a class that was predicted is right": Seeded(
        "fp4deploy/metrics.py",
        "right = torch.bincount(target[prediction == target]",
        "right = torch.bincount(prediction",
    ),
    "gate: the fastest is by its slowest runs": Seeded(
        "fp4deploy/bench/gate/decision.py",
        "entry.latency_ms.p50 if entry.latency_ms",
        "entry.latency_ms.p99 if entry.latency_ms",
    ),
    "detection: a box near an object of another class is a wrong class": Seeded(
        "fp4deploy/detection/errors.py",
        '    if of_foreign >= FOREGROUND:\n        return "classification", foreign',
        '    if of_foreign >= BACKGROUND:\n        return "classification", foreign',
    ),
    "instances: AP of medium and large objects are exchanged": Seeded(
        "fp4deploy/instances/scores.py",
        "ap_medium=by_size[2],\n        ap_large=by_size[3],",
        "ap_medium=by_size[3],\n        ap_large=by_size[2],",
    ),
    "evidence: the background has a Dice, too": Seeded(
        "fp4deploy/bench/evidence.py",
        "known[:, 0] = 0",
        "known[:, 0] *= 1",
    ),
    "data: the edge of a tile has no weight": Seeded(
        "fp4deploy/data/tiles.py",
        "np.minimum(place, place[::-1]) + 1, max(1, overlap))",
        "np.minimum(place, place[::-1]), max(1, overlap))",
    ),
    "data: windows of a mosaic exchange their corner": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "np.array([0, left, top, left, top], np.float32)",
        "np.array([0, top, left, top, left], np.float32)",
    ),
    "data: the spacing that was asked for is not taken": Seeded(
        "fp4deploy/data/volumes/plan.py",
        "target = spacing or _spacing(",
        "target = _spacing(",
    ),
    "train: weights of the box and the centre are exchanged": Seeded(
        "fp4deploy/train/losses/boxes.py",
        "parts = of_class / count.clamp(min=1), of_box / mass.clamp(min=1), of_centre / count.clamp(min=1)",
        "parts = of_class / count.clamp(min=1), of_centre / count.clamp(min=1), of_box / mass.clamp(min=1)",
    ),
    "ptq: every layer is chosen": Seeded(
        "fp4deploy/ptq/quantize.py",
        "            prepare(model, chosen.recipe, include, exclude, example_inputs=example, **formats)\n        say(",
        "            prepare(model, chosen.recipe, None, exclude, example_inputs=example, **formats)\n        say(",
    ),
    "interop: operands of two formats are taken over": Seeded(
        "fp4deploy/interop/modelopt.py",
        "    if weight.format != x.format:",
        "    if False:",
        "tests/cli/test_import_modelopt.py",
        nearby=True,
    ),
    "packed: scales of activations take no memory": Seeded(
        "fp4deploy/packed/memory.py",
        "blocks * (NVFP4_BLOCK // 2 + 1)",
        "blocks * (NVFP4_BLOCK // 2)",
    ),
    "packed: two outputs may have one name": Seeded(
        "fp4deploy/packed/check.py",
        '    if len(set(names)) != len(names) or ("" in names and len(names) > 1):\n        raise InputError(f"Outputs',
        '    if False:\n        raise InputError(f"Outputs',
    ),
    "verify: half of the boxes may differ": Seeded(
        "fp4deploy/export/verify/outputs.py",
        "if unmatched > 0.01 * count:",
        "if unmatched > 0.5 * count:",
        "tests/detection/test_box_layouts.py tests/export/verify",
        nearby=True,
    ),
    "verify: a hundred blocks of a layer may differ": Seeded(
        "fp4deploy/export/verify/outputs.py",
        "and found.blocks[layer] > 1:",
        "and found.blocks[layer] > 100:",
    ),
    "report: changes are those to the last run": Seeded(
        "fp4deploy/report/comparison.py",
        "_gap(value, values[0]) for value in values",
        "_gap(value, values[-1]) for value in values",
    ),
    "bench: one slow run makes times unsteady": Seeded(
        "fp4deploy/bench/tables.py",
        "times.p90 > UNSTEADY * times.p50",
        "times.p99 > UNSTEADY * times.p50",
    ),
    "bench: nothing warms up": Seeded(
        "fp4deploy/bench/latency.py",
        "    for _ in range(warmup):\n        call()\n    times: list",
        "    for _ in range(0):\n        call()\n    times: list",
    ),
    "predict: the last object is erased": Seeded(
        "fp4deploy/predict/predictor.py",
        "np.where(found.ids <= kept, found.ids, 0)",
        "np.where(found.ids < kept, found.ids, 0)",
    ),
    "serving: a server resizes to width times height": Seeded(
        "fp4deploy/serving/repository.py",
        'given = {"height": card.height, "width": card.width,',
        'given = {"height": card.width, "width": card.height,',
    ),
}
