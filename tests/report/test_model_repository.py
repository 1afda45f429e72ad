"""A run pushed to a stand-in with the hub's own file layout, and read back from the cache without a connection."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError

from fp4deploy.bench.hub import from_hub, is_of_hub
from fp4deploy.bench.locate import find_artifact
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.models import read_card
from fp4deploy.report.model_repository import push, write_model_repository
from fp4deploy.runs import Run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Cache:
    """What `HfApi` is asked for, written as the cache has it: refs, blobs' snapshots."""

    def __init__(self, root: Path) -> None:
        self.root, self.private = root, False

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if "/" not in repo_id:
            raise HFValidationError("Repo id must be in the form 'namespace/repo_name'")
        self.private = private

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        folder = self.root / f"models--{repo_id.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        shutil.copytree(folder_path, folder / "snapshots" / COMMIT)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Cache(tmp_path / "cache")


@pytest.fixture(scope="module")
def run(untrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    copied = Run(tmp_path_factory.mktemp("pushed") / "run")
    shutil.copytree(untrained.path, copied.path)
    copied.config_path.write_text("data: {root: /home/me/secret}\n")
    return copied


def test_a_run_comes_back_from_the_hub(run: Run, hub: Cache, tmp_path: Path) -> None:
    files = write_model_repository(run, tmp_path / "hub", "me/nuclei")
    assert {"README.md", "config.yaml", "report.json", "nvfp4/best.safetensors", "export/unet.nvfp4.onnx"} <= set(files)
    push(tmp_path / "hub", "me/nuclei", hub)
    assert hub.private
    text = (tmp_path / "hub" / "README.md").read_text()
    metadata: Any = yaml.safe_load(text.split("---")[1])
    assert metadata["pipeline_tag"] == "image-segmentation"
    assert "--model hf:me/nuclei" in text
    assert "per class" in text  # the report
    said = "".join((tmp_path / "hub" / name).read_text() for name in ("config.yaml", "report.json", "README.md"))
    assert "/home/me" not in said
    json.loads((tmp_path / "hub" / "report.json").read_text())

    assert read_card(find_artifact(Path("hf:me/nuclei"))).precision == "nvfp4"
    network = find_artifact(Path("hf:me/nuclei/export/unet.nvfp4.onnx"))
    assert network.read_bytes() == run.exported("nvfp4").read_bytes()
    assert from_hub(f"hf:me/nuclei@{COMMIT}/fp16/best.safetensors").parent.name == "fp16"


@pytest.mark.parametrize("name", ["nuclei", "me/nuclei/more", "me/nuclei@v1", "hf:me/nuclei", "../x", ""])
def test_a_name_that_is_no_repository_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InputError, match=r"is no repository of the hub\. Write ORG/NAME"):
        write_model_repository(run, tmp_path / "hub", name)
    assert not any(tmp_path.iterdir())


def test_names_that_are_not_there(hub: Cache, tmp_path: Path) -> None:
    assert not is_of_hub("hf:vit")
    for name in ("hf:me/nuclei/../../x", "hf:/x", "hf:me//x"):
        with pytest.raises(InputError, match="names no file of the hub"):
            from_hub(name)
    with pytest.raises(UnavailableError, match="not in the cache"):
        from_hub("hf:me/absent")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "pickle.bin").write_bytes(b"")
    push(tmp_path / "files", "me/other", hub)
    with pytest.raises(InputError, match="no checkpoint of fp4deploy"):
        from_hub("hf:me/other")
    with pytest.raises(InputError, match="no such file"):
        from_hub("hf:me/other/absent.onnx")
    with pytest.raises(InputError, match="The hub refuses other"):
        push(tmp_path / "files", "other", hub)


def test_without_a_connection_the_folder_is_kept(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(UnavailableError, match=r"The hub was not reached \(ConnectError: .* is kept"):
        push(tmp_path, "me/nuclei", HfApi(endpoint=address, token=False))
