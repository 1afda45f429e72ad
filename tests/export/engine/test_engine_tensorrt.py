"""How the TensorRT builder calls its library. The library here is a recorder: nothing is compiled, and nothing but the
order and the arguments of the calls is tested."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine import caches, rtx, tensorrt
from fp4deploy.export.engine.compile import CompileJob, compile_plan
from fp4deploy.export.lowering.lower import lower
from fp4deploy.plugins.runtime.nvcc import KernelError
from fp4deploy.plugins.tensorrt import kernels
from tests.export.lowering.test_lowering_gemm import one_layer

TACTIC = "no tactic for this layer"
HEADS = "Myelin (is_decomposable()) failed. Attention operation was not supported by a dedicated kernel."
LINE = "Name: conv, LayerType: gemm, Inputs: [], Constants: [], Outputs: [], Metadata: [ONNX Layer: conv]"


class Recorder:
    """A module object with the names of TensorRT's Python API that the builder uses."""

    __version__ = "0.recorded"

    __name__ = "tensorrt_recorded"

    def __init__(self, strongly_typed_is_an_option: bool, plan: bytes | None = b"plan", error: str = TACTIC) -> None:
        self.calls: list[Any] = []
        note = self.calls.append
        flags = {"STRONGLY_TYPED": 1} if strongly_typed_is_an_option else {}
        self.NetworkDefinitionCreationFlag = SimpleNamespace(**flags)
        self.ProfilingVerbosity = SimpleNamespace(DETAILED="detailed")
        self.LayerInformationFormat = SimpleNamespace(ONELINE="oneline")
        self.ILogger = object
        self.Logger = lambda severity: ("logger", severity)
        self.Logger.WARNING = "warning"  # type: ignore[attr-defined]
        image = SimpleNamespace(name="image", shape=(-1, 3, 8, 8))
        network = SimpleNamespace(num_inputs=1, get_input=lambda index: image)
        profile = SimpleNamespace(
            set_shape=lambda name, *shapes: note(("profile", name, shapes)), get_shape=lambda name: ((1,), (2,), (8,))
        )
        config = SimpleNamespace(add_optimization_profile=lambda given: note("add profile"))
        inspector = SimpleNamespace(get_engine_information=lambda form: note(("inspect", form)) or LINE)
        engine = SimpleNamespace(create_engine_inspector=lambda: inspector)
        self.config = config
        self.Runtime = lambda logger: SimpleNamespace(
            deserialize_cuda_engine=lambda given: note(("load", given)) or engine
        )
        self.OnnxParser = lambda network, logger: SimpleNamespace(parse=lambda data: note(("parse", data)) or True)

        def builder(logger: Any) -> Any:
            def build(network: Any, config: Any) -> bytes | None:
                note(("build", config.profiling_verbosity))
                if plan is None:
                    logger.log("Severity.ERROR", error)
                return plan

            return SimpleNamespace(
                create_network=lambda flags: note(("network", flags)) or network,
                create_builder_config=lambda: config,
                create_optimization_profile=lambda: profile,
                build_serialized_network=build,
            )

        self.Builder = builder


@pytest.fixture
def job(tmp_path: Path) -> CompileJob:
    found = CompileJob("tensorrt", "sm100", (1, 2, 8), str(tmp_path))
    found.onnx.write_bytes(b"onnx")
    return found


@pytest.mark.parametrize(("option", "flags"), [(True, 2), (False, 0)])
def test_calls_in_order(job: CompileJob, monkeypatch: pytest.MonkeyPatch, option: bool, flags: int) -> None:
    monkeypatch.setattr(tensorrt, "present_arch", lambda: "sm100")
    library = Recorder(option)
    answer = compile_plan(library, tensorrt.BACKEND, job, io.StringIO())
    shapes = ([1, 3, 8, 8], [2, 3, 8, 8], [8, 3, 8, 8])
    assert library.calls == [
        ("network", flags),
        ("parse", b"onnx"),
        ("profile", "image", shapes),
        "add profile",
        ("build", "detailed"),
        ("load", b"plan"),
        ("inspect", "oneline"),
    ]
    assert not hasattr(library.config, "num_compute_capabilities")
    assert (answer.evidence, answer.layers) == ("engine inspector", LINE)
    assert job.plan.read_bytes() == b"plan"


def test_times_of_kernels_are_kept(job: CompileJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorrt, "present_arch", lambda: "sm100")
    path = tmp_path / "timing.cache"
    monkeypatch.setattr(caches, "entry", lambda kind, library, version: path if kind == "timing" else None)
    for before, accepted in ((b"", True), (b"measured", True), (b"measured", False)):
        library = Recorder(False)
        given: list[Any] = []

        def take(content: bytes, ignore_mismatch: bool, given: list[Any] = given, accepted: bool = accepted) -> bool:
            given.append((content, ignore_mismatch))
            return accepted

        library.config.create_timing_cache = lambda content: content
        library.config.set_timing_cache = take
        library.config.get_timing_cache = lambda: SimpleNamespace(serialize=lambda: b"measured")
        compile_plan(library, tensorrt.BACKEND, job, io.StringIO())
        assert given == [(before, False)] + ([] if accepted else [(b"", False)])
        assert caches.read(path) == b"measured"


