"""The compiler's cache and messages: mostly with a stand-in for nvcc that counts its runs, then with nvcc itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.plugins import KernelError, compile_cubin
from fp4deploy.plugins.runtime import nvcc as compiler

SOURCE = '#include "value.cuh"\nextern "C" __global__ void fill(int *out) { out[threadIdx.x] = VALUE + EXTRA; }\n'
STAND_IN = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release $RELEASE, V$RELEASE.88"; exit ;;
--list-gpu-code) printf 'sm_80\\nsm_90\\n'; exit ;;
esac
echo "$@" >> "$(dirname "$0")/runs"
sleep "${DELAY:-0}"
while [ "$1" != "-o" ]; do shift; done
if grep -q '#error' "$3"; then echo "$3(1): error: refused" >&2; exit 2; fi
cat "$3" > "$2"
"""
needs_nvcc = pytest.mark.skipif(compiler.find_nvcc() is None, reason=f"no nvcc here; {compiler.INSTALL_NVCC}")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with a header of its own, and an empty cache."""
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "value.cuh").write_text("#define VALUE 3\n")
    (folder / "fill.cu").write_text(SOURCE)
    return folder / "fill.cu"


class Nvcc:
    """A stand-in for nvcc, whose "machine code" is the source."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bin" / "nvcc"
        self.path.parent.mkdir(parents=True)
        self.path.write_text(STAND_IN)
        self.path.chmod(0o755)

    def runs(self) -> list[str]:
        log = self.path.parent / "runs"
        return log.read_text().splitlines() if log.is_file() else []


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvcc:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("RELEASE", "13.0")
    return Nvcc(tmp_path / "toolkit")


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").rglob("*.cubin"))


def test_the_flags_keep_the_numerics(source: Path, nvcc: Nvcc) -> None:
    compile_cubin(source, "sm_90a", {"EXTRA": 1, "ON": True, "BARE": None, "PAIR": "a,b"})
    words = nvcc.runs()[0].split()
    assert {"--cubin", "-std=c++17", "-O3", "-fmad=false", "-lineinfo"} < set(words)
    assert "-gencode=arch=compute_90a,code=sm_90a" in words
    assert {"-DEXTRA=1", "-DON=1", "-DBARE", r"-DPAIR=a\,b"} < set(words)
    assert not any("fast" in word for word in words if word.startswith("-"))


def test_its_temporary_files_are_private(source: Path, nvcc: Nvcc) -> None:
    """Their names have the number of the process: another user could write them first."""
    nvcc.path.write_text(STAND_IN.replace('echo "$@"', 'echo "$TMPDIR" "$@"'))
    compile_cubin(source, "sm_90a", {"EXTRA": 1})
    words = nvcc.runs()[0].split()
    folder = Path(words[words.index("-o") + 1]).parent
    assert Path(words[0]) == folder
    assert not folder.exists()


def test_the_second_time_comes_from_the_cache(source: Path, nvcc: Nvcc, tmp_path: Path) -> None:
    first = compile_cubin(source, "sm_90a", {"EXTRA": 1, "OTHER": 2})
    assert compile_cubin(source, "sm_90a", {"OTHER": 2, "EXTRA": 1}) == first == SOURCE.encode()
    assert len(nvcc.runs()) == 1
    (entry,) = entries(tmp_path)
    assert entry.parent.name == "sm_90a"
    assert entry.name.startswith("fill-")


def test_whatever_decides_the_code_gives_another_entry(
    source: Path, nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> int:
        compile_cubin(source, arch, macros)
        return len(entries(tmp_path))

    arch, macros = "sm_90a", {"EXTRA": 1}
    assert compiled() == 1
    macros = {"EXTRA": 2}
    assert compiled() == 2
    macros = {"EXTRA": 2, "MORE": None}
    assert compiled() == 3
    arch = "sm_80"
    assert compiled() == 4
    (source.parent / "value.cuh").write_text("#define VALUE 4\n")
    assert compiled() == 5
    (source.parent / "new.cuh").write_text("")
    assert compiled() == 6
    source.write_text(SOURCE + "// changed\n")
    assert compiled() == 7
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    assert compiled() == 8
    monkeypatch.setenv("RELEASE", "13.1")
    compiler.nvcc_version.cache_clear()
    assert compiled() == 9
    (source.parent / "readme.txt").write_text("no header")
    assert compiled() == 9


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "digest only"])
def test_a_damaged_entry_is_compiled_again(source: Path, nvcc: Nvcc, tmp_path: Path, damage: str) -> None:
    good = compile_cubin(source, "sm_90a")
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    changed = bytes([content[0] ^ 1]) + content[1:]
    entry.write_bytes({"cut": content[:-5], "empty": b"", "changed": changed, "digest only": content[-32:]}[damage])
    assert compile_cubin(source, "sm_90a") == good
    assert len(nvcc.runs()) == 2
    assert entry.read_bytes() == content


