"""Artefacts of the Hugging Face hub: hf:ORG/NAME, hf:ORG/NAME/FILE, either with @REVISION behind the name.

A repository has the layout of a run's folder, as `fp4deploy push` writes it; without a file the NVFP4 checkpoint is
meant, or the first there is. What is downloaded, into the hub's own cache, are weights and data: no file of Python and
nothing pickled, so that loading runs no code of the repository. With HF_HUB_OFFLINE=1 the cache alone is looked at.
"""

from __future__ import annotations

import re
from pathlib import Path

from fp4deploy.errors import InputError, UnavailableError, named_cause
from fp4deploy.runs import Run

PREFIX = "hf:"
TAKEN = ("*.safetensors", "*.onnx", "*.fp4", "*.json", "*.yaml", "README.md")
_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(?!/)(.+))?\Z")


def is_of_hub(name: Path | str) -> bool:
    """Whether a name is one of the hub; `hf:vit`, without an owner, is a model spec."""
    return str(name).startswith(PREFIX) and "/" in str(name)


def require_repository(name: str) -> None:
    """Refuse what is no ORG/NAME, before anything is written or sent.

    Raises:
        InputError: naming it.
    """
    found = _NAME.match(PREFIX + name)
    if found is None or found[1] != name or ".." in name:
        raise InputError(f"'{name}' is no repository of the hub. Write ORG/NAME, of letters, digits, - _ and .")


def from_hub(name: Path | str) -> Path:
    """The file that a name means, downloaded where it is not in the cache.

    Raises:
        InputError: another form of name, no such repository or file.
        UnavailableError: the hub is not reached, and the cache does not have it.
    """
    text = str(name)
    found = _NAME.match(text)
    if found is None or ".." in text:
        raise InputError(
            f"'{text}' names no file of the hub. Write hf:ORG/NAME, hf:ORG/NAME/FILE or hf:ORG/NAME@REVISION."
        )
    repository, revision, file = found.groups()
    folder = _snapshot(repository, revision, text)
    if file is not None:
        if not (folder / file).is_file():
            raise InputError(
                f"{text}: the repository has no such file, or one of another kind than {', '.join(TAKEN)}."
            )
        return folder / file
    models = Run(folder).models()
    if not models:
        raise InputError(f"{text} has no checkpoint of fp4deploy. Name one of its files: hf:{repository}/FILE")
    return Run(folder).checkpoint("nvfp4" if "nvfp4" in models else models[0])


def _snapshot(repository: str, revision: str | None, text: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[*TAKEN]))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InputError(
            f"{text}: the hub has no such repository or revision, or it is private: hf auth login"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise UnavailableError(
            f"{text} is not in the cache of huggingface_hub, and the hub was not reached ({named_cause(error, 120)})."
        ) from error
