"""Running the checks, one after another, into a file that is written after each.

| a check | is |
|---|---|
| returns | proven |
| raises `UnavailableError` | not possible here, for that reason |
| raises anything else, also `KernelError`: a kernel that should run did not | failed |

The file may be published: texts lose every absolute path but its last part, and the names of user and host.
"""

from __future__ import annotations

import getpass
import math
import platform
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from fp4deploy import __version__
from fp4deploy.bench.environment import environment
from fp4deploy.bench.records import Machine
from fp4deploy.errors import UnavailableError
from fp4deploy.plugins import KernelError
from fp4deploy.report.html import Tile
from fp4deploy.report.html import environment as templates
from fp4deploy.report.model import described
from fp4deploy.selftest import engines, kernels, latency, networks, reference
from fp4deploy.selftest.context import Context
from fp4deploy.selftest.proof import Proof
from fp4deploy.selftest.records import FAILED, NOT_POSSIBLE, PROVEN, CheckRecord, SelfTestRecord, Status
from fp4deploy.system.children import owned_folder
from fp4deploy.system.files import write_whole

MAX_LETTERS = 600  # of a detail
CHIPS = {PROVEN: "ok", FAILED: "bad", NOT_POSSIBLE: "idle"}
Say = Callable[[CheckRecord], None]


@dataclass(frozen=True)
class Check:
    """A claim, and the function that shows it or raises."""

    group: str
    claim: str
    function: Callable[[Context], Proof]


CHECKS = (
    Check("reference", "the torch reference gives the recorded bytes", reference.recorded_bytes),
    Check("reference", "E2M1 codes are those of the nearest value", reference.nearest_values),
    Check("networks", "the ONNX file computes what torch computes", networks.exported),
    Check("networks", "the packed file, decoded on the CPU, computes what torch computes", networks.packed_on_cpu),
    Check("kernels", "quantisation kernels give the bytes of the reference", kernels.quantisation),
    Check("kernels", "GEMM kernels agree with float64", kernels.gemms),
    Check("kernels", "fused quantisation gives the bytes of quantising", kernels.packed_outputs),
    Check("networks", "every node of the packed network on the GPU agrees with the reference", networks.packed_on_gpu),
    Check("networks", "the profile has one FP4 kernel for each FP4 convolution", networks.kernels_that_ran),
    Check("engines", "an engine is built, and no layer falls back", engines.build),
    Check("engines", "the engine agrees with ONNX Runtime", engines.run),
    Check("engines", "the FP4 kernels of the ledger ran", engines.profile),
    Check("latency", "latency next to FP16, compiled, in a CUDA graph", latency.compared),
)


def self_test(
    out: Path,
    device: torch.device,
    say: Say = lambda _: None,
    checks: Sequence[Check] = CHECKS,
    begin: Callable[[str], None] = lambda _: None,
) -> SelfTestRecord:
    """Run the checks; write `out` after each of them, and the page (`out` with the suffix .html) at the end.

    begin: called with the claim of each check before it, `say` with its line afterwards.

    Raises:
        InputError: the files cannot be written.
        KeyboardInterrupt: after both files were written with what was done.
    """
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    machine = Machine.model_validate(environment())
    with owned_folder() as folder:
        context = Context(folder, device)
        record = SelfTestRecord(
            fp4deploy=__version__, created=created, device=str(context.architecture or "cpu"), environment=machine
        )
        try:
            for check in checks:
                begin(check.claim)
                record.checks.append(judge(check, context))
                write_whole(out, record.model_dump_json(indent=2) + "\n")
                say(record.checks[-1])
            record.complete = True
        finally:
            write_whole(out, record.model_dump_json(indent=2) + "\n")
            write_whole(out.with_suffix(".html"), _page(record))
    return record


def judge(check: Check, context: Context) -> CheckRecord:
    """One check's line."""
    start = time.perf_counter()
    proof, status = Proof(""), FAILED
    try:
        proof = check.function(context)
        status, detail = PROVEN, proof.sentence
    except KernelError as error:
        detail = str(error)
    except UnavailableError as error:
        status, detail = NOT_POSSIBLE, str(error)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
    return CheckRecord.model_validate(
        {
            "group": check.group,
            "claim": check.claim,
            "status": status,
            "detail": anonymous(detail)[:MAX_LETTERS],
            "figures": {name: value for name, value in proof.figures.items() if _finite(value)},
            "seconds": round(time.perf_counter() - start, 2),
        }
    )


def anonymous(text: str) -> str:
    """The text without folders, user name and host name."""
    text = re.sub(r"(?:~|[A-Za-z]:)?(?:[\\/][\w.@+~=-]+)*[\\/](?=[\w.@+~=-]+)", _last_part, text)
    names = [platform.node()]
    with suppress(Exception):  # there may be no name for the user's number
        names.append(getpass.getuser())
    for name in names:
        if name and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "…", text)
    return text


def _finite(value: float | int | str) -> bool:
    return isinstance(value, str) or math.isfinite(value)


def _last_part(found: re.Match[str]) -> str:
    """Nothing for an absolute path's folders; a relative path, a fraction or a unit stays."""
    before = found.string[: found.start()][-1:]
    return found.group() if re.match(r"[\w.)\]]", before) else "…/"


def _page(record: SelfTestRecord) -> str:
    """In the frame, style and rules of the reports."""
    notes: dict[Status, str] = {PROVEN: "shown on this machine", FAILED: "differs, or did not run"}
    notes[NOT_POSSIBLE] = "with the reason"
    tiles = [Tile(status, str(record.count(status)), note) for status, note in notes.items()]
    template = templates().get_template("selftest.html.j2")
    return template.render(record=record, tiles=tiles, chips=CHIPS, machine=described(record.environment))
