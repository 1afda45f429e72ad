"""Bad input: one paragraph with the cause and the next step, the right exit code, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import torch
from fp4deploy.cli.deferred import with_fields
from safetensors.torch import save_file

from fp4deploy.errors import GateError, InputError
from fp4deploy.runs import Run, create_run
from tests.bench.perfect import perfect
from tests.cli.command_line import Invoke

LONG = "x" * 5000
SMALL = (
    "--set", "model.scale=0.125", "--set", "data.height=32", "--set", "data.width=32",
    "--set", "train.epochs=1", "--set", "train.finetune_epochs=1", "--set", "train.batch_size=4",
)  # fmt: skip


def refused(result: Any, *causes: str, code: int = 2) -> None:
    """One paragraph on stderr that ends the output, none of a traceback, and nothing on stdout."""
    assert result.exit_code == code, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: "), result.stderr
    assert "Traceback" not in result.stderr
    assert "defect of fp4deploy" not in result.stderr
    for cause in causes:
        assert cause in last
    assert result.stdout == ""


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def broken(shapes: Path, tmp_path: Path) -> Path:
    """A copy of the dataset, to break."""
    return Path(shutil.copytree(shapes, tmp_path / "broken"))


def edit(folder: Path, split: str, change: Any) -> None:
    path = folder / "annotations" / f"instances_{split}2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_epochs_that_no_model_would_train_for(invoke: Invoke, shapes: Path, more: tuple[str, ...]) -> None:
    result = invoke("train", "--data", shapes, "--models", "nvfp4", "--epochs", 3, "--out", "new", *more)
    refused(result, "--epochs counts those of fp16, and only nvfp4", "--set train.finetune_epochs=3")
    assert not Path("new").exists()


@pytest.mark.parametrize("command", ["train", "run"])
class TestData:
    """What is wrong with the data stops train and run alike, before they leave anything."""

    def run(self, invoke: Invoke, command: str, data: Path, *more: str) -> Any:
        before = files(Path.cwd())
        result = invoke(command, "--data", data, *SMALL, *more)
        assert files(Path.cwd()) == before
        assert not list(Path("runs").glob("*"))
        return result

    def test_missing_folder(self, invoke: Invoke, command: str, tmp_path: Path) -> None:
        refused(self.run(invoke, command, tmp_path / "absent"), "absent does not exist", "fp4deploy data shapes")

    def test_a_folder_of_something_else(self, invoke: Invoke, command: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        refused(self.run(invoke, command, tmp_path / "empty"), "is not a dataset folder")

    def test_broken_json(self, invoke: Invoke, command: str, broken: Path) -> None:
        path = broken / "annotations" / "instances_train2017.json"
        path.write_text(path.read_text()[:500])
        refused(self.run(invoke, command, broken), "instances_train2017.json", "fp4deploy data check")

    def test_an_annotation_of_a_missing_image(self, invoke: Invoke, command: str, broken: Path) -> None:
        edit(broken, "train", lambda content: content["annotations"][2].update(image_id=987654))
        refused(self.run(invoke, command, broken), "987654", "fp4deploy data check")

    def test_an_annotation_of_a_missing_category(self, invoke: Invoke, command: str, broken: Path) -> None:
        edit(broken, "train", lambda content: content["annotations"][2].update(category_id=4321))
        refused(self.run(invoke, command, broken), "4321", "fp4deploy data check")

    def test_a_truncated_jpeg(self, invoke: Invoke, command: str, broken: Path) -> None:
        image = broken / "train2017" / "000000000003.jpg"
        image.write_bytes(image.read_bytes()[:400])
        refused(self.run(invoke, command, broken), "000000000003.jpg", "fp4deploy data check")

    def test_no_images(self, invoke: Invoke, command: str, broken: Path) -> None:
        edit(broken, "train", lambda content: content.update(images=[], annotations=[]))
        refused(self.run(invoke, command, broken), "lists no image")

    def test_an_unknown_class(self, invoke: Invoke, command: str, shapes: Path) -> None:
        refused(self.run(invoke, command, shapes, "--classes", "circle,squre"), "Did you mean 'square'?")

    def test_an_unknown_model(self, invoke: Invoke, command: str, shapes: Path) -> None:
        refused(self.run(invoke, command, shapes, "--models", "fp16,nvfp"), "Did you mean 'nvfp4'?", "fp16_control")

    def test_an_unknown_recipe(self, invoke: Invoke, command: str, shapes: Path) -> None:
        refused(self.run(invoke, command, shapes, "--recipe", "nvfp4qat"), "Did you mean 'nvfp4_qat'?")

    def test_an_unknown_setting(self, invoke: Invoke, command: str, shapes: Path) -> None:
        refused(self.run(invoke, command, shapes, "--set", "train.epoch=3"), "epoch")

    def test_a_missing_config(self, invoke: Invoke, command: str, shapes: Path) -> None:
        refused(self.run(invoke, command, shapes, "--config", "absent.yaml"), "absent.yaml")


def test_an_existing_run_is_not_overwritten(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    refused(invoke("train", "--data", shapes, "--out", "mine", *SMALL), "mine exists already", "--resume")
    assert files(tmp_path) == {"mine/notes.txt"}


def test_demo_takes_no_data(invoke: Invoke, shapes: Path) -> None:
    refused(invoke("run", "--demo", "--data", shapes), "--demo uses generated shapes")


def test_a_drop_without_a_baseline_is_refused(invoke: Invoke) -> None:
    refused(invoke("bench", "--max-drop", 1), "--max-drop is of the drop below a baseline", "--baseline FILE")


def test_an_unknown_gpu_is_refused_before_the_training(invoke: Invoke, shapes: Path, tmp_path: Path) -> None:
    refused(invoke("run", "--data", shapes, "--arch", "sm999"), "--arch sm999 is unknown", "Valid values: sm75")
    assert files(tmp_path) == set()


@pytest.mark.parametrize("command", [("export",), ("build",), ("bench",), ("train", "--resume")])
def test_nothing_to_work_on_names_the_first_step(invoke: Invoke, command: tuple[str, ...]) -> None:
    refused(invoke(*command), "There is no run under runs/", "fp4deploy train")


def test_export_of_something_else(invoke: Invoke, tmp_path: Path, shapes: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    before = files(tmp_path)
    refused(invoke("export", "absent"), "There is no file or folder absent", "fp4deploy train")
    refused(invoke("export", "folder"), "folder is not a run")
    refused(invoke("export", "notes.txt", "--data", shapes), "notes.txt")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "MODEL", "--no-verify", "--out", "file/x.onnx"),
        ("export", "MODEL", "--no-verify", "--format", "packed", "--out", "file/x.fp4"),
        ("quantize", "MODEL", "--out", "file/x.safetensors"),
        ("bench", "--engine", "MODEL", "--json", "file/x.json"),
        ("bench", "--engine", "MODEL", "--results", "file/x"),
        ("search", "MODEL", "--budget", "drop=1", "--out", "file/x"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused_before_the_work(
    invoke: Invoke, checkpoint: Path, shapes: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    given = [str(checkpoint) if part == "MODEL" else part for part in arguments]
    result = invoke(*given, "--data", shapes)
    refused(result, "file/x", "could not be written")
    assert result.stderr.count("\n") == 1
    assert files(tmp_path) == {"file"}


def test_export_without_data_to_verify_on(invoke: Invoke, checkpoint: Path, tmp_path: Path) -> None:
    refused(invoke("export", checkpoint, "--out", "x.onnx"), "--data DIR")
    assert files(tmp_path) == set()


@pytest.mark.parametrize("verify", [(), ("--no-verify",)])
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_export_of_a_corrupt_checkpoint_says_corrupt(
    invoke: Invoke, tiny_run: Run, tmp_path: Path, damage: str, verify: tuple[str, ...]
) -> None:
    content = bytearray(tiny_run.checkpoint("fp16").read_bytes())
    if damage == "changed":
        content[-9] ^= 1
    (tmp_path / "bad.safetensors").write_bytes({"cut": content[:-100], "changed": content, "empty": b""}[damage])
    refused(invoke("export", "bad.safetensors", *verify), "bad.safetensors is corrupt")


def test_a_checkpoint_of_another_scale(invoke: Invoke, checkpoint: Path, tmp_path: Path, shapes: Path) -> None:
    import dataclasses

    from safetensors.torch import load_file, save_file

    from fp4deploy.models import CARD_KEY, read_card

    card = dataclasses.replace(read_card(checkpoint), scale=0.25)
    save_file(load_file(checkpoint), tmp_path / "other.safetensors", metadata={CARD_KEY: card.to_json()})
    for command in (
        ("export", "other.safetensors", "--data", shapes),
        ("bench", "--engine", "other.safetensors", "--data", shapes),
        ("check", "other.safetensors"),
    ):
        refused(invoke(*command), "tensors differ in shape", "Use the scale and classes it was trained with")
    assert files(tmp_path) == {"other.safetensors"}


@pytest.mark.parametrize("command", [("build",), ("bench", "--engine"), ("inspect",), ("check",)])
@pytest.mark.parametrize("content", [b"", b"plain text", bytes(range(256)) * 20])
def test_a_file_that_is_not_onnx(
    invoke: Invoke, tmp_path: Path, shapes: Path, command: tuple[str, ...], content: bytes
) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    more = ("--data", shapes) if command[0] == "bench" else ()
    refused(invoke(*command, "model.onnx", *more), "model.onnx", "ONNX")
    assert files(tmp_path) == {"model.onnx"}


@pytest.mark.parametrize("name", ["net.pth", "net.safetensors"])
def test_exporting_weights_without_a_card(invoke: Invoke, tmp_path: Path, name: str) -> None:
    tensors = {"weight": torch.zeros(2)}
    torch.save(tensors, name) if name == "net.pth" else save_file(tensors, name)
    for command in (("export",), ("predict", "photo.jpg", "--model")):
        (tmp_path / "photo.jpg").touch()
        result = invoke(*command, name)
        refused(result, f"{name} is", "weights alone", f"fp4deploy quantize {name} --model SPEC", f"--init {name}")
        assert "corrupt" not in result.stderr


def test_building_what_is_not_there(invoke: Invoke, tmp_path: Path) -> None:
    refused(invoke("build", "absent.onnx"), "absent.onnx")
    assert files(tmp_path) == set()


def test_bench_of_an_unknown_kind(invoke: Invoke, tmp_path: Path, shapes: Path) -> None:
    (tmp_path / "weights.fp8").write_bytes(b"x")
    refused(invoke("bench", "--engine", "weights.fp8", "--data", shapes), ".onnx", ".safetensors", ".fp4", ".plan")


def test_bench_needs_data_outside_a_run(invoke: Invoke, checkpoint: Path) -> None:
    refused(invoke("bench", "--engine", checkpoint), "belongs to no run", "--data DIR")


def test_bench_on_other_classes(invoke: Invoke, checkpoint: Path, broken: Path) -> None:
    edit(broken, "val", lambda content: content["categories"][0].update(name="ball"))
    refused(invoke("bench", "--engine", checkpoint, "--data", broken), "circle")


def test_a_gate_that_fails_exits_1_and_still_reports(
    invoke: Invoke, checkpoint: Path, shapes: Path, tmp_path: Path
) -> None:
    measured = invoke("bench", "--engine", checkpoint, "--data", shapes, "--iterations", 1, "--json", "-")
    (tmp_path / "base.json").write_text(json.dumps(perfect(json.loads(measured.stdout))))
    command = ("bench", "--engine", checkpoint, "--data", shapes, "--baseline", "base.json", "--json", "-")
    result = invoke(*command, "--results", "kept")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["baseline_miou"] == 1.0
    (gate,) = document["gate"]
    assert gate["low"] <= gate["drop"] <= gate["high"]
    assert not gate["passed"]
    assert gate["worst_images"]
    assert "points below the baseline's 100.00 %; the 95 % interval of the drop over 4 images is" in result.stderr
    assert "classes that lost most" in result.stderr
    assert len(list((tmp_path / "kept" / "lost").glob("*.png"))) == len(gate["worst_images"])
    assert invoke(*command, "--split", "train").exit_code == 2


def test_a_json_that_cannot_be_written(invoke: Invoke, checkpoint: Path, shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = invoke("bench", "--engine", checkpoint, "--data", shapes, "--json", "file/out.json")
    assert result.exit_code == 2
    assert "could not be written" in result.stderr
    assert files(tmp_path) == {"file"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--data", LONG], ["train", "--out", LONG], ["train", "--config", LONG], ["bench", "--engine", LONG],
        ["export", LONG], ["build", LONG], ["check", LONG], ["inspect", LONG], ["audit", LONG], ["report", LONG],
        ["sweep", LONG], ["data", "check", LONG], ["data", "shapes", LONG], ["predict", LONG],
        ["predict", "x.jpg", "--model", LONG], ["telemetry", LONG], ["telemetry", "plot", LONG],
        ["estimate", "--data", LONG],
    ],
    ids=lambda arguments: " ".join(arguments[:-1]),
)  # fmt: skip
def test_a_path_that_the_system_refuses_is_said_in_words(invoke: Invoke, tmp_path: Path, arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.stderr
    assert "defect" not in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_said(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fp4deploy.models.build.build_model", refuse)
    refused(invoke("check", "unet:0.125"), "not enough free memory", code=3)


@pytest.mark.parametrize(
    "size", ["0x32", "0", "32x", "x", "-1x32", "32x16385", "9" * 5000 + "x32", "32x32x32", "1e3x32"]
)
def test_a_size_that_is_none(invoke: Invoke, size: str) -> None:
    refused(invoke("build", "x.onnx", "--size", size), "--size")


def floats(app: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every option of every command that takes a float, from the annotations."""
    found = []
    for command in app.registered_commands:
        hints = get_type_hints(
            with_fields(getattr(command.callback, "function", command.callback)), include_extras=True
        )
        for name, hint in hints.items():
            kind, *info = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if kind in (float, float | None):
                found.append((*path, command.name, *(info[0].param_decls or (f"--{name}",))))
    return found + [
        each for group in app.registered_groups for each in floats(group.typer_instance, (*path, group.name))
    ]


