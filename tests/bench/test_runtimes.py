"""Every runtime gives the same answer, and refuses what it cannot read in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from fp4deploy.bench.runtimes import packed
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.bench.runtimes.ort import OrtRuntime
from fp4deploy.bench.runtimes.pytorch import FORMS
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.models.card import CARD_KEY
from fp4deploy.plugins.runtime.fallback import Fallback, in_torch
from fp4deploy.plugins.runtime.nvcc import LaunchError
from fp4deploy.runs import Run
from tests.fuzz.predicted import DETECTION


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 3, 32, 48)).astype(np.float32)


def test_nan_for_finite_images_is_an_error(untrained: Run, images: np.ndarray, tmp_path: Path) -> None:
    """And no mask of class 0; NaN in an image is the image's own."""
    graph = onnx.load(untrained.export_dir / "unet.fp16.onnx")
    bias = next(each for each in graph.graph.initializer if "head" in each.name and "bias" in each.name)
    values = onnx.numpy_helper.to_array(bias)
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full_like(values, np.inf), bias.name))
    onnx.save(graph, tmp_path / "inf.onnx")
    with pytest.raises(InputError, match=r"inf\.onnx answers NaN or Inf for finite .*fp4deploy export --rest auto"):
        open_runtime(tmp_path / "inf.onnx").infer(images)
    assert not np.isfinite(open_runtime(tmp_path / "inf.onnx").infer(np.full_like(images, np.nan))).any()


@pytest.mark.parametrize("model", ["fp16", "nvfp4"])
def test_runtimes_agree(untrained: Run, images: np.ndarray, model: str) -> None:
    stem = f"unet.{model}"
    paths = (
        untrained.checkpoint(model),
        untrained.export_dir / f"{stem}.onnx",
        untrained.export_dir / f"{stem}.portable.onnx",
        untrained.export_dir / f"{stem}.fp4",
    )
    runtimes = [open_runtime(path) for path in paths]
    reference, canonical, portable, small = (runtime.infer(images) for runtime in runtimes)
    assert reference.shape == small.shape == (3, 7, 32, 48)
    assert reference.dtype == canonical.dtype == portable.dtype == small.dtype == np.float32
    assert np.array_equal(canonical, portable), "the lowering in memory is the portable file"
    if model == "fp16":
        assert np.abs(reference - canonical).max() < 1e-4
        assert np.abs(reference - small).max() < 1e-4
    assert np.abs(reference - canonical).mean() < 0.05 * np.abs(reference).mean()
    assert np.abs(reference - small).mean() < 0.05 * np.abs(reference).mean()
    assert [runtime.card for runtime in runtimes] == [runtimes[0].card] * 4
    assert all(runtime.card.precision == model for runtime in runtimes)


@pytest.mark.parametrize("suffix", ["nvfp4", "fp4"])
@pytest.mark.parametrize("dtype", [np.int64, np.complex64, np.bool_, np.str_])
def test_images_of_another_type_are_refused(untrained: Run, images: np.ndarray, suffix: str, dtype: type) -> None:
    path = untrained.exported("nvfp4").with_suffix(".fp4") if suffix == "fp4" else untrained.checkpoint(suffix)
    with pytest.raises(InputError, match="takes float32"):
        open_runtime(path).infer(images.astype(dtype))


def test_names_tell_what_runs_where(untrained: Run) -> None:
    torch_runtime = open_runtime(untrained.checkpoint("nvfp4"))
    canonical = open_runtime(untrained.export_dir / "unet.nvfp4.onnx")
    portable = open_runtime(untrained.export_dir / "unet.fp16.portable.onnx")
    assert torch_runtime.name.startswith("torch ")
    assert canonical.name.endswith("(CPU, decomposed in memory)")
    assert portable.name.endswith("(CPU)")
    assert (canonical.precision, portable.precision) == ("NVFP4 (emulated)", "FP16 (run in FP32)")


