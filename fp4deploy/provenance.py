"""RUN/provenance.jsonl: which file was made of which, by SHA-256, from the data to the engine.

    data --train, quantize, import-modelopt--> checkpoint --export--> ONNX, .fp4 --build--> engine

Every stage appends a line when its file is whole: the file, what it was made of, each with its digest at that moment.
The last line of a file counts. `verify_run` walks the chain and compares it with the files that are there now: a file
that was changed by hand, an engine of an older ONNX file, a checkpoint trained further after the export, other data.

A file of a kind that the stages make, but which no line names, is no break of the chain, and nothing vouches for it:
`unnamed` lists those, such as an engine that was copied into the run.

This finds mistakes and damage. It does not prove who made a file: who can change a file can change the line. To prove
that, sign RUN/provenance.jsonl with a tool made for it, such as cosign or gpg; it names everything else by digest.

**The digest of data** covers sorted names and sizes of all files of the folder, and the content of its JSON and text
files (annotations, lists). Images are not read, so that 20 GB take seconds; a pixel changed without a change of the
file's size is not found. (`bench` digests the decoded pixels of the split that it measures.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from fp4deploy.errors import InputError
from fp4deploy.runs import Run, is_first_process, run_of
from fp4deploy.system.files import TEMPORARY, append_line, digest_of, file_digest
from fp4deploy.system.schema import MAX_BYTES, Name, records, whole_lines

FILE = "provenance.jsonl"
Stage = Literal["train", "quantize", "import-modelopt", "export", "build"]
STAGES: tuple[Stage, ...] = get_args(Stage)
CONTENT = (".json", ".txt", ".csv", ".yaml", ".yml")  # suffixes of a dataset's files whose content is digested
MAX_FILES = 2_000_000  # of a dataset
MAX_CONTENT = 8 << 30  # bytes of its JSON and text files
MAX_LINKS = 1000  # files of a run
MADE = (".safetensors", ".onnx", ".fp4", ".plan")  # suffixes of what the stages make
RESUMED = "state"  # the folder of what a training is resumed from; of no other stage's concern
MAX_FOLDERS = 4  # datasets that one verification reads
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

OK, MISSING, CHANGED, OUTDATED = "ok", "missing", "changed", "outdated"


class Source(BaseModel):
    """A file or a data folder and its SHA-256; `path` relative to the run where it lies inside."""

    model_config = ConfigDict(extra="ignore")

    path: Name
    sha256: Digest


class Link(Source):
    """One file that a stage made, and what it was made of; `at` in UTC."""

    stage: Stage
    at: Name
    inputs: Annotated[list[Source], Field(max_length=16)]


@dataclass(frozen=True)
class Finding:
    """What became of a link: `status` is ok, missing, changed (the file) or outdated (what it was made of)."""

    stage: str
    path: str
    status: str
    text: str


def record(stage: Stage, output: Path, inputs: Sequence[Path]) -> None:
    """Note in the run of the first input, or of the output, that `output` was made of `inputs`.

    Nothing is noted where neither lies in a run. A folder among the inputs is a dataset.

    Raises:
        InputError: the line cannot be written.
    """
    run = next((found for path in (*inputs, output) if (found := run_of(path)) is not None), None)
    if run is None or not is_first_process():
        return
    sources = []
    for path in inputs:
        with suppress(InputError):  # not there, or cannot be read: the stage is done nevertheless
            sources.append(Source(path=_name(run, path), sha256=digest(path)).model_dump())
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    line = {"stage": stage, "path": _name(run, output), "sha256": digest(output), "inputs": sources, "at": at}
    append_line(run.path / FILE, line)


def links(run: Run) -> list[Link]:
    """The last line of each file, in the order of the stages; lines that cannot be read are left out.

    At most `MAX_LINKS`, those that were written last.
    """
    found: dict[str, Link] = {}
    for link in records(Link, whole_lines(run.path / FILE, MAX_BYTES)):
        found.pop(link.path, None)
        found[link.path] = link
    return sorted(list(found.values())[-MAX_LINKS:], key=lambda link: STAGES.index(link.stage))


def verify_run(run: Run) -> list[Finding]:
    """Compare every link with the files as they are now, from the data to the engines."""
    return _findings(run, links(run))


def unnamed(run: Run) -> list[str]:
    """Files of the run that a stage could have made and no line of the chain names, at most `MAX_LINKS`, sorted."""
    named = {link.path for link in links(run)}
    found: list[str] = []
    seen = 0
    for root, folders, files in os.walk(run.path):
        folders[:] = sorted(name for name in folders if name != RESUMED and not TEMPORARY.fullmatch(name))
        seen += len(files)
        names = (_inside(run, Path(root) / name) for name in sorted(files) if name.lower().endswith(MADE))
        found += [name for name in names if name not in named]
        if len(found) > MAX_LINKS or seen > MAX_FILES:
            break
    return sorted(found)[:MAX_LINKS]


def _inside(run: Run, path: Path) -> str:
    """A file of the run as lines name it; a link stays the name that it has there."""
    return path.relative_to(run.path).as_posix().encode(errors="surrogateescape").decode(errors="replace")


def outdated(path: Path) -> str | None:
    """Why a file is no longer what its run says it was made of; None where all is well or nothing was noted."""
    run = run_of(path)
    if run is None:
        return None
    name = _name(run, path)
    own = _findings(run, [link for link in links(run) if link.path == name])
    return next((finding.text for finding in own if finding.status in (CHANGED, OUTDATED)), None)


def digest(path: Path) -> str:
    """SHA-256 of a file, or of a dataset's folder as the module says.

    Raises:
        InputError: neither is there, a file of the folder cannot be read, or it has more of them than `MAX_FILES`.
    """
    if not path.is_dir():
        return file_digest(path)
    try:
        return digest_of(_parts(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.filename or path}: {error.strerror or error}.") from error


def _parts(folder: Path) -> list[bytes]:
    if folder.resolve() == Path(folder.resolve().anchor):
        raise InputError(f"{folder} is the root of the file system, and no dataset.")
    parts = []
    content = 0
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            file = Path(root) / name
            regular = file.is_file()  # neither a pipe, which never ends, nor a link to nothing
            size = file.stat().st_size if regular else 0
            whole = regular and file.suffix in CONTENT
            content += size * whole
            parts += [file.relative_to(folder).as_posix().encode(errors="surrogateescape")]
            parts += [file_digest(file).encode() if whole else str(size).encode()]
            if len(parts) > 2 * MAX_FILES or content > MAX_CONTENT:
                most = f"{MAX_FILES} files, or {MAX_CONTENT >> 30} GiB of JSON and text"
                raise InputError(f"{folder} has more than {most}: it is no dataset.")
    return parts


def _findings(run: Run, chain: Sequence[Link]) -> list[Finding]:
    """What became of each link; a file that several name is read once, and a folder only where it is data."""
    known: dict[str, str | None] = {}
    folders: set[str] = set()

    def now(path: str, data: bool) -> str | None:
        if path not in known:
            known[path] = None
            with suppress(OSError, InputError):  # a name that is too long, a device, a folder without permission
                whole = run.path / path  # an absolute path stays itself
                if whole.is_dir():
                    folders.add(path)
                if path not in folders or (data and len(folders) <= MAX_FOLDERS):
                    known[path] = digest(whole)
        return known[path]

    return [_finding(link, now) for link in chain]


def _finding(link: Link, now: Callable[[str, bool], str | None]) -> Finding:
    found = now(link.path, False)
    if found is None:
        return Finding(link.stage, link.path, MISSING, f"{link.path} is not there any more.")
    if found != link.sha256:
        text = (
            f"{link.path} is not the file that {link.stage} wrote: SHA-256 {found[:12]}, and {link.sha256[:12]} then."
        )
        return Finding(link.stage, link.path, CHANGED, text)
    for source in link.inputs:
        before = now(source.path, True)
        if before is None:
            text = f"{link.path} was made of {source.path}, which is not there any more."
            return Finding(link.stage, link.path, MISSING, text)
        if before != source.sha256:
            text = (
                f"{link.path} was made of another {source.path}: SHA-256 {source.sha256[:12]} then, {before[:12]} now. "
                f"Repeat: fp4deploy {link.stage}"
            )
            return Finding(link.stage, link.path, OUTDATED, text)
    made = ", ".join(source.path for source in link.inputs)
    return Finding(link.stage, link.path, OK, f"{link.path} <- {made}")


def _name(run: Run, path: Path) -> str:
    whole = Path(path).resolve()
    home = run.path.resolve()
    return whole.relative_to(home).as_posix() if whole.is_relative_to(home) else str(whole)
