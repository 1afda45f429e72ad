"""Write `recorded/` and `files/` anew from the present state of the package. By hand, never by a test:

    python -m tests.contract.record names commands operators plugins bytes schemas     recorded/NAME.json
    python -m tests.contract.record lines edits results                                what is answered and printed
    python -m tests.contract.record golden                                             files/: old files, kept readable
    python -m tests.contract.machine_code --record                                     recorded/machine_code.json

The diff of what it writes lists what changed for users: a key that went or a digest that moved has to be meant
and named in the release notes. The golden files stand for files that users already have: they are written once for each
version of a format and never again. All versions hold the same network, so one `expected.json` is for all of them.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from fp4deploy.plugins import fp4_cached_linear, fp4_quantize
from tests.contract import fixed_models, frozen, internals, lines, results, schemas, written
from tests.contract.invoke import must

FILES = Path(__file__).parent / "files"
PERIOD = 256  # of the golden network's weights, so that its archive is small


def write_json(path: Path, facts: object) -> None:
    """One fact a line, in a fixed order; the order inside lists is part of the facts."""
    path.write_text(json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def file_bytes() -> frozen.Facts:
    """Digests of files written into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return written.digests(written.write_all(Path(folder)))


def json_schemas() -> frozen.Facts:
    """Schemas of what a small run leaves."""
    with tempfile.TemporaryDirectory() as folder:
        return schemas.of_run(schemas.small_run(Path(folder)))


def edits() -> frozen.Facts:
    """What readers make of files with one edit each."""
    from tests.fuzz.edits import every_reader

    with tempfile.TemporaryDirectory() as folder:
        return every_reader(Path(folder))


def golden() -> None:
    """A packed network and a packed weight of today's formats, and what they decode to; what exists is kept."""
    FILES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        network, weight = folder / "unet.fp4", folder / "linear.safetensors"
        fixed_models.checkpoint(folder / "unet.safetensors", period=PERIOD)
        must("export", "unet.safetensors", "--format", "packed", "--no-verify", "--out", network, folder=folder)
        cache = fp4_quantize(*fixed_models.exact_weight())
        cache.save(weight)
        _keep(FILES / f"unet-{_format(network)}.fp4.gz", gzip.compress(network.read_bytes(), mtime=0))
        _keep(FILES / f"linear-{_format(weight)}.safetensors", weight.read_bytes())
        logits = internals.run_packed(network, fixed_models.whole_numbers(1, 3, 16, 16))
        weights = internals.decoded_weights(network)
        facts = {
            "weights": {name: fixed_models.sha256(value) for name, value in weights.items()},
            "logits": [round(float(value), 3) for value in logits.flatten()[::7]],
            "linear": {
                "weight": fixed_models.sha256(cache.dequantize()),
                "output": fixed_models.sha256(fp4_cached_linear(fixed_models.whole_numbers(5, 48).half(), cache)),
            },
        }
        if not (FILES / "expected.json").exists():
            write_json(FILES / "expected.json", facts)


def _keep(path: Path, content: bytes) -> None:
    if not path.exists():
        path.write_bytes(content)


def _format(path: Path) -> str:
    """The format that a file names, such as "packed-1"."""
    with safe_open(path, framework="pt") as file:
        (text,) = file.metadata().values()
    return str(json.loads(text)["format"]).replace("/", "-")


RECORDERS: dict[str, Callable[[], frozen.Facts]] = {
    "names": frozen.python_names,
    "commands": frozen.command_line,
    "operators": frozen.operators,
    "plugins": frozen.tensorrt_plugins,
    "bytes": file_bytes,
    "schemas": json_schemas,
    "edits": edits,
    "results": results.results,
    "lines": lines.recorded,
}


def main(names: list[str]) -> None:
    """Record what is named."""
    if not names or not set(names) <= {*RECORDERS, "golden"}:
        raise SystemExit(f"Usage: python -m tests.contract.record NAME ...  of {', '.join(RECORDERS)}, golden")
    for name in names:
        if name == "golden":
            golden()
        else:
            frozen.RECORDED.mkdir(exist_ok=True)
            write_json(frozen.RECORDED / f"{name}.json", RECORDERS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
