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

Compiling takes minutes where timing takes seconds. So cases are processes that compile at the same time (`at_once`),
and then one after another has the GPU for itself (`turn`).
"""

from __future__ import annotations

import copy
import fcntl
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.build import build_model
from fp4deploy.models.spec import parse_spec
from fp4deploy.models.torchvision_detectors import own_layout
from fp4deploy.train.losses import segmentation

Run = Callable[[], Any]
COMPILED = {"compiled": "default", "max-autotune": "max-autotune-no-cudagraphs"}
FORMS = ("eager, NCHW", "eager, channels_last", *COMPILED)


def command(*left_out: str) -> str:
    """The command line of this process, as results name it: without --json, nor other options with one value."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m
    script = ["-m", spec.name] if spec is not None else [f"benchmarks/{Path(sys.argv[0]).name}"]
    told, arguments = ["python", *script], iter(sys.argv[1:])
    for argument in arguments:
        if argument in ("--json", *left_out):
            next(arguments, None)
        else:
            told.append(argument)
    return shlex.join(told)


def network(name: str, channels: int) -> nn.Module:
    """What `fp4deploy train --model` builds of a specification, or of the scale of our UNet, with random weights.

    Statistics of BatchNorm are those of random images: with the initial ones activations of deep networks exceed FP16.
    """
    torch.manual_seed(0)
    spec = parse_spec(name if ":" in name else f"unet:{name}")
    layout = dict(own_layout(spec))
    head = DetectionHead(classes=channels, **layout) if layout else None
    made = build_model(spec, channels if head is None else head.channels, head=head)
    update_bn([torch.randn(2, 3, 128, 128)], made)
    return made


@contextmanager
def torch_loss() -> Iterator[None]:
    """Inside, `SegmentationLoss` is computed by torch's operators, not by its kernels."""
    with mock.patch.object(segmentation, "supports", _never):
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


def kernels_of(run: Run) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel of a run, in order."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = [each for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    return [(each.name, each.self_device_time_total) for each in events]


def at_once(commands: Sequence[Sequence[str]], folder: Path, seconds: float, every: float) -> list[int]:
    """Run commands that end in a `turn`, all at once until they are ready, then one after another.

    Args:
        folder: that their turns name; commands[number] is called `number` there.
        seconds: until the first turn; what is not ready by then is ended. every: seconds of all turns together.

    Returns:
        The numbers of those that were not ready in time, or ended before.
    """
    start = time.monotonic()
    children = [subprocess.Popen(each) for each in commands]
    ready = [folder / f"{number}.ready" for number in range(len(children))]
    while time.monotonic() < start + seconds:
        if all(path.exists() or child.poll() is not None for path, child in zip(ready, children, strict=True)):
            break
        time.sleep(0.2)
    late = [number for number, path in enumerate(ready) if not path.exists()]
    for number in late:
        children[number].kill()
    (folder / "go").touch()
    end = time.monotonic() + every
    for child in children:
        try:
            child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
    return late


@contextmanager
def turn(folder: Path, number: int) -> Iterator[None]:
    """Inside, this process of `at_once` has the GPU; before, it waits until all are ready."""
    (folder / f"{number}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)
    with _locked(folder / "lock"):
        yield


@contextmanager
def tuning_alone(folder: Path) -> Iterator[None]:
    """Inside, inductor times tilings and kernels of one layer while no other process of `at_once` does."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def alone(timed: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*args: Any, **kwargs: Any) -> Any:
            with _locked(folder / "tuning"):
                return timed(*args, **kwargs)

        return locked

    tilings = alone(CachingAutotuner.benchmark_all_configs)
    choices = alone(AlgorithmSelectorCache.benchmark_choices)  # of max-autotune: Triton's beside cuBLAS and cuDNN
    with (
        mock.patch.object(CachingAutotuner, "benchmark_all_configs", tilings),
        mock.patch.object(AlgorithmSelectorCache, "benchmark_choices", staticmethod(choices)),
    ):
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def origin() -> dict[str, str]:
    """Commit and date of a result; FP4DEPLOY_COMMIT names the commit of a copy of the files."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    commit = os.environ.get("FP4DEPLOY_COMMIT") or git.stdout.strip() or "unknown"
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