def test_every_number_is_finite_and_every_timer_is_one_of_the_system(app: Any, invoke: Invoke) -> None:
    found = floats(app)
    assert ("bench", "--timeout") in found
    assert ("sweep", "--minutes") in found
    for *command, option in found:
        for value in ("nan", "inf"):
            result = invoke(*command, "x", option, value)
            assert result.exit_code == 2, (command, option, result.stderr)
            assert option in result.stderr
    for command, option in (("bench", "--timeout"), ("sweep", "--minutes")):
        assert invoke(command, "x", option, "1e300").exit_code == 2


@pytest.mark.parametrize("first", ["fp16", "nvfp4"])
def test_of_several_failures_a_gate_decides_the_exit_code(
    first: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that watches for 1 hears of it, whichever model is exported first."""
    run = create_run(tmp_path / "run")
    run.config_path.write_text("{}")
    for model in ("fp16", "nvfp4"):
        run.model_dir(model).mkdir()
        run.checkpoint(model).write_bytes(b"")

    def fail(checkpoint: Path, *_: object, **__: object) -> None:
        model = checkpoint.parent.name
        kind = GateError if model == first else InputError
        raise kind(f"{kind.__name__} of {model}.")

    monkeypatch.setattr("fp4deploy.export.export_checkpoint", fail)
    result = invoke("export", run.path, "--no-verify")
    assert result.exit_code == 1, result.stderr
    assert result.stderr.count("Error of fp16.") == result.stderr.count("Error of nvfp4.") == 1


@pytest.mark.parametrize("form", ["triton", "deepstream", "holoscan"])
def test_a_model_is_served_once(form: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run the canonical graphs, not the same networks in standard operators beside them."""
    run = create_run(tmp_path / "run")
    run.config_path.write_text("{}")
    run.export_dir.mkdir()
    for name in ("net.fp16.onnx", "net.fp16.portable.onnx", "net.nvfp4.onnx", "net.nvfp4.portable.onnx", "net.fp4"):
        (run.export_dir / name).touch()
    served: list[str] = []

    def write(path: Path, out: Path, *_: object, **__: object) -> Any:
        served.append(path.name)
        return [out] if form == "triton" else out

    place = "repository.write_repository" if form == "triton" else "pipelines.write_pipeline"
    monkeypatch.setattr(f"fp4deploy.serving.{place}", write)
    result = invoke("export", run.path, "--format", form)
    assert result.exit_code == 0, result.stderr
    assert served == ["net.fp16.onnx", "net.nvfp4.onnx"]
