"""Seeded faults, one at a time: python -m tests.mutation.seeded [NAME ...]

Each fault is one that a reader could plausibly write, in code that decides bytes or verdicts. It replaces `old` by
`new` in a copy of the checkout, and one of the tests that are named must fail there: it passes on the unchanged copy, which
is tested afterwards. `tests/mutation/rooms.py` draws mistakes that nobody thought of.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass

from tests.mutation.copies import ROOT, Trial, run_trials
from tests.mutation.nearest import nearest
from tests.mutation.reached import LASTING

SECONDS = 300  # for the tests of one fault


@dataclass(frozen=True)
class Seeded:
    """A fault: `old` occurs once in `file`; `tests` are pytest arguments, separated by spaces.

    nearby: the test files that are `nearest` run as well; so they do where no test is named.
    """

    file: str
    old: str
    new: str
    tests: str = ""
    nearby: bool = False

    @property
    def has_place(self) -> bool:
        """Whether the code is still what it was when the fault was written."""
        path = ROOT / self.file
        return path.is_file() and path.read_text(encoding="utf-8").count(self.old) == 1

    def trial(self) -> Trial:
        """Its tests with the fault in place."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} times: {self.old}"
        near = (*nearest(self.file), "-m", LASTING) if self.nearby or not self.tests else ()
        return Trial((*self.tests.split(), *near), self.file, text.replace(self.old, self.new))


QDQ, LAYERS = "fp4deploy/export/onnx/qdq.py", "fp4deploy/export/onnx/layer_constants.py"
FORMS = "tests/export/onnx/test_layer_forms.py"
GEMM, GEMM_TESTS = "fp4deploy/export/lowering/gemm.py", "tests/export/lowering/test_lowering_gemm.py"
PADS = f"{GEMM_TESTS}::test_gemm_pads_each_side_as_the_convolution_does"
LEDGER, LEDGER_TESTS = "fp4deploy/export/ledger/actual.py", "tests/export/ledger/test_ledger.py"
GATE, BASELINE = "fp4deploy/bench/gate/decision.py", "fp4deploy/bench/gate/baseline.py"
GATE_TESTS = "tests/bench/test_gate.py"
CHECK, SHAPES = "fp4deploy/packed/check.py", "fp4deploy/packed/shapes.py"
CHECK_TESTS = "tests/packed/test_packed_check.py"
STATE, STATE_TESTS = "fp4deploy/train/state.py", "tests/train/test_interruption.py"
STATISTICS, STATISTICS_TESTS = "fp4deploy/qat/telemetry/statistics.py", "tests/qat/test_telemetry_statistics.py"
METRICS, METRICS_TESTS = "fp4deploy/metrics.py", "tests/test_metrics.py"

