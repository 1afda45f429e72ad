"""Launching on a GPU: streams, graphs, threads, devices, errors. The overhead is printed (pytest -s), not asserted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp4deploy.plugins import Kernel, KernelError, kernel, why_unavailable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.skipif(why_unavailable() is not None, reason=f"kernels cannot run here: {why_unavailable()}"),
]

SOURCE = """
extern "C" __global__ void add(const float *x, float *out, long long n, float value) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + value;
}
extern "C" __global__ void nothing(const float *, float *, long long, float) {}
extern "C" __global__ void reverse(const float *x, float *out, int n) {
    extern __shared__ float kept[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) kept[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = kept[n - 1 - i];
}
struct Sizes { long long n; float scale; };
extern "C" __global__ void mixed(float *out, char a, double b, unsigned c, Sizes sizes, bool last) {
    out[0] = a; out[1] = (float)b; out[2] = (float)c; out[3] = (float)sizes.n; out[4] = sizes.scale; out[5] = last;
}
"""
COUNT = 100_000
LONG = 100_000_000  # cycles: about 50 ms


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "small.cu"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def add(source: Path) -> Kernel:
    return kernel(source, "add", "PPqf", None, "cuda:0")


def run(add: Kernel, x: torch.Tensor, out: torch.Tensor, value: float = 1.0) -> None:
    add.launch((x.numel() + 255) // 256, 256, x, out, x.numel(), value)


def test_a_launch(add: Kernel) -> None:
    x = torch.randn(COUNT, device="cuda:0")
    out = torch.full_like(x, torch.nan)
    run(add, x, out, 2.5)
    assert torch.equal(out, x + 2.5)
    assert add.resources()["registers"] > 0
    assert add.resources()["local_bytes"] == 0


def test_arguments_arrive_as_declared(source: Path) -> None:
    out = torch.zeros(6, device="cuda:0")
    mixed = kernel(source, "mixed", "PbdI0q16s?", None, "cuda:0")
    sizes = (2**33).to_bytes(8, "little") + torch.tensor(0.25).numpy().tobytes() + bytes(4)
    mixed.launch(1, 1, out, -3, 1.5, 2**32 - 1, sizes, True)
    assert out.tolist() == [-3.0, 1.5, float(2**32), float(2**33), 0.25, 1.0]


def test_nothing_waits_and_nothing_is_allocated(add: Kernel) -> None:
    x, out = torch.randn(COUNT, device="cuda:0"), torch.empty(COUNT, device="cuda:0")
    side = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), side):
        with torch.cuda.stream(stream):
            run(add, x, out)
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda._sleep(LONG)
            done = torch.cuda.Event()
            run(add, x, out)
            done.record()
            assert not done.query()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        torch.cuda.synchronize()


@pytest.mark.parametrize("priority", [0, -1])
def test_order_on_a_side_stream(add: Kernel, priority: int) -> None:
    x, out = torch.zeros(COUNT, device="cuda:0"), torch.zeros(COUNT, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
        for step in range(20):
            torch.cuda._sleep(LONG // 20)
            x.fill_(step)  # must be seen by the kernel
            run(add, x, out)
            seen = out.clone()  # must see the kernel
            out.zero_()
            assert seen[[0, -1]].tolist() == [step + 1] * 2


def test_in_a_cuda_graph(add: Kernel) -> None:
    x, out = torch.zeros(COUNT, device="cuda:0"), torch.zeros(COUNT, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x * 2
        run(add, doubled, out)
        run(add, out, doubled, 10.0)
        result = doubled.sum()
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert result.item() == COUNT * (2 * value + 11)
        assert out[-1].item() == 2 * value + 1
    run(add, x, out)  # outside again
    assert out[-1].item() == 6.0


def test_a_kernel_that_is_not_loaded_before_the_capture(source: Path) -> None:
    x = torch.zeros(8, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(KernelError) as error:
            kernel(source, "nothing", "PPqf", {"LATE": 1}, "cuda:0")
    assert "Run the step once on this device before the capture" in str(error.value)
    graph.replay()
    assert x[0].item() == 1


def test_threads(add: Kernel) -> None:
    """Each on a stream of its own, two on one stream, and one that never called CUDA before."""
    shared, failures = torch.cuda.Stream(), []

    def work(stream: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(stream):
                x, out = torch.zeros(COUNT, device="cuda:0"), torch.zeros(COUNT, device="cuda:0")
                for step in range(200):
                    run(add, x, out, float(step))
                    x.copy_(out)
                assert x[-1].item() == sum(range(200))
        except BaseException as error:
            failures.append(error)

    still = torch.zeros(COUNT, device="cuda:0")
    moved = torch.empty_like(still)

    def first_call() -> None:
        try:
            run(add, still, moved, 7.0)
        except BaseException as error:
            failures.append(error)

    streams = [torch.cuda.Stream(), torch.cuda.default_stream(), shared, shared]
    threads = [threading.Thread(target=first_call)]
    threads += [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert moved[-1].item() == 7.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_each_device(source: Path) -> None:
    for index in (1, 0, 1):
        here = kernel(source, "add", "PPqf", None, index)
        for stream in (torch.cuda.default_stream(index), torch.cuda.Stream(index)):
            with torch.cuda.stream(stream):
                x = torch.randn(COUNT, device=f"cuda:{index}")
                out = torch.empty_like(x)
                with torch.cuda.device(1 - index):
                    run(here, x, out)
            torch.cuda.synchronize(index)
            assert torch.equal(out, x + 1)
            assert torch.cuda.current_device() == 0
            with pytest.raises(TypeError):
                run(here, x.to(f"cuda:{1 - index}"), out)


def test_dynamic_shared_memory(source: Path) -> None:
    x = torch.randn(16_384, device="cuda:0")
    out = torch.empty_like(x)
    reverse = kernel(source, "reverse", "PPi", None, "cuda:0")
    reverse.launch(1, 1024, x, out, x.numel(), shared=4 * x.numel())
    assert torch.equal(out, x.flip(0))


def test_a_refused_launch_leaves_everything_usable(add: Kernel) -> None:
    x = torch.zeros(8, device="cuda:0")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            with pytest.raises(KernelError) as error:
                add.launch(1, 2048, x, x, 8, 1.0)
            assert "The kernel add of small.cu (no macros) was not launched on cuda:0" in str(error.value)
            before = x[0].item()
            run(add, x, x)
            assert x[0].item() == before + 1


def test_a_name_the_source_does_not_have(source: Path) -> None:
    with pytest.raises(KernelError) as error:
        kernel(source, "subtract", "P", None, "cuda:0")
    assert "The kernel subtract of small.cu (no macros) was not loaded on cuda:0" in str(error.value)


@pytest.mark.parametrize("place", ["main", "thread"])
def test_the_process_ends_quietly(source: Path, place: str) -> None:
    script = f"""
import threading, torch
from fp4deploy.plugins import kernel
def work():
    x = torch.zeros(8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel({str(source)!r}, "add", "PPqf").launch(1, 8, x, x, 8, 1.0)
    kernel({str(source)!r}, "add", "PPqf").launch(1, 8, x, x, 8, 1.0)
    print(x.sum().item())
if {place!r} == "main":
    work()
else:
    thread = threading.Thread(target=work); thread.start(); thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() in ("16.0", "8.0")


def microseconds(call: Callable[[], object], repeats: int = 200, rounds: int = 9) -> float:
    """Median time of the host in a call, with an empty queue before each round."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return sorted(times)[rounds // 2]


def test_the_overhead_of_a_launch_is_printed(source: Path) -> None:
    x, out = torch.zeros(8, device="cuda:0"), torch.zeros(8, device="cuda:0")
    nothing = kernel(source, "nothing", "PPqf", None, "cuda:0")
    side = torch.cuda.Stream()

    def launch() -> None:
        nothing.launch(1, 32, x, out, 8, 1.0)

    def look_up_and_launch() -> None:
        kernel(source, "nothing", "PPqf", None, x.device).launch(1, 32, x, out, 8, 1.0)

    def replay_of(*steps: Callable[[], object]) -> float:
        """Microseconds a kernel, of a graph that repeats the steps."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(300):
                for step in steps:
                    step()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / (300 * len(steps)) * 1e3

    def copy() -> None:
        out.copy_(x)

    print(f"\n{torch.cuda.get_device_name(0)}, host time of a launch in us:")
    print(f"  kernel.launch, default stream  {microseconds(launch):6.2f}")
    print(f"  kernel() and launch            {microseconds(look_up_and_launch):6.2f}")
    with torch.cuda.stream(side):
        print(f"  kernel.launch, side stream     {microseconds(launch):6.2f}")
    print(f"  torch.add(x, y, out=z)         {microseconds(lambda: torch.add(x, x, out=out)):6.2f}")
    print(f"a kernel in a graph's replay, us: {replay_of(launch, copy):.2f} ours and torch's in turn,", end=" ")
    print(f"{replay_of(copy, copy):.2f} torch's alone")
