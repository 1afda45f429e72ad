"""A run as a repository of models for the Hugging Face hub: checkpoints, exported files, settings and report.

    README.md                      the hub's model card: metadata, how to use it, the report as Markdown
    report.json, config.yaml       without the paths of this machine
    nvfp4/best.safetensors, ...    checkpoints
    export/*                       ONNX files and packed networks

The layout is that of a run, so that `hf:ORG/NAME` is read as one (`bench.hub`). Engines are left out: they are code for
one GPU and one library version, built of the ONNX file in seconds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Protocol

import yaml

from fp4deploy.bench.hub import require_repository
from fp4deploy.errors import InputError, UnavailableError, named_cause
from fp4deploy.report.collect import collect
from fp4deploy.report.markdown import render_markdown
from fp4deploy.report.run_folder import read_run
from fp4deploy.runs import Run
from fp4deploy.system.files import replace_folder, require_own_folder
from fp4deploy.tasks import TASKS
from fp4deploy.train import load_config


class Hub(Protocol):
    """What is used of `huggingface_hub.HfApi`."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> object:
        """A repository, kept where there is one."""

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> object:
        """Its files."""


def write_model_repository(run: Run, out: Path, name: str = "ORG/NAME") -> list[str]:
    """Write the folder of a run; only a folder that this function wrote is replaced. Returns the files' names.

    Raises:
        InputError: the run has no checkpoint that can be read, the folder something else, or `name` is no ORG/NAME.
    """
    require_repository(name)
    report = collect(run, read_run(run)).model_copy(update={"data": Path(run.path / "data").name})
    files = {run.checkpoint(model) for model in run.models()}
    files |= {path for path in run.export_dir.glob("*") if path.suffix in (".onnx", ".fp4")}
    settings = load_config(run.config_path, []).model_dump(mode="json")
    settings["data"]["root"] = None
    require_own_folder(out)
    with replace_folder(out) as folder:
        for path in files:
            target = folder / path.relative_to(run.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_card(report.task, name, render_markdown(report)), encoding="utf-8")
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def push(folder: Path, name: str, hub: Hub, private: bool = True) -> None:
    """Create the repository where it is absent, and upload the folder.

    Raises:
        InputError: the name is none of a repository, or the hub refuses.
        UnavailableError: the hub is not reached.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=str(folder), commit_message="fp4deploy push")
    except (HFValidationError, HfHubHTTPError) as error:
        raise InputError(f"The hub refuses {name}: {named_cause(error, 200)}. Log in with: hf auth login") from error
    except (OSError, HTTPError) as error:  # a lost connection is the one or the other, by version
        raise UnavailableError(f"The hub was not reached ({named_cause(error, 120)}). {folder} is kept.") from error


def _card(task: str, name: str, report: str) -> str:
    metadata = {"library_name": "fp4deploy", "pipeline_tag": TASKS[task].hub, "tags": ["fp4deploy", "nvfp4", "onnx"]}
    text = f"""---
{yaml.safe_dump(metadata, sort_keys=False)}---

Written by `fp4deploy push` from the report of a run. Licence, intended use and data are for its author to add.

```
fp4deploy predict photos/ --model hf:{name}
```

"""
    return text + report
