"""EIGHTH: a sixth hand, over all rooms, in files that the lists before it have little or nothing of."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "data: a cache that does not fit is kept all the same": Seeded(
        "fp4deploy/data/cache.py", "size / len(samples) * len(dataset) > budget", "size > budget * len(dataset)"
    ),
    "data: masks of cached samples may be written": Seeded(
        "fp4deploy/data/cache.py",
        "(sample.image, sample.mask, sample.instances, sample.boxes)",
        "(sample.image, sample.instances, sample.boxes)",
    ),
    "data: a class that a split has not moves the numbers of those behind it": Seeded(
        "fp4deploy/data/folders.py",
        "for number, name in enumerate(self.class_names)\n            if name in found",
        "for number, name in enumerate(n for n in self.class_names if n in found)",
    ),
    "data: the median image is the smallest but one": Seeded(
        "fp4deploy/data/inspection/summary.py", "ordered[len(ordered) // 2]", "ordered[len(ordered) // 3]"
    ),
    "data: one image twice within a split hides that it is in two": Seeded(
        "fp4deploy/data/inspection/summary.py",
        "if len({split for _, split in equal}) < 2:",
        "if len(equal) != 2:",
    ),
    "data: void is drawn in black in an indexed mask": Seeded(
        "fp4deploy/data/palette.py", "    table[IGNORE] = VOID\n", "    table[len(palette)] = VOID\n"
    ),
    "formats: an E8M0 scale of 0 is 2^-126": Seeded(
        "fp4deploy/formats/mxfp4.py", "torch.full((), 2.0**-127,", "torch.full((), 2.0**-126,"
    ),
    "formats: scales are rounded up only beyond the next mantissa": Seeded(
        "fp4deploy/formats/mxfp4.py",
        "> int((2 * mantissa - 1) * (1 << _MANTISSA_BITS))",
        ">= int((2 * mantissa - 1) * (1 << _MANTISSA_BITS))",
    ),
    "formats: rows and blocks of swizzled scales are padded to each other's": Seeded(
        "fp4deploy/formats/swizzle.py",
        "(0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS)",
        "(0, -blocks % TILE_ROWS, 0, -rows % TILE_ROWS)",
    ),
    "graph: the last part of a division is one element short": Seeded(
        "fp4deploy/graph/open_axes.py",
        "starts = [place * -(-size // chunks) for place in range(chunks)]",
        "starts = [place * (size // chunks) for place in range(chunks)]",
    ),
    "graph: any finite value is all of them": Seeded(
        "fp4deploy/graph/finite.py",
        "answers[id(result)] = answer[0] != negated, result",
        "answers[id(result)] = answer[0], result",
    ),
    "graph: constants that are not held are cast all the same": Seeded(
        "fp4deploy/graph/wide.py",
        "return {node for node, x in held if x.dtype == torch.float32 and not rest.holds_tensor(x)}",
        "return {node for node, x in held if x.dtype == torch.float32 and rest.holds_tensor(x)}",
    ),
    "graph: a mask of attention keeps numbers below the least": Seeded(
        "fp4deploy/graph/wide.py", "(mask, -rest.largest)", "(mask, -2 * rest.largest)"
    ),
    "export: boxes are joined at the threshold of the score": Seeded(
        "fp4deploy/export/onnx/boxes.py",
        '(("iou", head.nms), ("least_score", head.threshold))',
        '(("iou", head.threshold), ("least_score", head.nms))',
    ),
    "export: classes of boxes begin at 0": Seeded(
        "fp4deploy/export/onnx/boxes.py", 'writer.integers("one", 1)', 'writer.integers("one", 0)'
    ),
    "export: a convolution of two strides is forecast as phases": Seeded(
        "fp4deploy/export/lowering/forecast.py", "        and len(set(layer.stride)) == 1\n", ""
    ),
    "export: the channels of a block are read of the outputs": Seeded(
        "fp4deploy/export/lowering/forecast.py",
        "weight.shape[:2] if isinstance(layer, TRANSPOSED) else weight.shape[1::-1]",
        "weight.shape[:2]",
    ),
    "ledger: the weight of a layer is its bias": Seeded(
        "fp4deploy/export/ledger/build_log.py",
        "large = tuple(tensor for tensor in (*self.constants, *self.inputs[1:]) if len(tensor.shape) >= 2)",
        "large = tuple(tensor for tensor in (*self.inputs[1:], *self.constants) if len(tensor.shape) >= 1)",
    ),
    "verify: inputs in half precision stay so": Seeded(
        "fp4deploy/export/verify/exported.py",
        "        return x.float() if x.is_floating_point() else x\n    if isinstance(batch, Mapping):",
        "        return x\n    if isinstance(batch, Mapping):",
    ),
    "packed: an output may be freed after its last reader": Seeded(
        "fp4deploy/packed/memory.py",
        "return reads | {each.activation: len(graph.nodes) for each in graph.outputs}",
        "return {each.activation: len(graph.nodes) for each in graph.outputs} | reads",
    ),
    "packed: a block of a form has no byte for its scale": Seeded(
        "fp4deploy/packed/memory.py", "(NVFP4_BLOCK // 2 + 1)", "(NVFP4_BLOCK // 2)"
    ),
    "packed: nodes that are said to be wide are so only if a seed": Seeded(
        "fp4deploy/packed/wide.py",
        "if _is_seed(node, tensors, rest) or any(form.name in said for form in node.outputs)",
        "if _is_seed(node, tensors, rest)",
    ),
    "plugins: a view along the channels keeps torch's order": Seeded(
        "fp4deploy/plugins/quantize/layout.py", "order = [0, *range(2, x.ndim), 1]", "order = [0, 1, *range(2, x.ndim)]"
    ),
    "plugins: a kernel that could not be launched once is refused for good": Seeded(
        "fp4deploy/plugins/runtime/fallback.py",
        "            self._missed[index] = self.missed(device) + 1\n",
        "            self._missed[index] = self.missed(device) + 1\n            self._refused.add(index)\n",
    ),
    "plugins: parameters of another rank lose their layout": Seeded(
        "fp4deploy/plugins/quantize/layout.py",
        "if layout == torch.contiguous_format or CHANNELS_LAST.get(tensor.ndim) == layout:",
        "if CHANNELS_LAST.get(tensor.ndim) == layout:",
    ),
    "predict: rounding of resized frames is down": Seeded(
        "fp4deploy/plugins/frames/prepare.py", "total = torch.full((), 1 << BITS - 1,", "total = torch.full((), 0,"
    ),
    "predict: NaN is a mask of class 0": Seeded(
        "fp4deploy/predict/pipeline.py", "[output.clone().numpy() if good else None for", "[output.clone().numpy() for"
    ),
    "predict: frames of all sizes get masks of the first": Seeded(
        "fp4deploy/predict/pipeline.py",
        "[classes_of(part, _size(run)) for part, run in zip(parts, runs, strict=True)]",
        "[classes_of(part, _size(runs[0])) for part in parts]",
    ),
    "predict: a letterboxed frame is stretched": Seeded(
        "fp4deploy/plugins/frames/prepare.py",
        "pixels = resized(frames, part)\n",
        "pixels = resized(frames, part := size)\n",
    ),
    "predict: classes are decided before the frame's size is reached": Seeded(
        "fp4deploy/plugins/frames/class_map.py",
        "return first.mul_(1 - share).add_(second.mul_(share))",
        "return torch.where(share < 0.5, first, second)",
    ),
    "ptq: a call is made again with what the module changed": Seeded(
        "fp4deploy/ptq/forward.py",
        "arguments.append(_cloned((inputs, keywords)))",
        "arguments.append((inputs, keywords))",
    ),
    "ptq: modules are ordered by their last call": Seeded(
        "fp4deploy/ptq/forward.py", "return list(dict.fromkeys(found))", "return list(dict.fromkeys(found[::-1]))[::-1]"
    ),
    "qat: the window of outliers ends a step early": Seeded(
        "fp4deploy/qat/outlier_selection.py",
        "step == first + control.window and",
        "step == first + control.window - 1 and",
    ),
    "qat: a resume outside of a window keeps its sums": Seeded(
        "fp4deploy/qat/outlier_selection.py",
        "layer.channel_norms = state[name].to(layer.weight.device) if name in state else None",
        "layer.channel_norms = state[name].to(layer.weight.device) if name in state else layer.channel_norms",
    ),
    "report: the engine's fallbacks are its layers": Seeded(
        "fp4deploy/report/model.py", 'self.counts.get("fallbacks", 0)', "sum(self.counts.values())"
    ),
    "serving: the limit of a server is that of its engine": Seeded(
        "fp4deploy/serving/repository.py", "min(most, ledger.batch[2])", "max(most, ledger.batch[2])"
    ),
    "serving: height and width of a mask are exchanged": Seeded(
        "fp4deploy/serving/postprocess.py",
        "_resized(_resized(output, height, 1), width, 2)",
        "_resized(_resized(output, width, 1), height, 2)",
    ),
    "system: a file may be one byte larger than its limit": Seeded(
        "fp4deploy/system/schema.py", "    if len(content) > most:", "    if len(content) > most + 1:"
    ),
    "system: text of UTF-16 is read as UTF-8": Seeded(
        "fp4deploy/system/schema.py", "(codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)", "(codecs.BOM_UTF16_LE,)"
    ),
    "telemetry: a weight's rows are what it contracts": Seeded(
        "fp4deploy/qat/telemetry/collect.py",
        "return 0 if isinstance(layer, TRANSPOSED) else 1",
        "return 1 if isinstance(layer, TRANSPOSED) else 0",
    ),
    "timing: operands that fit the cache are read from memory": Seeded(
        "fp4deploy/timing/model.py", "moved = 0.0 if warm and", "moved = 0.0 if not warm and"
    ),
    "timing: error bars are those of the other end": Seeded(
        "fp4deploy/timing/model.py",
        'Time(ms, ms / error["p95"], ms / error["p5"])',
        'Time(ms, ms / error["p5"], ms / error["p95"])',
    ),
    "train: validations of the last epochs are not counted": Seeded(
        "fp4deploy/train/estimate.py",
        "math.ceil(epochs / config.train.evaluate_every)",
        "epochs // config.train.evaluate_every",
    ),
    "train: one GPU has the efficiency of several": Seeded(
        "fp4deploy/train/estimate.py",
        "rate = speed.training * gpus * (efficiency if gpus > 1 else 1.0)",
        "rate = speed.training * gpus * efficiency",
    ),
    "train: samples of telemetry behind a resume are kept": Seeded(
        "fp4deploy/train/logging/jsonl_tracker.py",
        'else line["step"] <= step)',
        'else line["epoch"] <= epoch)',
    ),
    "train: a whole volume is validated with others": Seeded(
        "fp4deploy/train/batches.py",
        "config.train.batch_size if config.data.depth is None else 1",
        "config.train.batch_size",
    ),
    "train: time left counts the steps before a resume": Seeded(
        "fp4deploy/train/logging/progress.py", "training.completed - self.begun,", "training.completed,"
    ),
    "native: an argument begins where its memory does": Seeded(
        "fp4deploy/native/recording.py",
        'return Buffer("arena", where[self.alias.get(storage, storage)] + offset)',
        'return Buffer("arena", where[self.alias.get(storage, storage)])',
    ),
    "native: an activation lives from its first to its last but one launch": Seeded(
        "fp4deploy/native/recording.py", "max(known.last, when))", "max(known.last, when - 1))"
    ),
    "audit: times are of the last call": Seeded(
        "fp4deploy/audit/ort_profile.py", "total[name] = total.get(name, 0.0) + event.dur", "total[name] = event.dur"
    ),
    "instances: stuff is drawn over things": Seeded(
        "fp4deploy/instances/panoptic.py",
        "where = (found.ids == 0) & (found.semantic == number)",
        "where = found.semantic == number",
    ),
}
