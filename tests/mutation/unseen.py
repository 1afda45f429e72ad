"""Faults of a hand that had not read the tests: python -m tests.mutation.unseen [NAME ...] [--set SET]

They measure what the tests are likely to notice, where `seeded` holds what they must. Each was written from the code
alone, and names the test files that are nearest to it by package, not the test that is meant to fail. FIRST was
written first, and tests for the kinds of those that survived followed; SECOND was written after that and measures
whether they helped with other faults, too. Neither list grows: another hand wrote THIRD and FOURTH (`third`).
"""

from __future__ import annotations

import argparse
import sys

from tests.mutation.seeded import Seeded, run
from tests.mutation.third import FOURTH, THIRD

GATE = "tests/bench/test_gate.py"
METRICS = "tests/test_metrics.py tests/bench/test_volumes.py tests/data/test_volumes.py"
EVIDENCE = "tests/bench/test_evaluate.py tests/bench/test_detail.py tests/bench/test_gate.py"
BOXES = "tests/detection"
OBJECTS = "tests/instances"
TILES = "tests/data/test_volume_windows.py tests/predict/test_tiles.py"
LOADER = "tests/data/test_transforms.py tests/data/test_loader_ahead.py tests/train/test_interruption.py"
AUGMENTED = "tests/data/test_transforms.py tests/data/test_more_augmentation.py tests/data/test_boxes.py"
VOLUMES = "tests/data/test_volumes.py tests/predict/test_volumes.py"
DIGEST = "tests/bench/test_evaluate.py tests/bench/test_gate.py tests/data/test_check.py"
RESUMED = "tests/train/test_interruption.py tests/train/test_weight_average.py tests/qat/test_outliers.py"
TRAINING = "tests/train/test_training.py tests/train/test_config.py tests/train/test_quantization_start.py"
LEARNED = "tests/qat/test_learned.py tests/train/test_training.py"
BOX_LOSS = "tests/train/test_box_loss.py"
TAUGHT = "tests/train/test_auxiliary_losses.py tests/train/test_box_distillation.py"
PTQ = "tests/ptq/test_quantize.py tests/ptq/test_grid.py tests/ptq/test_rest.py"
ONNX = "tests/interop/test_onnx_network.py"
PLACED = "tests/interop/test_placement.py tests/interop/test_quantize_onnx.py"
CHECKED = "tests/packed/test_packed_check.py tests/packed/test_shapes.py"
MEMORY = "tests/packed/test_memory.py"
VERIFIED = "tests/export/verify tests/export/onnx/test_meaning.py"
PACKED = "tests/export/test_packed.py tests/export/test_packed_networks.py"
COMPARED = "tests/report/test_compare.py tests/report/test_report.py"
REPORTED = "tests/report/test_report.py tests/report/test_pages.py"
BENCHED = "tests/bench/test_latency.py tests/bench/test_tables.py"
PREDICTED = "tests/predict/test_predictor.py tests/predict/test_tiles.py tests/predict/test_predict_command.py"
SERVED = "tests/serving/test_repository.py"