def test_an_error_names_source_macros_and_what_nvcc_says(source: Path, nvcc: Nvcc, tmp_path: Path) -> None:
    source.write_text("#error\n")
    with pytest.raises(KernelError) as error:
        compile_cubin(source, "sm_90a", {"EXTRA": 1})
    assert "fill.cu (EXTRA=1) does not compile for sm_90a" in str(error.value)
    assert "error: refused" in str(error.value)
    assert error.value.exit_code == 3
    assert entries(tmp_path) == []


def test_no_nvcc(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    with pytest.raises(UnavailableError) as error:
        compile_cubin(source, "sm_90a")
    assert "fill.cu cannot be compiled: nvcc is missing" in str(error.value)
    assert "pip install nvidia-cuda-nvcc" in str(error.value)


def test_an_nvcc_that_does_not_run(source: Path, nvcc: Nvcc) -> None:
    nvcc.path.write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(UnavailableError) as error:
        compile_cubin(source, "sm_90a")
    assert f"{nvcc.path} does not run" in str(error.value)


def test_where_nvcc_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    wheel = tmp_path / "site" / "nvidia" / "cu13"
    on_path, at_home = Nvcc(tmp_path / "tools").path, Nvcc(tmp_path / "home").path
    in_wheel = Nvcc(wheel).path
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert compiler.find_nvcc() == on_path
    monkeypatch.setenv("CUDA_HOME", str(at_home.parent.parent))
    assert compiler.find_nvcc() == at_home
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "TOOLKIT", str(at_home.parent.parent))
    assert compiler.find_nvcc() == at_home
    monkeypatch.setattr(compiler, "TOOLKIT", str(tmp_path))
    assert compiler.find_nvcc() == in_wheel
    in_wheel.unlink()
    assert compiler.find_nvcc() is None


def test_unknown_sources_and_macros(nvcc: Nvcc, source: Path) -> None:
    with pytest.raises(InputError) as error:
        compile_cubin("no_such.cu", "sm_90a")
    assert "There is no CUDA source" in str(error.value)
    with pytest.raises(InputError) as error:
        compile_cubin(source, "sm_90a", {"A B": 1})
    assert "'A B' is not a macro name" in str(error.value)
    with pytest.raises(InputError) as error:
        compile_cubin(source, "sm_90a", {"A": 1.5})  # type: ignore[dict-item]
    assert "The macro A is a float" in str(error.value)


def test_a_cache_that_cannot_be_written_is_a_warning(
    source: Path, nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="Set FP4DEPLOY_CACHE to a folder that can be written"):
        assert compile_cubin(source, "sm_90a") == SOURCE.encode()


def test_disks_without_locks(source: Path, nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert compile_cubin(source, "sm_90a") == SOURCE.encode()
    assert len(entries(tmp_path)) == 1


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FP4DEPLOY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compiler.cache_folder() == tmp_path / "home" / ".cache" / "fp4deploy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiler.cache_folder() == tmp_path / "xdg" / "fp4deploy"
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path / "own"))
    assert compiler.cache_folder() == tmp_path / "own"


def test_processes_that_start_together_compile_once(
    source: Path, nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAY", "2")
    script = (
        "import sys; from fp4deploy.plugins import compile_cubin; print(len(compile_cubin(sys.argv[1], 'sm_90a')))\n"
        "assert 'torch' not in sys.modules"  # seconds
    )
    command = [sys.executable, "-c", script, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == [str(len(SOURCE))] * 2
    assert [process.returncode for process in processes] == [0, 0]
    assert len(nvcc.runs()) == 1
    names = [path.suffix for path in (tmp_path / "cache" / "kernels" / "sm_90a").iterdir()]
    assert sorted(names) == [".cubin", ".lock"]


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_103a", "sm_121a"])
def test_nvcc_compiles_for_every_architecture(source: Path, arch: str) -> None:
    """SM90 and SM120: tests/contract/test_machine_code.py."""
    cubin = compile_cubin(source, arch, {"EXTRA": 1})
    assert cubin[:4] == b"\x7fELF"
    assert b"fill" in cubin


@needs_nvcc
def test_nvcc_takes_commas_in_macros(source: Path) -> None:
    source.write_text(
        "template <int A, int B> struct Sum { static constexpr int value = A + B; };\n"
        'extern "C" __global__ void fill(int *out) { *out = TYPE::value; }\n'
    )
    assert compile_cubin(source, "sm_80", {"TYPE": "Sum<1,2>"})[:4] == b"\x7fELF"


@needs_nvcc
def test_the_message_of_nvcc(source: Path) -> None:
    with pytest.raises(KernelError) as error:
        compile_cubin(source, "sm_80")
    assert "fill.cu (no macros) does not compile for sm_80" in str(error.value)
    assert 'identifier "EXTRA" is undefined' in str(error.value)
