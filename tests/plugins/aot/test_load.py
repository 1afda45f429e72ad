"""Compiled kernels as files, and launching them, with stand-ins for Triton and for the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from pathlib import Path

import pytest
import torch

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.plugins import KernelError
from fp4deploy.plugins.aot import compile as aot_compile
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.aot import store
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.aot.store import Compiled
from fp4deploy.plugins.runtime import cubin
from fp4deploy.plugins.runtime.cache import write_entry
from tests.plugins.aot.aot_cases import KERNELS, SCALE
from tests.plugins.aot.minimal_cubin import minimal_cubin
from tests.plugins.cuda_stand_in import Pycuda, Tensor
from tests.samples import sample


def compiled(launch: Launch = SCALE, arch: str = "sm_90", triton: str = "3.6.0", code: bytes = b"code") -> Compiled:
    names = [name for name, _ in launch.arguments]
    name = launch.kernel.partition(":")[2]
    return Compiled(
        cubin=minimal_cubin(name, int(arch.removeprefix("sm_")), 8, code), ptx="// ptx", name=name,
        parameters=tuple(kind for _, kind in launch.arguments),
        divisible=tuple(names.index(name) for name in launch.divisible),
        shared=65536, num_warps=8, registers=40, spills=0, instructions=("mma.sync m16n8k16 f16",),
        arch=arch, triton=triton,
        sources=store.source_digest(launch), launch=store.description(launch),
    )  # fmt: skip


def code_of(kernel: Compiled) -> bytes:
    return cubin._section(kernel.cubin, f".text.{kernel.name}".encode())


def ship(folder: Path, kernel: Compiled, launch: Launch = SCALE) -> Path:
    """Write an entry as `fp4deploy kernels --out` does."""
    file = folder / store.file_name(launch, kernel.arch, kernel.triton)
    write_entry(file, store.pack(kernel))
    return file


class Triton:
    """A stand-in for the compiler that counts its runs."""

    def __init__(self) -> None:
        self.runs: list[tuple[Launch, str]] = []
        self.version: str | None = "3.6.0"

    def compile(self, launch: Launch, arch: str) -> Compiled:
        assert self.version is not None
        self.runs.append((launch, arch))
        return compiled(launch, arch, self.version, f"{len(self.runs)}".encode())


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Triton:
    """Triton 3.6.0 and an empty cache."""
    found = Triton()
    for name in ("FP4DEPLOY_KERNEL_PATH", *aot_compile.ALTERING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(aot_compile, "_compile", found.compile)
    for module in (aot, aot_compile):
        monkeypatch.setattr(module, "triton_version", lambda: found.version)
    return found


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.kernel"))


def test_a_file_holds_all_of_it() -> None:
    kernel = compiled(code=bytes(range(256)))
    assert store.unpack(store.pack(kernel)) == kernel
    header = json.loads(store.pack(kernel).partition(b"\n")[0])
    assert header["name"] == "scale_kernel"
    assert header["parameters"] == ["*fp32", "*fp32", "i32", "fp32"]
    assert (header["shared"], header["num_warps"]) == (65536, 8)
    assert header["sources"] == store.source_digest(SCALE)
    assert json.loads(header["launch"])["kernel"] == f"{KERNELS}:scale_kernel"


@pytest.mark.parametrize(
    "content", [b"", b"no json\n", b"[]\n", b'{"format": 1}\n', b'{"format": 99, "ptx_bytes": 0}\n']
)
def test_other_files_are_not_kernels(content: bytes) -> None:
    assert store.unpack(content) is None


@pytest.mark.parametrize("text", ["sm75", "sm_999", "blackwell"])
def test_unsupported_architectures(text: str) -> None:
    with pytest.raises(InputError) as error:
        store.supported(text)
    assert f"'{text}' is not a supported GPU architecture" in str(error.value)
    assert "Valid: sm80, sm86, sm87, sm89, sm90, sm100, sm103, sm107, sm110, sm120, sm121." in str(error.value)


def test_the_second_time_comes_from_the_cache(triton: Triton, tmp_path: Path) -> None:
    first = aot_compile.compile_launch(SCALE, "sm90")
    assert aot_compile.compile_launch(SCALE, "sm_90") == first
    assert triton.runs == [(SCALE, "sm_90")]
    (entry,) = entries(tmp_path)
    assert entry.parent.name == "sm_90"
    assert entry.name.startswith("scale_kernel-")
    assert entry.name.endswith("-triton3.6.0.kernel")


def test_whatever_decides_the_code_gives_another_entry(
    triton: Triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(launch: Launch, arch: str = "sm_90") -> int:
        aot_compile.compile_launch(launch, arch)
        return len(entries(tmp_path))

    folder = tmp_path / "more" / "aot_moved"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text("")
    monkeypatch.syspath_prepend(folder.parent)
    launch = dataclasses.replace(SCALE, kernel="aot_moved.one:scale_kernel")
    assert count(launch) == 1
    assert count(launch, "sm_80") == 2
    changes = [{"constants": (("BLOCK", 512),)}, {"constants": (("BLOCK", True),)}, {"constants": (("BLOCK", 1),)}]
    changes += [{"divisible": ("x",)}, {"num_warps": 8}, {"num_stages": 4}, {"fp_fusion": True}]
    changes += [{"arguments": (("x", "*fp16"), *SCALE.arguments[1:])}]
    for index, change in enumerate(changes):
        assert count(dataclasses.replace(launch, **change)) == 3 + index, change
    before = len(entries(tmp_path))
    triton.version = "3.7.0"
    assert count(launch) == before + 1
    for text in ("a = 1\n", "a = 2\n"):
        (folder / "two.py").write_text(text)
        store._digest_of_folder.cache_clear()
        before += 1
        assert count(launch) == before + 1
    (folder / "two.py").write_bytes(b"a = 2\r\n")
    store._digest_of_folder.cache_clear()
    assert count(launch) == before + 1


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "digest only"])
def test_a_damaged_entry_is_compiled_again(triton: Triton, tmp_path: Path, damage: str) -> None:
    aot_compile.compile_launch(SCALE, "sm_90")
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    changed = bytes([content[0] ^ 1]) + content[1:]
    entry.write_bytes({"cut": content[:-5], "empty": b"", "changed": changed, "digest only": content[-32:]}[damage])
    assert code_of(aot_compile.compile_launch(SCALE, "sm_90")) == b"2"
    assert code_of(aot_compile.compile_launch(SCALE, "sm_90")) == b"2"
    assert len(triton.runs) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(
    triton: Triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="Set FP4DEPLOY_CACHE to a folder that can be written"):
        assert code_of(aot_compile.compile_launch(SCALE, "sm_90")) == b"1"


def test_without_triton_an_entry_of_any_version_serves(triton: Triton, tmp_path: Path) -> None:
    for version in ("3.6.0", "3.10.1", "3.9.0"):
        ship(store.own_folder(), compiled(triton=version, code=version.encode()))
    triton.version = "3.9.0"
    assert code_of(aot_compile.compile_launch(SCALE, "sm_90")) == b"3.9.0"
    triton.version = None
    assert code_of(aot_compile.compile_launch(SCALE, "sm_90")) == b"3.10.1"
    assert triton.runs == []


def test_folders_that_were_shipped_come_first(triton: Triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ship(two, compiled(code=b"two", triton="3.5.0"))
    aot_compile.compile_launch(SCALE, "sm_90")
    monkeypatch.setenv("FP4DEPLOY_KERNEL_PATH", f"{one}:{two}")
    assert code_of(aot_compile.compile_launch(SCALE, "sm_90")) == b"two"
    file = ship(one, compiled(code=b"one"))
    assert code_of(aot_compile.compile_launch(SCALE, "sm_90")) == b"one"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is damaged, of another kernel or written by another version of fp4deploy"):
        assert code_of(aot_compile.compile_launch(SCALE, "sm_90")) == b"two"
    assert not list(one.rglob("*.lock"))


def test_without_triton_a_missing_entry_names_the_command(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    triton.version = None
    monkeypatch.setenv("FP4DEPLOY_KERNEL_PATH", "/models/kernels")
    with pytest.raises(KernelError) as error:
        aot_compile.compile_launch(SCALE, "sm_103")
    text = str(error.value)
    assert "scale_kernel is not compiled for sm_103, and Triton is missing" in text
    assert "Searched: /models/kernels, " in text
    assert "run: fp4deploy kernels --arch sm103 --out DIR; then set FP4DEPLOY_KERNEL_PATH=DIR here" in text
    assert "Or: pip install triton" in text
    assert error.value.exit_code == 3


def test_kernels_that_are_not_there(triton: Triton) -> None:
    for kernel, words in [
        ("scale_kernel", "is not of the form 'module:function'"),
        ("nothing:kernel", "There is no module fp4deploy.plugins.gemm.triton.nothing"),
        ("no_package.nothing:kernel", "There is no module no_package.nothing"),
    ]:
        with pytest.raises(InputError) as error:
            aot_compile.compile_launch(dataclasses.replace(SCALE, kernel=kernel), "sm_90")
        assert words in str(error.value)


def test_types_as_the_driver_packs_them() -> None:
    assert aot_compile.signature(("*fp32", "*u8", "i32", "i64", "fp32", "u32")) == "PPiqfIPP"
    with pytest.raises(InputError) as error:
        aot_compile.signature(("*fp32", "fp16"))
    assert "No launch takes arguments of type fp16" in str(error.value)


def test_a_launch(pycuda: Pycuda, triton: Triton) -> None:
    scale = aot.function(SCALE, "cuda:1")
    scale.launch((3, 1, 1), Tensor(64, 1), Tensor(4096, 1), 5, 1.5)
    buffer = struct.pack("@PPifPP", 64, 4096, 5, 1.5, 0, 0)
    assert pycuda.calls[:2] == ["init", "load"]
    assert pycuda.calls[2:] == [("shared", 65536), (1, (3, 1, 1), (256,), buffer, 65536, None)]
    assert repr(scale) == "Kernel(scale_kernel (sm_90, Triton 3.6.0), cuda:1)"
    assert scale.resources()["registers"] == len("registers")
    assert aot.function(SCALE, torch.device("cuda", 1)) is scale
    assert aot.function(dataclasses.replace(SCALE, num_stages=2), 1) is not scale
    assert len(triton.runs) == 2


def test_arguments_that_are_not_divisible_are_refused(pycuda: Pycuda, triton: Triton) -> None:
    launch = dataclasses.replace(SCALE, divisible=("out", "n"))
    scale = aot.function(launch, 0)
    scale.launch(1, Tensor(4), None, 32, 1.0)
    for arguments, words in [
        ((Tensor(4), Tensor(8), 32, 1.0), "Argument 1 of Kernel(scale_kernel"),
        ((Tensor(4), Tensor(16), 31, 1.0), "was compiled as a multiple of 16 and is 31"),
    ]:
        with pytest.raises(InputError) as error:
            scale.launch(1, *arguments)
        assert words in str(error.value)
    for arguments in ((), (Tensor(16), Tensor(16), 32), (Tensor(16, 1), Tensor(16), 32, 1.0)):
        with pytest.raises(TypeError) as refused:
            scale.launch(1, *arguments)
        assert "does not take these arguments" in str(refused.value)


def test_no_nvcc_is_needed(pycuda: Pycuda, triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.plugins.runtime import availability

    monkeypatch.setattr(availability, "find_nvcc", lambda: None)
    assert "nvcc is missing" in (availability.why_unavailable(0) or "")
    assert aot.why_unavailable(0) is None
    assert aot.available()
    aot.function(SCALE, 0)


def test_what_is_missing(pycuda: Pycuda, triton: Triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert aot.why_unavailable("cpu") == "the tensors are on the CPU, not on a CUDA device"
    triton.version = None
    assert aot.why_unavailable(0) == (
        "there are no compiled Triton kernels for sm_90, and Triton, which compiles them, is missing: pip install "
        "triton, or set FP4DEPLOY_KERNEL_PATH to a folder written elsewhere by: fp4deploy kernels --arch sm90 --out DIR"
    )
    with pytest.raises(UnavailableError) as error:
        aot.function(SCALE, 0)
    assert "scale_kernel cannot run: there are no compiled Triton kernels for sm_90" in str(error.value)
    ship(tmp_path / "kernels", compiled())
    monkeypatch.setenv("FP4DEPLOY_KERNEL_PATH", str(tmp_path / "kernels"))
    assert aot.why_unavailable(0) is None
    aot.function(SCALE, 0)
    with pytest.raises(KernelError):
        aot.function(dataclasses.replace(SCALE, num_warps=2), 0)
    monkeypatch.setenv("FP4DEPLOY_KERNELS", "off")
    assert aot.why_unavailable(0) == "switched off by FP4DEPLOY_KERNELS=off"


@pytest.mark.parametrize(("capability", "name"), [((9, 1), "sm91"), ((12, 5), "sm125"), ((13, 0), "sm130")])
def test_gpus_that_are_too_new(
    pycuda: Pycuda, triton: Triton, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    why = aot.why_unavailable(0) or ""
    assert f"this GPU is {name}, the Triton kernels of this version are for sm80, " in why
    assert "a cubin runs on no other architecture: install a newer fp4deploy" in why


def test_loading_inside_a_capture(pycuda: Pycuda, triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    early = aot.function(SCALE, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert aot.function(SCALE, 0) is early
    with pytest.raises(KernelError) as error:
        aot.function(dataclasses.replace(SCALE, num_warps=2), 0)
    assert "Run the step once on this device before the capture" in str(error.value)


@pytest.mark.parametrize(
    ("arch", "channels"), sample(store.TARGETS, [8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024], every=6)
)
def test_every_variant_that_a_network_uses_is_listed(arch: str, channels: int) -> None:
    """A variant that the dispatch chooses and AOT compilation does not list is an error on machines without Triton."""
    from fp4deploy.formats import quantize_nvfp4
    from fp4deploy.plugins.gemm.arguments import gemm_call, weight_only_call
    from fp4deploy.plugins.gemm.triton.variants import all_variants

    capability, listed = int(arch.removeprefix("sm_")), set(all_variants(arch))
    needed = {}
    for size, count, transposed in [(1, 1, False), (3, 1, False), (3, 2, False), (1, 1, True)]:
        if count == 2 and channels % 16:
            continue  # refused: a block would span both images
        x = quantize_nvfp4(torch.zeros(1, 1, 1, channels))
        side = 2 if transposed else size
        weight = quantize_nvfp4(torch.zeros(16, side, side, count * channels))
        for packed in (False, True):
            out = torch.empty(0, dtype=torch.uint8 if packed else torch.float16)
            for pixels in ((1, 4, 4), (16, 352, 480)):
                call = gemm_call(
                    (x,) * count, weight, None, pixels, pixels, out, *((out, x.amax) if packed else (None, None)),
                    torch.float16, capability, (size, size), transposed=transposed,
                )  # fmt: skip
                needed[f"{size}x{size} of {count}{' up' * transposed}{' packed' * packed}, {pixels}"] = call.launch
    for rows in (1, 1000):
        linear = torch.zeros(rows, channels, dtype=torch.float16)
        weight = quantize_nvfp4(torch.zeros(16, channels))
        call = weight_only_call(linear, weight, None, linear, capability)
        needed[f"weight-only, {rows} rows"] = call.launch
    assert [name for name, launch in needed.items() if launch not in listed] == []


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_120"}, {"arch": "sm_9000"}, {"arch": "SM_90"}, {"num_warps": 0}, {"num_warps": 4},
        {"num_warps": 64},
        {"name": "other_kernel"}, {"shared": 1 << 20}, {"shared": -1}, {"divisible": (99,)}, {"parameters": ("*x y",)},
        {"registers": 256}, {"cubin": b"code"}, {"ptx": "x" * (store.MAX_PTX + 1)},
    ],
    ids=lambda change: str(change)[:40],  # one is a text of 16 MB
)  # fmt: skip
def test_a_header_that_does_not_fit_the_machine_code(change: dict[str, object]) -> None:
    kernel = compiled()
    assert store.unpack(store.pack(kernel)) == kernel
    assert store.unpack(store.pack(dataclasses.replace(kernel, **change))) is None  # type: ignore[arg-type]


def test_a_file_under_the_name_of_another_is_ignored(tmp_path: Path) -> None:
    other = dataclasses.replace(SCALE, num_stages=2)
    ship(tmp_path, compiled(other), SCALE)
    with pytest.warns(UserWarning, match="of another kernel"):
        assert store.find(SCALE, "sm_90", [tmp_path]) is None
    assert store.find(other, "sm_90", [tmp_path]) is None
    ship(tmp_path, compiled(other), other)
    assert store.find(other, "sm_90", [tmp_path]) == compiled(other)


def test_a_cubin_with_offsets_beyond_its_end() -> None:
    whole = compiled().cubin
    for place in range(0, 64, 2):
        broken = whole[:place] + b"\xff\xff" + whole[place + 2 :]
        with contextlib.suppress(ValueError):
            cubin.require_code(broken, "scale_kernel", 90, 8)
        with contextlib.suppress(ValueError):
            cubin.resources(broken)