@pytest.mark.filterwarnings("ignore:.*back to torch")
def test_the_name_of_a_packed_network_tells_what_computed_it(untrained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU, as far as the name goes: kernels may be refused or missed, and a capture may fail."""
    path, gpu = untrained.export_dir / "unet.nvfp4.fp4", torch.device("cuda", 7)
    monkeypatch.setattr(packed, "why_unavailable", lambda _: None)
    fallback = Fallback("Norms", "torch")

    def opened() -> packed.PackedRuntime:
        runtime = packed.PackedRuntime(path, "cpu")
        assert runtime.name.endswith("packed (CPU, decoded)")
        runtime._device, runtime.cuda, runtime._network.enabled = gpu, True, True
        runtime._missed = in_torch(gpu).missed
        return runtime

    first = opened()
    assert first.name.endswith("packed (CUDA, kernels, one graph)")
    fallback.refuse(gpu, LaunchError("no memory"))
    assert first.name.endswith("packed (CUDA, kernels and torch, one graph)")
    second = opened()
    assert second.name.endswith("packed (CUDA, kernels, one graph)")
    second._network._runs[(1, 3, 8, 8),] = (), lambda: torch.zeros(1), None
    assert second.name.endswith("packed (CUDA, kernels)")
    fallback.refuse(gpu, UnavailableError("nvcc says no"))
    assert second.name.endswith("packed (CUDA, kernels and torch)")
    assert opened().name.endswith("packed (CUDA, kernels and torch, one graph)")


@pytest.mark.parametrize("name", ["unet.nvfp4.onnx", "unet.nvfp4.portable.onnx", "unet.nvfp4.fp4"])
def test_runtimes_time_themselves(untrained: Run, images: np.ndarray, name: str) -> None:
    times = open_runtime(untrained.export_dir / name).time(images, warmup=1, iterations=4, max_seconds=60)
    assert len(times) == 4
    assert min(times) > 0


@pytest.mark.parametrize("name", ["model.pkl", "model", "model.fp8", "model.onnx.txt"])
def test_unknown_suffix_lists_what_bench_takes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InputError, match=r"\.onnx .*\.safetensors .*\.fp4 .*\.plan"):
        open_runtime(tmp_path / name)


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors", ".fp4", ".plan"])
def test_missing_file(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(InputError, match="There is no file"):
        open_runtime(tmp_path / f"absent{suffix}")


@pytest.mark.parametrize("content", [b"", b"not a model", bytes(range(256)) * 40])
@pytest.mark.parametrize("suffix", [".onnx", ".safetensors", ".fp4", ".plan"])
def test_a_file_of_another_kind_is_an_input_error(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match="broken"):
        open_runtime(path)


def test_onnx_without_a_card_says_so(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 8, 8])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "f.onnx")
    runtime = open_runtime(tmp_path / "f.onnx")
    images = np.linspace(-1, 1, 192, dtype=np.float32).reshape(1, 3, 8, 8)
    assert np.array_equal(runtime.infer(images), np.maximum(images, 0))
    with pytest.raises(InputError, match="no fp4deploy model card"):
        _ = runtime.card


BOXES = {  # of two images, as `export.onnx.boxes` writes them
    "images": np.array([0, 1, 1]), "boxes": np.array([[0, 1, 9, 8], [2, 2, 5, 30], [1, 0, 31, 9]], np.float32),
    "classes": np.array([1, 2, 1]), "scores": np.array([0.9, 1.0, 0.0], np.float32),
}  # fmt: skip


def detector(path: Path, **changed: np.ndarray) -> OrtRuntime:
    """A file that answers these boxes, whatever it is given."""
    constants = {"raw": np.zeros((2, 7, 84), np.float32), **BOXES, **changed}
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(each))
        for name, each in constants.items()
    ]
    outputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in constants.items()
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 32, 32])
    graph = helper.make_graph(nodes, "detector", [image], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {CARD_KEY: DETECTION.to_json()})
    onnx.save(model, path)
    return OrtRuntime(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("classes", np.array([1, 2, 0])), ("classes", np.array([1, 3, 1])), ("classes", np.array([1, 2])),
        ("scores", np.array([0.9, 1.01, 0.0], np.float32)), ("scores", np.array([0.9, -0.1, 0.0], np.float32)),
        ("scores", np.array([0.9, np.nan, 0.0], np.float32)), ("boxes", np.full((3, 4), np.inf, np.float32)),
        ("boxes", np.zeros((3, 5), np.float32)), ("boxes", np.zeros((3, 4), np.int64)),
        ("images", np.zeros(3, np.float32)),
    ],
)  # fmt: skip
def test_boxes_of_a_file_are_boxes_of_its_classes(name: str, value: np.ndarray, tmp_path: Path) -> None:
    given = np.zeros((2, 3, 32, 32), np.float32)
    first, second = detector(tmp_path / "right.onnx").detect(given)
    assert (first[1].tolist(), second[1].tolist(), second[0].tolist()) == ([1], [2, 1], BOXES["boxes"][1:].tolist())
    with pytest.raises(InputError, match="answers no boxes of its classes"):
        detector(tmp_path / "wrong.onnx", **{name: value}).detect(given)


def test_a_loop_without_an_end_is_stopped(untrained: Run, tmp_path: Path) -> None:
    original = onnx.load(untrained.export_dir / "unet.fp16.portable.onnx")
    image = original.graph.input[0]
    true = helper.make_tensor("true", TensorProto.BOOL, [], [True])
    flag, value = (helper.make_tensor_value_info(name, kind, []) for name, kind in (("go", 9), ("at", 7)))
    after = helper.make_tensor_value_info("on", TensorProto.BOOL, [])
    carried, x = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, 32, 48]) for name in ("next", "x"))
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Neg", ["x"], ["next"])],
        "body", [value, flag, x], [after, carried],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["", "true", image.name], ["out"], body=body)
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["N", 3, 32, 48])
    graph = helper.make_graph([loop], "endless", [image], [out], [true])
    model = helper.make_model(graph, opset_imports=original.opset_import, ir_version=original.ir_version)
    model.metadata_props.extend(original.metadata_props)
    onnx.save(model, tmp_path / "endless.onnx")
    images = np.zeros((1, 3, 32, 48), np.float32)
    for use in (lambda each: each.infer(images), lambda each: each.time(images, 1, 1, 1.0)):
        with pytest.raises(InputError, match=r"endless.onnx did not finish an inference within 0.2 seconds.*--timeout"):
            use(open_runtime(tmp_path / "endless.onnx", timeout=0.2))


def test_truncated_checkpoint(untrained: Run, tmp_path: Path) -> None:
    whole = untrained.checkpoint("fp16").read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not a readable safetensors file"):
        open_runtime(path)


def test_forms_of_torch(untrained: Run, images: np.ndarray) -> None:
    """On a GPU each computes the same network; without one only `eager` runs."""
    checkpoint = untrained.checkpoint("fp16")
    with pytest.raises(InputError, match="'fast' is unknown. Valid: eager, graph, compiled, max-autotune"):
        open_runtime(checkpoint, form="fast")
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="torch runs a checkpoint as 'compiled' on a GPU only"):
            open_runtime(checkpoint, form="compiled")
        return
    expected = open_runtime(checkpoint).infer(images)
    for form in FORMS[1:]:
        runtime = open_runtime(checkpoint, form=form)
        assert np.abs(runtime.infer(images) - expected).mean() < 0.01 * np.abs(expected).mean()
        assert len(runtime.time(images, 1, 3, 60)) == 3
        assert runtime.name.endswith("one graph)")
