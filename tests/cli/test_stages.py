"""Train, export, build, bench one after another with no further arguments, and all of them in one `run`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fp4deploy.bench.kept import kept
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.errors import Interrupted
from fp4deploy.export import to_onnx
from fp4deploy.models import read_card
from fp4deploy.runs import Run
from fp4deploy.train import train_models
from tests.cli.command_line import PACKAGE, Invoke, run_in
from tests.export.exported_models import traced_once
from tests.processes import fp4deploy

TINY = (
    "--set", "model.scale=0.125", "--set", "data.height=32", "--set", "data.width=32", "--set", "data.workers=0",
    "--set", "train.epochs=4", "--set", "train.finetune_epochs=2", "--set", "train.batch_size=4",
    "--set", "telemetry.every=0",
)  # fmt: skip
RTX = importlib.util.find_spec("tensorrt_rtx") is not None
NO_GPU = not torch.cuda.is_available()


@pytest.fixture(scope="module", autouse=True)
def each_checkpoint_is_traced_once() -> Iterator[None]:
    """The tests look at what commands do with a graph; they export the same checkpoints again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_onnx, "export_graph", traced_once(to_onnx.export_graph))
        yield


@pytest.fixture(scope="module")
def home(app: Any, tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A folder in which `fp4deploy train` and `fp4deploy export` ran."""
    return run_in(
        tmp_path_factory.mktemp("home"),
        app,
        ("train", "--data", str(shapes), *TINY),
        ("export", "--format", "onnx", "--portable"),
    )


def latest(home: Path) -> Path:
    return next((home / "runs").iterdir())


def test_train_and_export_leave_the_files_of_the_contract(home: Path) -> None:
    run = latest(home)
    for name in (
        "config.yaml",
        "fp16/best.safetensors",
        "fp16/metrics.jsonl",
        "nvfp4/best.safetensors",
        "nvfp4/metrics.jsonl",
        "export/unet.nvfp4.onnx",
        "export/unet.nvfp4.portable.onnx",
        "export/unet.fp16.onnx",
        "export/unet.fp16.portable.onnx",
    ):
        assert (run / name).is_file(), name
    assert read_card(run / "nvfp4" / "best.safetensors").recipe == "nvfp4_qat"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["scale"] == 0.125
    assert not [path for path in run.rglob("*") if "partial" in path.name]


def test_export_takes_a_run_or_a_checkpoint(at_home: Invoke, tmp_path: Path) -> None:
    run = next(Path("runs").iterdir())
    whole = at_home("export", run, "--out", tmp_path / "whole", "--images", 2)
    assert whole.exit_code == 0, whole.stderr
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {"unet.nvfp4.onnx", "unet.fp16.onnx"}
    assert re.search(r"fp4deploy build \S+unet\.\S+\.onnx \S+unet\.\S+\.onnx$", whole.stderr.strip())
    one = at_home("export", run / "nvfp4" / "best.safetensors", "--out", tmp_path / "one.onnx", "--images", 2)
    assert one.exit_code == 0, one.stderr
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "whole" / "unet.nvfp4.onnx").read_bytes()
    for form in ("onnx", "packed"):
        given = ("--format", form, "--batch", 2, "--no-verify", "--out", tmp_path)
        two = at_home("export", run / "nvfp4" / "best.safetensors", *given)
        assert two.exit_code == 0, two.stderr
        runtime = open_runtime(next(tmp_path.glob("*.nvfp4.*")))
        assert runtime.inputs[0].extents[:2] == (2, 3)
        assert len(runtime.infer(np.zeros((3, 3, 32, 32), np.float32))) == 3
        next(tmp_path.glob("*.nvfp4.*")).unlink()
    many = at_home("export", run, "--out", tmp_path / "two.onnx")
    assert many.exit_code == 2
    assert "--out must be a folder" in many.stderr


def test_packed_export_inspect_and_bench(at_home: Invoke, tmp_path: Path) -> None:
    run = next(Path("runs").iterdir())
    result = at_home("export", run, "--format", "packed", "--out", tmp_path, "--images", 2)
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"unet.nvfp4.fp4", "unet.fp16.fp4"}
    assert "in FP16" in result.stdout
    assert re.search(r"fp4deploy bench( \S+\.fp4){2} --data DIR; list", result.stderr)
    shown = json.loads(at_home("inspect", tmp_path / "unet.nvfp4.fp4", "--json").stdout)
    assert shown["weight_bytes"] < 0.35 * shown["weight_bytes_fp16"]
    assert shown["activation_bytes"] < shown["activation_bytes_fp16"]
    layers = {layer["layer"]: layer for layer in shown["layers"]}
    assert (layers["up.0"]["precision"], layers["up.0"]["shape"]) == ("FP4", [16, 2, 2, 32])
    assert (layers["head"]["precision"], layers["head"]["sha256"]) == ("FP16", "ok")
    data = json.loads((run / "report.json").read_text())["data"] if (run / "report.json").is_file() else None
    data = data or yaml.safe_load((run / "config.yaml").read_text())["data"]["root"]
    engines = [part for name in ("unet.nvfp4.fp4", "unet.fp16.fp4") for part in ("--engine", tmp_path / name)]
    table = at_home("bench", *engines, "--engine", "nvfp4", "--data", data, "--iterations", 3, "--json", "-")
    assert table.exit_code == 0, table.stderr
    packed, plain, torch_model = json.loads(table.stdout)["artifacts"]
    assert abs(packed["miou"] - torch_model["miou"]) < 0.005
    assert packed["memory"]["weight_bytes"] == shown["weight_bytes"]
    assert (plain["precision"], torch_model["memory"]) == ("FP16 (run in FP32)", None)
    assert "live activations" in table.stderr
    both = at_home("export", run, "--format", "packed", "--portable")
    assert both.exit_code == 2
    assert "--portable" in both.stderr


def test_a_checkpoint_is_measured_with_another_rest(invoke: Invoke, untrained: Run, shapes: Path) -> None:
    path, more = untrained.checkpoint("fp16"), ("--data", shapes, "--iterations", 1, "--rest", "bf16")
    before = kept(untrained)
    result = invoke("bench", path, *more, "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["artifacts"][0]["precision"].startswith("BF16")
    assert kept(untrained) == before, "it is no measurement of the file as it is"
    refused = invoke("bench", untrained.exported("fp16"), *more)
    assert (refused.exit_code, "--rest is of checkpoints" in refused.stderr) == (2, True)


def test_a_damaged_packed_file(at_home: Invoke, untrained: Run, tmp_path: Path) -> None:
    target = tmp_path / "unet.nvfp4.fp4"
    content = bytearray((untrained.export_dir / target.name).read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    for command in (("inspect", target), ("bench", "--engine", target)):
        result = at_home(*command)
        assert result.exit_code == 2
        assert "is damaged: the tensor '" in result.stderr
        assert "Traceback" not in result.stderr


def test_export_goes_on_after_a_refused_model(at_home: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.export.verify.outputs import Agreement, require_agreement
    from tests.export.exported_models import pixels_that_differ

    def refuse_fp16(agreement: Agreement, name: str) -> None:
        require_agreement(Agreement(1, pixels_that_differ(100, 50), 1.0) if "/fp16/" in name else agreement, name)

    monkeypatch.setattr(to_onnx, "require_agreement", refuse_fp16)
    result = at_home("export", next(Path("runs").iterdir()), "--out", tmp_path / "out", "--images", 1)
    assert result.exit_code == 1
    assert "fp16/best.safetensors: ONNX Runtime and torch disagree" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unet.nvfp4.onnx"]


def test_export_goes_on_after_a_broken_checkpoint(at_home: Invoke, tmp_path: Path) -> None:
    shutil.copytree(next(Path("runs").iterdir()), tmp_path / "run", ignore=shutil.ignore_patterns("export", "state"))
    (tmp_path / "run" / "fp16" / "best.safetensors").write_bytes(b"no checkpoint")
    result = at_home("export", tmp_path / "run", "--images", 1)
    assert result.exit_code == 2
    assert "fp16/best.safetensors" in result.stderr
    assert "nvfp4/best.safetensors is" not in result.stderr
    assert [path.name for path in (tmp_path / "run" / "export").iterdir()] == ["unet.nvfp4.onnx"]


@pytest.mark.parametrize("name", ["unet.nvfp4.onnx", "unet.fp16.portable.onnx", "fp16", "nvfp4.safetensors"])
def test_bench_finds_names_in_the_latest_run(at_home: Invoke, home: Path, name: str) -> None:
    result = at_home("bench", "--engine", name, "--iterations", 3, "--json", "-")
    assert result.exit_code == 0, result.stderr
    (entry,) = json.loads(result.stdout)["artifacts"]
    assert (home / entry["path"]).is_file()
    assert entry["status"] == "ok"
    assert f"{name} is runs/" in result.stderr
    assert entry["path"] in result.stderr


def test_onnx_and_torch_score_alike(at_home: Invoke) -> None:
    names = ("nvfp4", "unet.nvfp4.onnx", "unet.nvfp4.portable.onnx")
    arguments = [part for name in names for part in ("--engine", name)]
    result = at_home("bench", *arguments, "--iterations", 3, "--json", "out.json")
    assert result.exit_code == 0, result.stderr
    entries = json.loads(Path("out.json").read_text())["artifacts"]
    scores = [entry["miou"] for entry in entries]
    assert max(scores) - min(scores) < 0.005
    assert [entry["model"] for entry in entries] == ["nvfp4"] * 3
    again = at_home("bench", "--engine", "unet.nvfp4.onnx", "--iterations", 1, "--baseline", "out.json")
    assert again.exit_code == 2
    assert "holds 3 artefacts" in again.stderr
    again = at_home(
        "bench", "--engine", "unet.nvfp4.onnx", "--iterations", 1, "--max-drop", 5, "--baseline", "out.json",
        "--baseline-artefact", "unet.nvfp4.onnx",
    )  # fmt: skip
    assert again.exit_code == 0, again.stderr
    assert "Within 5 points" in again.stderr


def test_inspect_and_check_of_the_exported_model(at_home: Invoke) -> None:
    facts = json.loads(at_home("inspect", "unet.nvfp4.onnx", "--json").stdout)
    assert facts["card"]["precision"] == "nvfp4"
    assert facts["opset"] == 23
    path = f"{next(Path('runs').iterdir())}/export/unet.nvfp4.onnx"
    planned = json.loads(at_home("check", path, "--json").stdout)["layers"]
    expected = json.loads(at_home("check", "unet:0.125", "--json").stdout)["layers"]
    assert [(layer["name"], layer["precision"]) for layer in planned] == [
        (layer["name"], layer["precision"]) for layer in expected
    ]


def test_audit_finds_the_file_of_the_latest_run(at_home: Invoke, home: Path) -> None:
    result = at_home("audit", "unet.nvfp4.onnx", "--json")
    assert result.exit_code == 0, result.stderr
    assert Path(json.loads(result.stdout)["file"]).parent.name == "export"
    absent = at_home("audit", "absent.onnx")
    assert (absent.exit_code, "absent.onnx" in absent.stderr) == (2, True)


@pytest.mark.rtx
@pytest.mark.skipif(not RTX, reason="TensorRT-RTX is not installed")
def test_build_then_bench(at_home: Invoke, home: Path) -> None:
    built = at_home("build")
    assert built.exit_code == 0, built.stderr
    run = latest(home)
    assert {path.name for path in (run / "engines").iterdir()} == {
        "unet.nvfp4.sm120.plan", "unet.nvfp4.sm120.ledger.json", "unet.fp16.sm120.plan", "unet.fp16.sm120.ledger.json"
    }  # fmt: skip
    assert "requested FP4 and got another" in built.stdout
    assert "built and inspected, not run" in at_home("inspect", "unet.nvfp4.sm120.plan").stdout
    assert json.loads(at_home("inspect", "unet.nvfp4.sm120.ledger.json", "--json").stdout)["arch"] == "sm120"
    before = {path.name: path.stat().st_ino for path in (run / "engines").iterdir()}
    refused = at_home("build", "--arch", "sm80")
    assert refused.exit_code == 2
    assert "unet.nvfp4.onnx holds FP4 layers, and sm80 has no FP4 tensor cores" in refused.stderr
    assert {path.name: path.stat().st_ino for path in (run / "engines").iterdir()} == before, "the FP16 engine stays"
    if NO_GPU:
        table = at_home(
            "bench",
            "--engine",
            "unet.nvfp4.sm120.plan",
            "--engine",
            "unet.nvfp4.onnx",
            "--iterations",
            1,
            "--json",
            "-",
        )
        assert table.exit_code == 0, table.stderr
        assert "no CUDA GPU" in table.stderr
        plan, graph = json.loads(table.stdout)["artifacts"]
        assert (plan["status"], plan["latency_ms"]) == ("emulated, not run", None)
        assert abs(plan["miou"] - graph["miou"]) < 0.1
        assert graph["status"] == "ok"
        source = next((run / "export").glob("unet.nvfp4.onnx"))
        source.rename(source.with_suffix(".away"))
        result = at_home("bench", "--engine", "unet.nvfp4.sm120.plan")
        source.with_suffix(".away").rename(source)
        assert result.exit_code == 3
        assert result.stdout == ""
        assert "SM120" in result.stderr
        assert "its source unet.nvfp4.onnx is not beside it" in result.stderr


def test_a_run_folder_and_a_pattern_of_its_export_name_what_is_built_and_measured(at_home: Invoke, home: Path) -> None:
    run = latest(home)
    for given in ([run], sorted((run / "export").glob("*.onnx"))):
        refused = at_home("build", *given, "--arch", "sm80")
        assert "unet.nvfp4.onnx holds FP4 layers, and sm80 has no FP4 tensor cores" in refused.stderr, (
            "both canonical files"
        )
    assert (
        "Leaving out unet.fp16.portable.onnx, unet.nvfp4.portable.onnx: engines are built of canonical"
        in refused.stderr
    )
    measured = at_home("bench", run, "--iterations", 1, "--limit", 1, "--json", "-")
    assert measured.exit_code == 0, measured.stderr
    names = {Path(each["path"]).name for each in json.loads(measured.stdout)["artifacts"]}
    assert {"unet.nvfp4.onnx", "unet.nvfp4.portable.onnx", "unet.fp16.onnx", "best.safetensors"} <= names
    empty = at_home("build", run / "fp16")
    assert "run/fp16 does not exist" not in empty.stderr
    assert "fp16 is not a run" in empty.stderr


def test_a_graph_whose_k_is_no_multiple_of_16(at_home: Invoke, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(next(Path("runs").glob("*/export/unet.nvfp4.onnx")))
    codes = next(item for item in model.graph.initializer if item.name == "encoder.2.conv1.weight.codes")
    codes.dims[1] -= 8
    codes.raw_data = codes.raw_data[: codes.dims[0] * codes.dims[1] // 2]
    (tmp_path / "odd.onnx").write_bytes(model.SerializeToString())
    result = at_home("build", tmp_path / "odd.onnx", "--out", tmp_path / "odd.plan")
    assert result.exit_code == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "encoder.2.conv1" in result.stderr
    assert str(codes.dims[1]) in result.stderr
    assert {item.name for item in tmp_path.iterdir()} == {"odd.onnx"}


class Links(HTMLParser):
    """Everything a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [str(value) for name, value in attrs if name in ("src", "href", "data") and value]


def test_run_chains_every_stage(small_run: Path) -> None:
    stdout, stderr = ((small_run.parent / f"{name}.txt").read_text() for name in ("stdout", "stderr"))
    for heading in ("[1/5] train", "[2/5] export and verify", "[3/5] build engines", "[4/5] bench", "[5/5] report"):
        assert heading in stderr
    facts = json.loads((small_run / "report.json").read_text())
    assert list(facts["models"]) == ["fp16", "nvfp4"]
    rows = {entry["path"]: entry for entry in facts["artifacts"]}
    assert rows.keys() >= {
        "fp16/best.safetensors",
        "nvfp4/best.safetensors",
        "export/unet.nvfp4.onnx",
        "export/unet.fp16.onnx",
        "export/unet.nvfp4.fp4",
        "export/unet.fp16.fp4",
    }
    assert abs(rows["export/unet.nvfp4.fp4"]["miou"] - rows["nvfp4/best.safetensors"]["miou"]) < 0.005
    assert any("packed file has" in sentence for sentence in facts["summary"])
    assert rows["nvfp4/best.safetensors"]["miou"] == facts["models"]["nvfp4"]["miou"] > 0
    assert abs(rows["export/unet.nvfp4.onnx"]["miou"] - rows["nvfp4/best.safetensors"]["miou"]) < 0.005
    if RTX and NO_GPU:
        assert rows["engines/unet.nvfp4.sm120.plan"]["status"] == "emulated, not run"
        assert rows["engines/unet.nvfp4.sm120.plan"]["latency_ms"] is None
        assert rows["engines/unet.nvfp4.sm120.plan"]["miou"] > 0
        assert facts["ledgers"][1]["actual"]["FP4"] > 0
        assert all(sum(ledger["actual"].values()) == pytest.approx(1) for ledger in facts["ledgers"])
    page = Links()
    page.feed((small_run / "report.html").read_text())
    assert page.tags >= {"table", "img", "details"} if RTX else page.tags >= {"table", "img"}
    assert [
        link[:40]
        for link in page.found
        if not link.startswith(("data:image/png;base64,", "data:image/svg+xml;base64,"))
    ] == []
    assert "run/report.html" in stdout
    assert "export/unet.nvfp4.onnx" in (small_run / "report.md").read_text()


def test_a_run_is_resumed_with_its_settings(invoke: Invoke, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chains: list[tuple[Any, ...]] = []

    def chain(config: Any, run: Run, data: Path, models: tuple[str, ...], **options: Any) -> None:
        chains.append((config, run.path, data, models))
        train_models(config, run, models, resume=options["resume"])
        raise Interrupted(signal.SIGINT, "fp4deploy train --resume")

    monkeypatch.setattr("fp4deploy.pipeline.run_chain", chain)
    first = invoke("run", "--data", shapes, "--out", "all", "--models", "fp16", *TINY, "--set", "train.epochs=1")
    assert (first.exit_code, first.stderr.rstrip()[-32:]) == (130, "fp4deploy run --out all --resume")
    trained = Path("all/fp16/metrics.jsonl").read_bytes()
    assert invoke("run", "--resume", "--out", "all").exit_code == 130
    assert chains[0] == chains[1]
    assert Path("all/fp16/metrics.jsonl").read_bytes() == trained, "nothing is trained twice"
    refused = invoke("run", "--resume", "--out", "all", "--config", "all/config.yaml")
    assert (refused.exit_code, "leave out --config" in refused.stderr) == (2, True)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_then_resume(shapes: Path, tmp_path: Path) -> None:
    """A real interruption of a real process: one line, exit 130, and the epochs done are not done again."""
    arguments = ("--data", shapes, *TINY, "--set", "train.epochs=6", "--models", "fp16")
    command = fp4deploy(tmp_path, "train", *arguments, set_up="wait_in_the_fourth_epoch")
    command.wait_until((tmp_path / "stepping").exists, "the fourth epoch")
    command.send(signal.SIGINT)
    assert command.wait() == 130, command.stderr
    assert "Traceback" not in command.stderr
    assert command.stderr.strip().splitlines()[-1].endswith("--resume")
    (metrics,) = tmp_path.glob("runs/*/fp16/metrics.jsonl")
    first = metrics.read_text().splitlines()
    assert len(first) == 3
    resumed = fp4deploy(tmp_path, "train", "--resume")
    assert resumed.wait() == 0, resumed.stderr
    lines = metrics.read_text().splitlines()
    assert lines[:3] == first
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert (metrics.parent / "best.safetensors").is_file()
    assert not (metrics.parents[1] / "nvfp4").exists()  # nobody asked for it


@pytest.mark.skipif(not NO_GPU, reason="of a machine without a GPU")
def test_forms_are_timed_on_a_gpu(
    invoke: Invoke, untrained: Run, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [untrained.export_dir / name for name in ("unet.fp16.onnx", "unet.nvfp4.onnx")]
    result = invoke("bench", "--forms", "--engine", models[0], "--engine", models[1], "--json", "forms.json")
    assert (result.exit_code, "here is no CUDA GPU" in result.stderr) == (3, True)
    assert (
        "unet.fp16-auto.plan, unet.nvfp4-auto.plan, unet.nvfp4-gemm.plan, unet.nvfp4-fp8.plan, unet.nvfp4-qdq.plan."
        in result.stderr
    )
    assert not (tmp_path / "forms.json").exists()
    (tmp_path / "unet.nvfp4.portable.onnx").touch()
    result = invoke("bench", "--forms", "--engine", "unet.nvfp4.portable.onnx")
    assert (result.exit_code, "Export them with" in result.stderr) == (2, True)
    packed = untrained.export_dir / "unet.nvfp4.fp4"
    monkeypatch.setattr(
        f"{PACKAGE}.commands.stages.bench._every_form", lambda paths: ([packed], {"unet.nvfp4-fp8.plan": "no"})
    )
    result = invoke("bench", "--forms", "--engine", models[0], "--data", shapes, "--limit", 1, "--json", "forms.json")
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "forms.json").read_text())
    assert (found["fastest"], found["not_built"]) == (str(packed), {"unet.nvfp4-fp8.plan": "no"})
