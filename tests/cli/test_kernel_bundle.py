"""`fp4deploy kernels --for FILE.fp4`, without compiling; that is tested on a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fp4deploy import native
from fp4deploy.native import Gpu, Plan, record
from fp4deploy.native import bundle as bundles
from fp4deploy.packed import PackedFile, packed_file, write_packed
from tests.cli.command_line import Invoke
from tests.native.plain_bundle import code
from tests.packed.small_networks import packed


@pytest.fixture(autouse=True)
def _no_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "compiled", lambda kernels, plan, jobs=None: [code(kernel) for kernel in kernels])


@pytest.fixture
def network(tmp_path: Path) -> Path:
    _, file = packed("nvfp4_qat", 0.25)
    write_packed(packed_file(tmp_path / "unet.fp4", file.card, file.graph, file.tensors))
    return tmp_path / "unet.fp4"


def test_a_bundle(invoke: Invoke, network: Path) -> None:
    result = invoke("kernels", "--for", network, "--arch", "sm90", "--batch", 1, "--batch", 3, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    path = network.with_name("unet.sm90.kernels")
    assert found["path"] == str(path)
    assert found["bytes"] == path.stat().st_size
    assert (found["arch"], found["tuned_for"], found["processors"]) == ("sm90", "", 132)
    assert [plan["input"] for plan in found["plans"]] == [[1, 3, 32, 32], [3, 3, 32, 32]]
    assert [plan["generated"] for plan in found["plans"]] == [None, None]
    other = network.with_name("other.kernels")
    sizes = ("--size", "32x64", "--size", "64x32", "--tuned-for", "NVIDIA B200", "--processors", 148)
    result = invoke("kernels", "--for", network, "--arch", "sm100", *sizes, "--out", other)
    assert result.exit_code == 0, result.stderr
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == ["1 x 3 x 32 x 64", "1 x 3 x 64 x 32"]
    assert "sm100, 148 multiprocessors" in result.stderr
    assert other.is_file()


def test_generated_kernels_are_said(invoke: Invoke, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their cause: the bundle holds the weights of one file, and does not multiply in FP4."""

    def of_other_kernels(file: PackedFile, gpu: Gpu, *shapes: tuple[int, ...]) -> Plan:
        return dataclasses.replace(record(file, gpu, *shapes), generated="no kernel has its form")

    monkeypatch.setattr(native, "record", of_other_kernels)
    result = invoke("kernels", "--for", network, "--arch", "sm90", "--json")
    assert json.loads(result.stdout)["plans"][0]["generated"] == "no kernel has its form"
    said = " ".join(result.stderr.split())
    assert "Kernels are generated: no kernel has its form. The bundle holds decoded weights" in said


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--arch", "sm90", "--arch", "sm120"), "give --arch once"),
        (("--arch", "all"), "give --arch once"),
        (("--arch", "sm75"), "is not a supported GPU architecture"),
        (("--arch", "sm90", "--size", "30x30"), "multiples of 4"),
        (("--arch", "sm90", "--size", "30x"), "HEIGHTxWIDTH"),
    ],
)
def test_refusals(invoke: Invoke, network: Path, words: tuple[str, ...], cause: str) -> None:
    result = invoke("kernels", "--for", network, *words)
    assert result.exit_code == 2
    assert cause in " ".join(result.stderr.split())


def test_options_of_a_bundle_need_one(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("kernels", "--arch", "sm90", "--batch", 2)
    assert result.exit_code == 2
    assert "--for" in result.stderr
    assert invoke("kernels", "--for", tmp_path / "none.fp4", "--arch", "sm90").exit_code == 2
