"""The driver without a GPU: reasons, packing and errors; launching with a stand-in for pycuda that logs calls."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.plugins import Kernel, KernelError, available, kernel, why_unavailable
from fp4deploy.plugins.runtime import availability
from fp4deploy.plugins.runtime import launch as cuda_launch
from fp4deploy.tracing import constant_when_compiled
from tests.plugins.cuda_stand_in import Pycuda, Tensor
from tests.plugins.gemm.threads import together


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "add.cu").write_text("")
    return tmp_path / "add.cu"


def test_nothing_is_needed_for_the_reference(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(availability, "find_nvcc", lambda: None)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    why = why_unavailable() or ""
    assert "no NVIDIA GPU that torch can use" in why
    assert "pip install pycuda" in why
    assert "nvcc is missing: install the CUDA toolkit, or: pip install nvidia-cuda-nvcc" in why
    assert not available()
    with pytest.raises(UnavailableError) as error:
        kernel("add.cu", "add", "P")
    assert "The kernel add cannot run: no NVIDIA GPU" in str(error.value)


def test_a_binding_without_its_driver_says_why(pycuda: Pycuda, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("pycuda")
    broken.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", broken)
    monkeypatch.delitem(sys.modules, "pycuda.driver")

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pycuda.driver":
                raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert why_unavailable() == (
        "pycuda does not load (libcuda.so.1: cannot open shared object file): pip install pycuda"
    )


def test_the_switch(pycuda: Pycuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available()
    monkeypatch.setenv("FP4DEPLOY_KERNELS", "off")
    assert why_unavailable() == "switched off by FP4DEPLOY_KERNELS=off"
    monkeypatch.setenv("FP4DEPLOY_KERNELS", "on")
    assert available()
    monkeypatch.setenv("FP4DEPLOY_KERNELS", "none")
    with pytest.raises(InputError) as error:
        available()
    assert "FP4DEPLOY_KERNELS is 'none'. Valid: on (the default), off." in str(error.value)


def test_gpus_and_compilers_that_are_too_old(pycuda: Pycuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "a GPU is sm75, and sm80 is the oldest" in (why_unavailable(0) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 1))
    monkeypatch.setattr(availability, "supported", lambda *_: False)
    assert "nvcc (release 13.0) is too old for sm_121a" in (why_unavailable(1) or "")


def test_devices(pycuda: Pycuda) -> None:
    names = [None, 1, "cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), "cpu", torch.device("cpu")]
    assert [availability.device_index(name) for name in names] == [0, 1, 0, 1, 0, 1, None, None]
    assert why_unavailable("cpu") == "the tensors are on the CPU, not on a CUDA device"
    assert available("cuda:1")


def test_compilers_take_the_answer_as_a_constant() -> None:
    """As torch's own decorator says it, which imports the compiler."""

    def answer() -> None: ...

    assert vars(constant_when_compiled(answer)) == vars(torch.compiler.assume_constant_result(lambda: None)) != {}
    assert vars(availability.available).items() >= vars(answer).items()


def test_arguments_lie_as_in_a_c_structure() -> None:
    pack, pointers = cuda_launch.packing("PiqfP?d0q12si")
    assert pointers == (0, 4)
    assert pack(1, 2, 3, 4.0, 5, True, 6.0, b"x" * 12, 7) == struct.pack(
        "<QixxxxqfxxxxQ?xxxxxxxd12si", 1, 2, 3, 4.0, 5, True, 6.0, b"x" * 12, 7
    )
    for signature in ("Px", "P P", "10q", "p", "*"):
        with pytest.raises(InputError) as error:
            cuda_launch.packing(signature)
        assert signature in str(error.value)


def test_where_each_argument_begins() -> None:
    signature = "128s?Piqf0q12si"
    pack, _ = cuda_launch.packing(signature)
    found, ends = cuda_launch.offsets(signature), (bytes(128), True, 2, 3, 4, 5.0, b"sixsixsixsix", 7)
    buffer = pack(*ends)
    letters = ("128s", "?", "P", "i", "q", "f", "12s", "i")
    assert tuple(struct.unpack_from(letter, buffer, at)[0] for letter, at in zip(letters, found, strict=True)) == ends
    assert found == (0, 128, 136, 144, 152, 160, 168, 180)
    assert cuda_launch.offsets("") == ()


def test_a_launch(pycuda: Pycuda, source: Path) -> None:
    add = kernel(source, "add", "PPqf", {"N": 1}, "cuda:1")
    add.launch(3, (32, 2), Tensor(64, 1), None, 5, 1.5)
    assert pycuda.calls == ["init", "load", (1, (3,), (32, 2), struct.pack("@PPqf", 64, 0, 5, 1.5), 0, None)]
    assert pycuda.stack.devices == []
    assert repr(add) == "Kernel(add of add.cu (N=1), cuda:1)"
    assert add.resources()["registers"] == len("registers")


def test_kernels_are_kept(pycuda: Pycuda, source: Path) -> None:
    first = kernel(source, "add", "PP", {"A": 1, "B": 2}, 0)
    assert kernel(source, "add", "PP", {"A": 1, "B": 2}, "cuda:0") is first
    assert kernel(str(source), "add", "PP", {"B": 2, "A": 1}) is first
    assert kernel(source, "subtract", "PP", {"A": 1, "B": 2}, 0) is not first
    assert pycuda.calls == ["init", "load"]
    assert kernel(source, "add", "PP", {"A": 2, "B": 2}, 0) is not first
    assert kernel(source, "add", "PP", {"A": 1, "B": 2}, 1) is not first
    assert pycuda.calls == ["init", "load", "load", "init", "load"]


