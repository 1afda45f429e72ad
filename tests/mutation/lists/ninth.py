"""NINTH: by the hand of EIGHTH, in files that EIGHTH has nothing of, before the tests that followed EIGHTH were written."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "volumes: labels are ordered as text": Seeded(
        "fp4deploy/data/volumes/layout.py", "str(classes[name]).zfill(9)", "str(classes[name])"
    ),
    "volumes: one more case of nine is to validate on": Seeded(
        "fp4deploy/data/volumes/layout.py",
        "(at % EVERY == EVERY - 1) == (split == VAL)",
        "(at % EVERY == 0) == (split == VAL)",
    ),
    "volumes: the test split is one of the list": Seeded(
        "fp4deploy/data/volumes/layout.py",
        "(names if split == TEST else self._of_split(names, split))",
        "self._of_split(names, split)",
    ),
    "balance: pixels beside a class are those of all images": Seeded(
        "fp4deploy/data/inspection/balance.py",
        "labelled += np.where(found > 0, found.sum(), 0)",
        "labelled += found.sum()",
    ),
    "balance: counts of another number of images are kept": Seeded(
        "fp4deploy/data/inspection/balance.py", ', "length": len(dataset)}', "}"
    ),
    "balance: weights are limited before the power": Seeded(
        "fp4deploy/data/inspection/balance.py", "np.clip(weights**power, *BOUNDS)", "np.clip(weights, *BOUNDS) ** power"
    ),
    "errors: a second detection of an object is a wrong class": Seeded(
        "fp4deploy/detection/errors.py", "            free[best] = False\n", ""
    ),
    "errors: crowds are missed objects": Seeded(
        "fp4deploy/detection/errors.py",
        'elif each["id"] not in covered and not each["iscrowd"]:',
        'elif each["id"] not in covered:',
    ),
    "errors: limits are of an image": Seeded(
        "fp4deploy/detection/errors.py",
        'key = (result["image_id"], result["category_id"])',
        'key = (result["image_id"], 0)',
    ),
    "matches: ignored detections are false ones": Seeded(
        "fp4deploy/instances/matches.py",
        "counted = weights[found.image] * ~found.ignored",
        "counted = weights[found.image] * np.ones_like(found.ignored)",
    ),
    "matches: the sizes of areas are images": Seeded(
        "fp4deploy/instances/matches.py", "start = place * len(parameters.areaRng) * count", "start = place * count"
    ),
    "detail: diagonal neighbours of a boundary grow twice as far": Seeded(
        "fp4deploy/bench/detail.py", "step = min(done + 1, reach - done)", "step = done + 1"
    ),
    "detail: recall of a size is of all pixels": Seeded(
        "fp4deploy/bench/detail.py", 'areas, side="right")', 'areas, side="left")'
    ),
    "plan: three quarters of a block may be padding": Seeded(
        "fp4deploy/qat/plan.py", "if channels <= NVFP4_BLOCK // 4:", "if channels < NVFP4_BLOCK // 4:"
    ),
    "plan: what is named is included though it is excluded": Seeded(
        "fp4deploy/qat/plan.py",
        '    if exclude is not None and exclude(name, layer):\n        return "excluded by name"\n    if include is not None:\n        return None if include(name, layer) else "not in the layers to include"\n',
        '    if include is not None:\n        return None if include(name, layer) else "not in the layers to include"\n    if exclude is not None and exclude(name, layer):\n        return "excluded by name"\n',
    ),
    "plan: groups of outputs of two-dimensional blocks are not asked": Seeded(
        "fp4deploy/qat/plan.py", 'recipe.weight.block == "2d"', 'recipe.weight.block == "1d"'
    ),
    "oscillation: a window is one step shorter": Seeded(
        "fp4deploy/qat/oscillation.py",
        "            elif phase <= reset.window:",
        "            elif phase < reset.window:",
    ),
    "oscillation: a resume keeps windows of before": Seeded(
        "fp4deploy/qat/oscillation.py",
        "        self._windows = {}\n        for name, layer in self._layers.items():",
        "        for name, layer in self._layers.items():",
    ),
    "optimizer: biases are decayed": Seeded(
        "fp4deploy/train/optimizer.py",
        '{"params": plain, "weight_decay": 0.0}',
        '{"params": plain, "weight_decay": weight_decay}',
    ),
    "optimizer: averages start slower": Seeded(
        "fp4deploy/train/optimizer.py", "(1 + self._step) / (10 + self._step)", "self._step / (10 + self._step)"
    ),
    "optimizer: rates of learned amaxes are those of weights": Seeded(
        "fp4deploy/train/optimizer.py", 'rate = lr * group.get("lr_factor", 1.0)', "rate = lr"
    ),
    "norms: the momentum of norms is forgotten": Seeded(
        "fp4deploy/train/norms.py", "                norm.momentum = momentum\n", ""
    ),
    "norms: the tracked statistics are lost": Seeded(
        "fp4deploy/train/norms.py",
        "                norm.eval()\n            _put(own, kept)\n",
        "                norm.eval()\n",
    ),
    "volumes predicted: two cases of one name in two folders are one": Seeded(
        "fp4deploy/predict/volumes.py",
        "if other != source or any(key[1] == name and key[0] != path.parent for key in cases):",
        "if other != source:",
    ),
    "volumes predicted: channels may lie on grids of their own": Seeded(
        "fp4deploy/predict/volumes.py",
        "            if grid is not None and (differs",
        "            if grid is None and (differs",
    ),
    "lowering: a part of a linear layer begins where the last one began": Seeded(
        "fp4deploy/export/lowering/linear.py",
        "*(found[ends] + 1).tolist(), *found[ends + 1].tolist()",
        "*found[ends].tolist(), *found[ends + 1].tolist()",
    ),
    "packing: positions from the end are left as they are": Seeded(
        "fp4deploy/export/packing/operators.py", "        positions = [each % size for each in positions]\n", ""
    ),
    "packing: tanh's approximation of GELU is the exact one": Seeded(
        "fp4deploy/export/packing/operators.py", 'function = "gelu_tanh"', 'function = "gelu"'
    ),
    "boxes: x and y of a place are exchanged": Seeded(
        "fp4deploy/models/boxes.py",
        "torch.stack((x.expand(rows, columns), y[:, None].expand(rows, columns)))",
        "torch.stack((y[:, None].expand(rows, columns), x.expand(rows, columns)))",
    ),
    "comparison: runs of one name have their whole paths": Seeded(
        "fp4deploy/report/comparison.py", "if len(set(found)) == len(found):", "if len(set(found)) > 1:"
    ),
}