FIRST: dict[str, Seeded] = {
    "metrics: only the last matrix that was added counts": Seeded(
        "fp4deploy/metrics.py",
        "self._counts = self._counts + matrix.to(self._counts)",
        "self._counts = matrix.to(self._counts)",
        METRICS,
    ),
    "metrics: classes without a Dice count as 0": Seeded(
        "fp4deploy/metrics.py",
        "return sum(known) / len(known) if known else None",
        "return sum(known) / len(values) if known else None",
        METRICS,
    ),
    "metrics: the nearer of the two surfaces decides the distance": Seeded(
        "fp4deploy/metrics.py", "return float(max(np.percentile", "return float(min(np.percentile", METRICS
    ),
    "metrics: voxels are cubes for distances": Seeded(
        "fp4deploy/metrics.py", "sampling=spacing)", "sampling=max(spacing))", METRICS
    ),
    "gate: a volume costs the whole of its own Dice": Seeded(
        "fp4deploy/bench/gate/bootstrap.py",
        "return (_mean(before) - _mean(after)) / len(baseline.images)",
        "return _mean(before) - _mean(after)",
        GATE,
    ),
    "gate: the constant answer is right for every class": Seeded(
        "fp4deploy/bench/evidence.py",
        " / max(1, truth.sum()) / max(1, np.count_nonzero(truth)))",
        " / max(1, truth.sum()))",
        GATE,
    ),
    "gate: what was not timed now may be the fastest": Seeded(
        "fp4deploy/bench/gate/decision.py",
        "if entry.status == OK and entry.latency_ms is not None]",
        "if entry.latency_ms is not None]",
        GATE,
    ),
    "gate: without an FP16 model any accuracy is enough": Seeded(
        "fp4deploy/bench/gate/decision.py", " or [entry.accuracy for entry in ran]\n", " or []\n", GATE
    ),
    "gate: the baseline is measured on the whole split": Seeded(
        "fp4deploy/bench/gate/baseline.py",
        "timeout=timeout, limit=limit, like=like",
        "timeout=timeout, like=like",
        GATE,
    ),
    "gate: a recorded artefact may have changed": Seeded(
        "fp4deploy/bench/gate/baseline.py", "not in (None, entry.sha256):", "is None:", GATE
    ),
    "detection: a file's boxes are not limited": Seeded(
        "fp4deploy/detection/decode.py", 'kind="stable")[: head.max_detections]', 'kind="stable")', BOXES
    ),
    "detection: boxes of other classes suppress": Seeded(
        "fp4deploy/detection/decode.py",
        "return found & (classes[first][:, None] == classes[second])",
        "return found",
        BOXES,
    ),
    "detection: the limit of an error study is one for all classes": Seeded(
        "fp4deploy/detection/errors.py",
        'key = (result["image_id"], result["category_id"])',
        'key = (result["image_id"], 0)',
        BOXES,
    ),
    "detection: a crowd of another class hides an error": Seeded(
        "fp4deploy/detection/errors.py",
        "zip(present, crowd & own, strict=True)",
        "zip(present, crowd, strict=True)",
        BOXES,
    ),
    "detection: boxes are moved by the letterbox before they are scaled": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "return (boxes - np.array([self.left, self.top] * 2)) / np.array([self.across, self.down] * 2, np.float32)",
        "return boxes / np.array([self.across, self.down] * 2, np.float32) - np.array([self.left, self.top] * 2)",
        f"{BOXES} tests/data/test_boxes.py",
    ),
    "instances: stuff is grouped into objects": Seeded(
        "fp4deploy/instances/decode.py",
        "return probability[[0, *head.stuff]].sum(0) < 0.5",
        "return probability[[0]].sum(0) < 0.5",
        OBJECTS,
    ),
    "instances: centres are at the corners of their pixels": Seeded(
        "fp4deploy/instances/decode.py",
        "centres = (places + 0.5) * stretch - 0.5",
        "centres = places * stretch",
        OBJECTS,
    ),
    "instances: stuff is drawn over objects": Seeded(
        "fp4deploy/instances/panoptic.py",
        "where = (found.ids == 0) & (found.semantic == number)",
        "where = found.semantic == number",
        OBJECTS,
    ),
    "instances: the area of a box is its width squared": Seeded(
        "fp4deploy/instances/scores.py",
        'result["bbox"][2] * result["bbox"][3]',
        'result["bbox"][2] * result["bbox"][2]',
        f"{OBJECTS} {BOXES}",
    ),
    "evidence: what was ignored is what was matched": Seeded(
        "fp4deploy/bench/evidence.py",
        "matched, ignored = powers @ each.matched, powers @ each.ignored",
        "matched, ignored = powers @ each.matched, powers @ each.matched",
        EVIDENCE,
    ),
    "evidence: a class that is never right was never predicted": Seeded(
        "fp4deploy/bench/evidence.py", "(self.predicted.sum(0) == 0)", "(self.hit.sum(0) == 0)", EVIDENCE
    ),
    "data: tiles leave a gap where they do not divide": Seeded(
        "fp4deploy/data/tiles.py",
        "math.ceil((length - tile) / (tile - overlap)) + 1",
        "math.floor((length - tile) / (tile - overlap)) + 1",
        TILES,
    ),
    "data: a volume's mirrors turn the channels": Seeded(
        "fp4deploy/data/tiles.py", "every = range(2, 2 + len(size))", "every = range(1, 1 + len(size))", TILES
    ),
    "data: every epoch has one order": Seeded(
        "fp4deploy/data/loader.py", "(_SHUFFLE, self._seed, self.epoch)", "(_SHUFFLE, self._seed)", LOADER
    ),
    "data: the last, smaller batch is trained on": Seeded(
        "fp4deploy/data/loader.py", "seed, len(dataset) > batch_size, compact)", "seed, False, compact)", LOADER
    ),
    "data: masks of the validation split have no say in the classes": Seeded(
        "fp4deploy/data/masks.py",
        "for split in SPLITS for path in mask_files(root, split).values()]",
        "for split in SPLITS[:1] for path in mask_files(root, split).values()]",
        "tests/data/test_masks.py tests/data/test_layouts.py",
    ),
    "data: crowds are objects of the ground truth": Seeded(
        "fp4deploy/data/coco/boxes.py", '"iscrowd": int(annotation.crowd)', '"iscrowd": 0', "tests/data/test_boxes.py"
    ),
    "data: a box is cut at the wrong side": Seeded(
        "fp4deploy/data/coco/boxes.py",
        "min(y + height, record.height)",
        "min(y + height, record.width)",
        "tests/data/test_boxes.py",
    ),
    "data: boxes turned upside down move by the width": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "np.array([0, 0, 1, 0, 1]) * self.height",
        "np.array([0, 0, 1, 0, 1]) * self.width",
        AUGMENTED,
    ),
    "data: what is seen of a box is cut at the other sides": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "limit = np.array([size[1], size[0]] * 2, np.float32)",
        "limit = np.array([size[0], size[1]] * 2, np.float32)",
        AUGMENTED,
    ),
    "data: a turn fills the corners with an object": Seeded(
        "fp4deploy/data/augmentation/transforms.py",
        "(labels[0], IGNORE), (labels[1], 0)]",
        "(labels[0], IGNORE), (labels[1], 1)]",
        AUGMENTED,
    ),
    "data: the thick axis is resampled to the coarsest": Seeded(
        "fp4deploy/data/volumes/plan.py",
        "np.percentile(found[:, thick], 10, axis=0)",
        "np.percentile(found[:, thick], 90, axis=0)",
        VOLUMES,
    ),
    "data: the thick axis is resampled by splines": Seeded(
        "fp4deploy/data/volumes/resample.py",
        "((3, [not each for each in thick]), (1, thick))",
        "((1, [not each for each in thick]), (3, thick))",
        VOLUMES,
    ),
    "data: intensities are those of the background, too": Seeded(
        "fp4deploy/data/volumes/plan.py",
        "inside = voxels[(labels > 0) & (labels != layout.ignored)]",
        "inside = voxels[labels != layout.ignored]",
        VOLUMES,
    ),
    "data: names of classes are not in the digest": Seeded(
        "fp4deploy/data/inspection/digest.py",
        "hashlib.sha256(repr(tuple(self.class_names)).encode())",
        "hashlib.sha256()",
        DIGEST,
    ),
    "train: a resumed training forgets its average": Seeded(
        "fp4deploy/train/state.py",
        'part.load_state(_below(tensors, f"{prefix}."))',
        '_below(tensors, f"{prefix}.")',
        RESUMED,
    ),
    "train: the first step has a rate of 0": Seeded(
        "fp4deploy/train/schedule.py", "return peak * (step + 1) / rising", "return peak * step / rising", TRAINING
    ),
    "train: the control has the rate of a first training": Seeded(
        "fp4deploy/train/schedule.py",
        'return model in ("fp16_control", "nvfp4_ptq")',
        'return model in ("nvfp4_ptq",)',
        TRAINING,
    ),
    "train: biases decay": Seeded(
        "fp4deploy/train/optimizer.py",
        "decayed = [p for p in others if p.ndim > 1]\n    plain = [p for p in others if p.ndim <= 1]",
        "decayed = [p for p in others if p.ndim > 0]\n    plain = [p for p in others if p.ndim <= 0]",
        LEARNED,
    ),
    "train: clips are learned at the rate of weights": Seeded(
        "fp4deploy/train/optimizer.py", 'rate = lr * group.get("lr_factor", 1.0)', "rate = lr", LEARNED
    ),
    "train: accumulated gradients are summed": Seeded(
        "fp4deploy/train/loop.py",
        "self.accelerator.backward(loss / group)",
        "self.accelerator.backward(loss)",
        TRAINING,
    ),
    "train: evaluated one epoch late": Seeded(
        "fp4deploy/train/loop.py",
        "(progress.epoch + 1) % self.settings.evaluate_every == 0",
        "progress.epoch % self.settings.evaluate_every == 0",
        TRAINING,
    ),
    "train: resumed with another batch": Seeded(
        "fp4deploy/train/loop.py", "if epoch and epoch != len(self.train_batches):", "if False:", RESUMED
    ),
    "train: a teacher of other classes": Seeded(
        "fp4deploy/train/distillation.py",
        "(card.task, card.class_names) != (target.task, target.class_names)",
        "card.task != target.task",
        TAUGHT,
    ),
    "train: alpha weighs the background": Seeded(
        "fp4deploy/train/losses/boxes.py",
        "balance = alpha * truth + (1 - alpha) * (1 - truth)",
        "balance = (1 - alpha) * truth + alpha * (1 - truth)",
        BOX_LOSS,
    ),
    "train: places in a crowd are background": Seeded(
        "fp4deploy/train/losses/boxes.py",
        "ignored |= (inside & crowd[..., None]).any(1) & ~found",
        "ignored |= (inside & crowd[..., None]).any(1) & found",
        BOX_LOSS,
    ),
    "ptq: a model comes back in training mode": Seeded(
        "fp4deploy/ptq/quantize.py", "model.train(was_training)", "model.train()", PTQ
    ),
    "ptq: the percentile is always the default": Seeded(
        "fp4deploy/ptq/quantize.py",
        "activations or chosen.activations, percentile)",
        "activations or chosen.activations)",
        PTQ,
    ),
    "ptq: biases are corrected the other way": Seeded(
        "fp4deploy/ptq/correction.py", "layer.bias.add_((mean - other_mean)", "layer.bias.add_((other_mean - mean)", PTQ
    ),
    "ptq: the card forgets the target": Seeded(
        "fp4deploy/ptq/checkpoint.py",
        "rest=rest_of(rest or card).name, target=target)",
        "rest=rest_of(rest or card).name)",
        f"{PTQ} tests/cli/test_quantize_command.py",
    ),
    "ptq: rows are padded by the other axis": Seeded(
        "fp4deploy/ptq/matrix.py",
        "for size in reversed(_numbers(layer.padding, len(kernel)))",
        "for size in _numbers(layer.padding, len(kernel))",
        PTQ,
    ),
    "interop: the factor of a Gemm's bias is left out": Seeded(
        "fp4deploy/interop/onnx_layers.py", "None if bias is None else beta * bias)", "bias)", ONNX
    ),
    "interop: every BatchNormalization has the usual epsilon": Seeded(
        "fp4deploy/interop/onnx_layers.py",
        'AnyBatchNorm(len(weight), float(node.attributes.get("epsilon", 1e-5)))',
        "AnyBatchNorm(len(weight))",
        ONNX,
    ),
    "interop: the range of codes is that of their upper end": Seeded(
        "fp4deploy/interop/placement.py",
        "largest = max(abs(low), abs(high)) * scale",
        "largest = abs(high) * scale",
        PLACED,
    ),
    "packed: one input may have a free batch alone": Seeded(
        "fp4deploy/packed/check.py", "if (0 in each.free) != (0 in graph.inputs[0].free):", "if False:", CHECKED
    ),
    "packed: output padding may be the stride": Seeded(
        "fp4deploy/packed/check.py", "beyond = any(a >= max(b, c)", "beyond = any(a > max(b, c)", CHECKED
    ),
    "packed: memory is that of one image": Seeded(
        "fp4deploy/packed/memory.py",
        "given = input_shapes(graph, size, batch)",
        "given = input_shapes(graph, size)",
        MEMORY,
    ),
    "verify: one other size is enough": Seeded(
        "fp4deploy/export/verify/sizes.py", "if len(found) == 2:", "if len(found) == 1:", VERIFIED
    ),
    "verify: what one place loses is averaged over places": Seeded(
        "fp4deploy/export/verify/agreement.py", ".float().mean(1).max())", ".float().mean(1).mean())", VERIFIED
    ),
    "verify: only the last batch loses a place": Seeded(
        "fp4deploy/export/verify/agreement.py", "lost=max(before.lost, found.lost)", "lost=found.lost", VERIFIED
    ),
    "verify: a black image is not tried": Seeded(
        "fp4deploy/export/verify/flat.py",
        'for name in ("a black", "a white", "a constant"):',
        'for name in ("a white", "a constant"):',
        VERIFIED,
    ),
    "verify: a node's error is that of the last batch": Seeded(
        "fp4deploy/export/verify/packed.py",
        "nodes |= {name: largest(nodes.get(name, 0.0), error) for",
        "nodes |= {name: error for",
        PACKED,
    ),
    "report: runs of other classes are subtracted": Seeded(
        "fp4deploy/report/comparison.py",
        "return one.task == other.task and one.class_names == other.class_names",
        "return one.task == other.task",
        COMPARED,
    ),
    "report: sizes are swapped": Seeded(
        "fp4deploy/report/collect.py", '(by["nvfp4"], by["fp16"])', '(by["fp16"], by["nvfp4"])', REPORTED
    ),
    "report: the last score is the first": Seeded(
        "fp4deploy/report/run_folder.py",
        "last = scored[-1] if scored else None",
        "last = scored[0] if scored else None",
        COMPARED,
    ),
    "report: a file of the same size has not changed": Seeded(
        "fp4deploy/report/run_folder.py",
        "if size == entry.size_bytes and file_digest(path) == entry.sha256:",
        "if size == entry.size_bytes:",
        f"{REPORTED} tests/report/test_compare.py",
    ),
    "bench: images a second are batches a second": Seeded(
        "fp4deploy/bench/latency.py", "return 1000 * self.batch / self.p50", "return 1000 / self.p50", BENCHED
    ),
    "bench: an FP16 model is the baseline before its control": Seeded(
        "fp4deploy/bench/tables.py",
        'BASELINES = ("fp16_control", "fp16")',
        'BASELINES = ("fp16", "fp16_control")',
        BENCHED,
    ),
    "bench: a change is that of the source": Seeded(
        "fp4deploy/bench/change.py",
        "scores[0], scores[1], unit)",
        "scores[1], scores[0], unit)",
        "tests/cli/test_quantize_command.py tests/bench/test_evaluate.py",
    ),
    "predict: an overlap of 0 is the default": Seeded(
        "fp4deploy/predict/predictor.py",
        "min(card.height, card.width) // 4 if overlap is None else overlap",
        "overlap or min(card.height, card.width) // 4",
        PREDICTED,
    ),
    "predict: stuff is erased from a mask of objects": Seeded(
        "fp4deploy/predict/predictor.py",
        "things = ~np.isin(mask, (0, *self.card.head.stuff))",
        "things = mask != 0",
        PREDICTED,
    ),
    "predict: the share of a class is a sum over frames": Seeded(
        "fp4deploy/predict/video.py", 'entry["share"] /= frames', 'entry["share"] /= 1', PREDICTED
    ),
    "predict: millilitres are cubic millimetres": Seeded(
        "fp4deploy/predict/volumes.py",
        "np.prod(grid.spacing) / 1000)",
        "np.prod(grid.spacing))",
        "tests/predict/test_volumes.py",
    ),
    "predict: a volume is resampled as if it had the model's spacing": Seeded(
        "fp4deploy/predict/volumes.py",
        "resample_image(normalised(voxels, intensity), size, grid.spacing)",
        "resample_image(normalised(voxels, intensity), size, card.volume.spacing)",
        "tests/predict/test_volumes.py",
    ),
    "predict: an object is of the image before": Seeded(
        "fp4deploy/predict/write.py", '"image_id": number, **each})', '"image_id": number - 1, **each})', PREDICTED
    ),
    "predict: the mean share is over the images that show the class": Seeded(
        "fp4deploy/predict/write.py",
        "float(np.sum(values) / len(measured))",
        "float(np.sum(values) / len(values))",
        PREDICTED,
    ),
    "serving: a batch is larger than the engine takes": Seeded(
        "fp4deploy/serving/repository.py", "min(most, ledger.batch[2])", "most", SERVED
    ),
    "serving: an FP16 engine is sent FP32 images": Seeded(
        "fp4deploy/serving/repository.py",
        '"std": card.std, "half": served.half}',
        '"std": card.std, "half": False}',
        SERVED,
    ),
}

