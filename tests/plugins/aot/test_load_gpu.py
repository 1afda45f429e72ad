"""Kernels compiled ahead of time, on a GPU: results, streams, graphs, and a process that has no Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError
from fp4deploy.plugins import KernelError
from fp4deploy.plugins.aot import build as aot_build
from fp4deploy.plugins.aot import compile as aot_compile
from fp4deploy.plugins.aot import load as aot
from tests.plugins.aot.aot_cases import BLOCK_TRITON, SCALE, environment, product

DECODED = product(False, bk=64)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.skipif(aot.why_unavailable() is not None, reason=f"cannot run here: {aot.why_unavailable()}"),
    pytest.mark.skipif(aot_compile.triton_version() is None, reason="Triton is missing: pip install triton"),
]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example kernels for this GPU, as `fp4deploy kernels --out` writes them."""
    out = tmp_path_factory.mktemp("kernels")
    arch = Architecture.of_device(0).triton_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP4DEPLOY_CACHE", str(tmp_path_factory.mktemp("cache")))
        done = dict(aot_build.build([(SCALE, arch), (DECODED, arch)], jobs=2, out=out))
    assert all(each.compiled is not None for each in done.values())
    return out


@pytest.fixture(autouse=True)
def only_shipped(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DEPLOY_KERNEL_PATH", str(shipped))


def scaled(x: torch.Tensor, factor: float = 2.5) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    aot.function(SCALE, x.device).launch((x.numel() + 1023) // 1024, x, out, x.numel(), factor)
    return out


@pytest.mark.parametrize("count", [1, 16, 1000, 1_000_003])
def test_a_launch(count: int) -> None:
    x = torch.randn(count, device="cuda")
    assert torch.equal(scaled(x), 2.5 * x)


def test_a_gemm() -> None:
    a, b = (torch.randn(128, 512, device="cuda").half() for _ in range(2))
    out = torch.full((128, 128), torch.nan, device="cuda")
    aot.function(DECODED, 0).launch((1, 1, 1), a, None, b, None, out, 512)
    torch.testing.assert_close(out, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


def test_resources_are_those_of_the_header() -> None:
    function = aot.function(DECODED, 0)
    found = function.resources()
    assert (found["registers"], found["local_bytes"]) == (function.compiled.registers, function.compiled.spills)


def test_another_stream_and_a_graph() -> None:
    x = torch.randn(5000, device="cuda")
    out = torch.zeros_like(x)
    function = aot.function(SCALE, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        y = x + 1
        function.launch(5, y, out, 5000, 3.0)
        z = out + 1
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(z, 3 * (x + 1) + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function.launch(5, x, out, 5000, 2.0)
    out.zero_()
    x.fill_(4)
    graph.replay()
    assert torch.equal(out, torch.full_like(out, 8))


def test_misaligned_tensors_are_refused() -> None:
    x = torch.zeros(100, device="cuda")
    with pytest.raises(InputError, match="was compiled as a multiple of 16"):
        scaled(x[1:])


def test_a_variant_that_is_not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    for module in (aot, aot_compile):
        monkeypatch.setattr(module, "triton_version", lambda: None)
    with pytest.raises(KernelError, match="is not compiled for sm_"):
        aot.function(product(False, bm=64, bk=64), 0)


def test_a_process_without_triton(shipped: Path, tmp_path: Path) -> None:
    script = BLOCK_TRITON + (
        "import torch\n"
        "from aot_cases import SCALE\n"
        "from fp4deploy.plugins.aot import load as aot\n"
        "x = torch.randn(5000, device='cuda'); out = torch.zeros_like(x)\n"
        "aot.function(SCALE, 0).launch(5, x, out, 5000, 3.0)\n"
        "assert torch.equal(out, 3 * x)\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] == 'triton' and sys.modules[name]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(tmp_path, shipped), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
