"""FOURTH: by the hand of THIRD after those tests, in files that THIRD has nothing of; tests followed."""

from __future__ import annotations

from tests.mutation.seeded import Seeded

FAULTS: dict[str, Seeded] = {
    "data: values of a mask beyond 255 are counted from 0 again": Seeded(
        "fp4deploy/data/images.py",
        "else np.clip(values, 0, 255).astype(np.uint8)",
        "else values.astype(np.uint8)",
        "tests/data/test_written_otherwise.py tests/data/test_coco.py",
        nearby=True,
    ),
    "data: counts of other classes are taken from the cache": Seeded(
        "fp4deploy/data/inspection/balance.py",
        '{"identity": identity, "classes": list(dataset.class_names), "length"',
        '{"identity": identity, "length"',
    ),
    "train: centres are learned where pixels are void": Seeded(
        "fp4deploy/train/losses/centres.py",
        "- heatmap).square() * labelled).sum()",
        "- heatmap).square()).sum()",
    ),
    "train: the gradient of a sum over processes is their mean": Seeded(
        "fp4deploy/train/distributed.py",
        "return total + dist.get_world_size() * (sums - sums.detach())",
        "return total + (sums - sums.detach())",
    ),
    "qat: transposed experts are blocked along their outputs": Seeded(
        "fp4deploy/qat/experts.py",
        "axes = (1, 0) if contracted(self) == 1 else (0, 1)",
        "axes = (0, 1)",
    ),
    "qat: experts that are switched off are quantised where they are held": Seeded(
        "fp4deploy/qat/experts.py",
        'if each.quantizing and "held" not in vars(each)]',
        'if "held" not in vars(each)]',
    ),
    "export: an activation has as many blocks as the weight outputs": Seeded(
        "fp4deploy/export/lowering/scales.py",
        "blocks = layer.shape[0] // NVFP4_BLOCK",
        "blocks = layer.out_channels // NVFP4_BLOCK",
    ),
    "export: weights are stored as the smallest constant is": Seeded(
        "fp4deploy/export/ledger/actual.py",
        "return max(weights, key=",
        "return min(weights, key=",
        "tests/export/ledger",
        nearby=True,
    ),
    "native: a buffer is overwritten by the launch that reads it": Seeded(
        "fp4deploy/native/arena.py",
        "return self.first <= other.last and other.first <= self.last",
        "return self.first < other.last and other.first < self.last",
    ),
    "interop: decibels are those of amplitudes": Seeded(
        "fp4deploy/interop/quantize_onnx.py",
        "10 * math.log10(",
        "20 * math.log10(",
    ),
    "interop: a file is calibrated on the first images": Seeded(
        "fp4deploy/interop/quantize_onnx.py",
        "[transform(dataset.load(at))[0] for at in evenly(len(dataset), count)]",
        "[transform(dataset.load(at))[0] for at in range(min(count, len(dataset)))]",
        "tests/cli/test_quantize_onnx.py",
        nearby=True,
    ),
    "sweep: this process sees one GPU afterwards": Seeded(
        "fp4deploy/experiments/sweep/pool.py",
        "        elif seen:\n            del os.environ[VISIBLE]\n",
        "",
    ),
    "files: what is renamed may not be on the disk": Seeded(
        "fp4deploy/system/files.py",
        "        yield temporary\n        _synchronise(temporary)\n        if",
        "        yield temporary\n        if",
    ),
    "report: the best images are called the most wrong": Seeded(
        "fp4deploy/report/figures/lost.py",
        "np.argsort(right, kind",
        "np.argsort(-right, kind",
    ),
    "plugins: a convolution pads by its dilation": Seeded(
        "fp4deploy/plugins/gemm/conv.py",
        '_one(padding, "padding"), _one(dilation, "dilation")',
        '_one(dilation, "dilation"), _one(padding, "padding")',
    ),
    "graph: a power of a size has a factor more": Seeded(
        "fp4deploy/graph/sizes.py",
        "for _ in range(int(expression.args[1]) - 1):",
        "for _ in range(int(expression.args[1])):",
    ),
    "bench: a file is as wide as --like says it is high": Seeded(
        "fp4deploy/bench/runtimes/like.py",
        "given = (self.height, self.width)",
        "given = (self.width, self.height)",
    ),
    "predict: the background is a category of objects": Seeded(
        "fp4deploy/predict/write.py",
        "for number, name in enumerate(predictor.class_names) if number]",
        "for number, name in enumerate(predictor.class_names)]",
    ),
    "packed: a fixed batch takes the memory of another": Seeded(
        "fp4deploy/packed/memory.py",
        "(batch if 0 in each.free else each.shape[0], *",
        "(batch, *",
    ),
    "verify: lists of images are digested by their size": Seeded(
        "fp4deploy/provenance.py",
        "whole = regular and file.suffix in CONTENT",
        'whole = regular and file.suffix == ".json"',
    ),
    "cli: a full disk behind stdout is a reader that has gone": Seeded(
        "cli/process.py",
        "self.failure = OSError(errno.EPIPE, error.strerror) if closed else error",
        "self.failure = OSError(errno.EPIPE, error.strerror)",
        "tests/cli/test_lifetime.py -k full",
        nearby=True,
    ),
}
