"""Kernels in CUDA C++ from the kernel store: the code of nvcc, without nvcc, by the rules of Triton's kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.aot import build, store
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.convolution import block_scaled, fastest
from fp4deploy.plugins.gemm.reference import conv2d_reference
from fp4deploy.plugins.runtime import availability, launch, nvcc
from fp4deploy.plugins.runtime.cache import write_entry
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.selftest import kernels
from fp4deploy.selftest.kernels import cases_beside
from tests.plugins.cuda_stand_in import Pycuda

NVCC = nvcc.find_nvcc()
GPU = torch.device("cuda", 0)
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
Shipped = Callable[[str], Path]


def operands() -> tuple[Nvfp4Tensor, Nvfp4Tensor]:
    torch.manual_seed(0)
    return quantize_nvfp4(torch.randn(1, 5, 6, 64)), quantize_nvfp4(torch.randn(24, 3, 3, 64))


def of_layer(stride: int = 1) -> Launch:
    """That of `operands` on a GPU that they fill: of one multiprocessor, as `num_sms` says of a CPU."""
    return block_scaled.launches((64,), 24, (3, 3), stride, (1, 1), 1, torch.float16, False)[0]


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    """Write the kernel of the layer to a folder, as `fp4deploy kernels --out` does; none was kept before."""

    def write(arch: str) -> Path:
        with monkeypatch.context() as patched:
            patched.setattr(store, "own_folder", lambda: tmp_path / "own")
            built = build.build_one(of_layer(), arch)
        assert built.compiled is not None, built.failure
        assert built.diagnostics() == []
        build._save(built.compiled, built.launch, tmp_path / "kernels")
        (file,) = (tmp_path / "kernels" / arch).iterdir()
        return file

    return write


@pytest.fixture
def deployed(pycuda: Pycuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[launch.Kernel]:
    """A GPU of SM120 on a machine without nvcc, which takes kernels from a folder; the kernels that are launched.

    Operands of the CPU stand for its own.
    """
    found: list[launch.Kernel] = []

    def kernel(*arguments: Any) -> launch.Kernel:
        source, name, signature, macros, _, compiled = arguments
        return launch.kernel(source, name, signature, macros, 0, compiled)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (12, 0))
    monkeypatch.setattr(availability, "find_nvcc", lambda: None)
    monkeypatch.setattr(block_scaled, "kernel", kernel)
    monkeypatch.setattr(block_scaled, "launch_secondary", lambda run, *_, **__: found.append(run))
    monkeypatch.setattr(block_scaled, "fallback", Fallback("Test kernels", "Triton's"))
    monkeypatch.setenv("FP4DEPLOY_KERNEL_PATH", str(tmp_path / "kernels"))
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "cache"))
    block_scaled._has_instruction.cache_clear()
    return found


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_120", "sm_121"])
def test_the_store_has_the_machine_code_of_nvcc(shipped: Shipped, arch: str) -> None:
    file, layer = shipped(arch), of_layer()
    found = store.find(layer, arch, [file.parents[1]])
    assert found is not None
    assert found.cubin == nvcc.compile_cubin(block_scaled.SOURCE, f"{arch}a", dict(layer.constants))
    assert found.instructions == ("mma.sync m16n8k64 kind::mxf4nvf4",)
    assert found.spills == 0
    assert NVCC is not None
    assert file.name.endswith(f"-nvcc{nvcc.release(NVCC)}.kernel")


@needs_nvcc
def test_without_nvcc_the_kernel_comes_from_a_folder(shipped: Shipped, request: pytest.FixtureRequest) -> None:
    layer = of_layer()
    code = nvcc.compile_cubin(block_scaled.SOURCE, "sm_120a", dict(layer.constants))
    shipped("sm_120")
    launched = request.getfixturevalue("deployed")
    assert not availability.available(GPU)
    assert block_scaled.is_available(GPU)
    x, weight = operands()
    block_scaled.conv2d((x,), weight, padding=(1, 1))
    assert [run.cubin for run in launched] == [code]


def test_without_nvcc_and_a_folder_nothing_is_tried(deployed: list[launch.Kernel]) -> None:
    assert not block_scaled.is_available(GPU)


@needs_nvcc
@pytest.mark.parametrize("fault", ["digest", "content", "another kernel", "another version", "another architecture"])
def test_what_is_not_the_kernel_is_refused(
    shipped: Shipped, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    file = shipped("sm_120")
    whole = file.read_bytes()
    if fault == "digest":
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif fault == "content":
        file.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    elif fault == "another kernel":  # under this one's name, with a digest that is right
        header, _, rest = whole[:-32].partition(b"\n")
        about = json.loads(header)
        about["launch"] = store.description(of_layer(stride=2))
        write_entry(file, json.dumps(about, sort_keys=True).encode() + b"\n" + rest)
    elif fault == "another version":  # of the sources: its name has their digest
        monkeypatch.setattr(nvcc, "FLAGS", (*nvcc.FLAGS, "-G"))
        monkeypatch.setattr(store, "FLAGS", nvcc.FLAGS)
    launched = request.getfixturevalue("deployed")
    if fault == "another architecture":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (12, 1))
    x, weight = operands()
    damaged = fault in ("digest", "content", "another kernel")
    with pytest.raises(nvcc.KernelError) as error, pytest.warns(match="is ignored") if damaged else nullcontext():
        block_scaled.conv2d((x,), weight, padding=(1, 1))
    said = str(error.value)
    for words in ("block_scaled_conv is not compiled for sm_12", "nvcc is missing", str(file.parents[1])):
        assert words in said
    assert ("It is there for sm_120" in said) == (fault == "another architecture")
    assert launched == []


@needs_nvcc
def test_a_layer_that_the_folder_lacks_is_tritons_and_the_others_stay(
    shipped: Shipped, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped("sm_120")
    launched = request.getfixturevalue("deployed")
    x, weight = operands()
    monkeypatch.setattr(block_scaled, "is_available", lambda _: True)
    monkeypatch.setattr(fastest, "_choices", {})
    monkeypatch.setattr(fastest, "milliseconds", lambda _: 1.0)
    monkeypatch.setattr(fastest, "is_capturing", lambda _: False)
    monkeypatch.setattr(fastest, "fastest", lambda *_: fastest.OWN)

    def convolved(stride: int) -> object:
        place = ((stride, stride), (1, 1), 1, False, torch.float16, None)
        y = conv2d_reference((x,), weight, None, stride, (1, 1))
        return fastest.convolve_packed((x,), weight, None, *place, lambda: y) is y

    with pytest.warns(UserWarning, match=r"fell back to Triton's .* is not compiled for sm_120") as said:
        assert convolved(2)
    assert len(said) == 1
    assert not convolved(1)
    assert len(launched) == 2  # measured, then computed


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 200), st.integers(1, 200)),
    st.lists(st.integers(1, 24), min_size=1, max_size=2),
    st.integers(1, 300),
    st.sampled_from([(1, 1), (3, 3), (5, 1), (7, 7)]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([48, 84, 170]),
)
def test_what_a_layer_launches_at_any_size_is_listed(
    size: tuple[int, int, int],
    blocks: list[int],
    outputs: int,
    taps: tuple[int, int],
    stride: int,
    padding: int,
    dilation: int,
    packed: bool,
    num_sms: int,
) -> None:
    n, h, w = size
    h, w = h + dilation * (taps[0] - 1), w + dilation * (taps[1] - 1)
    around = (padding, padding)
    channels = tuple(16 * count for count in blocks)
    sources = tuple(_empty(n, h, w, count) for count in channels)
    weight = _empty(outputs, *taps, sum(channels))
    found: list[dict[str, Any]] = []

    def recorded(source: object, name: object, signature: object, macros: dict[str, Any]) -> Any:
        found.append(macros)
        return _Ignored()

    with launch.substituted(recorded, num_sms):
        amax = sources[0].amax if packed else None
        block_scaled.conv2d(sources, weight, None, stride, around, dilation, out_amax=amax)
    listed = block_scaled.launches(channels, outputs, taps, stride, around, dilation, torch.float16, packed)
    assert found[0] in [dict(each.constants) for each in listed]


class _Ignored:
    def launch(self, *_: object, **__: object) -> None:
        """Nothing."""


def _empty(*shape: int) -> Nvfp4Tensor:
    codes, scales = (
        torch.empty((*shape[:-1], shape[-1] // each), dtype=torch.uint8, device="meta") for each in (2, 16)
    )
    return Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.ones((), device="meta"), torch.Size(shape))


def test_a_folder_of_cuda_kernels_has_none_of_tritons(
    deployed: list[launch.Kernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot, "triton_version", lambda: None)
    folder = tmp_path / "kernels" / "sm_120"
    folder.mkdir(parents=True)
    (folder / "block_scaled_conv-0-nvcc13.0.88.kernel").touch()
    assert block_scaled.is_available(GPU)
    assert "there are no compiled Triton kernels for sm_120" in (aot.why_unavailable(0) or "")


def test_the_self_test_asks_for_no_variant_that_a_folder_may_lack(
    deployed: list[launch.Kernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels" / "sm_120"
    folder.mkdir(parents=True)
    (folder / "block_scaled_conv-0-nvcc13.0.88.kernel").touch()
    assert block_scaled.is_available(GPU)
    assert cases_beside(GPU) == []
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "why_unavailable", lambda _: None)
        assert cases_beside(GPU)