SECOND: dict[str, Seeded] = {
    "metrics: every image of a class that was predicted is right": Seeded(
        "fp4deploy/metrics.py",
        "right = torch.bincount(target[prediction == target]",
        "right = torch.bincount(prediction",
        METRICS,
    ),
    "gate: the fastest is by its slowest runs": Seeded(
        "fp4deploy/bench/gate/decision.py",
        "entry.latency_ms.p50 if entry.latency_ms",
        "entry.latency_ms.p99 if entry.latency_ms",
        GATE,
    ),
    "detection: a box near an object of another class is a wrong class": Seeded(
        "fp4deploy/detection/errors.py",
        '    if of_foreign >= FOREGROUND:\n        return "classification", foreign',
        '    if of_foreign >= BACKGROUND:\n        return "classification", foreign',
        BOXES,
    ),
    "instances: AP of medium and large objects are exchanged": Seeded(
        "fp4deploy/instances/scores.py",
        "ap_medium=by_size[2],\n        ap_large=by_size[3],",
        "ap_medium=by_size[3],\n        ap_large=by_size[2],",
        f"{OBJECTS} {BOXES}",
    ),
    "evidence: the background has a Dice, too": Seeded(
        "fp4deploy/bench/evidence.py", "known[:, 0] = 0", "known[:, 0] *= 1", EVIDENCE
    ),
    "data: the edge of a tile has no weight": Seeded(
        "fp4deploy/data/tiles.py",
        "np.minimum(place, place[::-1]) + 1, max(1, overlap))",
        "np.minimum(place, place[::-1]), max(1, overlap))",
        TILES,
    ),
    "data: windows of a mosaic exchange their corner": Seeded(
        "fp4deploy/data/augmentation/letterbox.py",
        "np.array([0, left, top, left, top], np.float32)",
        "np.array([0, top, left, top, left], np.float32)",
        AUGMENTED,
    ),
    "data: the spacing that was asked for is not taken": Seeded(
        "fp4deploy/data/volumes/plan.py", "target = spacing or _spacing(", "target = _spacing(", VOLUMES
    ),
    "train: weights of the box and the centre are exchanged": Seeded(
        "fp4deploy/train/losses/boxes.py",
        "parts = of_class / count.clamp(min=1), of_box / mass.clamp(min=1), of_centre / count.clamp(min=1)",
        "parts = of_class / count.clamp(min=1), of_centre / count.clamp(min=1), of_box / mass.clamp(min=1)",
        BOX_LOSS,
    ),
    "ptq: every layer is chosen": Seeded(
        "fp4deploy/ptq/quantize.py",
        "prepare(model, chosen.recipe, include, exclude,",
        "prepare(model, chosen.recipe, None, exclude,",
        PTQ,
    ),
    "interop: operands of two formats are taken over": Seeded(
        "fp4deploy/interop/modelopt.py",
        "    if weight.format != x.format:",
        "    if False:",
        "tests/interop/test_modelopt.py tests/cli/test_import_modelopt.py",
    ),
    "packed: scales of activations take no memory": Seeded(
        "fp4deploy/packed/memory.py", "blocks * (NVFP4_BLOCK // 2 + 1)", "blocks * (NVFP4_BLOCK // 2)", MEMORY
    ),
    "packed: two outputs may have one name": Seeded(
        "fp4deploy/packed/check.py",
        '    if len(set(names)) != len(names) or ("" in names and len(names) > 1):\n        raise InputError(f"Outputs',
        '    if False:\n        raise InputError(f"Outputs',
        CHECKED,
    ),
    "verify: half of the boxes may differ": Seeded(
        "fp4deploy/export/verify/outputs.py",
        "if unmatched > 0.01 * count:",
        "if unmatched > 0.5 * count:",
        "tests/detection/test_box_layouts.py tests/export/verify",
    ),
    "verify: a hundred blocks of a layer may differ": Seeded(
        "fp4deploy/export/verify/outputs.py", "and found.blocks[layer] > 1:", "and found.blocks[layer] > 100:", VERIFIED
    ),
    "report: changes are those to the last run": Seeded(
        "fp4deploy/report/comparison.py",
        "_gap(value, values[0]) for value in values",
        "_gap(value, values[-1]) for value in values",
        COMPARED,
    ),
    "bench: one slow run makes times unsteady": Seeded(
        "fp4deploy/bench/tables.py", "times.p90 > UNSTEADY * times.p50", "times.p99 > UNSTEADY * times.p50", BENCHED
    ),
    "bench: nothing warms up": Seeded(
        "fp4deploy/bench/latency.py",
        "    for _ in range(warmup):\n        call()\n    times: list",
        "    for _ in range(0):\n        call()\n    times: list",
        BENCHED,
    ),
    "predict: the last object is erased": Seeded(
        "fp4deploy/predict/predictor.py",
        "np.where(found.ids <= kept, found.ids, 0)",
        "np.where(found.ids < kept, found.ids, 0)",
        PREDICTED,
    ),
    "serving: a server resizes to width times height": Seeded(
        "fp4deploy/serving/repository.py",
        'given = {"height": card.height, "width": card.width,',
        'given = {"height": card.width, "width": card.height,',
        SERVED,
    ),
}
SETS = {"FIRST": FIRST, "SECOND": SECOND, "THIRD": THIRD, "FOURTH": FOURTH}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults; all by default")
    parser.add_argument("--set", choices=SETS, default="FIRST", help="which list")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, each in a copy of the checkout")
    chosen = parser.parse_args()
    return 1 if run(chosen.names, chosen.jobs, SETS[chosen.set]) else 0


if __name__ == "__main__":
    sys.exit(main())
