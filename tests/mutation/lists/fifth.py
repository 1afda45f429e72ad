"""FIFTH: by a fourth hand, of all rooms, in files that the lists before it have little or nothing of."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "data: a validation split that is all void passes": Seeded(
        "fp4deploy/data/inspection/labels.py",
        'if wrong or (split, kind) == (VAL, "all-void")',
        "if wrong",
    ),
    "data: two categories of one name are two classes": Seeded(
        "fp4deploy/data/coco/annotations.py",
        'elif record["id"] in parsed.categories or record["name"] in names:',
        'elif record["id"] in parsed.categories:',
    ),
    "data: a volume that is moved to the other side is the same": Seeded(
        "fp4deploy/data/volumes/nifti.py",
        "float(np.abs(self.affine - other.affine).max())",
        "float((self.affine - other.affine).max())",
    ),
    "data: a mask of a volume with a time axis is refused": Seeded(
        "fp4deploy/data/volumes/nifti.py",
        "while len(shape) > 3 and shape[-1] == 1:",
        "while len(shape) > 4 and shape[-1] == 1:",
    ),
    "data: corners that a rotation uncovers are an object": Seeded(
        "fp4deploy/data/augmentation/transforms.py",
        "[(labels[0], IGNORE), (labels[1], 0)]",
        "[(labels[0], IGNORE), (labels[1], IGNORE)]",
    ),
    "data: contrast does not keep the mean of a brightened image": Seeded(
        "fp4deploy/data/augmentation/transforms.py",
        "offset = brightness * (1 - contrast) * middle",
        "offset = (1 - contrast) * middle",
    ),
    "train: the first step replaces the average": Seeded(
        "fp4deploy/train/optimizer.py",
        "        self._averaged.n_averaged.fill_(1)  # the initial weights count, so that the first step averages, too\n",
        "",
    ),
    "train: learned amaxes decay as weights do": Seeded(
        "fp4deploy/train/optimizer.py",
        '"weight_decay": clip_decay,',
        '"weight_decay": weight_decay,',
    ),
    "train: the first step learns nothing": Seeded(
        "fp4deploy/train/schedule.py",
        "return peak * (step + 1) / rising",
        "return peak * step / rising",
    ),
    "train: measured statistics are of the last batches": Seeded(
        "fp4deploy/train/norms.py",
        "                norm.momentum = None  # a cumulative mean\n",
        "",
    ),
    "train: training goes on with the measured statistics": Seeded(
        "fp4deploy/train/norms.py",
        "                norm.eval()\n            _put(own, kept)\n",
        "                norm.eval()\n",
    ),
    "train: void pixels of an object cost": Seeded(
        "fp4deploy/train/losses/sets.py",
        "goal = (truth & counted).to(logits.dtype)",
        "goal = truth.to(logits.dtype)",
    ),
    "train: empty channels weigh as much as matched ones": Seeded(
        "fp4deploy/train/losses/sets.py",
        "+ self.empty * empty / silent",
        "+ empty / silent",
    ),
    "train: an error is relative to the student": Seeded(
        "fp4deploy/train/losses/features.py",
        "size = target.detach().float().square().sum()",
        "size = output.detach().float().square().sum()",
    ),
    "train: a layer that is called twice is compared crosswise": Seeded(
        "fp4deploy/train/losses/features.py",
        "self._own[name].pop(0) if",
        "self._own[name].pop() if",
    ),
    "train: a detector's distillation fades with the temperature": Seeded(
        "fp4deploy/train/losses/taught_boxes.py",
        "return temperature**2 * (",
        "return 1.0 * (",
    ),
    "qat: equalisation exchanges weights and activations": Seeded(
        "fp4deploy/qat/equalize.py",
        "(share * own[0] - (1 - share) * own[1])",
        "((1 - share) * own[0] - share * own[1])",
    ),
    "qat: a loaded amax is not what the file gives back": Seeded(
        "fp4deploy/qat/load.py",
        "                layer.input_amax.copy_(deployed_amax(layer.input_amax))\n",
        "                pass\n",
    ),
    "ptq: a block whose largest code is 4 is no fixed point": Seeded(
        "fp4deploy/ptq/grid.py",
        "return ((top == 6) | (top == 4)) &",
        "return (top == 6) &",
    ),
    "search: a layer saves in all precisions at once": Seeded(
        "fp4deploy/experiments/search/choose.py",
        "most[layer] = max(most.get(layer, 0.0), saved[layer, precision])",
        "most[layer] = most.get(layer, 0.0) + saved[layer, precision]",
    ),
    "search: a layer that is used twice is timed once": Seeded(
        "fp4deploy/experiments/search/costs.py",
        "own[key] = own.get(key, 0.0) + row.ms / network.batch",
        "own[key] = row.ms / network.batch",
    ),
    "time model: outputs are written in the precision of the operands": Seeded(
        "fp4deploy/timing/launches.py",
        "(PACKED if self.packed else FP16) * self.rows * self.places * self.outputs",
        "PACKED * self.rows * self.places * self.outputs",
    ),
    "sensitivity: an error is a power": Seeded(
        "fp4deploy/experiments/sensitivity/study.py",
        "math.sqrt(error / power) if power",
        "error / power if power",
    ),
    "sensitivity: inputs are sampled along the width": Seeded(
        "fp4deploy/experiments/sensitivity/study.py",
        "x.movedim(channel_axis(layer, x), -1).flatten(0, -2)",
        "x.flatten(0, -2)",
    ),
    "sweep: a setting of the workers makes a base of its own": Seeded(
        "fp4deploy/experiments/sweep/spec.py",
        "if key.startswith(OF_THE_BASE) and key not in NOT_OF_THE_BASE\n",
        "if key.startswith(OF_THE_BASE)\n",
    ),
    "sweep: a continued training keeps its test score": Seeded(
        "fp4deploy/experiments/sweep/test_split.py",
        "    (run.model_dir(model) / FILE).unlink(missing_ok=True)\n",
        "    (run.model_dir(model) / FILE).exists()\n",
    ),
    "gate: any equal value of a position is enough": Seeded(
        "fp4deploy/models/meaning.py",
        "given).all(self.classes.axis)",
        "given).any(self.classes.axis)",
    ),
    "gate: every output has ranges of its channels": Seeded(
        "fp4deploy/models/meaning.py",
        "if axis is None or x.numel() < ENOUGH * x.shape[axis]:",
        "if axis is None:",
    ),
    "bench: a boundary has one side": Seeded(
        "fp4deploy/bench/detail.py",
        "        edge[behind] |= differs\n",
        "",
    ),
    "bench: an object of 1024 pixels is small": Seeded(
        "fp4deploy/bench/detail.py",
        'areas, side="right")',
        'areas, side="left")',
    ),
    "bench: predictions of void pixels have boundaries": Seeded(
        "fp4deploy/bench/detail.py",
        "self._add_boundaries(predicted.masked_fill(~known, IGNORE), truth)",
        "self._add_boundaries(predicted, truth)",
    ),
    "bench: objects' digest is of the images alone": Seeded(
        "fp4deploy/bench/instances.py",
        "hashlib.sha256((digested.digest() + truth).encode())",
        "hashlib.sha256(digested.digest().encode())",
    ),
    "instances: an ignored detection counts as found": Seeded(
        "fp4deploy/instances/matches.py",
        "(each.matched & ~each.ignored).mean(axis=0)",
        "each.matched.mean(axis=0)",
    ),
    "detection: boxes of a file are of the network's image": Seeded(
        "fp4deploy/detection/evaluation.py",
        "in_image(boxes, self.head, self.target, (record.height, record.width))",
        "in_image(boxes, self.head, self.target, self.target)",
    ),
    "predict: files of one folder with one stem overwrite each other": Seeded(
        "fp4deploy/predict/sources.py",
        "name if times[stem] > 1 else stem",
        "name if times[stem] > 2 else stem",
    ),
    "predict: a CPU takes the packed file first": Seeded(
        "fp4deploy/predict/choose.py",
        "for suffix in WITH_GPU if gpu else WITHOUT_GPU:",
        "for suffix in WITH_GPU:",
    ),
    "predict: the first image is timed as well": Seeded(
        "fp4deploy/predict/timing.py",
        "for path in (paths[0], *paths)][1:]",
        "for path in paths]",
    ),
    "models: the scale that a spec names is not in the card": Seeded(
        "fp4deploy/models/state_dict.py",
        "    if spec.scale is not None:\n        card = replace(card, scale=spec.scale)\n",
        "",
    ),
    "serving: DeepStream reads width before height": Seeded(
        "fp4deploy/serving/pipelines.py",
        '"infer-dims": f"3;{card.height};{card.width}"',
        '"infer-dims": f"3;{card.width};{card.height}"',
    ),
    "serving: Holoscan's frames are 0 to 1": Seeded(
        "fp4deploy/serving/pipelines.py",
        '"scale_max": 255.0',
        '"scale_max": 1.0',
    ),
    "serving: images lie on their side": Seeded(
        "fp4deploy/serving/preprocess.py",
        "ImageOps.exif_transpose(Image.open(io.BytesIO(content), formats=FORMATS)).convert",
        "Image.open(io.BytesIO(content), formats=FORMATS).convert",
    ),
    "graph: a layer that is called twice multiplies once": Seeded(
        "fp4deploy/graph/costs.py",
        "before.written + written, before.macs + macs",
        "before.written + written, macs",
    ),
    "packed: padding of -Inf is the largest number": Seeded(
        "fp4deploy/export/packing/operators.py",
        "math.copysign(writer.rest.largest, value)",
        "writer.rest.largest",
    ),
    "report: what is lost is won": Seeded(
        "fp4deploy/report/summary.py",
        'verb = "loses" if gain < 0 else "gains"',
        'verb = "loses" if gain > 0 else "gains"',
    ),
    "report: fine-tuning is drawn from the first epoch on": Seeded(
        "fp4deploy/report/figures/curves.py",
        '0 if model == "fp16" else offset, marker',
        "0, marker",
    ),
    "report: scores are shares, and said to be percent": Seeded(
        "fp4deploy/report/figures/curves.py",
        'factor = 1 if key == "loss" else 100',
        "factor = 1",
    ),
}
