"""THIRD: by a third hand, of all packages; tests for whole families followed."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "data: runs of a compressed RLE are differences from the third on": Seeded(
        "fp4deploy/data/coco/regions.py",
        "runs[2::2] = np.cumsum(runs[2::2])",
        "runs[::2] = np.cumsum(runs[::2])",
    ),
    "data: a YOLO box is given by its corner": Seeded(
        "fp4deploy/data/importing/yolo.py",
        "box = [(x - across / 2) * width,",
        "box = [x * width,",
    ),
    "data: the seed of an import divides nothing": Seeded(
        "fp4deploy/data/importing/splits.py",
        'f"{seed}/{name}".encode()',
        "name.encode()",
    ),
    "data: padding of a volume is brightened": Seeded(
        "fp4deploy/data/augmentation/volumes.py",
        "torch.from_numpy(offset).view(each) * known",
        "torch.from_numpy(offset).view(each)",
    ),
    "train: validated in training mode": Seeded(
        "fp4deploy/train/loop.py",
        "        self.model.eval()\n        with (",
        "        with (",
    ),
    "train: an epoch ends a row of skipped steps": Seeded(
        "fp4deploy/train/logging/running_statistics.py",
        "EpochStatistics(consecutive=self.consecutive, running=",
        "EpochStatistics(running=",
        "tests/train/test_training.py tests/train/test_precision.py",
        nearby=True,
    ),
    "train: void pixels are smoothed": Seeded(
        "fp4deploy/train/losses/segmentation.py",
        "(log_probability.mean(1) * counted).sum()",
        "log_probability.mean(1).sum()",
    ),
    "train: a teacher drops out": Seeded(
        "fp4deploy/train/losses/auxiliary.py",
        "place(self.teacher, device, layout).eval().requires_grad_(False)",
        "place(self.teacher, device, layout).requires_grad_(False)",
    ),
    "train: minutes between two states are seconds": Seeded(
        "fp4deploy/train/state.py",
        "self._most, self._cost, self._saved_at = 60 * minutes,",
        "self._most, self._cost, self._saved_at = minutes,",
    ),
    "qat: negative values have no range": Seeded(
        "fp4deploy/qat/ranges.py",
        "size = x.detach().abs()",
        "size = x.detach()",
    ),
    "qat: a weight moves from where its window began": Seeded(
        "fp4deploy/qat/oscillation.py",
        "                window.weight, window.quantized = weight.clone(), quantized\n",
        "",
    ),
    "qat: a calibration forgets earlier batches": Seeded(
        "fp4deploy/qat/layers.py",
        "decay = 1.0 if self.observing else self.recipe.amax_decay",
        "decay = self.recipe.amax_decay",
    ),
    "qat: a percentile is that of positive values": Seeded(
        "fp4deploy/qat/calibration.py",
        "// SAMPLE)].float().abs()",
        "// SAMPLE)].float()",
        "tests/qat/test_prepare.py tests/qat/test_qat.py",
        nearby=True,
    ),
    "quantize: H is that of inputs before quantisation": Seeded(
        "fp4deploy/ptq/quantize.py",
        "input_rows(layer, layer.quantized_input(inputs[0]), generator)",
        "input_rows(layer, inputs[0], generator)",
    ),
    "quantize: errors of a group of columns are dropped": Seeded(
        "fp4deploy/ptq/gptq.py",
        "        left[:, end:] -= errors @ upper[start:end, end:]\n",
        "",
    ),
    "quantize: roundings are learned with one seed": Seeded(
        "fp4deploy/ptq/reconstruct.py",
        "random = torch.Generator().manual_seed(seed)",
        "random = torch.Generator().manual_seed(0)",
        "tests/test_seeds.py",
        nearby=True,
    ),
    "quantize: the last batch chooses the range": Seeded(
        "fp4deploy/ptq/activations.py",
        "errors[name][place] += (quantized",
        "errors[name][place] = (quantized",
    ),
    "export: epsilon of a BatchNorm is added to the deviation": Seeded(
        "fp4deploy/export/packing/norms.py",
        '(variance + node.attributes["eps"]).sqrt()',
        '(variance.sqrt() + node.attributes["eps"])',
    ),
    "export: block scales are tiled over a row": Seeded(
        "fp4deploy/export/lowering/fp8.py",
        "np.repeat(scales * global_scale, NVFP4_BLOCK, axis=1)",
        "np.tile(scales * global_scale, (1, NVFP4_BLOCK))",
    ),
    "export: the mean of bytes is that of shares": Seeded(
        "fp4deploy/export/lowering/interface.py",
        '"centred", 255 * mean)',
        '"centred", mean)',
    ),
    "export: a difference of sizes is never negative": Seeded(
        "fp4deploy/export/onnx/floor.py",
        '("Add", "Div", "Max", "Min", "Mul")',
        '("Add", "Div", "Max", "Min", "Mul", "Sub")',
        "tests/export/onnx tests/export/verify/test_sizes.py",
        nearby=True,
    ),
    "verify: a white image is 1 after normalisation": Seeded(
        "fp4deploy/export/verify/flat.py",
        'colour = (level - _per_channel(card, "mean", level, 0.0)) / _per_channel(card, "std", level, 1.0)',
        "colour = level",
    ),
    "verify: values of a plain network may differ at other sizes": Seeded(
        "fp4deploy/export/verify/sizes.py",
        "elif not quantized and found.largest > CLOSE * largest:",
        "elif quantized and found.largest > CLOSE * largest:",
    ),
    "verify: a file is made of the first of its sources": Seeded(
        "fp4deploy/provenance.py",
        "for source in link.inputs:\n        before",
        "for source in link.inputs[:1]:\n        before",
        "tests/cli/test_chain_of_files.py",
        nearby=True,
    ),
    "bench: p99 is p95": Seeded(
        "fp4deploy/bench/latency.py",
        "for q in (0.5, 0.9, 0.99))",
        "for q in (0.5, 0.9, 0.95))",
    ),
    "bench: the images of a change are those of the last batch": Seeded(
        "fp4deploy/bench/change.py",
        "self.images += len(images)",
        "self.images = len(images)",
    ),
    "bench: data is that of the latest run": Seeded(
        "fp4deploy/bench/locate.py",
        "run = run_of(path) or latest_run()",
        "run = latest_run()",
    ),
    "predict: classes are enlarged from the corners of pixels": Seeded(
        "fp4deploy/plugins/frames/class_map.py",
        "at = ((torch.arange(target, dtype=torch.float32) + 0.5) * (source / target) - 0.5).clamp(0, source - 1)",
        "at = (torch.arange(target, dtype=torch.float32) * (source / target)).clamp(0, source - 1)",
    ),
    "predict: a network reads the blue of a video as red": Seeded(
        "fp4deploy/predict/video.py",
        "yield np.ascontiguousarray(frame[..., ::-1])",
        "yield np.ascontiguousarray(frame)",
    ),
    "packed: tensors are not compared with their digests": Seeded(
        "fp4deploy/packed/file.py",
        " or digest(tensor) != info.sha256:",
        ":",
    ),
    "packed: outputs take no memory behind their node": Seeded(
        "fp4deploy/packed/memory.py",
        "return reads | {each.activation: len(graph.nodes) for each in graph.outputs}",
        "return reads",
    ),
    "packed: a program of another type is taken from the cache": Seeded(
        "fp4deploy/packed/program_cache.py",
        "str(places), str(dtype), str(device)",
        "str(places), str(device)",
    ),
    "fusion: a factor is the quotient of the sizes": Seeded(
        "fp4deploy/fusion/resize.py",
        "[(int(source * factor), 1 / factor) for source",
        "[(int(source * factor), source / int(source * factor)) for source",
        "tests/fusion",
        nearby=True,
    ),
    "graph: random numbers are folded": Seeded(
        "fp4deploy/graph/folding.py",
        "return not called._schema.is_mutable and torch.Tag.nondeterministic_seeded not in called.tags",
        "return not called._schema.is_mutable",
    ),
    "plugins: a frozen weight thaws on another device": Seeded(
        "fp4deploy/plugins/gemm/weight_cache.py",
        "bias.to(device), frozen=self.frozen)",
        "bias.to(device))",
    ),
    "plugins: compiled code is deleted after hours": Seeded(
        "fp4deploy/plugins/runtime/cache.py",
        "MAX_UNUSED_DAYS * 86400",
        "MAX_UNUSED_DAYS * 3600",
    ),
    "native: the last launch says how much shared memory": Seeded(
        "fp4deploy/native/bundle.py",
        "most[row[0]] = max(most[row[0]], row[5])",
        "most[row[0]] = row[5]",
    ),
    "interop: patches are of the first cases": Seeded(
        "fp4deploy/interop/nnunet/cases.py",
        "[values[at] for at in evenly(len(values), count)]",
        "values[:count]",
    ),
    "search: what was measured of another checkpoint is taken": Seeded(
        "fp4deploy/experiments/search/study.py",
        ' or lines[0].get("identity") != identity:',
        ":",
    ),
    "sweep: an interval of 95 % leaves 5 % on each side": Seeded(
        "fp4deploy/experiments/sweep/results.py",
        "t.ppf((1 + level) / 2,",
        "t.ppf(level,",
    ),
    "report: a bench from before the report is the later one": Seeded(
        "fp4deploy/report/run_folder.py",
        'if later.at >= (kept.created or ""):',
        'if later.at <= (kept.created or ""):',
    ),
    "cli: a drop beyond the limit ends with 0": Seeded(
        "cli/commands/stages/bench.py",
        "        require_passed(decisions)\n",
        "",
        "tests/cli/test_quantize_command.py",
        nearby=True,
    ),
    "cli: the seed of quantize goes nowhere": Seeded(
        "cli/commands/stages/quantize.py",
        '"iterations": iterations, "seed": seed}',
        '"iterations": iterations}',
        "tests/cli/test_main.py",
        nearby=True,
    ),
}
