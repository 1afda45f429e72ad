"""Networks of several inputs and outputs: every runtime is called like the module, and says what it takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import fp4deploy as fd
from fp4deploy.bench.artifact import bench_artifact
from fp4deploy.bench.runtimes.engine_interface import EngineInterface
from fp4deploy.bench.runtimes.ports import Port, fed
from fp4deploy.bench.runtimes.tensorrt import TensorRtRuntime
from fp4deploy.errors import InputError
from fp4deploy.export import to_portable
from fp4deploy.export.lowering.interface import Interface
from fp4deploy.qat import deployed
from fp4deploy.runs import Run

HEIGHT, WIDTH = 16, 24


class TwoCameras(nn.Module):
    """An image and a smaller depth map in; classes and a number for each image out."""

    def __init__(self) -> None:
        super().__init__()
        self.image_stem, self.depth_stem = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(1, 16, 3, padding=1)
        self.body, self.head, self.score = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 5, 1), nn.Linear(32, 1)

    def forward(self, image: torch.Tensor, depth: torch.Tensor) -> dict[str, torch.Tensor]:
        depth = nn.functional.interpolate(self.depth_stem(depth), scale_factor=2.0)
        x = self.body(torch.cat([self.image_stem(image), depth], 1).relu()).relu()
        return {"classes": self.head(x), "score": self.score(x.mean((2, 3)))}


@pytest.fixture(scope="module")
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    image, depth = torch.rand(2, 3, HEIGHT, WIDTH), torch.rand(2, 1, HEIGHT // 2, WIDTH // 2)
    return image.half().float(), depth.half().float()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, inputs: Any) -> tuple[dict[str, Path], list[np.ndarray]]:
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(0)
    model = fd.prepare(TwoCameras())
    fd.calibrate(model, [(inputs, None)])
    model.eval()
    graph = fd.export_graph(model, inputs)
    onnx.save(graph, folder / "two.onnx")
    onnx.save(to_portable(graph), folder / "two.portable.onnx")
    fd.pack(model, folder / "two.fp4", example_inputs=inputs, verify=False)
    with torch.inference_mode():
        expected = [each.numpy() for each in deployed(model)(*inputs).values()]
    return {name: folder / f"two.{name}" for name in ("onnx", "portable.onnx", "fp4")}, expected


@pytest.mark.parametrize("kind", ["onnx", "portable.onnx", "fp4"])
def test_in_order_or_by_name(files: Any, inputs: Any, kind: str) -> None:
    paths, expected = files
    runtime = fd.open_runtime(paths[kind])
    found = runtime(*inputs)
    assert list(found) == ["classes", "score"]
    for one, other in zip(found.values(), expected, strict=True):
        assert one.dtype == np.float32
        assert np.abs(one - other).max() < 0.02 * np.abs(other).max()
    image, depth = (each.numpy() for each in inputs)
    again = runtime({"depth": depth.astype(np.float64), "image": image})
    assert all(np.array_equal(again[name], found[name]) for name in found)
    assert len(runtime.time({"depth": depth, "image": image}, 1, 3, 60.0)) == 3


@pytest.mark.parametrize("kind", ["onnx", "portable.onnx", "fp4"])
def test_what_does_not_fit_is_one_line(files: Any, inputs: Any, kind: str) -> None:
    path, (image, depth) = files[0][kind], inputs
    runtime = fd.open_runtime(path)
    takes = r"image float32 \[N, 3, 16, 24\], depth float32 \[N, 1, 8, 12\]"  # tied to each other, hence fixed
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((image,), rf"takes 2 inputs \({takes}\), and 1 was given"),
        ((image, depth, depth), r"takes 2 inputs .*, and 3 were given"),
        (({"image": image, "deep": depth},), rf"takes {takes}; the dict has image, deep\."),
        ((depth, image), r"the input 'image' takes float32 \[N, 3, 16, 24\], and was given \[2, 1, 8, 12\]"),
        ((image, depth[0]), r"the input 'depth' .* was given \[1, 8, 12\]"),
        ((image, depth.long()), r"the input 'depth' takes float32 \[N, 1, 8, 12\], and was given int64"),
        ((image, None), r"the input 'depth' takes .*, and was given object"),
        ((image, depth[:1]), r"'image' and 'depth' share the axis N, and have 2 and 1"),
    ]
    for given, message in wrong:
        with pytest.raises(InputError, match=f"two.{kind}.*{message}"):
            runtime(*given)
    with pytest.raises(InputError, match="takes 2 inputs"):
        runtime.infer(image.numpy())


@pytest.mark.parametrize("kind", ["onnx", "fp4"])
def test_commands_feed_images_alone(files: Any, kind: str) -> None:
    with pytest.raises(InputError, match=r"takes 2 inputs \(image .*open_runtime\(FILE\)\(first, second\)"):
        bench_artifact(files[0][kind], None)


def test_one_input_is_called_too(untrained: Run) -> None:
    images = np.random.default_rng(1).standard_normal((2, 3, 32, 48)).astype(np.float32)
    for path in (untrained.checkpoint("fp16"), untrained.export_dir / "unet.fp16.onnx"):
        runtime = fd.open_runtime(path)
        (port,) = runtime.inputs
        assert np.array_equal(runtime(images), runtime.infer(images))
        assert np.array_equal(runtime({port.name: torch.from_numpy(images)}), runtime.infer(images))
        with pytest.raises(InputError, match=rf"{path.name}: the input '{port.name}' takes .* given \[2, 1, 32, 48\]"):
            runtime(images[:, :1])
    with pytest.raises(InputError, match=rf"{path.name}: infer takes one array"):
        runtime.infer({port.name: images})  # type: ignore[arg-type]


def test_tuples_and_integers(tmp_path: Path) -> None:
    a, b = (helper.make_tensor_value_info(name, TensorProto.INT64, ["N", 2]) for name in "ab")
    y, z = (helper.make_tensor_value_info(name, TensorProto.INT64, ["N", 2]) for name in ("output_0", "output_1"))
    nodes = [helper.make_node("Add", ["a", "b"], ["output_0"]), helper.make_node("Neg", ["a"], ["output_1"])]
    graph = helper.make_graph(nodes, "g", [a, b], [y, z])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "f.onnx")
    runtime = fd.open_runtime(tmp_path / "f.onnx")
    found = runtime(np.array([[1, 2]], np.int32), np.array([[3, 4]]))
    assert {name: each.tolist() for name, each in found.items()} == {"output_0": [[4, 6]], "output_1": [[-1, -2]]}
    for wrong in (np.ones((1, 2)), np.ones((1, 2), bool), np.ones((1, 2), np.uint64)):
        with pytest.raises(InputError, match=f"'b' takes int64 .*, and was given {wrong.dtype}"):
            runtime(np.array([[1, 2]]), wrong)


def test_a_range_of_sizes() -> None:
    port = Port("x", np.dtype(np.float16), ((1, 4), 3, None))
    assert port.described == "x float16 [1..4, 3, any]"
    assert fed([port], [torch.ones(4, 3, 7, dtype=torch.bfloat16)], "e.plan")["x"].dtype == np.float16
    with pytest.raises(InputError, match=r"e.plan: the input 'x' takes .*, and was given \[5, 3, 7\]"):
        fed([port], [np.ones((5, 3, 7))], "e.plan")


class Context:
    """An engine's context that adds the means of its two inputs, on tensors of the CPU."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.shapes["a"][0],)

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address