FAULTS: dict[str, Seeded] = {
    "a traced tensor is asked for its size, which bounds the batch": Seeded(
        "fp4deploy/formats/blocks.py",
        'if torch.compiler.is_compiling() or x.device.type != "cpu" or x.numel() <= PIECE:',
        'if x.device.type != "cpu" or x.numel() <= PIECE or torch.compiler.is_compiling():',
        "tests/qat/test_framework.py -k any_batch_size",
    ),
    "a linear layer's 3-D activation is quantised along the second axis": Seeded(
        LAYERS, '"channel_axis": -1 if isinstance(layer, nn.Linear) else 1', '"channel_axis": 1', f"{FORMS} -k linear"
    ),
    "a linear layer's 4-D activation is quantised along the second axis": Seeded(
        QDQ,
        "return (shape[0], _product(shape[1:axis]), shape[axis]), 2",
        "return (shape[0], shape[1], _product(shape[2:])), 1",
        f"{FORMS} -k linear",
    ),
    "a 3-D activation is quantised along its second axis": Seeded(
        QDQ, "        return shape, axis\n", "        return shape, len(shape) - 2\n", f"{FORMS} -k linear"
    ),
    "a 1x1 transposed convolution is reshaped instead of transposed": Seeded(
        QDQ, "if layer.order[0] == 0 and set(layer.shape[1:-1]) == {1}:", "if set(layer.shape[1:-1]) == {1}:",
        f"{FORMS} -k transposed",
    ),
    "a 3x1 convolution is reshaped instead of transposed": Seeded(
        QDQ, "set(layer.shape[1:-1]) == {1}:", "1 in layer.shape[1:-1]:", f"{FORMS} -k convolution",
    ),
    "a transposed convolution's taps are those of a convolution": Seeded(
        LAYERS, "return weight.permute(*taps, 1, 0)", "return weight.permute(*taps, 0, 1)", f"{FORMS} -k transposed"
    ),
    "channels are padded in front": Seeded(
        QDQ, "pads[len(shape) + axis] =", "pads[axis] =", f"{FORMS} -k convolution"
    ),
    "im2col pads the bottom and the right as the top and the left": Seeded(
        GEMM, 'writer.integers("pads", 0, 0, top, left, 0, 0, bottom, right)',
        'writer.integers("pads", 0, 0, bottom, right, 0, 0, top, left)', PADS,
    ),
    "im2col swaps top and left": Seeded(
        GEMM, "top, left, bottom, right = plan.pads", "left, top, right, bottom = plan.pads", PADS
    ),
    "the ledger lists the first kernel of a layer": Seeded(
        LEDGER, "kernels=tuple(kernel.name for kernel in kernels)", "kernels=tuple(kernel.name for kernel in kernels[:1])",
        f"{LEDGER_TESTS}::test_every_kernel_of_a_layer_is_listed",
    ),
    "the ledger knows one kernel of a node": Seeded(
        LEDGER, "by_node.setdefault(node, []).append(kernel)", "by_node[node] = [kernel]",
        f"{LEDGER_TESTS}::test_every_kernel_of_a_layer_is_listed",
    ),
    "a layer that fell back is not said to have": Seeded(
        LEDGER, "(actual, weights) != (layer.compute, layer.weights)", "weights != layer.weights", LEDGER_TESTS
    ),
    "the loss scaler is not restored": Seeded(
        STATE, 'if scaler is not None and meta.get("scaler"):', "if False:",
        f"{STATE_TESTS}::test_the_loss_scaler_comes_back",
    ),
    "the digest of a state is not compared": Seeded(
        "fp4deploy/models/checkpoint.py", "if DIGEST_KEY in metadata and", "if False and",
        f"{STATE_TESTS} -k flipped",
    ),
    "inputs of one node may differ in size": Seeded(
        SHAPES, "tensors = [_empty(shape) for shape in inputs]",
        "tensors = [_empty((*shape[:2], *inputs[0][2:])) for shape in inputs]", CHECK_TESTS,
    ),
    "two layers may share a weight of another shape": Seeded(
        CHECK, "_check_tensors(graph, node, shapes, layers)", "_check_tensors(graph, node, shapes, {})", CHECK_TESTS
    ),
    "a packed file's logits may have other channels": Seeded(
        CHECK, "    if channels is not None:\n        _check_logits", "    if False:\n        _check_logits", CHECK_TESTS
    ),
    "a packed file's scale may be tiny": Seeded(
        CHECK, "if name in amaxes and not float(tensor) >= SMALLEST_AMAX:", "if False:", CHECK_TESTS
    ),
    "detections are numbered from 0": Seeded(
        "fp4deploy/instances/scores.py", 'enumerate(content["annotations"], start=1)',
        'enumerate(content["annotations"])',
        "tests/instances/test_scores.py::test_a_second_detection_of_one_object_is_false",
    ),
    "regions of equal area are drawn in reverse": Seeded(
        "fp4deploy/data/coco/dataset.py", "sorted(objects, key=lambda item: -item[0])",
        "sorted(objects[::-1], key=lambda item: -item[0])",
        "tests/data/test_instances.py::test_regions_of_equal_area_are_drawn_in_the_order_of_the_file",
    ),
    "small regions are drawn under large ones": Seeded(
        "fp4deploy/data/coco/dataset.py", "sorted(objects, key=lambda item: -item[0])",
        "sorted(objects, key=lambda item: item[0])", "tests/data/test_instances.py tests/data/test_coco.py",
    ),
    "a drop of exactly the limit fails": Seeded(
        GATE, "100 * self.drop.high <= self.max_drop + ROUNDING", "100 * self.drop.high < self.max_drop",
        f"{GATE_TESTS} -k exactly",
    ),
    "the gate looks at the lower bound": Seeded(
        GATE, "100 * self.drop.high <= self.max_drop + ROUNDING", "100 * self.drop.low <= self.max_drop + ROUNDING",
        f"{GATE_TESTS} -k whole_interval",
    ),
    "the baseline is the last entry of a file": Seeded(
        BASELINE, "            return named[0]", "            return scored[-1]", f"{GATE_TESTS} -k several_entries"
    ),
    "the counts are those of another entry": Seeded(
        BASELINE, "(document.evidence or [])[place] if", "(document.evidence or [])[0] if", f"{GATE_TESTS} -k several_entries"
    ),
    "the split of a baseline is not compared": Seeded(
        BASELINE, "    if entry.split != split:", "    if False:", f"{GATE_TESTS} -k bound"
    ),
    "an artefact without a score passes the gate": Seeded(
        GATE, "    if unscored is not None:", "    if False:", f"{GATE_TESTS} -k no_score"
    ),
    "the last batch of an engine is dropped": Seeded(
        "fp4deploy/bench/runtimes/tensorrt.py", "for i in range(0, len(images), most)]",
        "for i in range(0, len(images) - len(images) % most or most, most)]",
        "tests/bench/test_runtime_tensorrt.py::test_more_images_than_the_largest_batch_all_run",
    ),
    "the smallest normal scale counts as underflow": Seeded(
        STATISTICS, "coded.scales < coded.smallest", "coded.scales <= coded.smallest",
        f"{STATISTICS_TESTS}::test_the_smallest_normal_scale_is_no_underflow",
    ),
    "the confusion matrix is transposed": Seeded(
        METRICS, "union = counts.sum(0) + counts.sum(1) - hit", "union = 2 * counts.sum(0) - hit", METRICS_TESTS
    ),
    "classes that never occurred count as 0": Seeded(
        METRICS, "miou=float(iou[seen].mean())", "miou=float(iou.mean())", METRICS_TESTS
    ),
    "a training that cannot be scored keeps its first epoch": Seeded(
        "fp4deploy/train/loop.py", "(scores.score > best or best < 0)", "(scores.score > best or progress.epoch == 1)",
        "tests/train/test_unscored.py",
    ),
    "a signal stops one process of several": Seeded(
        "fp4deploy/train/loop.py", "        if not self._alone:\n            number =", "        if False:\n            number =",
        "tests/train/test_distributed.py::test_a_signal_to_one_process_stops_both_after_the_same_step",
    ),
    "the offset of the last tap is not compared with 32 bits": Seeded(
        "fp4deploy/plugins/gemm/arguments.py", "(last_tap + 1) * deepest,", "0,",
        "tests/plugins/gemm/test_dispatch.py -k 32_bits",
    ),
    "shapes of an ONNX file are divided rounding down": Seeded(
        "fp4deploy/interop/onnx_operators.py", "np.frompyfunc(_truncated, 2, 1)(x, y)", "x // y",
        "tests/interop/test_onnx_network.py -k towards_zero",
    ),
    "an exported division of sizes rounds towards zero": Seeded(
        "fp4deploy/export/onnx/floor.py", "    if _is_count(dividend) and _is_count(divisor):", "    if True:",
        "tests/export/onnx/test_image_size.py -k as_in_python",
    ),
    "class ids are taken modulo 256": Seeded(
        "fp4deploy/data/sample.py", "np.uint8 if classes <= MAX_CLASSES else np.uint16", "np.uint8",
        "tests/predict/test_predictor.py -k a_byte",
    ),
    "statistics in FP32 are what a norm computes in": Seeded(
        LEDGER, 'for precision in ("FP16", "BF16", "FP32") if precision in found',
        'for precision in ("FP32", "BF16", "FP16") if precision in found', f"{LEDGER_TESTS} -k statistics",
    ),
    "a volume lower than a window lies at its end": Seeded(
        "fp4deploy/data/tiles.py", "before = [max(0, side - own) // 2 for", "before = [max(0, side - own) for",
        "tests/data/test_volume_windows.py -k shorter",
    ),
    "a layer that reads the image again is a first one": Seeded(
        "fp4deploy/qat/ends.py", "first = [call for call in reading if not self.inputs[call].all & set(reading)]",
        "first = reading", "tests/qat/test_ends.py -k reads_the_image_again",
    ),
    "a percentile is that of the last batch": Seeded(
        "fp4deploy/qat/calibration.py", "torch.maximum(largest[name], value) if name in largest else value", "value",
        "tests/qat/test_learned.py -k percentile_is_of",
    ),
    "a brush is where it is red": Seeded(
        "fp4deploy/data/importing/label_studio.py", "[..., 3] > 0", "[..., 0] > 0",
        "tests/data/test_label_studio.py -k opaque",
    ),
    "a case of nnU-Net may have more channels": Seeded(
        "fp4deploy/interop/nnunet/cases.py", "if held != wanted:", "if held[:channels] != wanted:",
        "tests/interop/test_nnunet_cases.py",
    ),
    "a place with Inf has a box": Seeded(
        "fp4deploy/detection/decode.py", "outputs.where(outputs.isfinite().all(0), -torch.inf)",
        "outputs.nan_to_num(-torch.inf)", "tests/detection/test_decode_boxes.py -k infinity",
    ),
    "a command leaves its signal handlers": Seeded(
        "cli/process.py", "            signal.signal(number, signal.SIG_DFL)", "            pass",
        "tests/cli/test_main.py -k signals",
    ),
    "numbers of an activation's type are traced in FP16, where they are 0": Seeded(
        "fp4deploy/export/onnx/mixed_types.py", " | dict.fromkeys(OF_NUMBERS, _of_numbers)", "",
        "tests/export/test_wide_numbers.py -k Made",
    ),
    "sizes of open axes are computed with in FP16": Seeded(
        "fp4deploy/graph/wide.py", "wide_constants |= _sizes_as_tensors(", "_sizes_as_tensors(",
        "tests/export/test_wide_numbers.py -k sizes",
    ),
    "last bits explain what a fault of a thousandth does": Seeded(
        "fp4deploy/export/verify/last_bits.py", "FACTOR = 4 ", "FACTOR = 40000 ",
        "tests/export/verify/test_last_bits.py -k tie",
    ),
    "outputs that last bits move far are compared nowhere": Seeded(
        "fp4deploy/export/verify/last_bits.py", "[found * held for found, held in", "[found for found, held in",
        "tests/export/verify/test_last_bits.py -k too_much",
    ),
}  # fmt: skip


