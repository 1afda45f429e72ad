"""SIXTH: in files that were drawn at random, by their lines, of those that FIFTH has nothing of, after the tests for FIFTH."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "cli: studies of two models are one": Seeded(
        "cli/commands/results/telemetry.py",
        'return whole.parents[1] / "plots" / kind / whole.parent.name',
        'return whole.parents[1] / "plots" / kind',
    ),
    "bench: the control is compared with the model that was trained less": Seeded(
        "fp4deploy/bench/tables.py",
        'BASELINES = ("fp16_control", "fp16")',
        'BASELINES = ("fp16", "fp16_control")',
    ),
    "export: a file of one batch takes any": Seeded(
        "fp4deploy/export/to_onnx.py",
        "dynamic_size, chosen, batch=batch)\n    _describe(canonical, card, checkpoint)",
        "dynamic_size, chosen, batch=None)\n    _describe(canonical, card, checkpoint)",
    ),
    "data: the threshold itself is background": Seeded(
        "fp4deploy/data/importing/masks.py",
        "return (values >= threshold).astype(np.uint8)",
        "return (values > threshold).astype(np.uint8)",
    ),
    "cli: --compile switches it off": Seeded(
        "cli/settings.py",
        '    if not value:\n        os.environ["FP4DEPLOY_COMPILE"] = "off"',
        '    if value:\n        os.environ["FP4DEPLOY_COMPILE"] = "off"',
    ),
    "cli: provenance of a quantised file forgets the data": Seeded(
        "cli/commands/stages/quantize.py",
        'provenance.record("quantize", target, [source, where])\n    change',
        'provenance.record("quantize", target, [source])\n    change',
    ),
    "nnunet: include and exclude are exchanged": Seeded(
        "fp4deploy/interop/nnunet/quantize.py",
        "plan_network(network, found[0], recipe, include, exclude, rest",
        "plan_network(network, found[0], recipe, exclude, include, rest",
    ),
    "qat: arguments with defaults are assumed as well": Seeded(
        "fp4deploy/qat/ends.py",
        "count = max(1, sum(each.default is kinds.empty for each in positional))",
        "count = max(1, len(positional))",
    ),
    "train: features alone teach nothing": Seeded(
        "fp4deploy/train/sections.py",
        "return self.weight > 0 or self.features > 0",
        "return self.weight > 0",
    ),
    "cli: a class that a split does not have is counted": Seeded(
        "cli/commands/machine/data.py",
        'str(each.get(name, "-"))',
        "str(each.get(name, 0))",
    ),
    "native: kernels cover wide networks": Seeded(
        "fp4deploy/native/record.py",
        'graph.rest != "fp32" and not graph.wide',
        'graph.rest != "fp32"',
    ),
    "tasks: a classifier's classes are those of the folder": Seeded(
        "fp4deploy/tasks/classification.py",
        "return self.open(data, split, card.class_names)",
        "return self.open(data, split)",
    ),
    "graph: the inner replacement outlives the outer": Seeded(
        "fp4deploy/graph/replacement.py",
        "switch.replacements.pop()",
        "switch.replacements.pop(0)",
    ),
    "models: a class beyond the last is stuff": Seeded(
        "fp4deploy/models/card.py",
        "(all(number < names for number in head.stuff)",
        "(all(number <= names for number in head.stuff)",
    ),
    "cli: files of another run are of the latest": Seeded(
        "cli/artifacts.py",
        "if found == {latest} and latest is not None:",
        "if latest in found and latest is not None:",
    ),
    "packed: block scales take no memory on the device": Seeded(
        "fp4deploy/packed/network.py",
        "return weight.codes.nbytes + weight.scales.nbytes",
        "return weight.codes.nbytes",
    ),
    "models: a digest is of no shapes": Seeded(
        "fp4deploy/models/checkpoint.py",
        "            str(list(tensor.shape)).encode(),\n",
        "",
    ),
    "models: NaN of green and blue is an image": Seeded(
        "fp4deploy/models/input_encoding.py",
        "total = wide.sum(1, keepdim=True)",
        "total = wide[:, :1]",
    ),
    "graph: sizes of parts may be any formula": Seeded(
        "fp4deploy/graph/growth.py",
        "for each in result if isinstance(result, (tuple, list)) else (result,):",
        "for each in (result,):",
    ),
    "data: a part of a set has no background": Seeded(
        "fp4deploy/data/part.py",
        "= dataset.class_names, dataset.background, dataset.layout",
        "= dataset.class_names, False, dataset.layout",
    ),
    "cli: layers in INT8 are planned as FP4": Seeded(
        "cli/commands/stages/engine_formats.py",
        'formats = card.formats | {"fp8": ()}',
        'formats = {"fp8": ()}',
    ),
    "system: an inner block ends the outer one": Seeded(
        "fp4deploy/system/offline.py",
        "        _block.what = outer\n",
        "        _block.what = None\n",
    ),
    "qat: another layout of the same memory is taken for it": Seeded(
        "fp4deploy/qat/operators/recompute.py",
        "(known.shape, known.stride()) != (x.shape, x.stride())",
        "known.shape != x.shape",
    ),
    "lowering: channels of zeros are read": Seeded(
        "fp4deploy/export/lowering/plugin_match.py",
        "value, channels = node.inputs[0], padded - filled",
        "value, channels = node.inputs[0], padded",
    ),
    "ptq: GPTQ changes the amax": Seeded(
        "fp4deploy/ptq/quantize.py",
        "return hold_amax(gptq(rows, amax, hessian), rows, amax)",
        "return gptq(rows, amax, hessian)",
    ),
}
