"""FIFTEENTH: by the hand of FOURTEENTH, written with it, and run after tests for its survivors."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "loader: padding rows are boxes of class 0": Seeded(
        "fp4deploy/data/loader.py",
        "functional.pad(label, (0, 0, 0, most - len(label)), value=PAD)",
        "functional.pad(label, (0, 0, 0, most - len(label)))",
    ),
    "label studio: skipped annotation taken": Seeded(
        "fp4deploy/data/importing/label_studio.py",
        'found = [each for each in task["annotations"] if not each.get("was_cancelled")]',
        'found = [each for each in task["annotations"]]',
    ),
    "pairs: void of Cityscapes is road": Seeded(
        "fp4deploy/data/importing/pairs.py",
        "table = np.full(256, IGNORE, np.uint8)\n    table[list(CITYSCAPES)]",
        "table = np.zeros(256, np.uint8)\n    table[list(CITYSCAPES)]",
    ),
    "centres: centres of mass rounded down": Seeded(
        "fp4deploy/train/losses/centres.py",
        "centre = (centre / area.clamp(min=1)).round()",
        "centre = (centre / area.clamp(min=1)).floor()",
    ),
    "comparison: score of the reference run on the wrong side": Seeded(
        "fp4deploy/report/comparison.py", "({100 * (score - gap):.2f} %)", "({100 * (score + gap):.2f} %)"
    ),
    "study: search measures weights that are not deployed": Seeded(
        "fp4deploy/experiments/search/study.py", "            round_to_deployed(found, self.rest)\n", ""
    ),
    "memory: peak memory counts what was read last": Seeded(
        "fp4deploy/packed/memory.py", "if last.get(name, -1) > number}", "if last.get(name, -1) >= number}"
    ),
    "files: folder lost where its replacement fails": Seeded(
        "fp4deploy/system/files.py", "            old.rename(path)\n        raise", "            pass\n        raise"
    ),
    "schema: epochs with a NaN loss vanish": Seeded(
        "fp4deploy/system/schema.py",
        'yield parse_json(line.decode("utf-8", errors="replace"), path, nan="none")',
        'yield parse_json(line.decode("utf-8", errors="replace"), path)',
    ),
    "targets: audit lets 4-D FP4 quantisers pass": Seeded(
        "fp4deploy/audit/targets.py",
        "if operand.dynamic and operand.rank > 3:",
        "if operand.dynamic and operand.rank > 4:",
    ),
    "export: decomposed twins are served as models of their own": Seeded(
        "cli/commands/stages/export.py", ' if ".portable" not in path.name]', "]"
    ),
    "equalize: padding by another number than 0 scaled": Seeded(
        "fp4deploy/qat/equalize.py",
        'if node.op == "pad" and not attributes.get("value") and',
        'if node.op == "pad" and',
    ),
    "volumes: distances measured in void voxels": Seeded(
        "fp4deploy/tasks/volumes.py", "        predicted = np.where(truth == IGNORE, IGNORE, predicted)\n", ""
    ),
    "schedule: the rate does not reach 0": Seeded(
        "fp4deploy/train/schedule.py", "(step - rising) / max(1, steps - rising)", "(step - rising) / steps"
    ),
    "write: likeliest classes are all listed ones": Seeded(
        "fp4deploy/predict/write.py",
        'for found in entry.get("classes", [])[:1]:',
        'for found in entry.get("classes", []):',
    ),
    "state dict: numbers instead of names, and class 0 background": Seeded(
        "fp4deploy/models/state_dict.py", "mean, std, background and fits)", "mean, std, background)"
    ),
    "pipeline: throughput of parts that overlap is of their sum": Seeded(
        "fp4deploy/predict/pipeline.py",
        '"images_per_s": 1e3 * self.batch / whole',
        '"images_per_s": 1e3 * self.batch / total',
    ),
    "dataset: pictures of a.jpg and a.png overwrite each other": Seeded(
        "fp4deploy/data/coco/dataset.py",
        'shared = self._stems[name.with_suffix("")] > 1',
        'shared = self._stems[name.with_suffix("")] > 2',
    ),
    "segmentation: absent classes in the Dice loss": Seeded(
        "fp4deploy/train/losses/segmentation.py", "weight = (size > 0).to(dice.dtype)", "weight = torch.ones_like(dice)"
    ),
    "recording: body begins before the longer input stage ends": Seeded(
        "fp4deploy/native/recording.py",
        "first = max(counts[stage] for stage in STAGES",
        "first = min(counts[stage] for stage in STAGES",
    ),
}