def run(names: list[str], jobs: int, faults: dict[str, Seeded] = FAULTS) -> list[str]:
    """The faults that survive; prints a line for each."""
    chosen = [(name, faults[name]) for name in names or faults]
    planted = [(name, fault) for name, fault in chosen if fault.has_place]
    for name in [name for name, fault in chosen if not fault.has_place]:
        print(f"{name}: its place is no longer in the code", flush=True)
    noticed: dict[str, list[str]] = {}  # fault -> the tests that fail with it
    survivors = []
    for number, outcome in run_trials([fault.trial() for _, fault in planted], jobs, SECONDS):
        name, fault = planted[number]
        killed = outcome.failed and outcome.status is not None  # what is only slow has noticed nothing
        if killed:
            noticed[name] = re.findall(r"^(?:FAILED|ERROR) (\S+)", outcome.output, re.MULTILINE) or list(
                fault.trial().tests
            )
        else:
            survivors.append(name)
        verdict = f"killed by {noticed[name][0]}" if killed else "SURVIVED"
        print(f"{outcome.seconds:5.0f} s  {name}: {verdict}", flush=True)
    every = [Trial(tuple(tests)) for tests in noticed.values()]  # which pass without it
    for number, outcome in run_trials(every, jobs, SECONDS):
        if outcome.failed:
            name = list(noticed)[number]
            survivors.append(name)
            print(f"{name}: its tests fail without it\n{outcome.output[-400:]}", flush=True)
    print(f"{len(planted) - len(survivors)} of {len(planted)} killed")
    return survivors


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, each in a copy of the checkout")
    chosen = parser.parse_args()
    return 1 if run(chosen.names, chosen.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
