"""Building: what is refused before a compiler is asked, what a build leaves behind, and what real builds realise."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import onnx
import pytest

from fp4deploy import __version__
from fp4deploy.errors import GateError, InputError, UnavailableError
from fp4deploy.export.engine.backends import BACKENDS
from fp4deploy.export.engine.build import build_engine, open_plan, require_device
from fp4deploy.export.engine.compile import CompileJob, compile_plan
from fp4deploy.export.ledger.ledger import load_ledger
from fp4deploy.export.lowering.interface import Interface, with_interface
from fp4deploy.export.lowering.lower import lower
from tests.export.lowering.engine_graphs import CanonicalGraph, with_open_size
from tests.processes import runs, wait_until
from tests.train.launch import start


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written_model(tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model and its plan, for tests that only read them."""
    pytest.importorskip("tensorrt_rtx")
    folder = tmp_path_factory.mktemp("built")
    build_engine(written_model(folder), folder / "model.plan")
    return folder


def written_model(folder: Path) -> Path:
    """FP4 graph with a 3x3 convolution, a transposed convolution, a skip and a 1x1 convolution."""
    graph = CanonicalGraph()
    skip = graph.norm_relu("norm", graph.conv("first", graph.image(16, 16), 32, fp4=False))
    x = graph.up("up", graph.conv("deep", graph.pool("pool", skip), 32), 32)
    x = graph.conv("point", graph.concat("skip", skip, x), 32, kernel=1)
    path = folder / "model.onnx"
    onnx.save(graph.model(graph.conv("head", x, 4, kernel=1, fp4=False)), path)
    return path


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fake_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Let the child process import a stand-in for tensorrt_rtx."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "tensorrt_rtx.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)


