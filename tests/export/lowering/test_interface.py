"""Engines of other types and layouts compute what the graph in the file computes; open image sizes stay open."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from fp4deploy.bench.runtimes.engine_interface import EngineInterface, assumed
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine import adapter, caches
from fp4deploy.export.engine.profile import Profile
from fp4deploy.export.lowering.interface import Interface, with_interface
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.size import fix_size
from fp4deploy.models import ModelCard
from tests.export.lowering.engine_graphs import CanonicalGraph, with_open_size
from tests.export.lowering.test_lowering_gemm import evaluate, with_function

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CARD = {"mean": list(MEAN), "std": list(STD)}
MODEL_CARD = ModelCard("fp16", 1.0, ("a", "b", "c", "d"), 6, 8, MEAN, STD, background=False)


def graph(open_size: bool = False) -> onnx.ModelProto:
    """A 1x1 convolution of 3 channels to 4, FP16."""
    size = ["H", "W"] if open_size else [6, 8]
    weight = np.random.default_rng(0).standard_normal((4, 3, 1, 1)).astype(np.float16)
    made = helper.make_graph(
        [helper.make_node("Conv", ["image", "weight"], ["logits"], name="conv")],
        "network",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT16, ["N", 3, *size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT16, ["N", 4, *size])],
        [onnx.numpy_helper.from_array(weight, "weight")],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def run(model: onnx.ModelProto, image: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: image})
    return result


@pytest.fixture
def photo() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (2, 3, 6, 8), dtype=np.uint8)


@pytest.fixture
def normalised(photo: np.ndarray) -> np.ndarray:
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (MEAN, STD))
    return ((photo.astype(np.float32) / 255 - mean) / std).astype(np.float32)


@pytest.mark.parametrize("open_size", [False, True])
@pytest.mark.parametrize("output_layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("output", [None, "fp16", "fp32", "argmax"])
@pytest.mark.parametrize("input_layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kind", [None, "fp16", "fp32", "uint8"])
def test_every_interface_computes_the_same(
    photo: np.ndarray,
    normalised: np.ndarray,
    kind: str | None,
    input_layout: str,
    output: str | None,
    output_layout: str,
    open_size: bool,
) -> None:
    if output == "argmax" and output_layout == "nhwc":
        pytest.skip("refused")
    wanted = Interface(kind, input_layout, output, output_layout)
    model = with_interface(graph(open_size), wanted, CARD)
    io = EngineInterface(wanted)
    types = {"uint8": np.uint8, "fp32": np.float32}
    given = io.given(normalised, MODEL_CARD).numpy().astype(types.get(str(kind), np.float16))
    if kind == "uint8":
        np.testing.assert_array_equal(given, photo if input_layout == "nchw" else photo.transpose(0, 2, 3, 1))
    made = run(model, given)
    logits = io.logits(torch.from_numpy(made), MODEL_CARD)
    expected = run(graph(), normalised.astype(np.float16)).astype(np.float32)
    assert logits.shape == expected.shape == (2, 4, 6, 8)
    if output == "argmax":
        assert made.dtype == np.int32
        differs = logits.argmax(1) != expected.argmax(1)
        ranked = np.sort(expected, axis=1)
        assert (ranked[:, -1] - ranked[:, -2])[differs].max(initial=0) < 0.02
    else:
        assert made.dtype == (np.float32 if output == "fp32" else np.float16)
        np.testing.assert_allclose(logits, expected, atol=0.02)
        exact = kind in (None, "fp16") and output != "fp32"  # ONNX Runtime may drop a Cast to FP16 and back
        assert not exact or np.array_equal(logits, expected)


def test_nothing_is_changed_where_nothing_is_asked() -> None:
    model = graph()
    assert with_interface(model, Interface(), None) is model
    same = with_interface(model, Interface("fp16", output="fp16"), None)
    assert [node.op_type for node in same.graph.node] == ["Conv"]


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="--input is 'uint9'. Did you mean 'uint8'"):
        Interface("uint9")
    with pytest.raises(InputError, match="has no channels"):
        Interface(output="argmax", output_layout="nhwc")
    with pytest.raises(InputError, match="needs the model card"):
        with_interface(graph(), Interface("uint8"), None)
    two = graph()
    two.graph.output.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT16, [4, 3, 1, 1]))
    with pytest.raises(InputError, match="1 inputs and 2 outputs"):
        with_interface(two, Interface("fp32"), CARD)


def test_the_interface_of_an_engine_without_a_ledger() -> None:
    assert assumed("uint8", (-1, 8, 8, 3), "int32", (-1, 8, 8)) == Interface("uint8", "nhwc", "argmax")
    assert assumed("fp16", (-1, 3, 8, 3), "fp32", (-1, 4, 8, 3)) == Interface("fp16", "nchw", "fp32")
    bare = ModelCard("unknown", 0.0, (), 2, 2, MEAN, STD, background=False)
    classes = torch.tensor([[[0, 2], [1, 1]]], dtype=torch.int32)
    logits = EngineInterface(Interface(output="argmax")).logits(classes, bare)
    assert logits.shape == (1, 3, 2, 2)
    np.testing.assert_array_equal(logits.argmax(1), classes.numpy())


@pytest.fixture(scope="module")
def open_model() -> onnx.ModelProto:
    """A 3x3, a transposed and a 1x1 convolution in FP4 between two in FP16, for images of any size."""
    made = CanonicalGraph(seed=3)
    x = made.conv("deep", made.conv("first", made.image(8, 8), 16, fp4=False), 32)
    x = made.conv("point", made.up("up", x, 16), 32, kernel=1)
    return with_open_size(made.model(made.conv("head", x, 4, kernel=1, fp4=False)))


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("size", [(6, 8), (10, 4)])
def test_an_open_size_is_lowered_as_a_fixed_one(open_model: onnx.ModelProto, size: tuple[int, int]) -> None:
    lowered = lower(open_model, usual=size)
    fixed = lower(fix_size(open_model, size))
    assert [(layer.name, layer.form, layer.macs) for layer in lowered.layers] == [
        (layer.name, layer.form, layer.macs) for layer in fixed.layers
    ]
    assert [layer.form for layer in lowered.layers if layer.requested == "FP4"] == ["fp8", "gemm", "gemm"]
    image = np.random.default_rng(2).standard_normal((2, 3, *size)).astype(np.float32)
    results = [evaluate(with_function(each.model, open_model), image) for each in (lowered, fixed)]
    assert results[0].shape == (2, 4, 2 * size[0], 2 * size[1])
    np.testing.assert_array_equal(*results)


def test_an_open_size_needs_a_range_and_a_form_that_takes_it(open_model: onnx.ModelProto) -> None:
    with pytest.raises(InputError, match="Give one with --size HxW"):
        lower(open_model)
    with pytest.raises(InputError, match="--conv gemm needs one image size"):
        lower(open_model, "gemm", usual=(8, 8))
    assert ir.from_proto(lower(open_model, "fp8", usual=(8, 8)).model).graph


@pytest.mark.parametrize(
    ("profile", "shape", "expected"),
    [
        (Profile((1, 2, 4)), [-1, 3, 8, 8], [[1, 3, 8, 8], [2, 3, 8, 8], [4, 3, 8, 8]]),
        (
            Profile((1, 2, 4), ((4, 8), (6, 8), (8, 16))),
            [-1, -1, -1, 3],
            [[1, 4, 8, 3], [2, 6, 8, 3], [4, 8, 16, 3]],
        ),
        (Profile((1, 1, 8), ((4, 8), (6, 8), (8, 16))), [2, 3, -1, -1], [[2, 3, 4, 8], [2, 3, 6, 8], [2, 3, 8, 16]]),
    ],
)
def test_profiles_fill_in_batch_height_and_width(profile: Profile, shape: list[int], expected: list[list[int]]) -> None:
    assert profile.shapes(shape, "image") == expected


def test_profiles_that_are_none() -> None:
    with pytest.raises(InputError, match=r"batch range \(4, 2, 8\)"):
        Profile((4, 2, 8))
    with pytest.raises(InputError, match=r"width range \(8, 8, 4\)"):
        Profile(sizes=((2, 8), (4, 8), (8, 4)))
    with pytest.raises(InputError, match="height and width must be fixed"):
        Profile().shapes([-1, 3, -1, -1], "image")


def test_a_monitor_writes_phases() -> None:
    class Base:
        pass

    log = io.StringIO()
    monitor = adapter.monitor(type("trt", (), {"IProgressMonitor": Base}), log)
    monitor.phase_start("Optimizing graph", None, 30)
    assert monitor.step_complete("Optimizing graph", 0) is True
    monitor.phase_finish("Optimizing graph")
    assert [json.loads(line) for line in log.getvalue().splitlines()] == [
        {"phase": "Optimizing graph", "parent": None, "steps": 30, "done": 0},
        {"phase": "Optimizing graph", "done": 1},
        {"phase": "Optimizing graph", "finished": True},
    ]
    assert adapter.monitor(object(), log) is None


def test_flags_that_a_library_lacks() -> None:
    flags: list[Any] = []
    config = type("config", (), {"set_flag": staticmethod(flags.append)})
    library = type("trt", (), {"__version__": "9", "BuilderFlag": type("flags", (), {"REFIT": "refit"})})
    adapter.set_flags(library, config, ("refittable",), "TensorRT")
    assert flags == ["refit"]
    with pytest.raises(UnavailableError, match="TensorRT 9 does not offer --strip-weights"):
        adapter.set_flags(library, config, ("stripped",), "TensorRT")


def test_caches_are_of_one_version_gpu_and_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert caches.entry("timing", "tensorrt", "11.4") is None
    assert caches.driver_version(tmp_path / "absent") == "none"
    proc = tmp_path / "version"
    proc.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: gcc 12.2.0\n")
    assert caches.driver_version(proc) == "580.95.05"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 5090")
    monkeypatch.setattr(caches, "driver_version", lambda: "580.95.05")
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "cache"))
    path = caches.entry("runtime", "tensorrt-rtx", "1.7.1.116")
    assert path is not None
    assert path.name == "runtime-tensorrt_rtx-1.7.1.116-NVIDIA_GeForce_RTX_5090-580.95.05.cache"
    assert caches.read(path) == b""
    caches.keep(path, b"kernels")
    assert caches.read(path) == b"kernels"
    path.write_bytes(b"damaged")
    assert caches.read(path) == b""


def test_the_runtime_cache_goes_into_the_context() -> None:
    calls: list[Any] = []

    class Cache:
        def deserialize(self, content: bytes) -> None:
            calls.append(content)

    class Config:
        def create_runtime_cache(self) -> Cache:
            return Cache()

        def set_runtime_cache(self, cache: Cache) -> None:
            calls.append(cache)

    engine = type("engine", (), {"create_runtime_config": staticmethod(Config)})
    config, cache = adapter.runtime_cache(engine, b"before")
    assert isinstance(config, Config)
    assert calls == [b"before", cache]
    assert adapter.runtime_cache(object(), b"") == (None, None)


@pytest.mark.rtx
def test_the_library_has_every_call_of_the_adapter() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    used = {
        trt.ICudaEngine: ("create_runtime_config",),
        trt.IRuntimeConfig: ("create_runtime_cache", "set_runtime_cache"),
        trt.IRuntimeCache: ("deserialize", "serialize"),
        trt.IBuilderConfig: ("progress_monitor", "create_timing_cache", "set_timing_cache", "get_timing_cache"),
        trt.BuilderFlag: tuple(adapter.FLAGS.values()),
        trt.OnnxParserRefitter: ("refit_from_file",),
        trt.Refitter: ("refit_cuda_engine",),
        trt.Runtime: ("engine_host_code_allowed",),
    }
    assert [(owner, name) for owner, names in used.items() for name in names if not hasattr(owner, name)] == []
