"""`fp4deploy kernels`, without compiling; that is tested in tests/plugins/aot/test_compile_aot.py."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp4deploy.errors import UnavailableError
from fp4deploy.packed import packed_launches, write_packed
from fp4deploy.plugins.aot import build as aot_build
from fp4deploy.plugins.aot import store
from fp4deploy.plugins.aot.build import BuildResult
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.aot.store import Compiled
from fp4deploy.plugins.gemm.triton import variants
from fp4deploy.plugins.runtime import nvcc
from tests.cli.command_line import Invoke
from tests.packed.small_networks import packed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `build` was asked for; kernels for sm_100 fall back, those for sm_121 are refused, others are right.

    A twentieth of the kernels: printing thousands of rows takes seconds.
    """
    found: list[Any] = []
    every = variants.all_variants

    def build(
        requested: list[tuple[Launch, str]], jobs: int | None, out: Path | None
    ) -> Iterator[tuple[int, BuildResult]]:
        found.append((requested, jobs, out))
        for index, (launch, arch) in reversed(list(enumerate(requested))):
            native = dict(launch.constants).get("NATIVE")
            kind = "tcgen05.mma kind::mxf4nvf4" if native else "wgmma.mma_async m64n128k16 f16"
            kind = (
                "tcgen05.mma kind::f16" if arch == "sm_100" else kind if native or arch == "sm_90" else "mma.sync f16"
            )
            compiled = Compiled(
                b"code", "", launch.kernel.partition(":")[2], (), (), 1024, 8, 99, 0, (kind,), arch, "3.6.0", "",
                store.description(launch),
            )  # fmt: skip
            yield (
                index,
                BuildResult(launch, arch, None, "no luck") if arch == "sm_121" else BuildResult(launch, arch, compiled),
            )

    monkeypatch.setattr(aot_build, "build", build)
    monkeypatch.setattr(aot_build, "already", lambda requested: [False] * len(requested))
    monkeypatch.setattr(variants, "all_variants", lambda arch: list(every(arch))[::20])
    return found


def test_the_table(invoke: Invoke, calls: list[Any]) -> None:
    result = invoke("kernels", "--arch", "sm90", "--jobs", 3)
    assert result.exit_code == 0, result.stderr
    ((requested, jobs, out),) = calls
    assert {arch for _, arch in requested} == {"sm_90"}
    assert (jobs, out) == (3, None)
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + len(requested)
    assert all("sm_90" in line and "wgmma.mma_async m64n128k16 f16" in line for line in lines[1:])
    assert f"{len(requested)} of {len(requested)} kernels passed the checks" in result.stderr


def test_what_is_kept_comes_first_and_the_rest_is_estimated(
    invoke: Invoke, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list(variants.all_variants("sm_90"))
    monkeypatch.setattr(aot_build, "already", lambda requested: [index % 3 == 1 for index in range(len(requested))])
    result = invoke("kernels", "--arch", "sm90", "--jobs", 2, "--json")
    assert result.exit_code == 0, result.stderr
    kept = len(every[1::3])
    assert calls[0][0][:kept] == [(launch, "sm_90") for launch in every[1::3]]
    assert f"{len(every)} kernels for sm_90: {kept} kept" in result.stderr
    assert f"{len(every) - kept} to compile, about " in result.stderr
    named = [each["constants"] for each in json.loads(result.stdout)["kernels"]]
    assert named == [dict(launch.constants) for launch in every]


def test_a_kernel_of_the_cache_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "own_folder", lambda: tmp_path)
    monkeypatch.setattr(aot_build, "compiler_version", lambda _: "3.6.0")
    first, second = list(variants.all_variants("sm_90"))[:2]
    file = store.own_folder() / store.file_name(first, "sm_90", "3.6.0")
    file.parent.mkdir(parents=True)
    file.touch()
    assert aot_build.already([(first, "sm_90"), (second, "sm90"), (first, "sm_100")]) == [True, False, False]


@pytest.mark.parametrize("compiler", [Path("nvcc"), None])
def test_the_layers_of_a_network(
    invoke: Invoke, calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Path | None
) -> None:
    file = dataclasses.replace(packed("nvfp4_qat", 0.25)[1], path=tmp_path / "unet.fp4")
    write_packed(file)
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: compiler)
    result = invoke("kernels", "--layers", file.path, "--arch", "sm120", "--arch", "sm90", "--json")
    assert result.exit_code == 0, result.stderr
    listed = [(launch, arch) for arch in ("sm_120", "sm_90") for launch in packed_launches(file, arch)]
    of_cuda = [each for each in listed if each[0].kernel == "block_scaled_conv.cu:block_scaled_conv"]
    assert {arch for _, arch in of_cuda} == {"sm_120"}
    assert calls[0][0] == [each for each in listed if compiler or each not in of_cuda]
    left_out = f"{len(of_cuda)} kernels for sm_120 are left out, as nvcc is missing: install"
    assert (left_out in result.stderr) == (compiler is None)
    written = json.loads(result.stdout)["kernels"]
    assert all({"nvcc", "triton"} & each.keys() == {each["compiler"]} for each in written)  # which has its version
    names = {(each["kernel"], each["compiler"]) for each in written}
    assert (("block_scaled_conv.cu:block_scaled_conv", "nvcc") in names) == bool(compiler)