STAND_IN = """
import os, sys, time
__version__ = "0"
class ILogger:
    pass
class Builder:
    def __init__(self, logger):
        logger.log("Severity.VERBOSE", "about to meet a strange operator")
        {doom}
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tensorrt-rxt"}, "--backend tensorrt-rxt is unknown. Did you mean 'tensorrt-rtx'"),
        ({"arch": "sm12"}, "--arch sm12 is unknown to TensorRT-RTX.*Valid values: sm75, .*sm121"),
        ({"arch": "sm100"}, "--arch sm100 is unknown to TensorRT-RTX"),
        ({"arch": "sm89"}, "sm89 has no FP4 tensor cores.*Valid --arch values for it: sm120, sm121"),
        ({"backend": "tensorrt", "arch": "sm90"}, "sm90 has no FP4 tensor cores.*sm100, sm103"),
        ({"conv": "im2col"}, "--conv im2col is unknown"),
        ({"conv": "plugin"}, "TensorRT-RTX takes no plugins"),
        ({"batch": (1, 4, 2)}, "batch range"),
    ],
)
def test_wrong_options_are_refused(model: Path, options: dict[str, object], message: str) -> None:
    before = written(model.parent)
    with pytest.raises(InputError, match=message):
        build_engine(model, model.with_name("model.plan"), **options)  # type: ignore[arg-type]
    assert written(model.parent) == before


@pytest.mark.parametrize(
    "content", [b"", b"not a model", b"\x89PNG\r\n\x1a\n" + bytes(64), json.dumps({"a": 1}).encode()]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not an ONNX"):
        build_engine(path, tmp_path / "model.plan")
    with pytest.raises(InputError, match=r"does not exist.*fp4deploy export"):
        build_engine(tmp_path / "absent.onnx", tmp_path / "model.plan")


def test_later_opset_is_refused(model: Path) -> None:
    newer = onnx.load(model)
    newer.opset_import[0].version = 24
    onnx.save(newer, model)
    with pytest.raises(InputError, match="opset 24.*at most opset 23"):
        build_engine(model, model.with_name("model.plan"))


@pytest.mark.parametrize("backend", ["tensorrt-rtx", "tensorrt"])
def test_missing_library_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=rf"pip install {backend}$"):
        build_engine(model, model.with_name("model.plan"), backend=backend, arch="sm120")
    with pytest.raises(UnavailableError, match="not installed"):
        build_engine(model, model.with_name("model.plan"), backend=backend)


def test_aborting_compiler_becomes_one_error(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_library(tmp_path, monkeypatch, STAND_IN.format(doom="os.abort()"))
    before = written(tmp_path)
    with pytest.raises(InputError, match="ended by SIGABRT.*no engine was written") as caught:
        build_engine(model, tmp_path / "model.plan", log=tmp_path / "build.log")
    assert "about to meet a strange operator" in str(caught.value)
    assert "strange operator" in (tmp_path / "build.log").read_text(encoding="utf-8")
    assert written(tmp_path) == before | {"build.log"}


def test_interrupt_stops_the_compiler(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "alive"
    doom = f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    fake_library(tmp_path, monkeypatch, STAND_IN.format(doom=doom))

    def interrupt() -> None:
        while not (mark.is_file() and mark.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build_engine(model, tmp_path / "model.plan")
    assert time.monotonic() - start < 20
    assert not Path(f"/proc/{mark.read_text()}").exists()
    assert "model.plan" not in written(tmp_path)


def building(model: Path, library: Path, temporary: Path) -> None:
    """A process that builds with a stand-in for the library."""
    sys.path.insert(0, str(library))
    tempfile.tempdir = str(temporary)
    build_engine(model, model.with_name("model.plan"))


def test_a_killed_build_leaves_no_compiler_and_the_next_one_no_folder(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, temporary = tmp_path / "alive", tmp_path / "temporary"
    temporary.mkdir()
    doom = f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    fake_library(tmp_path, monkeypatch, STAND_IN.format(doom=doom))
    build = start(building, model, tmp_path / "fake", temporary)
    wait_until(lambda: mark.is_file() and mark.read_text(), "the start of the compiler")
    compiler = int(mark.read_text())
    assert runs(compiler)
    build.kill()
    build.join()
    wait_until(lambda: not runs(compiler), "the end of the compiler")
    assert any(temporary.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (tmp_path / "fake" / "tensorrt_rtx.py").write_text("raise ImportError('none')", encoding="utf-8")
    with pytest.raises(UnavailableError):
        build_engine(model, tmp_path / "model.plan")
    assert not any(temporary.iterdir())


def test_library_that_does_not_load(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_library(tmp_path, monkeypatch, "raise ImportError('libnvinfer.so.11: cannot open shared object file')")
    with pytest.raises(UnavailableError, match=r"libnvinfer.*pip install tensorrt-rtx"):
        build_engine(model, tmp_path / "model.plan")


@pytest.mark.parametrize("in_environment", [True, False])
def test_the_compiler_imports_nothing_from_the_users_folder(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, in_environment: bool
) -> None:
    fake_library(tmp_path, monkeypatch, "raise ImportError('libnvinfer.so.11 is missing')")
    folder, mark = tmp_path / "user", tmp_path / "executed"
    folder.mkdir()
    for name in ("dataclasses.py", "json.py", "sitecustomize.py", "fp4deploy.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit(7)\n", encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    if in_environment:
        monkeypatch.setenv("PYTHONPATH", str(folder))
    with pytest.raises(UnavailableError, match="libnvinfer.so.11 is missing"):
        build_engine(model, tmp_path / "model.plan")
    assert not mark.exists()


def test_every_backend_names_its_architectures() -> None:
    for backend in BACKENDS.values():
        assert set(backend.fp4_arches) < set(backend.arches)
    assert BACKENDS["tensorrt-rtx"].default_arch() == "sm120"


@pytest.fixture
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx")


@pytest.mark.rtx
@pytest.mark.usefixtures("rtx")
class TestRtx:
    """Builds with TensorRT-RTX for a GPU that is not there."""

    def test_build_leaves_plan_and_ledger(self, model: Path) -> None:
        out = model.parent / "engines" / "model.plan"
        result = build_engine(model, out, conv="gemm", strict=True)
        assert written(out.parent) == {"model.plan", "model.ledger.json"}
        assert out.stat().st_size == result.size_bytes == result.ledger.plan_bytes
        assert load_ledger(result.ledger_path) == open_plan(out) == result.ledger
        assert (result.ledger.backend, result.ledger.arch, result.ledger.conv) == ("tensorrt-rtx", "sm120", "gemm")
        assert result.ledger.evidence == "build log"
        assert result.ledger.about == {"version": __version__}  # the graph has neither checkpoint nor card

    @pytest.mark.parametrize(
        ("conv", "realised"),
        [
            ("auto", {"deep": "FP8", "up": "FP4", "point": "FP4"}),
            ("qdq", {"deep": "FP16", "up": "FP16", "point": "FP4"}),
            ("gemm", {"deep": "FP4", "up": "FP4", "point": "FP4"}),
        ],
    )
    @pytest.mark.parametrize("arch", ["sm120", pytest.param("sm121", marks=pytest.mark.nightly)])
    def test_realised_precision(self, model: Path, conv: str, realised: dict[str, str], arch: str) -> None:
        ledger = build_engine(model, model.with_name("model.plan"), arch=arch, conv=conv).ledger
        ledger.require_no_fallback()
        assert [row.layer for row in ledger.not_as_requested()] == [k for k, v in realised.items() if v != "FP4"]
        rows = {row.layer: row for row in ledger.layers}
        assert {name: rows[name].actual for name in realised} == realised
        assert {rows[name].weights for name in realised if realised[name] != "FP8"} == {"FP4"}
        assert (rows["deep"].weights == "FP8") == (conv == "auto")
        assert (rows["first"].actual, rows["head"].actual) == ("FP16", "FP16")
        assert ledger.totals().fp4_gemms == sum(precision == "FP4" for precision in realised.values())

    def test_fp16_model_builds_for_older_gpus(self, tmp_path: Path) -> None:
        graph = CanonicalGraph()
        path = tmp_path / "fp16.onnx"
        onnx.save(graph.model(graph.conv("conv", graph.image(16, 16), 8, fp4=False), function=False), path)
        ledger = build_engine(path, tmp_path / "fp16.plan", arch="sm86", strict=True).ledger
        assert ledger.precision == "fp16"
        assert [(row.actual, row.weights) for row in ledger.layers] == [("FP16", "FP16")]

    def test_strict_writes_nothing_when_a_layer_is_not_as_requested(self, model: Path) -> None:
        proto = onnx.load(model)
        for entry in proto.metadata_props:
            layers = json.loads(entry.value)
            layers["head"]["precision"] = "FP4"  # requested, and the file has no FP4 weights for it
            entry.value = json.dumps(layers)
        onnx.save(proto, model)
        out = model.with_name("model.plan")
        with pytest.raises(GateError, match=r"1 of 5 layers are not as requested: head"):
            build_engine(model, out, conv="gemm", strict=True)
        with pytest.raises(GateError, match=r"2 of 5 layers are not as requested: deep \(.*FP8.*; head"):
            build_engine(model, out, strict=True)
        assert written(model.parent) == {"model.onnx"}
        assert [row.layer for row in build_engine(model, out).ledger.fallbacks()] == ["head"]

    def test_unknown_operator_is_reported_in_the_compilers_words(self, tmp_path: Path) -> None:
        graph = CanonicalGraph()
        value, *size = graph.image(16, 16)
        graph.nodes.append(onnx.helper.make_node("Wavelet", [value], ["w"], name="wavelet", domain="custom"))
        proto = graph.model(("w", *size))  # type: ignore[arg-type]
        proto.opset_import.append(onnx.helper.make_opsetid("custom", 1))
        onnx.save(proto, tmp_path / "model.onnx")
        with pytest.raises(InputError, match=r"cannot parse the model: .*node wavelet, operator Wavelet"):
            build_engine(tmp_path / "model.onnx", tmp_path / "model.plan")
        assert written(tmp_path) == {"model.onnx"}

    def test_dynamic_image_size_is_refused(self, tmp_path: Path) -> None:
        graph = CanonicalGraph()
        proto = graph.model(graph.conv("conv", graph.image(16, 16), 8, fp4=False), function=False)
        proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"
        onnx.save(proto, tmp_path / "model.onnx")
        with pytest.raises(InputError, match="Give one: --size HxW"):
            build_engine(tmp_path / "model.onnx", tmp_path / "model.plan")

    def test_a_range_of_batches_and_image_sizes(self, model: Path) -> None:
        onnx.save(with_open_size(onnx.load(model)), model)
        seen: list[tuple[str, int, int]] = []
        sizes = ((8, 16), (16, 16), (32, 24))
        built = build_engine(
            model,
            model.with_name("model.plan"),
            batch=(2, 3, 4),
            sizes=sizes,
            interface=Interface("fp32", "nhwc", "argmax"),
            progress=lambda *phase: seen.append(phase),
        )
        ledger = open_plan(built.plan)
        assert (ledger.batch, ledger.sizes) == ((2, 3, 4), sizes)
        assert ledger.interface == {
            "input": "fp32",
            "input_layout": "nhwc",
            "output": "argmax",
            "output_layout": "nchw",
        }
        assert ledger.fallbacks() == ()
        assert {row.layer: row.form for row in ledger.layers}["up"] == "gemm"
        assert ledger.totals().macs > 0
        assert "Optimizing graph" in {phase for phase, _, _ in seen}
        assert all(0 <= done <= of for _, done, of in seen)

    def test_the_compiler_gives_the_profile_back(self, model: Path, tmp_path: Path) -> None:
        job = CompileJob("tensorrt-rtx", "sm120", (2, 3, 4), str(tmp_path), sizes=((8, 16), (16, 16), (32, 24)))
        assert CompileJob.from_json(json.dumps(dataclasses.asdict(job))) == job
        usual = (16, 16)
        lowered = with_interface(
            lower(with_open_size(onnx.load(model)), usual=usual).model, Interface(None, "nhwc"), None
        )
        onnx.save(lowered, job.onnx)
        backend = BACKENDS["tensorrt-rtx"]
        answer = compile_plan(backend.load(), backend, job, io.StringIO())
        assert answer.profile == {"image": [[2, 8, 16, 3], [3, 16, 16, 3], [4, 32, 24, 3]]}

    def test_options_that_do_not_go_together(self, model: Path) -> None:
        before = written(model.parent)
        with pytest.raises(InputError, match="does not offer --version-compatible"):
            build_engine(model, model.with_name("model.plan"), options=("version_compatible",))
        for wrong in ({"sizes": ((8, 8), (8, 8), (8, 8))}, {"sizes": ((8, 8), (16, 16), (16, 16)), "size": (8, 8)}):
            with pytest.raises(InputError, match="--size"):
                build_engine(model, model.with_name("model.plan"), **wrong)
        with pytest.raises(InputError, match="has one image size"):
            build_engine(model, model.with_name("model.plan"), sizes=((8, 8), (16, 16), (16, 16)))
        assert written(model.parent) == before

    def test_failed_build_keeps_the_previous_plan(
        self, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(built, tmp_path, dirs_exist_ok=True)
        model, out = tmp_path / "model.onnx", tmp_path / "model.plan"
        first = open_plan(out)

        def full_disk(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("shutil.copyfile", full_disk)
        with pytest.raises(InputError, match="No space left on device"):
            build_engine(model, out, conv="gemm")
        assert open_plan(out) == first

    def test_plan_that_is_not_the_ledgers(self, built: Path, tmp_path: Path) -> None:
        shutil.copytree(built, tmp_path, dirs_exist_ok=True)
        out = tmp_path / "model.plan"
        data = bytearray(out.read_bytes())
        data[-1] ^= 1
        out.write_bytes(data)
        with pytest.raises(InputError, match="is not the plan that model.ledger.json was written for"):
            open_plan(out)

    @pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
    def test_device_of_the_same_generation_runs_it(self, built: Path, capability: tuple[int, int]) -> None:
        require_device(open_plan(built / "model.plan"), capability)

    @pytest.mark.parametrize(("capability", "words"), [(None, "no GPU"), ((9, 0), "sm90"), ((10, 0), "sm100")])
    def test_other_machines_get_one_sentence(self, built: Path, capability: tuple[int, int] | None, words: str) -> None:
        ledger = open_plan(built / "model.plan")
        with pytest.raises(UnavailableError, match=f"^model.plan was built for sm120 .* {words}") as caught:
            require_device(ledger, capability)
        assert str(caught.value).count(". ") == 0


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "unet.plan"
    with pytest.raises(InputError, match="does not exist"):
        open_plan(path)
    path.write_bytes(b"garbage")
    with pytest.raises(InputError, match="is not an engine plan"):
        open_plan(path)
    path.write_bytes(b"vtrt" + bytes(64))
    with pytest.raises(InputError, match=r"has no ledger \(unet.ledger.json\)"):
        open_plan(path)
