"""The chain from data to engine: noted by each stage, walked by `verify_run`, each kind of break found and named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fp4deploy import provenance
from fp4deploy.provenance import CHANGED, MISSING, OK, OUTDATED, links, outdated, record, unnamed, verify_run
from fp4deploy.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """data -> nvfp4/best.safetensors -> export/unet.onnx -> engines/unet.plan."""
    run = Run(tmp_path / "run")
    data = tmp_path / "data"
    for path, text in {
        run.config_path: "seed: 0\n",
        data / "annotations" / "train.json": '{"images": []}',
        data / "train" / "a.jpg": "pixels",
        run.checkpoint("nvfp4"): "weights",
        run.export_dir / "unet.onnx": "graph",
        run.engine_dir / "unet.plan": "engine",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    record("train", run.checkpoint("nvfp4"), [data])
    record("export", run.export_dir / "unet.onnx", [run.checkpoint("nvfp4")])
    record("build", run.engine_dir / "unet.plan", [run.export_dir / "unet.onnx"])
    return run


def statuses(run: Run) -> dict[str, str]:
    return {finding.path: finding.status for finding in verify_run(run)}


def test_a_whole_chain(run: Run) -> None:
    assert statuses(run) == {"nvfp4/best.safetensors": OK, "export/unet.onnx": OK, "engines/unet.plan": OK}
    lines = [json.loads(line) for line in (run.path / provenance.FILE).read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["train", "export", "build"]
    assert lines[1]["inputs"] == [{"path": "nvfp4/best.safetensors", "sha256": lines[0]["sha256"]}]
    assert lines[0]["inputs"][0]["path"] == str(run.path.parent / "data")


def test_files_that_no_line_names_are_listed(run: Run) -> None:
    assert unnamed(run) == []
    for name in ("engines/copied.plan", "nvfp4/old.SAFETENSORS", "other/deep/net.onnx", "net.fp4"):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("bytes")
    for name in ("nvfp4/state/last.safetensors", "report.json", f".{'0' * 16}.partial/unet.onnx"):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("bytes")
    (run.path / "export" / "link.onnx").symlink_to(run.export_dir / "unet.onnx")
    listed = ["engines/copied.plan", "export/link.onnx", "net.fp4", "nvfp4/old.SAFETENSORS", "other/deep/net.onnx"]
    assert unnamed(run) == listed
    assert set(statuses(run).values()) == {OK}


def test_stages_are_walked_in_their_order(run: Run) -> None:
    quantised = run.path / "fp16" / "nvfp4-gptq.safetensors"
    quantised.parent.mkdir()
    quantised.write_text("codes")
    record("quantize", quantised, [run.checkpoint("nvfp4"), run.path.parent / "data"])
    assert [link.stage for link in links(run)] == ["train", "quantize", "export", "build"]
    run.checkpoint("nvfp4").write_text("trained further")
    assert statuses(run)["fp16/nvfp4-gptq.safetensors"] == OUTDATED


def test_a_run_may_be_moved(run: Run, tmp_path: Path) -> None:
    moved = Run(tmp_path / "elsewhere" / "named anew")
    moved.path.parent.mkdir()
    shutil.move(run.path, moved.path)
    assert set(statuses(moved).values()) == {OK}


def test_a_file_changed_by_hand_breaks_its_link_and_the_next(run: Run) -> None:
    (run.export_dir / "unet.onnx").write_text("another graph")
    assert statuses(run) == {"nvfp4/best.safetensors": OK, "export/unet.onnx": CHANGED, "engines/unet.plan": OUTDATED}
    assert "fp4deploy build" in str(outdated(run.engine_dir / "unet.plan"))
    assert outdated(run.checkpoint("nvfp4")) is None


def test_a_file_made_again_breaks_what_was_made_of_it(run: Run) -> None:
    run.checkpoint("nvfp4").write_text("trained further")
    record("train", run.checkpoint("nvfp4"), [run.path.parent / "data"])
    assert statuses(run) == {"nvfp4/best.safetensors": OK, "export/unet.onnx": OUTDATED, "engines/unet.plan": OK}
    record("export", run.export_dir / "unet.onnx", [run.checkpoint("nvfp4")])
    assert set(statuses(run).values()) == {OK}  # the last line of a file counts


@pytest.mark.parametrize("name", ["annotations/train.json", "train/a.jpg", "train/b.jpg", "deep/er/c.jpg"])
def test_other_data(run: Run, name: str) -> None:
    (run.path.parent / "data" / name).parent.mkdir(parents=True, exist_ok=True)
    (run.path.parent / "data" / name).write_text('{"images": [1]}')
    assert statuses(run)["nvfp4/best.safetensors"] == OUTDATED


@pytest.mark.parametrize("suffix", [*provenance.CONTENT, ".jpg"])
def test_the_digest_of_data(tmp_path: Path, suffix: str) -> None:
    """Of text its content, of images the sizes; names, in any order of the file system, and no place of the folder."""
    data, digests = tmp_path / "data", []
    for text, folder in (("12", "a"), ("21", "a"), ("12", "b"), ("123", "a")):
        shutil.rmtree(data, ignore_errors=True)
        for name in ("2", "1", "3"):
            file = data / folder / f"{name}{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text if name == "2" else "same")
        digests.append(provenance.digest(data))
    assert len({*digests}) == (3 if suffix == ".jpg" else 4)
    assert (digests[0] == digests[1]) == (suffix == ".jpg")
    shutil.copytree(data, tmp_path / "elsewhere")
    assert provenance.digest(tmp_path / "elsewhere") == digests[-1]


def test_a_line_is_in_the_run_of_the_first_input_and_else_of_the_output(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    out = other.export_dir / "unet.onnx"
    out.parent.mkdir(parents=True)
    other.config_path.write_text("seed: 1\n")
    out.write_text("graph")
    record("export", out, [run.checkpoint("nvfp4")])
    assert [(link.path, link.inputs[0].path) for link in links(run) if link.stage == "export"][-1] == (
        str(out), "nvfp4/best.safetensors",
    )  # fmt: skip
    assert links(other) == []
    record("export", out, [tmp_path / "data"])
    assert [(link.path, link.inputs[0].path) for link in links(other)] == [("export/unet.onnx", str(tmp_path / "data"))]


def test_what_is_gone_is_missing(run: Run) -> None:
    run.checkpoint("nvfp4").unlink()
    assert statuses(run) == {"nvfp4/best.safetensors": MISSING, "export/unet.onnx": MISSING, "engines/unet.plan": OK}


@pytest.mark.parametrize("line", ["", "{", "[]", '{"stage": "train"}', '{"stage": "train", "path": 3, "sha256": "x"}'])
def test_a_damaged_line_is_left_out(run: Run, line: str) -> None:
    with (run.path / provenance.FILE).open("a") as file:
        file.write(line + "\n")
    assert len(links(run)) == 3


def test_files_outside_any_run_are_not_noted(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_text("graph")
    record("export", tmp_path / "a.onnx", [])
    assert list(tmp_path.iterdir()) == [tmp_path / "a.onnx"]


@pytest.mark.parametrize("path", ["/dev/zero", "/", "pipe", "x" * 5000, "../../../../../../dev/zero"])
def test_a_line_may_name_anything(run: Run, tmp_path: Path, path: str) -> None:
    """A run that was copied from a stranger: what is no file is missing, and nothing waits."""
    os.mkfifo(run.path / "pipe")
    own = provenance.digest(run.checkpoint("nvfp4"))
    line = {"stage": "train", "path": "nvfp4/best.safetensors", "sha256": own, "at": "now"}
    for changed in ({**line, "path": path, "inputs": []}, {**line, "inputs": [{"path": path, "sha256": own}]}):
        (run.path / provenance.FILE).write_text(json.dumps(changed) + "\n")
        assert {finding.status for finding in verify_run(run)} <= {MISSING}
        assert outdated(run.checkpoint("nvfp4")) is None


def test_data_with_pipes_and_links_to_nothing_are_digested(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "odd"
    data.mkdir()
    os.mkfifo(data / "a.json")
    (data / "b.json").symlink_to(tmp_path / "nowhere")
    record("train", run.checkpoint("nvfp4"), [data])
    assert statuses(run)["nvfp4/best.safetensors"] == OK


def test_a_run_of_many_links_keeps_the_last(run: Run) -> None:
    line = {"stage": "export", "sha256": "0" * 64, "at": "now", "inputs": []}
    with (run.path / provenance.FILE).open("a") as file:
        file.writelines(json.dumps({**line, "path": f"{number}.onnx"}) + "\n" for number in range(3000))
    assert [link.path for link in links(run)] == [f"{number}.onnx" for number in range(2000, 3000)]


def test_folders_are_read_where_they_are_data_and_only_a_few(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was copied from a stranger may name every folder of the machine."""
    read: list[Path] = []

    def digest(path: Path) -> str:
        read.append(path)
        return "0" * 64

    monkeypatch.setattr(provenance, "digest", digest)
    for number in range(9):
        (run.path / f"data{number}").mkdir()
    lines = [
        {"stage": "train", "path": name, "sha256": "0" * 64, "at": "now", "inputs": inputs}
        for name, inputs in (
            ("data0", []),
            ("nvfp4/best.safetensors", [{"path": f"data{number}", "sha256": "0" * 64} for number in range(1, 9)]),
        )
    ]
    (run.path / provenance.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [finding.status for finding in verify_run(run)] == [MISSING, MISSING]
    assert [path.name for path in read] == ["best.safetensors", "data1", "data2", "data3"]
