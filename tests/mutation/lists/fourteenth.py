"""FOURTEENTH: by a ninth hand, of all rooms, in lines that the lists before it have nothing of."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "metrics: hd95 measured within the box of the truth only": Seeded(
        "fp4deploy/metrics.py", "ndimage.find_objects((prediction | truth).astype", "ndimage.find_objects(truth.astype"
    ),
    "yolo: labels of YOLO not found where a parent folder is called images": Seeded(
        "fp4deploy/data/importing/yolo.py",
        "at = max((place for place, part in enumerate(parts[:-1])",
        "at = min((place for place, part in enumerate(parts[:-1])",
    ),
    "tiles: weights of a volume's tile are not symmetric": Seeded(
        "fp4deploy/data/tiles.py", "away = np.arange(tile) - (tile - 1) / 2", "away = np.arange(tile) - tile / 2"
    ),
    "resample: resampled size truncated": Seeded(
        "fp4deploy/data/volumes/resample.py", "max(1, round(side * own / new))", "max(1, int(side * own / new))"
    ),
    "panoptic: segments without a pixel in panoptic files": Seeded(
        "fp4deploy/instances/panoptic.py", "        if area[number]\n", ""
    ),
    "optimizer: own weights lost after a validation with the average": Seeded(
        "fp4deploy/train/optimizer.py",
        "own = {name: parameter.detach().clone() for",
        "own = {name: parameter.detach() for",
    ),
    "load: NaN in a parameter is deployed": Seeded(
        "fp4deploy/qat/load.py",
        "rest.require(name, tensor[tensor.isfinite()] if masked else tensor)",
        "rest.require(name, tensor[tensor.isfinite()])",
    ),
    "provenance: no warning for an engine of an older ONNX file": Seeded(
        "fp4deploy/provenance.py", "finding.status in (CHANGED, OUTDATED)", "finding.status == CHANGED"
    ),
    "onnx operators: uneven padding of MaxPool by 0": Seeded(
        "fp4deploy/interop/onnx_operators.py", "x, even = padded(x, pads, -math.inf)", "x, even = padded(x, pads)"
    ),
    "ledger: an FP8 layer that runs in FP16 counts as requested": Seeded(
        "fp4deploy/export/ledger/ledger.py",
        "if row.requested in OF_ENGINES and row.actual != row.requested",
        'if row.requested == "FP4" and row.actual != row.requested',
    ),
    "metrics: AUPRC without the first step": Seeded(
        "fp4deploy/metrics.py", "hits.diff(prepend=hits.new_zeros(1))", "hits.diff(prepend=hits[:1])"
    ),
    "decision: classes that lost least are listed": Seeded(
        "fp4deploy/bench/gate/decision.py", "key=lambda pair: -pair[1].drop)", "key=lambda pair: pair[1].drop)"
    ),
    "transforms: padding of a zoomed image is object 255": Seeded(
        "fp4deploy/data/augmentation/transforms.py",
        "(void[0] if void.ndim == 3 else void)[:] = IGNORE",
        "void[:] = IGNORE",
    ),
    "splits: the test split of an import gets no images of its share": Seeded(
        "fp4deploy/data/importing/splits.py", "ends.append((taken, split))", "ends.append((share, split))"
    ),
    "loop: skipped steps are those of the last epoch": Seeded(
        "fp4deploy/train/loop.py", "progress.skipped += counts.skipped", "progress.skipped = counts.skipped"
    ),
    "loop: the checkpoint holds other weights than were scored": Seeded(
        "fp4deploy/train/loop.py",
        "                with self._averaged(), self.norms.applied():\n",
        "                with self.norms.applied():\n",
    ),
    "correction: layers corrected in the order of registration": Seeded(
        "fp4deploy/ptq/correction.py", "names = order_of(model, wanted, batches[0])", "names = wanted"
    ),
    "matrix: rows of a dilated convolution are those of neighbours": Seeded(
        "fp4deploy/ptq/matrix.py", "places = [start + at * wide for start", "places = [start + at for start"
    ),
    "run: decibels of an amplitude": Seeded(
        "fp4deploy/experiments/search/run.py", "return -10 * math.log10(error)", "return -20 * math.log10(error)"
    ),
    "provenance: renamed images leave the digest of data as it is": Seeded(
        "fp4deploy/provenance.py",
        '            parts += [file.relative_to(folder).as_posix().encode(errors="surrogateescape")]\n',
        "",
    ),
    "postprocess: classes beyond 255 wrap in the server's mask": Seeded(
        "fp4deploy/serving/postprocess.py",
        "classes.astype(np.uint8 if self.palette else np.uint16)",
        "classes.astype(np.uint8)",
    ),
    "prediction: predicted boxes as corners": Seeded(
        "fp4deploy/predict/prediction.py",
        '"bbox": [float(value) for value in (*box[:2], *side)],',
        '"bbox": [float(value) for value in box],',
    ),
    "onnx operators: DepthToSpace with rows and columns of a block exchanged": Seeded(
        "fp4deploy/interop/onnx_operators.py", "permute(0, 3, 4, 1, 5, 2)", "permute(0, 3, 4, 2, 5, 1)"
    ),
    "ledger: constants that kernels share counted twice": Seeded(
        "fp4deploy/export/ledger/ledger.py",
        "constants = {tensor.name: tensor for",
        "constants = {id(tensor): tensor for",
    ),
    "producers: packed concatenation of a source that is no whole blocks": Seeded(
        "fp4deploy/packed/producers.py",
        "all(shape[1] % NVFP4_BLOCK == 0 for shape in sources)",
        "all(shape[1] % NVFP4_BLOCK == 0 for shape in sources[1:])",
    ),
    "memory: layers that are used twice count twice in FP16": Seeded(
        "fp4deploy/packed/memory.py", "is_quantized(node) and node.layer not in counted:", "is_quantized(node):"
    ),
    "writer: readers of other scales share packed activations": Seeded(
        "fp4deploy/export/packing/writer.py",
        "(form.axis == axis and self._equal(cast(str, form.amax), amax))",
        "form.axis == axis",
    ),
    "card: depth of a resized card": Seeded(
        "fp4deploy/models/card.py",
        "volume = None if self.volume is None else dataclasses.replace(self.volume, depth=size[0])",
        "volume = self.volume",
    ),
    "report: a layer without a kernel has not fallen back": Seeded(
        "fp4deploy/audit/report.py", "fell_back=layer.requested in OF_ENGINES,", "fell_back=False,"
    ),
    "proof: the self-test takes NaN for any number": Seeded(
        "fp4deploy/selftest/proof.py", "~((found != found) & (expected != expected))", "~(found != found)"
    ),
    "qdq: a power of two too large where the amax is on the border": Seeded(
        "fp4deploy/export/onnx/qdq.py", 'writer.add("LessOrEqual", "below"', 'writer.add("Less", "below"'
    ),
    "rewrites: regions with an autocast of their own are inlined": Seeded(
        "fp4deploy/graph/rewrites.py",
        '(name == "wrap_with_autocast" and node.args[2] is False)',
        'name == "wrap_with_autocast"',
    ),
    "ledgers: FP8 layers counted as others, too": Seeded(
        "fp4deploy/bench/ledgers.py",
        "totals.fp16_with_fp4_weights - totals.fp16 - fp8,",
        "totals.fp16_with_fp4_weights - totals.fp16,",
    ),
    "forms: a smaller plan said to be larger": Seeded(
        "fp4deploy/export/engine/forms.py",
        "if other.plan_bytes < ledger.plan_bytes:",
        "if other.plan_bytes > ledger.plan_bytes:",
    ),
    "network: estimated and projected exchanged": Seeded(
        "fp4deploy/timing/network.py",
        '"estimated" if gpu.name == fitted()["gpu"] else "projected"',
        '"projected" if gpu.name == fitted()["gpu"] else "estimated"',
    ),
    "sets: of more objects than channels the smallest kept": Seeded(
        "fp4deploy/train/losses/sets.py",
        "area.argsort(dim=1, descending=True, stable=True)",
        "area.argsort(dim=1, stable=True)",
    ),
    "video: overlay videos with red and blue exchanged": Seeded(
        "fp4deploy/predict/video.py",
        "writer.write(np.ascontiguousarray(prediction.overlay(pixels)[..., ::-1]))",
        "writer.write(np.ascontiguousarray(prediction.overlay(pixels)))",
    ),
    "engine info: precision of an engine's layer by the first word of its format": Seeded(
        "fp4deploy/audit/engine_info.py", "_NAMES.get(found[-1].lower()", "_NAMES.get(found[0].lower()"
    ),
}
