"""Start the processes of a test cheaply: forked from a server that has imported torch and fp4deploy once a session."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import socket
import sys
from collections.abc import Callable, Container, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fp4deploy.runs import Run, create_run
from tests.shallow import is_shallow, make_shallow

PRELOADED = ["fp4deploy.train", "fp4deploy.data", "pytest", "torch.distributed"]
PRELOADED += ["torch._dynamo", "fp4deploy.export.to_onnx", "fp4deploy.export.to_packed", "typer.main"]


def start(function: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None) -> BaseProcess:
    """A process that calls a module's function; what it prints to stderr is this process's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here = torch.get_num_threads(), is_shallow()
    process = context.Process(target=_call, args=(function, arguments, environment or {}, here))
    process.start()
    return process


def run_ranks(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a module's function in `count` processes that find each other as those of torchrun do; all must succeed."""
    processes = [start(function, *arguments, environment=environment) for environment in rank_environments(count)]
    try:
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()


def rank_environments(count: int) -> list[dict[str, str]]:
    """The variables that torchrun sets, of each of `count` processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _call(
    function: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str], there: tuple[int, bool]
) -> None:
    threads, shallow = there
    os.environ.update(environment)
    torch.set_num_threads(threads)  # a forked process has one, and sums in another order than this one
    gc.freeze()  # what was preloaded
    make_shallow(shallow)
    function(*arguments)
    sys.stderr.flush()


def copy_of(run: Run, folder: Path, models: Iterable[str]) -> Run:
    """A new run that holds some trained models of another, to be continued with resume=True."""
    copied = create_run(folder)
    shutil.copy(run.config_path, copied.config_path)
    for model in models:
        shutil.copytree(run.model_dir(model), copied.model_dir(model))
    return copied


def assert_same(run: Run, other: Run, models: Iterable[str] = ("fp16", "nvfp4"), but: Container[str] = ()) -> None:
    """Two runs hold the same weights, states (`but` some tensors) and metrics of their epochs, bit for bit."""
    for model in models:
        for name in ("best.safetensors", "state/last.safetensors"):
            first, second = load_file(run.model_dir(model) / name), load_file(other.model_dir(model) / name)
            assert first.keys() == second.keys()
            for key, value in first.items():
                assert key in but or torch.equal(value, second[key]), (model, name, key)
        mine, theirs = ((each.model_dir(model) / "metrics.jsonl").read_text().splitlines() for each in (run, other))
        assert [_without_times(line) for line in mine] == [_without_times(line) for line in theirs]


def _without_times(line: str) -> dict[str, Any]:
    left_out = ("seconds", "images_per_s", "peak_memory_bytes")
    return {key: value for key, value in json.loads(line).items() if key not in left_out}
