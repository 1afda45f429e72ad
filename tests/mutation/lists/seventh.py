"""SEVENTH: a fifth hand, over all rooms, after the calls between folders were recorded."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "metrics: pixels of one score are ranked among themselves": Seeded(
        "fp4deploy/metrics.py", "torch.cat([scores[1:] != scores[:-1]", "torch.cat([scores[1:] <= scores[:-1]"
    ),
    "metrics: surfaces are near where the truth's are": Seeded(
        "fp4deploy/metrics.py", "np.percentile(away[0][surfaces[1]], 95)", "np.percentile(away[1][surfaces[1]], 95)"
    ),
    "losses: smoothing takes no weights of classes": Seeded(
        "fp4deploy/train/losses/segmentation.py",
        "(log_probability.mean(1) * counted).sum()",
        "(log_probability.mean(1) * labelled).sum()",
    ),
    "losses: weights of classes replace the balance": Seeded(
        "fp4deploy/train/losses/segmentation.py",
        "balance if weights is None else weights if balance is None else weights * balance",
        "balance if weights is None else weights",
    ),
    "verify: numbers that are wide in the file are rounded": Seeded(
        "fp4deploy/export/verify/numbers.py",
        "x in self.computed and x not in self.wide and _is_floating(x)",
        "x in self.computed and _is_floating(x)",
    ),
    "packed: a block that is not full takes no memory": Seeded(
        "fp4deploy/packed/memory.py", "blocks = -(-channels // NVFP4_BLOCK)", "blocks = channels // NVFP4_BLOCK"
    ),
    "packed: digits of the input take its memory": Seeded(
        "fp4deploy/packed/memory.py",
        "total += rest.bytes * math.prod(read)",
        "total += rest.bytes * math.prod(shape)",
        "tests/packed/test_memory.py -k digits_counts",
    ),
    "predict: an image has to be larger on both sides to be cut": Seeded(
        "fp4deploy/predict/predictor.py",
        "pixels.shape[0] > self.card.height or pixels.shape[1]",
        "pixels.shape[0] > self.card.height and pixels.shape[1]",
    ),
    "predict: an object of just the least score is left out": Seeded(
        "fp4deploy/predict/predictor.py",
        "kept = int((found.scores >= self.min_score).sum())",
        "kept = int((found.scores > self.min_score).sum())",
        "tests/predict/test_predictor.py -k just_the_least",
    ),
    "gate: an entry is not found by its path": Seeded(
        "fp4deploy/bench/gate/baseline.py",
        "if artefact in (name, entries[place].path)]",
        "if artefact == name]",
        "tests/bench/test_gate.py -k one_of_several_entries",
    ),
    "gate: the baseline is measured on all images": Seeded(
        "fp4deploy/bench/gate/baseline.py", "timeout=timeout, limit=limit, like=like", "timeout=timeout, like=like"
    ),
    "report: sizes are those of the last file of a kind": Seeded(
        "fp4deploy/report/collect.py",
        'pairs.setdefault(suffix, (by["nvfp4"], by["fp16"]))',
        'pairs[suffix] = (by["nvfp4"], by["fp16"])',
        "tests/report/test_report.py -k first_pair",
    ),
    "report: what began from scratch was fine-tuned": Seeded(
        "fp4deploy/report/collect.py",
        'fine_tuned=not found.config.get("train.from_scratch")',
        'fine_tuned=bool(found.config.get("train.from_scratch"))',
    ),
    "sweep: the last epoch has no score": Seeded(
        "fp4deploy/experiments/sweep/results.py", "if line.epoch <= last_epoch]", "if line.epoch < last_epoch]"
    ),
    "sweep: runs that failed are compared as well": Seeded(
        "fp4deploy/experiments/sweep/results.py",
        'all(each[seed]["status"] == "done" and key in each[seed] for',
        "all(key in each[seed] for",
    ),
    "resume: an epoch of minutes is not saved where saving is dear": Seeded(
        "fp4deploy/train/state.py",
        "self.SHARE * (time.monotonic() - self._saved_at) or self.due_within_epoch()",
        "self.SHARE * (time.monotonic() - self._saved_at)",
    ),
    "resume: the best score of an older version is forgotten": Seeded(
        "fp4deploy/train/state.py",
        'fields["best_score"] = fields.pop("best_miou")',
        'fields.pop("best_miou")',
    ),
    "train: the first step of a warm-up learns nothing": Seeded(
        "fp4deploy/train/schedule.py", "return peak * (step + 1) / rising", "return peak * step / rising"
    ),
    "telemetry: a low nibble of 15 flips the high one": Seeded(
        "fp4deploy/qat/telemetry/statistics.py",
        "_total(differing > 15)",
        "_total(differing >= 15)",
        "tests/qat/test_telemetry_statistics.py -k every_pair_of_bytes",
    ),
    "interop: blocks over two axes have a scale's format": Seeded(
        "fp4deploy/interop/modelopt.py", "if len(blocks) > 1:", "if len(blocks) > 2:"
    ),
    "serving: a channel without limits is clamped to the other side": Seeded(
        "fp4deploy/serving/bundle.py",
        '((lows, "-torch.inf"), (highs, "torch.inf"))',
        '((lows, "torch.inf"), (highs, "-torch.inf"))',
    ),
    "cli: the smallest size of a range is the largest": Seeded(
        "cli/commands/stages/build.py", "return found[2], found[1], found[0]", "return found[0], found[1], found[2]"
    ),
    "cli: files beside a run are not named in the next command": Seeded(
        "cli/artifacts.py", "if len(found) == len(runs) == 1 else files", "if len(runs) == 1 else files"
    ),
    "provenance: of a long chain the oldest links are walked": Seeded(
        "fp4deploy/provenance.py", "list(found.values())[-MAX_LINKS:]", "list(found.values())[:MAX_LINKS]"
    ),
    "data: mirror images are averaged unmirrored": Seeded(
        "fp4deploy/data/tiles.py",
        "np.flip(network(np.ascontiguousarray(np.flip(tiles, axes))), axes)",
        "network(np.ascontiguousarray(np.flip(tiles, axes)))",
    ),
    "data: tiles share less than they have to": Seeded(
        "fp4deploy/data/tiles.py",
        "math.ceil((length - tile) / (tile - overlap)) + 1",
        "math.floor((length - tile) / (tile - overlap)) + 1",
    ),
    "models: weights without counters of batches do not fit": Seeded(
        "fp4deploy/models/initial.py",
        "if name.startswith(prefix) and name not in given and not _is_counter(name)]",
        "if name.startswith(prefix) and name not in given]",
        "tests/models/test_initial.py -k counters_alone",
    ),
    "audit: a size of 0 in a Reshape is nothing": Seeded(
        "fp4deploy/audit/operands.py",
        "return [x.shape[index] if size == 0 else size for index, size in enumerate(given)]",
        "return list(given)",
    ),
    "ptq: an amax is chosen by the last batch": Seeded(
        "fp4deploy/ptq/activations.py",
        "errors[name][place] += (quantized - x)",
        "errors[name][place] = (quantized - x)",
    ),
    "graph: a transposed convolution multiplies for each output": Seeded(
        "fp4deploy/graph/costs.py", "(read if transposed else written)", "written"
    ),
}
