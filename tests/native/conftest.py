"""Builds and files that the tests of the C library share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fp4deploy.architecture import Architecture
from fp4deploy.native import Gpu, Plan, record
from fp4deploy.packed import PackedFile, write_packed
from tests.native import builds
from tests.native.plain_bundle import write_plain_bundle
from tests.packed.small_networks import packed

GPU = Gpu(Architecture(9, 0), "NVIDIA H200", 132)
SHAPES = ((1, 3, 32, 32), (2, 3, 64, 32))


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The harness under AddressSanitizer and UndefinedBehaviorSanitizer."""
    if builds.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return builds.harness(tmp_path_factory.mktemp("sanitized"), sanitized=True)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording test double of the CUDA driver."""
    if builds.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return builds.recording_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def unet(tmp_path_factory: pytest.TempPathFactory) -> PackedFile:
    """A UNet, written as a packed file."""
    return written(tmp_path_factory.mktemp("native") / "unet.fp4")


def written(path: Path, rest: str = "fp16") -> PackedFile:
    about = '{"version": "0", "checkpoint_sha256": "0", "palette": [null, [76, 110, 245]]}'
    file = dataclasses.replace(packed("nvfp4_qat", 0.25, rest=rest)[1], path=path, about=about)
    write_packed(file)
    return file


@pytest.fixture(scope="session")
def plans(unet: PackedFile) -> list[Plan]:
    return [record(unet, GPU, shape) for shape in SHAPES]


@pytest.fixture(scope="session")
def bundle(unet: PackedFile, plans: list[Plan]) -> Path:
    """A bundle of the UNet whose machine code is headers alone: the recording driver runs nothing."""
    path = unet.path.with_suffix(".kernels")
    write_plain_bundle(path, unet, plans)
    return path
