"""FP16 of torch in every form that a reader may compare with, and how a forward pass is timed.

| form | what runs |
|---|---|
| eager | the module, channels_last or NCHW |
| compiled | `torch.compile`, default mode |
| max-autotune | `torch.compile(mode="max-autotune-no-cudagraphs")`: Triton's convolutions compete with cuDNN's |

Each is timed twice: `launched` from Python, and `graph`, replayed from one CUDA graph that is captured here in the same
way for all of them, so that no form has a wrapper that another lacks. The GPU is kept busy while launches queue up, so
`launched` still is the time of the GPU where the queue is long enough, and that of the host where a network has more
launches than the wait covers.
"""

from __future__ import annotations

import copy
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fp4deploy.models.build import build_model
from fp4deploy.models.spec import parse_spec
from fp4deploy.train.losses import segmentation

Run = Callable[[], Any]
COMPILED = {"compiled": "default", "max-autotune": "max-autotune-no-cudagraphs"}
FORMS = ("eager, NCHW", "eager, channels_last", *COMPILED)


def command(*left_out: str) -> str:
    """The command line of this process, as results name it: without --json, nor other options with one value."""
    told, arguments = ["python", f"benchmarks/{Path(sys.argv[0]).name}"], iter(sys.argv[1:])
    for argument in arguments:
        if argument in ("--json", *left_out):
            next(arguments, None)
        else:
            told.append(argument)
    return shlex.join(told)


def network(name: str, channels: int) -> nn.Module:
    """What `fp4deploy train --model` builds of a specification, or of the scale of our UNet, with random weights."""
    torch.manual_seed(0)
    return build_model(parse_spec(name if ":" in name else f"unet:{name}"), channels)


@contextmanager
def torch_loss() -> Iterator[None]:
    """Inside, `SegmentationLoss` is computed by torch's operators, not by its kernels."""
    with mock.patch.object(segmentation, "fits", _never):
        yield


def _never(*_: Any) -> bool:
    return False


def forward(model: nn.Module, form: str, x: torch.Tensor) -> Run:
    """A forward pass of an FP16 copy of `model` in one of `FORMS`, on images x [N, C, H, W]."""
    layout = torch.contiguous_format if form == "eager, NCHW" else torch.channels_last
    own: Any = copy.deepcopy(model).cuda().half().eval().to(memory_format=layout)  # type: ignore[call-overload]
    images = x.half().contiguous(memory_format=layout)
    if form in COMPILED:
        torch._dynamo.reset()  # what was compiled before counts towards the recompile limit, past which eager runs
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        own = torch.compile(own, mode=COMPILED[form], dynamic=False)
    return lambda: own(images)


def captured(run: Run, warm: int = 3) -> Run:
    """`run` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    used = run, kept  # whose memory the graph reads and writes

    def replay() -> Any:
        graph.replay()
        return used[1]

    return replay


def median_ms(run: Run, repeats: int = 21, warm: int = 2) -> float:
    """Median milliseconds of `run`, by CUDA events."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # launches queue up meanwhile: the GPU is timed, not the host
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def peak_bytes(run: Run) -> int:
    """Peak bytes of one pass above what was allocated before; after warm-up, not captured."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(run: Run) -> dict[str, float]:
    """Both times of a run, its peak memory, and the seconds until it ran for the first time; errors by name."""
    began = time.perf_counter()
    try:
        run()
        torch.cuda.synchronize()
        found: dict[str, Any] = {"first_call_s": time.perf_counter() - began}
        found["peak_bytes"] = peak_bytes(run)
        found["launched_ms"] = median_ms(run)
        found["graph_ms"] = median_ms(captured(run))
    except Exception as error:  # a form that torch or the machine lacks: the row says so
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    torch.cuda.empty_cache()
    return found


def origin() -> dict[str, str]:
    """Commit and date of a result; FP4DEPLOY_COMMIT names the commit where there is no repository."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    commit = git.stdout.strip() or os.environ.get("FP4DEPLOY_COMMIT") or "unknown"
    return {"commit": commit, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def machine() -> dict[str, Any]:
    """What a result was measured on, when, and of which commit (`origin`)."""
    return {
        **origin(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
