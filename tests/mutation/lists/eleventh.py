"""ELEVENTH: by the hand of TENTH, in files that TENTH has nothing of, before its answers were known."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "masks: a class beyond those that are learned is the first one": Seeded(
        "fp4deploy/data/masks.py",
        "self._class_of = np.full(256, IGNORE, dtype=np.uint8)",
        "self._class_of = np.zeros(256, dtype=np.uint8)",
    ),
    "masks: names in blanks keep them": Seeded(
        "fp4deploy/data/masks.py", "names = [line.strip() for line in text_of", "names = [line for line in text_of"
    ),
    "masks: the largest value is that of the first mask": Seeded(
        "fp4deploy/data/masks.py",
        "largest = max(largest, int(np.where(values < IGNORE, values.astype(np.int16), -1).max(initial=-1)))",
        "largest = int(np.where(values < IGNORE, values.astype(np.int16), -1).max(initial=-1))",
    ),
    "importing: annotations of an image go to every split": Seeded(
        "fp4deploy/data/importing/folder.py",
        'if split_of[each["image_id"]] == split],',
        'if each["image_id"] in split_of],',
    ),
    "importing: an image that is in two folders is that of the first": Seeded(
        "fp4deploy/data/importing/folder.py",
        '        if len(found) > 1:\n            raise InputError(f"The image',
        '        if len(found) > 2:\n            raise InputError(f"The image',
    ),
    "search: times are of a batch": Seeded(
        "fp4deploy/experiments/search/costs.py",
        "own.get(key, 0.0) + row.ms / network.batch",
        "own.get(key, 0.0) + row.ms",
    ),
    "search: a layer that is used twice has the time of its last use": Seeded(
        "fp4deploy/experiments/search/costs.py", "own[key] = own.get(key, 0.0) + row.ms", "own[key] = row.ms"
    ),
    "search: channels are not padded to blocks": Seeded(
        "fp4deploy/experiments/search/costs.py",
        "padded = channels + -channels % (1 if spec.in_eight_bits else spec.block_size)",
        "padded = channels",
    ),
    "search: times that were estimated count as measured": Seeded(
        "fp4deploy/experiments/search/costs.py",
        'if label := next((network.label for network in networks if network.label), ""):',
        'if label := next((network.label for network in networks[1:] if network.label), ""):',
    ),
    "sensitivity: work is that of one image of all": Seeded(
        "fp4deploy/experiments/sensitivity/layers.py",
        "work[name].macs / max(1, total),",
        "work[name].macs / max(1, max(each.macs for each in work.values())),",
    ),
    "audit: refused layers fall back": Seeded(
        "fp4deploy/audit/report.py",
        'f"; {len(lost) - refused} fall back" if len(lost) > refused else ""',
        'f"; {len(lost)} fall back" if lost else ""',
    ),
    "inspect: FP4 weights are an FP4 layer": Seeded(
        "fp4deploy/export/onnx/layers.py", 'return "FP4" if quantised else "FP4 weights"', 'return "FP4"'
    ),
    "inspect: bytes are those of the weight's first constant": Seeded(
        "fp4deploy/export/onnx/layers.py",
        "bytes=sum(_bytes(value) for value in constants.values()),",
        "bytes=next((_bytes(value) for value in constants.values()), 0),",
    ),
    "prepare: static scales that were calibrated are lost": Seeded(
        "fp4deploy/qat/prepare.py", "layer, own), calibrated.get(name), name)", "layer, own), None, name)"
    ),
    "calibrate: a mask may hold NaN": Seeded(
        "fp4deploy/qat/prepare.py",
        "bool(((x < torch.inf) if len(tensors) > 1",
        "bool((~(x >= torch.inf) if len(tensors) > 1",
    ),
    "prepare: a model is told of one format of products alone": Seeded(
        "fp4deploy/qat/prepare.py",
        "            require_packed(recipe)\n    for layer in layers:",
        "            pass\n    for layer in layers:",
    ),
    "runs: models of a later training take the place of those before": Seeded(
        "fp4deploy/runs.py",
        "json.dumps(list(dict.fromkeys((*self.asked_models(), *models))))",
        "json.dumps(list(dict.fromkeys(models)))",
    ),
    "runs: engines are those of all models": Seeded(
        "fp4deploy/runs.py",
        'self.engine_dir.glob("*.plan")) if model_stem(path) in own]',
        'self.engine_dir.glob("*.plan")) if own]',
    ),
    "schedule: warm-up begins at nothing": Seeded(
        "fp4deploy/train/schedule.py", "return peak * (step + 1) / rising", "return peak * step / rising"
    ),
    "schedule: a network trained from scratch in FP4 is fine-tuned": Seeded(
        "fp4deploy/train/schedule.py",
        'or (model == "nvfp4" and not config.train.from_scratch)',
        'or model == "nvfp4"',
    ),
    "report: files that quantize made count as the run's": Seeded(
        "fp4deploy/report/collect.py",
        "if entry.size_bytes is not None and own:",
        "if entry.size_bytes is not None:",
    ),
    "report: validation is called a measurement": Seeded(
        "fp4deploy/report/collect.py",
        "measured = model.measured is not None",
        "measured = model.measured is not None or bool(model.best)",
    ),
    "layer-wise: elements that are not finite are one block": Seeded(
        "fp4deploy/export/verify/layerwise.py",
        "blocks[name] += _blocks_with(differs, layers[name]) if finite else x.numel()",
        "blocks[name] += _blocks_with(differs, layers[name]) if finite else 1",
    ),
    "layer-wise: elements of eight bits lie in blocks": Seeded(
        "fp4deploy/export/verify/layerwise.py",
        "    if eight_bits(layer.recipe):\n        return int(differs.sum())\n",
        "",
    ),
    "layer-wise: differing elements are those of the last image": Seeded(
        "fp4deploy/export/verify/layerwise.py", "wrong[name] += int(differs.sum())", "wrong[name] = int(differs.sum())"
    ),
    "volumes: distances of volumes without the class count as 0": Seeded(
        "fp4deploy/tasks/volumes.py",
        "distances = np.where(away >= 0, away, np.nan)",
        "distances = np.where(away >= 0, away, 0)",
    ),
    "volumes: Dice has a mean over the background": Seeded(
        "fp4deploy/tasks/volumes.py", "columns = values.T[1:]", "columns = values.T[:-1]"
    ),
    "nnunet: the formats of a folder are lost": Seeded(
        "fp4deploy/interop/nnunet/quantization.py",
        "quantization.layers, example_inputs=None, **quantization.formats)",
        "quantization.layers, example_inputs=None)",
    ),
    "scales: the finite amax of rows counts Inf": Seeded(
        "fp4deploy/formats/scales.py",
        "    magnitude = torch.where(torch.isfinite(magnitude), magnitude, 0.0)\n",
        "",
    ),
    "scales: a tracked amax decays below what it sees": Seeded(
        "fp4deploy/formats/scales.py",
        "moved = torch.maximum(largest, tracked * decay)",
        "moved = torch.lerp(largest, tracked, decay)",
    ),
}
