"""FIRST: written by a hand that had not read the tests; tests for the kinds of those that survived followed."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "metrics: only the last matrix that was added counts": Seeded(
        "fp4deploy/metrics.py",
        "self._counts = self._counts + matrix.to(self._counts)",
        "self._counts = matrix.to(self._counts)",
    ),
    "metrics: classes without a Dice count as 0": Seeded(
        "fp4deploy/metrics.py",
        "return sum(known) / len(known) if known else None",
        "return sum(known) / len(values) if known else None",
    ),
    "metrics: the nearer of the two surfaces decides the distance": Seeded(
        "fp4deploy/metrics.py",
        "return float(max(np.percentile",
        "return float(min(np.percentile",
    ),
    "metrics: voxels are cubes for distances": Seeded(
        "fp4deploy/metrics.py",
        "sampling=spacing)",
        "sampling=max(spacing))",
    ),
    "gate: a volume costs the whole of its own Dice": Seeded(
        "fp4deploy/bench/gate/bootstrap.py",
        "return (_mean(before) - _mean(after)) / len(baseline.images)",
        "return _mean(before) - _mean(after)",
    ),
    "gate: the constant answer is right for every class": Seeded(
        "fp4deploy/bench/evidence.py",
        " / max(1, truth.sum()) / max(1, np.count_nonzero(truth)))",
        " / max(1, truth.sum()))",
    ),
    "gate: what was not timed now may be the fastest": Seeded(
        "fp4deploy/bench/gate/decision.py",
        "if entry.status == OK and entry.latency_ms is not None]",
        "if entry.latency_ms is not None]",
    ),
    "gate: without an FP16 model any accuracy is enough": Seeded(
        "fp4deploy/bench/gate/decision.py",
        " or [entry.accuracy for entry in ran]\n",
        " or []\n",
    ),
    "gate: the baseline is measured on the whole split": Seeded(
        "fp4deploy/bench/gate/baseline.py",
        "timeout=timeout, limit=limit, like=like",
        "timeout=timeout, like=like",
    ),
    "gate: a recorded artefact may have changed": Seeded(
        "fp4deploy/bench/gate/baseline.py",
        "not in (None, entry.sha256):",
        "is None:",
    ),
    "detection: a file's boxes are not limited": Seeded(
        "fp4deploy/detection/decode.py",
        'kind="stable")[: head.max_detections]',
        'kind="stable")',
    ),
    "detection: boxes of other classes suppress": Seeded(
        "fp4deploy/detection/decode.py",
        "return found & (classes[first][:, None] == classes[second])",
        "return found",
    ),
    "detection: the limit of an error study is one for all classes": Seeded(
        "fp4deploy/detection/errors.py",
        'key = (result["image_id"], result["category_id"])',
        'key = (result["image_id"], 0)',
    ),
    "detection: a crowd of another class hides an error": Seeded(
        "fp4deploy/detection/errors.py",
        "zip(present, crowd & own, strict=True)",
        "zip(present, crowd, strict=True)",
    ),
    "detection: boxes are moved by the letterbox before they are scaled": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "return (boxes - np.array([self.left, self.top] * 2)) / np.array([self.across, self.down] * 2, np.float32)",
        "return boxes / np.array([self.across, self.down] * 2, np.float32) - np.array([self.left, self.top] * 2)",
    ),
    "instances: stuff is grouped into objects": Seeded(
        "fp4deploy/instances/decode.py",
        "return probability[[0, *head.stuff]].sum(0) < 0.5",
        "return probability[[0]].sum(0) < 0.5",
    ),
    "instances: centres are at the corners of their pixels": Seeded(
        "fp4deploy/instances/decode.py",
        "centres = (places + 0.5) * stretch - 0.5",
        "centres = places * stretch",
    ),
    "instances: stuff is drawn over objects": Seeded(
        "fp4deploy/instances/panoptic.py",
        "where = (found.ids == 0) & (found.semantic == number)",
        "where = found.semantic == number",
    ),
    "instances: the area of a box is its width squared": Seeded(
        "fp4deploy/instances/scores.py",
        'result["bbox"][2] * result["bbox"][3]',
        'result["bbox"][2] * result["bbox"][2]',
    ),
    "evidence: what was ignored is what was matched": Seeded(
        "fp4deploy/bench/evidence.py",
        "matched, ignored = powers @ each.matched, powers @ each.ignored",
        "matched, ignored = powers @ each.matched, powers @ each.matched",
    ),
    "evidence: a class that is never right was never predicted": Seeded(
        "fp4deploy/bench/evidence.py",
        "(self.predicted.sum(0) == 0)",
        "(self.hit.sum(0) == 0)",
    ),
    "data: tiles leave a gap where they do not divide": Seeded(
        "fp4deploy/data/tiles.py",
        "math.ceil((length - tile) / (tile - overlap)) + 1",
        "math.floor((length - tile) / (tile - overlap)) + 1",
    ),
    "data: a volume's mirrors turn the channels": Seeded(
        "fp4deploy/data/tiles.py",
        "every = range(2, 2 + len(size))",
        "every = range(1, 1 + len(size))",
    ),
    "data: every epoch has one order": Seeded(
        "fp4deploy/data/loader.py",
        "(_SHUFFLE, self._seed, self.epoch)",
        "(_SHUFFLE, self._seed)",
    ),
    "data: the last, smaller batch is trained on": Seeded(
        "fp4deploy/data/loader.py",
        "seed, len(dataset) > batch_size, compact)",
        "seed, False, compact)",
    ),
    "data: masks of the validation split have no say in the classes": Seeded(
        "fp4deploy/data/masks.py",
        "for split in SPLITS for path in mask_files(root, split).values()]",
        "for split in SPLITS[:1] for path in mask_files(root, split).values()]",
        "tests/data/test_layouts.py",
        nearby=True,
    ),
    "data: crowds are objects of the ground truth": Seeded(
        "fp4deploy/data/coco/boxes.py",
        '"iscrowd": int(annotation.crowd)',
        '"iscrowd": 0',
    ),
    "data: a box is cut at the wrong side": Seeded(
        "fp4deploy/data/coco/boxes.py",
        "min(y + height, record.height)",
        "min(y + height, record.width)",
    ),
    "data: boxes turned upside down move by the width": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "np.array([0, 0, 1, 0, 1]) * self.height",
        "np.array([0, 0, 1, 0, 1]) * self.width",
    ),
    "data: what is seen of a box is cut at the other sides": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "limit = np.array([size[1], size[0]] * 2, np.float32)",
        "limit = np.array([size[0], size[1]] * 2, np.float32)",
    ),
    "data: a turn fills the corners with an object": Seeded(
        "fp4deploy/data/augmentation/transforms.py",
        "(labels[0], IGNORE), (labels[1], 0)]",
        "(labels[0], IGNORE), (labels[1], 1)]",
    ),
    "data: the thick axis is resampled to the coarsest": Seeded(
        "fp4deploy/data/volumes/plan.py",
        "np.percentile(found[:, thick], 10, axis=0)",
        "np.percentile(found[:, thick], 90, axis=0)",
    ),
    "data: the thick axis is resampled by splines": Seeded(
        "fp4deploy/data/volumes/resample.py",
        "[1 if step > ANISOTROPIC * min(spacing) else 3",
        "[3 if step > ANISOTROPIC * min(spacing) else 1",
    ),
    "data: intensities are those of the background, too": Seeded(
        "fp4deploy/data/volumes/plan.py",
        "inside = voxels[(labels > 0) & (labels != layout.ignored)]",
        "inside = voxels[labels != layout.ignored]",
    ),
    "data: names of classes are not in the digest": Seeded(
        "fp4deploy/data/inspection/digest.py",
        "hashlib.sha256(repr(tuple(self.class_names)).encode())",
        "hashlib.sha256()",
    ),
    "train: a resumed training forgets its average": Seeded(
        "fp4deploy/train/state.py",
        'part.load_state(_below(tensors, f"{prefix}."))',
        '_below(tensors, f"{prefix}.")',
    ),
    "train: the first step has a rate of 0": Seeded(
        "fp4deploy/train/schedule.py",
        "return peak * (step + 1) / rising",
        "return peak * step / rising",
    ),
    "train: the control has the rate of a first training": Seeded(
        "fp4deploy/train/schedule.py",
        'return model in ("fp16_control", "nvfp4_ptq")',
        'return model in ("nvfp4_ptq",)',
    ),
    "train: biases decay": Seeded(
        "fp4deploy/train/optimizer.py",
        "decayed = [p for p in others if p.ndim > 1]\n    plain = [p for p in others if p.ndim <= 1]",
        "decayed = [p for p in others if p.ndim > 0]\n    plain = [p for p in others if p.ndim <= 0]",
    ),
    "train: clips are learned at the rate of weights": Seeded(
        "fp4deploy/train/optimizer.py",
        'rate = lr * group.get("lr_factor", 1.0)',
        "rate = lr",
    ),
    "train: accumulated gradients are summed": Seeded(
        "fp4deploy/train/loop.py",
        "self.accelerator.backward(loss / group)",
        "self.accelerator.backward(loss)",
    ),
    "train: evaluated one epoch late": Seeded(
        "fp4deploy/train/loop.py",
        "(progress.epoch + 1) % self.settings.evaluate_every == 0",
        "progress.epoch % self.settings.evaluate_every == 0",
    ),
    "train: resumed with another batch": Seeded(
        "fp4deploy/train/loop.py",
        "if epoch and epoch != len(self.train_batches):",
        "if False:",
    ),
    "train: a teacher of other classes": Seeded(
        "fp4deploy/train/distillation.py",
        "(card.task, card.class_names) != (target.task, target.class_names)",
        "card.task != target.task",
    ),
    "train: alpha weighs the background": Seeded(
        "fp4deploy/train/losses/boxes.py",
        "balance = alpha * truth + (1 - alpha) * (1 - truth)",
        "balance = (1 - alpha) * truth + alpha * (1 - truth)",
    ),
    "train: places in a crowd are background": Seeded(
        "fp4deploy/train/losses/boxes.py",
        "ignored |= (inside & crowd[..., None]).any(1) & ~found",
        "ignored |= (inside & crowd[..., None]).any(1) & found",
    ),
    "ptq: a model comes back in training mode": Seeded(
        "fp4deploy/graph/modes.py",
        "module.training = before.get(module, before[model])",
        "module.training = True",
    ),
    "ptq: the percentile is always the default": Seeded(
        "fp4deploy/ptq/quantize.py",
        "activations or chosen.activations, percentile)",
        "activations or chosen.activations)",
    ),
    "ptq: biases are corrected the other way": Seeded(
        "fp4deploy/ptq/correction.py",
        "layer.bias.add_((mean - other_mean)",
        "layer.bias.add_((other_mean - mean)",
    ),
    "ptq: the card forgets the target": Seeded(
        "fp4deploy/ptq/checkpoint.py",
        "rest=rest_of(rest or card).name, target=target)",
        "rest=rest_of(rest or card).name)",
        "tests/cli/test_quantize_command.py",
        nearby=True,
    ),
    "ptq: rows are padded by the other axis": Seeded(
        "fp4deploy/ptq/matrix.py",
        "for size in reversed(_numbers(layer.padding, len(kernel)))",
        "for size in _numbers(layer.padding, len(kernel))",
    ),
    "interop: the factor of a Gemm's bias is left out": Seeded(
        "fp4deploy/interop/onnx_layers.py",
        "None if bias is None else beta * bias)",
        "bias)",
    ),
    "interop: every BatchNormalization has the usual epsilon": Seeded(
        "fp4deploy/interop/onnx_layers.py",
        'AnyBatchNorm(len(weight), float(node.attributes.get("epsilon", 1e-5)))',
        "AnyBatchNorm(len(weight))",
    ),
    "interop: the range of codes is that of their upper end": Seeded(
        "fp4deploy/interop/placement.py",
        "largest = max(abs(low), abs(high)) * scale",
        "largest = abs(high) * scale",
    ),
    "packed: one input may have a free batch alone": Seeded(
        "fp4deploy/packed/check.py",
        "if (0 in each.free) != (0 in graph.inputs[0].free):",
        "if False:",
    ),
    "packed: output padding may be the stride": Seeded(
        "fp4deploy/packed/check.py",
        "beyond = any(a >= max(b, c)",
        "beyond = any(a > max(b, c)",
    ),
    "packed: memory is that of one image": Seeded(
        "fp4deploy/packed/memory.py",
        "given = input_shapes(graph, size, batch)",
        "given = input_shapes(graph, size)",
    ),
    "verify: one other size is enough": Seeded(
        "fp4deploy/export/verify/sizes.py",
        "if len(found) == 2:",
        "if len(found) == 1:",
    ),
    "verify: what one place loses is averaged over places": Seeded(
        "fp4deploy/export/verify/agreement.py",
        ".float().mean(1).max())",
        ".float().mean(1).mean())",
    ),
    "verify: only the last batch loses a place": Seeded(
        "fp4deploy/export/verify/agreement.py",
        "lost=max(before.lost, found.lost)",
        "lost=found.lost",
    ),
    "verify: a black image is not tried": Seeded(
        "fp4deploy/export/verify/flat.py",
        'for name in ("a black", "a white", "a constant"):',
        'for name in ("a white", "a constant"):',
    ),
    "verify: a node's error is that of the last batch": Seeded(
        "fp4deploy/export/verify/packed.py",
        "nodes |= {name: largest(nodes.get(name, 0.0), error) for",
        "nodes |= {name: error for",
    ),
    "report: runs of other classes are subtracted": Seeded(
        "fp4deploy/report/comparison.py",
        "return one.task == other.task and one.class_names == other.class_names",
        "return one.task == other.task",
    ),
    "report: sizes are swapped": Seeded(
        "fp4deploy/report/collect.py",
        '(by["nvfp4"], by["fp16"])',
        '(by["fp16"], by["nvfp4"])',
    ),
    "report: the last score is the first": Seeded(
        "fp4deploy/report/run_folder.py",
        "last = scored[-1] if scored else None",
        "last = scored[0] if scored else None",
    ),
    "report: a file of the same size has not changed": Seeded(
        "fp4deploy/report/run_folder.py",
        "if size == entry.size_bytes and file_digest(path) == entry.sha256:",
        "if size == entry.size_bytes:",
    ),
    "bench: images a second are batches a second": Seeded(
        "fp4deploy/bench/latency.py",
        "return 1000 * self.batch / self.p50",
        "return 1000 / self.p50",
    ),
    "bench: an FP16 model is the baseline before its control": Seeded(
        "fp4deploy/bench/tables.py",
        'BASELINES = ("fp16_control", "fp16")',
        'BASELINES = ("fp16", "fp16_control")',
    ),
    "bench: a change is that of the source": Seeded(
        "fp4deploy/bench/change.py",
        "scores[0], scores[1], unit)",
        "scores[1], scores[0], unit)",
        "tests/bench/test_evaluate.py",
        nearby=True,
    ),
    "predict: an overlap of 0 is the default": Seeded(
        "fp4deploy/predict/predictor.py",
        "min(card.height, card.width) // 4 if overlap is None else overlap",
        "overlap or min(card.height, card.width) // 4",
    ),
    "predict: stuff is erased from a mask of objects": Seeded(
        "fp4deploy/predict/predictor.py",
        "things = ~np.isin(mask, (0, *self.card.head.stuff))",
        "things = mask != 0",
    ),
    "predict: the share of a class is a sum over frames": Seeded(
        "fp4deploy/predict/video.py",
        'entry["share"] /= frames',
        'entry["share"] /= 1',
    ),
    "predict: millilitres are cubic millimetres": Seeded(
        "fp4deploy/predict/volumes.py",
        "np.prod(grid.spacing) / 1000)",
        "np.prod(grid.spacing))",
    ),
    "predict: a volume is resampled as if it had the model's spacing": Seeded(
        "fp4deploy/predict/volumes.py",
        "resample_image(normalised(voxels, intensity), size, grid.spacing)",
        "resample_image(normalised(voxels, intensity), size, card.volume.spacing)",
    ),
    "predict: an object is of the image before": Seeded(
        "fp4deploy/predict/write.py",
        '"image_id": number, **each})',
        '"image_id": number - 1, **each})',
    ),
    "predict: the mean share is over the images that show the class": Seeded(
        "fp4deploy/predict/write.py",
        "float(np.sum(values) / len(measured))",
        "float(np.sum(values) / len(values))",
    ),
    "serving: a batch is larger than the engine takes": Seeded(
        "fp4deploy/serving/repository.py",
        "min(most, ledger.batch[2])",
        "most",
    ),
    "serving: an FP16 engine is sent FP32 images": Seeded(
        "fp4deploy/serving/repository.py",
        '"std": card.std, "half": served.half}',
        '"std": card.std, "half": False}',
    ),
}
