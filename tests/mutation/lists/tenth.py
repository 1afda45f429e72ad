"""TENTH: a seventh hand, over all rooms, from the code alone; it had read the tests of last bits."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "verify: blocks of a layer up to sixteen may differ": Seeded(
        "fp4deploy/export/verify/outputs.py", "found.blocks[layer] > 1:", "found.blocks[layer] > 16:"
    ),
    "verify: a tenth of the boxes of a file may be others": Seeded(
        "fp4deploy/export/verify/outputs.py", "if unmatched > 0.01 * count:", "if unmatched > 0.1 * count:"
    ),
    "verify: nodes are those of the last batch": Seeded(
        "fp4deploy/export/verify/packed.py",
        "nodes |= {name: largest(nodes.get(name, 0.0), error) for name, error in by_node.errors.items()}",
        "nodes |= by_node.errors",
    ),
    "verify: quantised networks are compared at their size alone": Seeded(
        "fp4deploy/export/verify/sizes.py",
        "            if not found.passed:",
        "            if not (found.passed or quantized):",
    ),
    "regions: polygons may not reach beyond their image": Seeded(
        "fp4deploy/data/coco/regions.py", "reach = 16 * max(height, width)", "reach = max(height, width)"
    ),
    "balance: a class counts the pixels of images without it": Seeded(
        "fp4deploy/data/inspection/balance.py",
        "labelled += np.where(found > 0, found.sum(), 0)",
        "labelled += found.sum()",
    ),
    "letterbox: a box of one visible side is kept": Seeded(
        "fp4deploy/data/augmentation/letterbox.py", "(sides >= MIN_SIDE).all(1)", "(sides >= MIN_SIDE).any(1)"
    ),
    "letterbox: turned boxes move by the width": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "np.array([0, 0, 1, 0, 1]) * self.height",
        "np.array([0, 0, 1, 0, 1]) * self.width",
    ),
    "labels: corners are told where all boxes end beyond the image": Seeded(
        "fp4deploy/data/inspection/labels.py",
        "sure = len(placed) >= CERTAIN and 2 * beyond > len(placed)",
        "sure = len(placed) >= CERTAIN and beyond == len(placed)",
    ),
    "labels: a validation split that is all void is no defect": Seeded(
        "fp4deploy/data/inspection/labels.py", 'if wrong or (split, kind) == (VAL, "all-void")', "if wrong"
    ),
    "labels: sparse values of named classes are a defect": Seeded(
        "fp4deploy/data/inspection/labels.py",
        "if not named and classes > 2 * len(learned)",
        "if classes > 2 * len(learned)",
    ),
    "evidence: Dice of a volume counts the background": Seeded(
        "fp4deploy/bench/evidence.py", "        known[:, 0] = 0\n", ""
    ),
    "evidence: a constant prediction is scored by its share of the pixels": Seeded(
        "fp4deploy/bench/evidence.py",
        "float(truth[best] / max(1, truth.sum()) / max(1, np.count_nonzero(truth)))",
        "float(truth[best] / max(1, truth.sum()))",
    ),
    "evidence: classes that nobody labelled were never predicted": Seeded(
        "fp4deploy/bench/evidence.py",
        "absent = (self.truth.sum(0) > 0) & (self.predicted.sum(0) == 0)",
        "absent = self.predicted.sum(0) == 0",
    ),
    "bootstrap: an image's cost is of its truth in the baseline": Seeded(
        "fp4deploy/bench/gate/bootstrap.py",
        "+ other.predicted - baseline.predicted - hit",
        "- hit",
    ),
    "sweep: a run that is done has failed since it once did": Seeded(
        "fp4deploy/experiments/sweep/results.py",
        'if found["status"] != "done" and error_file.is_file():',
        "if error_file.is_file():",
    ),
    "sweep: the deviation is that of the population": Seeded(
        "fp4deploy/experiments/sweep/results.py", '"sd": statistics.stdev(values)', '"sd": statistics.pstdev(values)'
    ),
    "sweep: spikes are those of the worst epoch": Seeded(
        "fp4deploy/experiments/sweep/results.py",
        '"loss_spikes": sum(line.loss_spikes or 0 for line in lines)',
        '"loss_spikes": max(line.loss_spikes or 0 for line in lines)',
    ),
    "grid: no scale clips": Seeded("fp4deploy/ptq/grid.py", "BELOW, ABOVE = 3, 7", "BELOW, ABOVE = 0, 7"),
    "grid: the amax of a tensor is lost": Seeded(
        "fp4deploy/ptq/grid.py",
        "    if float(found[row, part].abs().max()) < float(amax) * (1 - 1e-6):",
        "    if float(found[row, part].abs().max()) < float(amax) * 0.75:",
    ),
    "sensitive: the share that stays in FP4 is not kept": Seeded(
        "fp4deploy/qat/sensitive.py",
        "min(share * sum(macs.values()), sum(macs[name] for name in errors) - least)",
        "share * sum(macs.values())",
    ),
    "packed: a resize by a scale rounds": Seeded(
        "fp4deploy/packed/shapes.py",
        "(int(size * scale) for size, scale in zip(spatial, node.scale, strict=True))",
        "(round(size * scale) for size, scale in zip(spatial, node.scale, strict=True))",
    ),
    "checker: an input packed along the wrong axis": Seeded(
        "fp4deploy/packed/check.py", '_require(not wrong, f"its input is not packed along its {axis}")', "del wrong"
    ),
    "heads: offsets are not compared": Seeded(
        "fp4deploy/models/heads.py",
        "apart = (expected - given)[:, self.classes :].abs().amax(1)",
        "apart = (expected - given)[:, self.classes : self.classes + 1].abs().amax(1)",
    ),
    "card: detectors may name more classes than they have": Seeded(
        "fp4deploy/models/card.py",
        '(head.classes == names - 1, f"head.classes = {head.classes}, and there are {names} class_names"),\n                (list',
        '(head.classes < names, f"head.classes = {head.classes}, and there are {names} class_names"),\n                (list',
    ),
    "losses: smoothing forgets the weights of classes": Seeded(
        "fp4deploy/train/losses/segmentation.py",
        "(log_probability.mean(1) * counted).sum()",
        "(log_probability.mean(1) * labelled).sum()",
    ),
    "losses: balance takes the place of the weights": Seeded(
        "fp4deploy/train/losses/segmentation.py",
        "weights if balance is None else weights * balance",
        "weights if balance is None else balance",
    ),
    "losses: empty masks are pushed where nothing is labelled": Seeded(
        "fp4deploy/train/losses/sets.py",
        "silence = (F.softplus(flat) * labelled[:, None]).sum(2)",
        "silence = F.softplus(flat).sum(2)",
    ),
    "losses: dampening starts at its full strength": Seeded(
        "fp4deploy/train/losses/auxiliary.py",
        "max(0.0, (done - self.damping_start) / (1 - self.damping_start))",
        "float(done > self.damping_start)",
    ),
    "resume: moments keep the layout of the file": Seeded(
        "fp4deploy/train/state.py", "        _lay_out_like_parameters(optimizer)\n", ""
    ),
    "running statistics: spikes move the running mean": Seeded(
        "fp4deploy/train/logging/running_statistics.py",
        "torch.where(finite & ~spike, moved,",
        "torch.where(finite, moved,",
    ),
    "predict: the number of frames is a multiple of the batch": Seeded(
        "fp4deploy/predict/video.py", "frames += 1", "frames += batch"
    ),
    "predict: a class map is enlarged with aligned corners": Seeded(
        "fp4deploy/plugins/frames/class_map.py",
        "at = ((torch.arange(target, dtype=torch.float32) + 0.5) * (source / target) - 0.5).clamp(0, source - 1)",
        "at = (torch.arange(target, dtype=torch.float32) * ((source - 1) / max(1, target - 1))).clamp(0, source - 1)",
    ),
    "predict: the area of a box is that of a square": Seeded(
        "fp4deploy/predict/prediction.py", '"area": float(side[0] * side[1])', '"area": float(side[0] * side[0])'
    ),
    "lowering: columns are counted with the stride of rows": Seeded(
        "fp4deploy/export/lowering/gemm.py",
        "// strides[i] + 1 for i in range(2))",
        "// strides[0] + 1 for i in range(2))",
    ),
    "lowering: the border of a padded 1x1 is lost": Seeded(
        "fp4deploy/export/lowering/gemm.py",
        "plan.strides == (1, 1) and not any(plan.pads):",
        "plan.strides == (1, 1):",
    ),
    "graph: unpooling pads the width where the height lacks rows": Seeded(
        "fp4deploy/graph/unpooling.py", "for extra in reversed(missing) for each", "for extra in missing for each"
    ),
    "graph: random numbers of constants are constants": Seeded(
        "fp4deploy/graph/folding.py",
        "not called._schema.is_mutable and torch.Tag.nondeterministic_seeded not in called.tags",
        "not called._schema.is_mutable",
    ),
}
