"""Faults of a third hand, for `unseen`: THIRD and, after tests for the kinds of THIRD that survived, FOURTH."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

COCO = "tests/data/test_coco.py tests/data/test_written_otherwise.py tests/instances"
IMPORTED = "tests/data/test_importing.py tests/data/test_label_studio.py"
WINDOWS = "tests/data/test_volume_windows.py tests/data/test_volumes.py"
TRAINED = "tests/train/test_training.py tests/train/test_unscored.py tests/train/test_interruption.py"
LOSSES = "tests/train/test_losses.py tests/train/test_auxiliary_losses.py"
RANGES = "tests/qat/test_ranges.py"
OSCILLATION = "tests/qat/test_oscillation.py"
TIMING = "tests/qat/test_amax_timing.py tests/qat/test_prepare.py tests/qat/test_qat.py"
PTQ = "tests/ptq/test_quantize.py tests/ptq/test_grid.py tests/ptq/test_rest.py"
PACKED_OPERATORS = "tests/export/test_packed_operators.py tests/export/test_packed.py"
FP8 = "tests/export/lowering/test_lowering_fp8.py tests/export/test_fp8_export.py"
VERIFIED = "tests/export/verify"
BENCHED = "tests/bench/test_latency.py tests/bench/test_artifact.py tests/bench/test_evaluate.py"
PREDICTED = "tests/predict/test_predictor.py tests/predict/test_predict_command.py tests/predict/test_tiles.py"
PACKED_FILES = "tests/packed/test_file.py tests/packed/test_packed_check.py tests/packed/test_mutations.py"
WEIGHTS = "tests/plugins/gemm/test_linear.py tests/plugins/gemm/test_weight_file.py tests/plugins/gemm/test_conv.py"
SEARCHED = "tests/experiments/test_search.py"
REPORTED = "tests/report/test_report.py tests/report/test_compare.py tests/report/test_pages.py"
QUANTIZE_COMMAND = "tests/cli/test_quantize_command.py tests/cli/test_quantize_state_dict.py"

THIRD: dict[str, Seeded] = {
    "data: runs of a compressed RLE are differences from the third on": Seeded(
        "fp4deploy/data/coco/regions.py",
        "runs[2::2] = np.cumsum(runs[2::2])",
        "runs[::2] = np.cumsum(runs[::2])",
        COCO,
    ),
    "data: a YOLO box is given by its corner": Seeded(
        "fp4deploy/data/importing/yolo.py", "box = [(x - across / 2) * width,", "box = [x * width,", IMPORTED
    ),
    "data: the seed of an import divides nothing": Seeded(
        "fp4deploy/data/importing/splits.py",
        'f"{seed}/{name}".encode()',
        "name.encode()",
        "tests/test_seeds.py",
    ),
    "data: padding of a volume is brightened": Seeded(
        "fp4deploy/data/augmentation/volumes.py",
        "torch.from_numpy(offset).view(each) * known",
        "torch.from_numpy(offset).view(each)",
        WINDOWS,
    ),
    "train: validated in training mode": Seeded(
        "fp4deploy/train/loop.py", "        self.model.eval()\n        with (", "        with (", TRAINED
    ),
    "train: an epoch ends a row of skipped steps": Seeded(
        "fp4deploy/train/logging/running_statistics.py",
        "EpochStatistics(consecutive=self.consecutive, running=",
        "EpochStatistics(running=",
        "tests/train/test_training.py tests/train/test_precision.py tests/train/test_interruption.py",
    ),
    "train: void pixels are smoothed": Seeded(
        "fp4deploy/train/losses/segmentation.py",
        "(log_probability.mean(1) * counted).sum()",
        "log_probability.mean(1).sum()",
        LOSSES,
    ),
    "train: a teacher drops out": Seeded(
        "fp4deploy/train/losses/auxiliary.py",
        "memory_format=layout).eval().requires_grad_(False)",
        "memory_format=layout).requires_grad_(False)",
        f"{LOSSES} tests/train/test_box_distillation.py",
    ),
    "train: minutes between two states are seconds": Seeded(
        "fp4deploy/train/state.py",
        "self._most, self._cost, self._saved_at = 60 * minutes,",
        "self._most, self._cost, self._saved_at = minutes,",
        TRAINED,
    ),
    "qat: negative values have no range": Seeded(
        "fp4deploy/qat/ranges.py", "size = x.detach().abs()", "size = x.detach()", RANGES
    ),
    "qat: a weight moves from where its window began": Seeded(
        "fp4deploy/qat/oscillation.py",
        "                window.weight, window.quantized = weight.clone(), quantized\n",
        "",
        OSCILLATION,
    ),
    "qat: a calibration forgets earlier batches": Seeded(
        "fp4deploy/qat/layers.py",
        "decay = 1.0 if self.observing else self.recipe.amax_decay",
        "decay = self.recipe.amax_decay",
        TIMING,
    ),
    "qat: a percentile is that of positive values": Seeded(
        "fp4deploy/qat/calibration.py",
        "// SAMPLE)].float().abs()",
        "// SAMPLE)].float()",
        "tests/qat/test_learned.py tests/qat/test_prepare.py tests/qat/test_qat.py",
    ),
    "quantize: H is that of inputs before quantisation": Seeded(
        "fp4deploy/ptq/quantize.py",
        "input_rows(layer, layer.quantized_input(inputs[0]), generator)",
        "input_rows(layer, inputs[0], generator)",
        "tests/test_batches.py",
    ),
    "quantize: errors of a group of columns are dropped": Seeded(
        "fp4deploy/ptq/gptq.py", "        left[:, end:] -= errors @ upper[start:end, end:]\n", "", PTQ
    ),
    "quantize: roundings are learned with one seed": Seeded(
        "fp4deploy/ptq/reconstruct.py",
        "random = torch.Generator().manual_seed(seed)",
        "random = torch.Generator().manual_seed(0)",
        "tests/test_seeds.py",
    ),
    "quantize: the last batch chooses the range": Seeded(
        "fp4deploy/ptq/activations.py",
        "errors[name][place] += (quantized",
        "errors[name][place] = (quantized",
        "tests/test_batches.py",
    ),
    "export: epsilon of a BatchNorm is added to the deviation": Seeded(
        "fp4deploy/export/packing/norms.py",
        '(variance + node.attributes["eps"]).sqrt()',
        '(variance.sqrt() + node.attributes["eps"])',
        "tests/export/test_attributes.py",
    ),
    "export: block scales are tiled over a row": Seeded(
        "fp4deploy/export/lowering/fp8.py",
        "np.repeat(scales * global_scale, NVFP4_BLOCK, axis=1)",
        "np.tile(scales * global_scale, (1, NVFP4_BLOCK))",
        FP8,
    ),
    "export: the mean of bytes is that of shares": Seeded(
        "fp4deploy/export/lowering/interface.py",
        '"centred", 255 * mean)',
        '"centred", mean)',
        "tests/export/lowering/test_interface.py",
    ),
    "export: a difference of sizes is never negative": Seeded(
        "fp4deploy/export/onnx/floor.py",
        '("Add", "Div", "Max", "Min", "Mul")',
        '("Add", "Div", "Max", "Min", "Mul", "Sub")',
        "tests/export/onnx tests/export/verify/test_sizes.py",
    ),
    "verify: a white image is 1 after normalisation": Seeded(
        "fp4deploy/export/verify/flat.py",
        'colour = (level - _per_channel(card, "mean", level, 0.0)) / _per_channel(card, "std", level, 1.0)',
        "colour = level",
        "tests/export/test_wide_numbers.py",
    ),
    "verify: values of a plain network may differ at other sizes": Seeded(
        "fp4deploy/export/verify/sizes.py",
        "elif not quantized and found.largest > CLOSE * largest:",
        "elif quantized and found.largest > CLOSE * largest:",
        "tests/export/verify/test_sizes.py",
    ),
    "verify: a file is made of the first of its sources": Seeded(
        "fp4deploy/provenance.py",
        "for source in link.inputs:\n        before",
        "for source in link.inputs[:1]:\n        before",
        "tests/test_provenance.py tests/cli/test_chain_of_files.py",
    ),
    "bench: p99 is p95": Seeded(
        "fp4deploy/bench/latency.py", "for q in (0.5, 0.9, 0.99))", "for q in (0.5, 0.9, 0.95))", BENCHED
    ),
    "bench: the images of a change are those of the last batch": Seeded(
        "fp4deploy/bench/change.py",
        "self.images += len(images)",
        "self.images = len(images)",
        f"{QUANTIZE_COMMAND} {BENCHED}",
    ),
    "bench: data is that of the latest run": Seeded(
        "fp4deploy/bench/locate.py",
        "run = run_of(path) or latest_run()",
        "run = latest_run()",
        "tests/bench/test_locate.py tests/bench/test_artifact.py",
    ),
    "predict: classes are enlarged from the corners of pixels": Seeded(
        "fp4deploy/predict/predictor.py",
        "source = ((place + 0.5) * (rows / height) - 0.5).clamp(0, rows - 1)",
        "source = (place * (rows / height)).clamp(0, rows - 1)",
        PREDICTED,
    ),
    "predict: a network reads the blue of a video as red": Seeded(
        "fp4deploy/predict/video.py",
        "yield np.ascontiguousarray(frame[..., ::-1])",
        "yield np.ascontiguousarray(frame)",
        f"{PREDICTED} tests/predict/test_timing.py",
    ),
    "packed: tensors are not compared with their digests": Seeded(
        "fp4deploy/packed/file.py", " or digest(tensor) != info.sha256:", ":", PACKED_FILES
    ),
    "packed: outputs take no memory behind their node": Seeded(
        "fp4deploy/packed/memory.py",
        "return reads | {each.activation: len(graph.nodes) for each in graph.outputs}",
        "return reads",
        "tests/packed/test_memory.py",
    ),
    "packed: a program of another type is taken from the cache": Seeded(
        "fp4deploy/packed/program_cache.py",
        "str(places), str(dtype), str(device)",
        "str(places), str(device)",
        "tests/packed/test_program.py",
    ),
    "fusion: a factor is the quotient of the sizes": Seeded(
        "fp4deploy/fusion/resize.py",
        "[(int(source * factor), 1 / factor) for source",
        "[(int(source * factor), source / int(source * factor)) for source",
        "tests/fusion",
    ),
    "graph: random numbers are folded": Seeded(
        "fp4deploy/graph/folding.py",
        "return not called._schema.is_mutable and torch.Tag.nondeterministic_seeded not in called.tags",
        "return not called._schema.is_mutable",
        "tests/graph/test_folding.py tests/graph/test_randomness.py",
    ),
    "plugins: a frozen weight thaws on another device": Seeded(
        "fp4deploy/plugins/gemm/weight_cache.py", "bias.to(device), frozen=self.frozen)", "bias.to(device))", WEIGHTS
    ),
    "plugins: compiled code is deleted after hours": Seeded(
        "fp4deploy/plugins/runtime/cache.py",
        "MAX_UNUSED_DAYS * 86400",
        "MAX_UNUSED_DAYS * 3600",
        "tests/plugins/runtime/test_cache.py",
    ),
    "native: the last launch says how much shared memory": Seeded(
        "fp4deploy/native/bundle.py",
        "most[row[0]] = max(most[row[0]], row[5])",
        "most[row[0]] = row[5]",
        "tests/native/test_plans.py",
    ),
    "interop: patches are of the first cases": Seeded(
        "fp4deploy/interop/nnunet/cases.py",
        "[values[at] for at in evenly(len(values), count)]",
        "values[:count]",
        "tests/interop/test_nnunet.py tests/interop/test_nnunet_cases.py",
    ),
    "search: what was measured of another checkpoint is taken": Seeded(
        "fp4deploy/experiments/search/study.py", ' or lines[0].get("identity") != identity:', ":", SEARCHED
    ),
    "sweep: an interval of 95 % leaves 5 % on each side": Seeded(
        "fp4deploy/experiments/sweep/results.py",
        "t.ppf((1 + level) / 2,",
        "t.ppf(level,",
        "tests/experiments/test_sweep.py",
    ),
    "report: a bench from before the report is the later one": Seeded(
        "fp4deploy/report/run_folder.py",
        'if later.at >= (kept.created or ""):',
        'if later.at <= (kept.created or ""):',
        REPORTED,
    ),
    "cli: a drop beyond the limit ends with 0": Seeded(
        "cli/commands/stages/bench.py",
        "        require_passed(decisions)\n",
        "",
        "tests/cli/test_quantize_command.py",
    ),
    "cli: the seed of quantize goes nowhere": Seeded(
        "cli/commands/stages/quantize.py",
        '"iterations": iterations, "seed": seed}',
        '"iterations": iterations}',
        "tests/cli/test_main.py",
    ),
}

FOURTH: dict[str, Seeded] = {
    "data: values of a mask beyond 255 are counted from 0 again": Seeded(
        "fp4deploy/data/images.py",
        "else np.clip(values, 0, 255).astype(np.uint8)",
        "else values.astype(np.uint8)",
        "tests/data/test_masks.py tests/data/test_written_otherwise.py tests/data/test_coco.py",
    ),
    "data: counts of other classes are taken from the cache": Seeded(
        "fp4deploy/data/inspection/balance.py",
        '{"identity": identity, "classes": list(dataset.class_names), "length"',
        '{"identity": identity, "length"',
        "tests/data/test_balance.py",
    ),
    "train: centres are learned where pixels are void": Seeded(
        "fp4deploy/train/losses/centres.py",
        "- heatmap).square() * labelled).sum()",
        "- heatmap).square()).sum()",
        "tests/train/test_instance_losses.py tests/train/test_instance_combinations.py",
    ),
    "train: the gradient of a sum over processes is their mean": Seeded(
        "fp4deploy/train/distributed.py",
        "return total + dist.get_world_size() * (sums - sums.detach())",
        "return total + (sums - sums.detach())",
        "tests/train/test_losses.py",
    ),
    "qat: transposed experts are blocked along their outputs": Seeded(
        "fp4deploy/qat/experts.py",
        "axes = (1, 0) if contracted(self) == 1 else (0, 1)",
        "axes = (0, 1)",
        "tests/qat/test_experts.py",
    ),
    "qat: experts that are switched off are quantised where they are held": Seeded(
        "fp4deploy/qat/experts.py",
        'if each.quantizing and "held" not in vars(each)]',
        'if "held" not in vars(each)]',
        "tests/qat/test_experts.py",
    ),
    "export: an activation has as many blocks as the weight outputs": Seeded(
        "fp4deploy/export/lowering/scales.py",
        "blocks = layer.shape[0] // NVFP4_BLOCK",
        "blocks = layer.out_channels // NVFP4_BLOCK",
        "tests/export/lowering/test_lowering_scales.py",
    ),
    "export: weights are stored as the smallest constant is": Seeded(
        "fp4deploy/export/ledger/actual.py",
        "return max(weights, key=",
        "return min(weights, key=",
        "tests/export/ledger",
    ),
    "native: a buffer is overwritten by the launch that reads it": Seeded(
        "fp4deploy/native/arena.py",
        "return self.first <= other.last and other.first <= self.last",
        "return self.first < other.last and other.first < self.last",
        "tests/native/test_plans.py",
    ),
    "interop: decibels are those of amplitudes": Seeded(
        "fp4deploy/interop/quantize_onnx.py",
        "10 * math.log10(",
        "20 * math.log10(",
        "tests/interop/test_quantize_onnx.py",
    ),
    "interop: a file is calibrated on the first images": Seeded(
        "fp4deploy/interop/quantize_onnx.py",
        "[transform(dataset.load(at))[0] for at in evenly(len(dataset), count)]",
        "[transform(dataset.load(at))[0] for at in range(min(count, len(dataset)))]",
        "tests/interop/test_quantize_onnx.py tests/cli/test_quantize_onnx.py",
    ),
    "sweep: this process sees one GPU afterwards": Seeded(
        "fp4deploy/experiments/sweep/pool.py",
        "        elif seen:\n            del os.environ[VISIBLE]\n",
        "",
        "tests/experiments/test_sweep_workers.py",
    ),
    "files: what is renamed may not be on the disk": Seeded(
        "fp4deploy/system/files.py",
        "        yield temporary\n        _synchronise(temporary)\n        if",
        "        yield temporary\n        if",
        "tests/system/test_files.py",
    ),
    "report: the best images are called the most wrong": Seeded(
        "fp4deploy/report/figures/lost.py",
        "np.argsort(right, kind",
        "np.argsort(-right, kind",
        "tests/report/test_lost.py",
    ),
    "plugins: a convolution pads by its dilation": Seeded(
        "fp4deploy/plugins/gemm/conv.py",
        '_one(padding, "padding"), _one(dilation, "dilation")',
        '_one(dilation, "dilation"), _one(padding, "padding")',
        "tests/plugins/gemm/test_conv.py",
    ),
    "graph: a power of a size has a factor more": Seeded(
        "fp4deploy/graph/sizes.py",
        "for _ in range(int(expression.args[1]) - 1):",
        "for _ in range(int(expression.args[1])):",
        "tests/graph/test_sizes.py",
    ),
    "bench: a file is as wide as --like says it is high": Seeded(
        "fp4deploy/bench/runtimes/like.py",
        "given = (self.height, self.width)",
        "given = (self.width, self.height)",
        "tests/bench/test_like.py",
    ),
    "predict: the background is a category of objects": Seeded(
        "fp4deploy/predict/write.py",
        "for number, name in enumerate(predictor.class_names) if number]",
        "for number, name in enumerate(predictor.class_names)]",
        "tests/predict/test_predict_command.py tests/predict/test_predictor.py",
    ),
    "packed: a fixed batch takes the memory of another": Seeded(
        "fp4deploy/packed/memory.py",
        "(batch if 0 in each.free else each.shape[0], *",
        "(batch, *",
        "tests/packed/test_memory.py",
    ),
    "verify: lists of images are digested by their size": Seeded(
        "fp4deploy/provenance.py",
        "whole = regular and file.suffix in CONTENT",
        'whole = regular and file.suffix == ".json"',
        "tests/test_provenance.py",
    ),
    "cli: a full disk behind stdout is a reader that has gone": Seeded(
        "cli/process.py",
        "self.failure = OSError(errno.EPIPE, error.strerror) if closed else error",
        "self.failure = OSError(errno.EPIPE, error.strerror)",
        "tests/cli/test_lifetime.py -k full",
    ),
}