def test_json_is_alone_on_stdout(invoke: Invoke, calls: list[Any], tmp_path: Path) -> None:
    result = invoke("kernels", "--arch", "sm_80", "--arch", "sm80", "--json", "--out", "kernels")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["folder"] == "kernels"
    assert [each["arch"] for each in content["kernels"]] == ["sm_80"] * len(calls[0][0])
    first = content["kernels"][0]
    assert (first["registers"], first["spills"], first["shared"], first["complaints"]) == (99, 0, 1024, [])
    assert f"FP4DEPLOY_KERNEL_PATH={tmp_path / 'kernels'}" in result.stderr


def test_a_fallback_and_a_refusal_exit_1(invoke: Invoke, calls: list[Any]) -> None:
    result = invoke("kernels", "--arch", "sm100")
    assert result.exit_code == 1
    assert "kernels failed the checks" in result.stderr
    assert "asked for kind::mxf4nvf4 and got tcgen05.mma kind::f16" in result.stderr
    assert "asked for kind::mxf4nvf4" in result.stdout
    result = invoke("kernels", "--arch", "sm121", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["kernels"][0]["complaints"] == ["no luck"]


@pytest.mark.parametrize("arguments", [pytest.param(("--arch", "all"), marks=pytest.mark.variants), ()])
def test_all_architectures(
    invoke: Invoke, calls: list[Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    invoke("kernels", *arguments, "--json")
    assert list(dict.fromkeys(arch for _, arch in calls[0][0])) == list(store.TARGETS)


def test_the_gpu_present(invoke: Invoke, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert invoke("kernels").exit_code == 0
    assert {arch for _, arch in calls[0][0]} == {"sm_89"}


def test_an_unknown_architecture_exits_2(invoke: Invoke) -> None:
    result = invoke("kernels", "--arch", "sm75")
    assert result.exit_code == 2
    assert "'sm75' is not a supported GPU architecture. Valid: sm80" in result.stderr


def test_no_triton_exits_3(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_build, "triton_version", lambda: None)
    result = invoke("kernels", "--arch", "sm120")
    assert result.exit_code == UnavailableError.exit_code == 3
    assert "Triton is missing, and it compiles the kernels: pip install triton" in result.stderr
    assert result.stdout == ""


def test_a_folder_that_cannot_be_written_exits_2(tmp_path: Path) -> None:
    from fp4deploy.errors import InputError

    (tmp_path / "file").write_text("")
    launch = Launch("gemm:kernel", (), ())
    compiled = Compiled(b"code", "", "kernel", (), (), 0, 4, 9, 0, (), "sm_90", "3.6.0", "", "{}")
    with pytest.raises(InputError) as error:
        aot_build._save(compiled, launch, tmp_path / "file" / "kernels")
    assert "could not be written: Not a directory" in str(error.value)


def test_emulated_cases_are_listed(invoke: Invoke) -> None:
    pytest.importorskip("triton")
    result = invoke("kernels", "--emulate", "--arch", "sm100", "linear, bfloat16", "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["kernels"]
    found = [row[key] for key in ("arch", "family", "bit_equal", "different", "hazard")]
    assert found == ["sm_100", "linear", True, 0, ""]
    assert "1 of 1 cases are bit-equal" in result.stderr


def test_emulation_without_the_emulator_exits_3(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fp4deploy_emulator", None)
    result = invoke("kernels", "--emulate")
    assert result.exit_code == UnavailableError.exit_code
    assert "kernels --emulate needs fp4deploy_emulator, which is missing" in result.stderr
    assert "Add it with: pip install ./tools/emulator (in a clone of fp4deploy)" in result.stderr


def test_emulation_without_a_compiler_exits_3(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4deploy.plugins.runtime.nvcc.find_nvcc", lambda: None)
    result = invoke("kernels", "--emulate", "amax")
    assert result.exit_code == UnavailableError.exit_code
    assert "1 of 1 cases were not compiled here. The first:" in result.stderr
    assert "not compiled" in result.stdout


def test_gpu_needs_emulate_and_a_gpu(invoke: Invoke) -> None:
    assert "--gpu is for --emulate" in invoke("kernels", "--gpu").stderr
    import torch

    if not torch.cuda.is_available():
        result = invoke("kernels", "--emulate", "--gpu")
        assert result.exit_code == UnavailableError.exit_code
        assert "there is no CUDA GPU that torch can use" in result.stderr
