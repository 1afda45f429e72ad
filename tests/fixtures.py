"""Fixtures of several packages, made once a session: a dataset, a configuration, untrained models, artefacts."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn
from torch._subclasses import fake_impls
from torch.export import decomp_utils, exported_program

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, generate_shapes, open_dataset
from fp4deploy.export import build_engine, export_checkpoint, to_packed
from fp4deploy.export.to_packed import pack
from fp4deploy.graph import Graph, capture
from fp4deploy.graph.capture import Inputs
from fp4deploy.models import ModelCard, build_unet, save_checkpoint
from fp4deploy.models.unet import UNet
from fp4deploy.qat import calibrate, prepare
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, load_config, train_models
from tests.shallow import levels, make_shallow

SIZE, WIDTH = 32, 48  # of images, and of what a network reads: not square, so that nothing may be exchanged
TINY = (
    "model.scale=0.125",
    "data.height=32",
    "data.width=32",
    "train.epochs=2",
    "train.finetune_epochs=2",
    "train.batch_size=4",
    "telemetry.every=0",
)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A copy of a folder that one of this session's processes has made, whichever needed it first."""
    common = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    folder, finished = common / f"{name}.once", common / f"{name}.finished"
    with FileLock(common / f"{name}.lock"):
        if not finished.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            finished.touch()
    mine = factory.mktemp(name) / "one"
    shutil.copytree(folder, mine)
    return mine


@pytest.fixture(scope="session", autouse=True)
def _unets_have_three_levels() -> None:
    make_shallow()


@pytest.fixture
def whole_unets(_unets_have_three_levels: None) -> Iterator[None]:
    """All five levels, in a test that is about the network; it reads no checkpoints of the session's."""
    with levels(5):
        yield


@pytest.fixture(scope="session", autouse=True)
def _each_unet_is_captured_once() -> Iterator[None]:
    """The graph of a UNet does not depend on its weights, and packing captures the same few again and again."""
    kept: dict[tuple[str, torch.Size, bool], Graph] = {}

    def captured(
        model: nn.Module, example_inputs: Inputs, dynamic_size: bool = False, layers: Collection[str] = (), *form: Any
    ) -> Graph:
        if type(model) is not UNet or not isinstance(example_inputs, torch.Tensor) or any(form):
            return capture(model, example_inputs, dynamic_size, layers, *form)
        key = repr(model), example_inputs.shape, dynamic_size
        if key not in kept:
            kept[key] = capture(model, example_inputs, dynamic_size)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_packed, "capture", captured)
        yield


@pytest.fixture(scope="session", autouse=True)
def _composite_operators_are_listed_once() -> Iterator[None]:
    """torch walks through all operators for each graph that it decomposes, though none was defined since the last."""
    list_all, kept = exported_program._collect_all_valid_cia_ops, dict[tuple[int, int], Any]()

    def listed() -> Any:
        defined = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        key = len(defined), sum(len(vars(each)) for each in vars(torch.ops).values() if hasattr(each, "__dict__"))
        if key not in kept:
            kept[key] = list_all()
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (exported_program, decomp_utils):
            patch.setattr(module, "_collect_all_valid_cia_ops", listed)
        yield


@pytest.fixture(scope="session", autouse=True)
def _rules_that_keep_composite_operators_are_made_once() -> Iterator[None]:
    """torch makes twenty kernels for each of some hundred operators, for each graph that it decomposes."""
    override, keep = exported_program._override_composite_implicit_decomp, exported_program._special_op_to_preserve_cia
    fake, kept = fake_impls.op_implementations_dict, dict[Any, tuple[dict[Any, Any], Any]]()

    @contextmanager
    def overridden(rules: dict[Any, Any]) -> Iterator[None]:
        new = [each for each, rule in rules.items() if rule is keep and each not in kept]
        if new:
            with override(dict.fromkeys(new, keep)):
                kept.update({each: (dict(each.py_kernels), fake.get(each)) for each in new})
        same = {each: dict(each.py_kernels) for each, rule in rules.items() if rule is keep}
        with override({each: rule for each, rule in rules.items() if each not in same}):
            try:
                for each in same:
                    kernels, rule = kept[each]
                    each.py_kernels.update(kernels)
                    each._dispatch_cache.clear()
                    fake.setdefault(each, rule)
                yield
            finally:
                for each, kernels in same.items():
                    each.py_kernels.clear()
                    each.py_kernels.update(kernels)
                    each._dispatch_cache.clear()
                    fake_impls._deregister_op_impl(each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported_program, "_override_composite_implicit_decomp", overridden)
        yield


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "data"
    generate_shapes(folder, train=8, val=4, size=32, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_data: Path) -> Config:
    return load_config(None, [f"data.root={tiny_data}", *TINY])


@pytest.fixture(scope="session")
def tiny_run(tiny: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """FP16 and NVFP4 trained by `tiny`; for reading, or to be copied by `tests.train.launch.copy_of`."""
    run = create_run(tmp_path_factory.mktemp("trained") / "run")
    with levels(3):
        train_models(tiny, run)
    return run


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight training and six validation scenes of 32 x 32 pixels."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    generate_shapes(folder, train=8, val=6, size=SIZE, seed=0)
    return folder


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Run:
    """A run with an FP16 and an NVFP4 checkpoint of the same random weights, exported without verification."""
    names = open_dataset(shapes, "val").class_names
    with levels(3):
        return Run(made_once(tmp_path_factory, "untrained", lambda folder: _export_untrained(Run(folder), names)))


def _export_untrained(run: Run, names: tuple[str, ...]) -> None:
    for precision in ("fp16", "nvfp4"):
        torch.manual_seed(0)
        model = build_unet(len(names), 0.125)
        recipe = "nvfp4_qat" if precision == "nvfp4" else None
        if recipe:
            prepare(model, recipe)
            calibrate(model, [torch.randn(2, 3, SIZE, WIDTH)])
        card = ModelCard(precision, 0.125, names, SIZE, WIDTH, IMAGE_MEAN, IMAGE_STD, True, recipe)
        save_checkpoint(run.checkpoint(precision), model, card)
        target = run.exported(precision)
        export_checkpoint(run.checkpoint(precision), target, portable=True, verify=False)
        pack(run.checkpoint(precision), target.with_suffix(".fp4"), verify=False)


@pytest.fixture(scope="session")
def plan(untrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SM120 engine of the NVFP4 model, with its ledger."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed (pip install tensorrt-rtx)")

    def build(folder: Path) -> None:
        build_engine(untrained.export_dir / "unet.nvfp4.onnx", folder / "unet.nvfp4.sm120.plan")

    return made_once(tmp_path_factory, "engines", build) / "unet.nvfp4.sm120.plan"


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run of every stage; beside it are stdout.txt and stderr.txt."""
    from tests.contract.schemas import small_run

    def run(folder: Path) -> None:
        small_run(folder)

    with levels(3):
        return made_once(tmp_path_factory, "small_run", run) / "run"