def test_flags_of_the_plan(job: CompileJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "present_arch", lambda: "sm100")
    library = Recorder(True)
    library.BuilderFlag = SimpleNamespace(VERSION_COMPATIBLE="vc", STRIP_PLAN="strip", REFIT="refit")  # type: ignore[attr-defined]
    flags: list[str] = []
    library.config.set_flag = flags.append
    options = tuple(tensorrt.BACKEND.options)
    compile_plan(library, tensorrt.BACKEND, dataclasses.replace(job, options=options), io.StringIO())
    assert flags == ["vc", "strip", "refit"]


@pytest.mark.parametrize(("present", "words"), [(None, "this machine has none"), ("sm90", "which is sm90, not sm100")])
def test_only_the_gpu_present_is_a_target(
    job: CompileJob, monkeypatch: pytest.MonkeyPatch, present: str | None, words: str
) -> None:
    monkeypatch.setattr(tensorrt, "present_arch", lambda: present)
    with pytest.raises(UnavailableError, match=f"{words}.*--backend tensorrt-rtx"):
        compile_plan(Recorder(False), tensorrt.BACKEND, job, io.StringIO())
    assert not job.plan.exists()


@pytest.mark.parametrize(("error", "words"), [(TACTIC, TACTIC), (HEADS, "it has no kernel for attention.* Myelin")])
def test_refused_graph_carries_the_librarys_words(
    job: CompileJob, monkeypatch: pytest.MonkeyPatch, error: str, words: str
) -> None:
    monkeypatch.setattr(tensorrt, "present_arch", lambda: "sm100")
    log = io.StringIO()
    with pytest.raises(InputError, match=f"cannot build this model for sm100: {words}"):
        compile_plan(Recorder(False, plan=None, error=error), tensorrt.BACKEND, job, log)
    assert log.getvalue() == f"ERROR {error}\n"
    assert not job.plan.exists()


@pytest.fixture
def plugin_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompileJob:
    """A job whose file holds a quantiser and a convolution as plugins, on a machine with a Blackwell GPU."""
    found = CompileJob("tensorrt", "sm100", (1, 2, 8), str(tmp_path), plugins=True)
    onnx.save(lower(one_layer("3x3"), "plugin", "tensorrt").model, found.onnx)
    monkeypatch.setattr(tensorrt, "present_arch", lambda: "sm100")
    return found


def with_plugins(library: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `plugin` package beside the recorder, and a compiler that only says what it was asked for."""
    monkeypatch.setitem(sys.modules, "tensorrt_recorded", ModuleType("tensorrt_recorded"))
    monkeypatch.setitem(sys.modules, "tensorrt_recorded.plugin", ModuleType("tensorrt_recorded.plugin"))
    note = library.calls.append

    def node_kernels(plugin: Any, attributes: Any, arch: str) -> None:
        note(("compile", plugin.name, attributes["channels"], arch))

    def register_plugins(trt: Any, trtp: Any, arch: str) -> None:
        assert trt is library
        assert trtp is sys.modules["tensorrt_recorded.plugin"]
        note(("register", arch))

    monkeypatch.setattr(kernels, "node_kernels", node_kernels)
    monkeypatch.setattr("fp4deploy.plugins.tensorrt.register_plugins", register_plugins)


def test_plugins_are_compiled_and_registered_before_the_file_is_parsed(
    plugin_job: CompileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Recorder(False)
    with_plugins(library, monkeypatch)
    compile_plan(library, tensorrt.BACKEND, plugin_job, io.StringIO())
    assert library.calls[:4] == [
        ("compile", "nvfp4_quantize", [32], "sm100"),
        ("compile", "nvfp4_conv2d", [32], "sm100"),
        ("register", "sm100"),
        ("network", 0),
    ]
    assert library.calls[4] == ("parse", plugin_job.onnx.read_bytes())


def test_other_forms_register_nothing(plugin_job: CompileJob, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder(False)
    with_plugins(library, monkeypatch)
    compile_plan(library, tensorrt.BACKEND, dataclasses.replace(plugin_job, plugins=False), io.StringIO())
    assert [call[0] for call in library.calls[:2]] == ["network", "parse"]


def test_plugins_that_cannot_be_made(plugin_job: CompileJob, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder(False)
    with pytest.raises(UnavailableError, match=r"has no Python plugins .*pip install --upgrade tensorrt"):
        compile_plan(library, tensorrt.BACKEND, plugin_job, io.StringIO())
    with pytest.raises(InputError, match="TensorRT-RTX takes no plugins"):
        compile_plan(library, rtx.BACKEND, plugin_job, io.StringIO())
    with_plugins(library, monkeypatch)

    def fails(*_: Any) -> None:
        raise KernelError("quantize_entry does not compile for sm_100")

    monkeypatch.setattr(kernels, "node_kernels", fails)
    with pytest.raises(KernelError, match="does not compile"):
        compile_plan(library, tensorrt.BACKEND, plugin_job, io.StringIO())
    assert library.calls == []
