"""TWELFTH: by an eighth hand, of all rooms, in lines that the lists before it have nothing of; it had read no tests."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "images: grey of 16 bits is clipped": Seeded(
        "fp4deploy/data/images.py", "np.clip(np.asarray(image) >> 8, 0, 255)", "np.clip(np.asarray(image), 0, 255)"
    ),
    "images: photos with annotations are always turned upright": Seeded(
        "fp4deploy/data/images.py",
        "        if size is not None and (image.height, image.width) != size:\n            image = ImageOps",
        "        if size is not None:\n            image = ImageOps",
    ),
    "loader: the first batches are those of the running epoch": Seeded(
        "fp4deploy/data/loader.py", "            sampler.set_epoch(0)\n", "            pass\n"
    ),
    "volumes: where shares are equal the larger label wins": Seeded(
        "fp4deploy/data/volumes/resample.py", "result[found > best] = value", "result[found >= best] = value"
    ),
    "volumes: sides of the input are multiples of 8": Seeded(
        "fp4deploy/data/volumes/plan.py", "most - most % (STEP if most >= STEP else 8)", "most - most % 8"
    ),
    "transforms: both sides of a window have the zoom of the width": Seeded(
        "fp4deploy/data/augmentation/transforms.py",
        "_span(height, self.height, zoom[1], down)",
        "_span(height, self.height, zoom[0], down)",
    ),
    "regions: triangles draw nothing": Seeded(
        "fp4deploy/data/coco/regions.py", "MIN_COORDINATES = 6 ", "MIN_COORDINATES = 8 "
    ),
    "yolo: a polygon has twice its area": Seeded(
        "fp4deploy/data/importing/yolo.py", '"area": abs(turns) / 2}', '"area": abs(turns)}'
    ),
    "pairs: classes of nnU-Net are named in the order of the file": Seeded(
        "fp4deploy/data/importing/pairs.py", "tuple(sorted(values, key=lambda name: values[name]))", "tuple(values)"
    ),
    "metrics: classes that were predicted alone have no IoU": Seeded(
        "fp4deploy/metrics.py", "        seen = union > 0\n", "        seen = counts.sum(1) > 0\n"
    ),
    "detection: boxes are cut at the other side's end": Seeded(
        "fp4deploy/detection/decode.py",
        ".clip(0, [width, height, width, height])",
        ".clip(0, [height, width, height, width])",
    ),
    "instances: an object may be of the background": Seeded(
        "fp4deploy/instances/decode.py", "        mean[:, [0, *head.stuff]] = 0.0\n", ""
    ),
    "centres: offsets count both directions": Seeded(
        "fp4deploy/train/losses/centres.py", ".abs().sum(1) / 2 * things", ".abs().sum(1) * things"
    ),
    "loop: the last group of batches is as long as the others": Seeded(
        "fp4deploy/train/loop.py", "group = min(accumulate, progress.batches - first)", "group = accumulate"
    ),
    "loop: of equal scores the last is the best": Seeded(
        "fp4deploy/train/loop.py", "(scores.score > best or best < 0)", "(scores.score >= best or best < 0)"
    ),
    "layers: what padding 'same' has over is before": Seeded(
        "fp4deploy/qat/layers.py",
        "[(total // 2, total - total // 2) for total in reversed(totals)]",
        "[(total - total // 2, total // 2) for total in reversed(totals)]",
    ),
    "layers: a layer is calibrated by any number but 0": Seeded(
        "fp4deploy/qat/layers.py", "        if not 0 < number < math.inf:\n", "        if number == 0:\n"
    ),
    "equalize: squares are those of the last batch": Seeded(
        "fp4deploy/qat/equalize.py",
        "squares[name] = squares[name] + square if name in squares else square",
        "squares[name] = square",
    ),
    "rest: negative weights fit": Seeded(
        "fp4deploy/rest.py",
        "largest = float(x.detach().abs().max()) if x.numel() else 0.0",
        "largest = float(x.detach().max()) if x.numel() else 0.0",
    ),
    "gptq: inputs that are always 0 are in the damping": Seeded(
        "fp4deploy/ptq/gptq.py", "damping * diagonal[~dead].mean()", "damping * diagonal.mean()"
    ),
    "correction: slopes have no limits": Seeded(
        "fp4deploy/ptq/correction.py",
        "(covariance / variance.clamp(min=1e-12)).clamp(MIN_SLOPE, MAX_SLOPE)",
        "covariance / variance.clamp(min=1e-12)",
    ),
    "reconstruct: roundings are kept though they are worse": Seeded(
        "fp4deploy/ptq/reconstruct.py", "better = after < before", "better = True"
    ),
    "ptq: the rest of a checkpoint is lost": Seeded(
        "fp4deploy/ptq/checkpoint.py", "rest=rest_of(rest or card).name", "rest=rest_of(rest).name"
    ),
    "lowering: a transposed convolution is as wide as high": Seeded(
        "fp4deploy/export/lowering/conv_transpose.py",
        "stride * (layer.shape[1 + axis] - 1)",
        "stride * (layer.shape[1] - 1)",
    ),
    "lowering: axes that are counted from the end are the first": Seeded(
        "fp4deploy/export/lowering/linear.py", "(slice(None),) * (axis % numbers.ndim)", "(slice(None),) * axis"
    ),
    "pooling: padding is not counted where the divisor is another": Seeded(
        "fp4deploy/export/onnx/pooling.py",
        '{"count_include_pad": True, "divisor_override": None}',
        '{"divisor_override": None}',
    ),
    "plan: multiply-accumulates of a linear layer are those of a batch": Seeded(
        "fp4deploy/export/lowering/plan.py",
        "return shape[1:-1] if shape is not None",
        "return shape[:-1] if shape is not None",
    ),
    "programs: inputs of other strides have the same program": Seeded(
        "fp4deploy/packed/program_cache.py",
        "(tuple(x.shape), x.stride(), str(x.dtype))",
        "(tuple(x.shape), str(x.dtype))",
    ),
    "producers: pooling that rounds up is pooling by two": Seeded(
        "fp4deploy/packed/producers.py",
        "([2, 2], [2, 2], [0, 0], [1, 1]) and not node.ceil_mode",
        "([2, 2], [2, 2], [0, 0], [1, 1])",
    ),
    "profile: operations of a transposed convolution are those of its inputs alone": Seeded(
        "fp4deploy/bench/layers.py", "math.prod(weight[:-1])", "math.prod(weight[1:])"
    ),
    "search: the score of a placement does not depend on its precisions": Seeded(
        "fp4deploy/experiments/search/study.py",
        'text = "\\n".join(f"{precision} {layer}" for layer, precision in options)',
        'text = "\\n".join(layer for layer, _ in options)',
    ),
    "sweep: settings of the whole sweep win over a variant's": Seeded(
        "fp4deploy/experiments/sweep/spec.py",
        '[*self.sets, *variant.sets, f"seed={seed}"]',
        '[*variant.sets, *self.sets, f"seed={seed}"]',
    ),
    "predict: tiles overlap by a quarter of their height": Seeded(
        "fp4deploy/predict/predictor.py",
        "min(card.height, card.width) // 4 if",
        "card.height // 4 if",
    ),
    "runs: the latest run is the last by its name": Seeded(
        "fp4deploy/runs.py", "sorted(written, key=written.__getitem__)[-1]", "sorted(written)[-1]"
    ),
    "files: a linked folder is nobody's": Seeded(
        "fp4deploy/system/files.py", "for name in (*files, *links)]", "for name in files]"
    ),
    "schema: files that are too large are cut": Seeded(
        "fp4deploy/system/schema.py",
        "file.read(min(most, os.fstat(file.fileno()).st_size) + 1)",
        "file.read(min(most, os.fstat(file.fileno()).st_size))",
    ),
    "processors: parts of a processor are none": Seeded(
        "fp4deploy/system/processors.py", "min(bound, math.ceil(quota))", "min(bound, int(quota))"
    ),
    "settings: options win over --set": Seeded(
        "cli/settings.py", "    given += options.sets or []\n", "    given = [*(options.sets or []), *given]\n"
    ),
    "modelopt: a scale of one number is that of no channel": Seeded(
        "fp4deploy/interop/modelopt.py",
        "scale.numel() not in (1, weight.shape[1])",
        "scale.numel() != weight.shape[1]",
    ),
    "timing: a transposed convolution multiplies at every output": Seeded(
        "fp4deploy/timing/network.py",
        "pixels = math.prod(source) / source[axis] if _transposed(step) else rows",
        "pixels = rows",
    ),
}