def test_an_engine_binds_every_input_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"a": "half", "b": "int32", "sum": "half", "size": "int32"}
    profiles = {"a": ((1, 3), (1, 3), (4, 3)), "b": ((1, 2), (1, 2), (4, 2))}
    runtime = object.__new__(TensorRtRuntime)
    runtime._where, runtime._path, runtime._input, runtime._outputs = "cpu", Path("two.plan"), "a", ["sum", "size"]
    runtime._trt = SimpleNamespace(DataType=SimpleNamespace(HALF="half", INT32="int32"))  # type: ignore[assignment]
    runtime._engine = SimpleNamespace(
        get_tensor_dtype=kinds.get,
        get_tensor_shape=lambda name: (-1, *profiles[name][0][1:]),
        get_tensor_profile_shape=lambda name, index: profiles[name],
    )
    context = runtime._context = Context()
    runtime._io = EngineInterface(Interface())
    runtime._stream, runtime._cache = SimpleNamespace(wait_stream=lambda other: None), None  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    runtime.inputs = tuple(map(runtime._port, ("a", "b")))
    held: dict[str, torch.Tensor] = {}
    bind = runtime._bind

    def watched(given: Any) -> Any:
        tensors, outputs = bind(given)
        held.update(zip(given, tensors, strict=True))
        held.update(outputs)
        return tensors, outputs

    def launch() -> None:
        assert context.addresses == {name: each.data_ptr() for name, each in held.items()}
        held["sum"].copy_(held["a"].mean(1) + held["b"].sum(1))
        held["size"].fill_(len(held["a"]))

    monkeypatch.setattr(runtime, "_bind", watched)
    monkeypatch.setattr(runtime, "_launch", launch)
    monkeypatch.setattr(runtime, "_wait", lambda: None)
    found = runtime({"b": np.ones((2, 2), np.int32), "a": torch.ones(2, 3)})
    assert {name: each.tolist() for name, each in found.items()} == {"sum": [3.0, 3.0], "size": [2, 2]}
    with pytest.raises(InputError, match=r"two.plan: the input 'a' takes float16 \[1..4, 3\], and was given \[5, 3\]"):
        runtime(np.ones((5, 3)), np.ones((5, 2), np.int32))
    with pytest.raises(InputError, match="two.plan takes 2 inputs"):
        runtime.time(np.ones((2, 3), np.float32), 1, 1, 1.0)