def test_arguments_that_do_not_fit(pycuda: Pycuda, source: Path) -> None:
    add = kernel(source, "add", "Pi", None, 0)
    for arguments, words in [
        ((Tensor(1, -1), 1), "argument 0 is on cpu, not on cuda:0"),
        ((Tensor(1, 1), 1), "argument 0 is on cuda:1, not on cuda:0"),
        ((torch.zeros(1), 1), "argument 0 is on cpu, not on cuda:0"),
        ((Tensor(1),), "pack expected 2 items"),
        ((), "range"),
        ((Tensor(1), 1, 2), "pack expected 2 items"),
        ((Tensor(1), 2**31), "'i' format requires"),
        ((Tensor(1), 0.5), "required argument is not an integer"),
        (("text", 1), "has no attribute"),
    ]:
        with pytest.raises(TypeError) as error:
            add.launch(1, 1, *arguments)
        assert "The kernel add of add.cu (no macros) does not take these arguments" in str(error.value)
        assert words in str(error.value)
    assert pycuda.calls == ["init", "load"]


def test_a_refused_launch_names_the_kernel_and_leaves_the_context(pycuda: Pycuda, source: Path) -> None:
    with pytest.raises(KernelError) as error:
        kernel(source, "add", "P").launch(1, 2048, None)
    assert "The kernel add of add.cu (no macros) was not launched on cuda:0" in str(error.value)
    assert "block (2048,)" in str(error.value)
    assert "invalid argument" in str(error.value)
    assert pycuda.stack.devices == []


def test_a_kernel_the_module_lacks(pycuda: Pycuda, source: Path) -> None:
    with pytest.raises(KernelError) as error:
        kernel(source, "missing", "P")
    assert "named symbol not found" in str(error.value)
    assert "(CUDA 12.8)" in str(error.value)
    assert pycuda.stack.devices == []


def test_loading_inside_a_capture(pycuda: Pycuda, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = kernel(source, "early", "P")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel(source, "early", "P") is early
    with pytest.raises(KernelError) as error:
        kernel(source, "late", "P")
    assert "Run the step once on this device before the capture" in str(error.value)


def test_more_dynamic_shared_memory_is_asked_for_once(pycuda: Pycuda, source: Path) -> None:
    """Below 48 KiB too: without being asked, a kernel has 48 KiB of static and dynamic shared memory together."""
    add = kernel(source, "add", "")
    for shared in (0, 47 * 1024, 64 * 1024, 50 * 1024):
        add.launch(1, 1, shared=shared)
    assert [call for call in pycuda.calls if call[0] == "shared"] == [("shared", 47 * 1024), ("shared", 64 * 1024)]


def test_another_stream_is_forked_and_joined(pycuda: Pycuda, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self, stream: str) -> None:
            pycuda.calls.append(f"record on {stream}")

        def wait(self, stream: str) -> None:
            pycuda.calls.append(f"{stream} waits")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "theirs")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"ours {handle}")
    monkeypatch.setattr(cuda_launch, "raw_stream", lambda _: 7)
    add = kernel(source, "add", "")
    pycuda.calls.clear()
    add.launch(1, 1)
    *before, launch, joined, waits = pycuda.calls
    assert before == ["record on theirs", "ours 99 waits"]
    assert launch[-1].handle == 99
    assert (joined, waits) == ("record on ours 99", "theirs waits")
    pycuda.calls.clear()
    with pytest.raises(KernelError):
        add.launch(1, 2048)
    assert pycuda.calls[-1] == "theirs waits"
    add.launch(1, 1)
    assert pycuda.calls[-3][-1] is launch[-1]


def test_threads_load_a_kernel_once(pycuda: Pycuda, source: Path) -> None:
    found = []

    def work(_: int) -> None:
        add = kernel(source, "add", "P", None, 0)
        add.launch(1, 1, None)
        found.append(add)

    together(4, work)
    assert len(set(map(id, found))) == 1
    assert pycuda.calls.count("load") == 1
    assert len(pycuda.calls) == 6


def test_other_threads_launch_while_one_records(pycuda: Pycuda, source: Path) -> None:
    recorded, found = [], {}

    def record(*given: object) -> object:
        recorded.append(given)
        return None

    def work(at: int) -> None:
        found[at] = kernel(source, "add", "P", None, 0), cuda_launch.num_sms(torch.device("meta"))

    with cuda_launch.substituted(record, num_sms=132):
        together(2, work)
        assert not recorded
        assert [processors for _, processors in found.values()] == [1, 1]
        assert all(isinstance(each, Kernel) for each, _ in found.values())
        work(2)
        assert found[2] == (None, 132)
        with cuda_launch.substituted(lambda *_: "inner"):
            assert kernel(source, "add", "P") == "inner"  # type: ignore[comparison-overlap]
        work(2)
    assert recorded == [(source, "add", "P", None)] * 2
    assert kernel(source, "add", "P", None, 0) is found[0][0]
    assert cuda_launch.num_sms(torch.device("meta")) == 1
