"""Fixtures and markers shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import accelerate.utils.memory
import pytest
import torch
from filelock import FileLock

from fp4deploy.experiments.sweep import variant
from fp4deploy.models import spec
from fp4deploy.system.onnx_runtime import ort

pytest_plugins = ["tests.fixtures"]

MANY_MODULES = 100
_frozen_modules = 0


class _NoCollection:
    """In the place of `gc` where a training asks for a collection."""

    collect = staticmethod(lambda: 0)


def pytest_configure() -> None:
    """Let tests interrupt themselves and what they start, also where a shell runs the tests in the background, and
    collect garbage less often."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What tests make is graphs of many small objects, among which Python looks for garbage 200 times a second.
    gc.set_threshold(100_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests have whole UNets: which kernel runs depends on the channels, and time is not the matter there."""
    for item in items:
        names = item.fixturenames if isinstance(item, pytest.Function) and item.get_closest_marker("gpu") else None
        if names and not {"untrained", "checkpoint", "whole_unets"} & set(names):  # which other tests read, too
            names.insert(0, "whole_unets")  # before its other fixtures


def pytest_collection_finish() -> None:
    # pytest gives a logger that does not propagate handlers of its own, and torch then writes every trace out for them.
    logging.getLogger("torch.__trace").propagate = True
    _freeze_what_is_imported()


def pytest_runtest_teardown() -> None:
    if len(sys.modules) > _frozen_modules + MANY_MODULES:  # what tests import late: compilers, exporters, figures
        _freeze_what_is_imported()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """In a fresh clone one worker after another: the first one rewrites the assertions, and the others read them."""
    rewritten = any(Path(__file__).parent.glob("__pycache__/test_*-pytest-*"))
    if rewritten or sys.dont_write_bytecode or not hasattr(session.config, "workerinput"):
        return (yield)
    with FileLock(Path(tempfile.gettempdir(), f"fp4deploy_collection_{os.getppid()}.lock")):
        return (yield)


def _freeze_what_is_imported() -> None:
    """Keep what was imported, and what it left in cycles, out of the collections that come by themselves."""
    global _frozen_modules
    gc.freeze()
    _frozen_modules = len(sys.modules)


def pytest_unconfigure() -> None:
    """Let the interpreter free it, or libraries report leaks as it ends."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where all libraries are meant to be installed (`make libraries`), a test that skips without one fails."""
    report = yield
    if report.skipped and "pip install -e" in str(report.longrepr) and os.environ.get("FP4DEPLOY_NEED_LIBRARIES"):
        report.outcome = "failed"
    return report


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """What tests write need not survive a loss of power, and they write thousands of files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _onnx_runtime_has_one_thread() -> Iterator[None]:
    """The second of two spins while it waits for the next operator: as much of a processor as the first one needs."""
    open_session = ort.InferenceSession.__init__

    def opened(self: ort.InferenceSession, model: Any, options: Any = None, *more: Any, **named: Any) -> None:
        options = options or named.pop("sess_options", None) or ort.SessionOptions()
        options.intra_op_num_threads = options.intra_op_num_threads or 1
        open_session(self, model, options, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort.InferenceSession, "__init__", opened)
        yield


@pytest.fixture(autouse=True)
def _models_that_a_test_expects_are_its_own() -> Iterator[None]:
    """`--model` holds for a process, and a test that gives it runs commands in this one."""
    before = list(spec._expected)
    yield
    spec._expected[:] = before


@pytest.fixture(scope="session", autouse=True)
def _no_collections_after_trainings() -> Iterator[None]:
    """They give a GPU its memory back; without one they are a quarter of the seconds of a small training."""
    with pytest.MonkeyPatch.context() as patch:
        for module in () if torch.cuda.is_available() else (accelerate.utils.memory, variant):
            patch.setattr(module, "gc", _NoCollection)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with the reference vectors and real images next to the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "vectors").is_dir():
        pytest.skip("the folder ../shared (reference vectors, real images) is not next to this checkout")
    return folder
