"""How close the quantising kernels come to memory bandwidth.

    python benchmarks/kernels.py --json benchmarks/results/kernels_h200.json

For each kernel: the median time, the bytes it has to move (input once, outputs once), and the time that a
device-to-device copy of as many bytes takes in the same run; their quotient is the share of copy bandwidth. Buffers
rotate, so that no run finds its data in the L2 cache, and the GPU is kept busy while launches queue up, so that the
host's time is not in the numbers. The given amax is a float32 number such as tracking, learning or a calibration gives
(`AMAX`). 4/6 is also timed with three amaxes of which some scales put bfloat16 elements on the midpoint
of two values (`TIES`), because rounding those to even takes longer; an amax that is a bfloat16 itself often does.
`--peers` adds a short Triton kernel (`triton_peer.py`), torch.compile of the reference and ModelOpt's kernel with every
tile that compiles; `--only TEXT` keeps the rows whose names contain one of the texts.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fp4deploy import formats
from fp4deploy.formats import FourOverSix
from fp4deploy.plugins.quantize import dispatch
from fp4deploy.plugins.quantize.ms_eden import fake_quantize_ms_eden, quantize_ms_eden

ops = torch.ops.fp4deploy
ROTATION = 4
PLAIN = [0, 448, 0, 0, 0, 0]
AMAX = 5.3
TIES = (5.8125, 5.0625, 5.25)


def median_ms(run: Callable[[int], object], repeats: int = 30) -> float:
    """Median milliseconds of run(i), i the number of the buffer to use."""
    kept: list[object] = [None] * ROTATION  # results stay alive for a round, so that outputs rotate as well
    for index in range(2 * ROTATION):
        kept[index % ROTATION] = run(index % ROTATION)
    times = []
    for index in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the GPU waits while the launches queue up: kernels are timed, not the host
        start.record()
        for inner in range(4):
            kept[(4 * index + inner) % ROTATION] = run((4 * index + inner) % ROTATION)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 4)
    return sorted(times)[repeats // 2]


def copy_ms(count: int) -> float:
    """Median milliseconds of a copy that reads and writes `count` bytes together."""
    half = count // 2 // 16 * 16
    sources = [torch.empty(half, dtype=torch.uint8, device="cuda").random_() for _ in range(ROTATION)]
    targets = [torch.empty_like(source) for source in sources]
    return median_ms(lambda index: targets[index].copy_(sources[index]))


def matrix(dtype: torch.dtype) -> list[torch.Tensor]:
    """[16384, 6144], the size of the speed targets."""
    return [torch.randn(16384, 6144, device="cuda").to(dtype) for _ in range(ROTATION)]


def cases(dtype: torch.dtype, peers: bool) -> dict[str, tuple[Callable[[int], object], int]]:
    """name -> (run, bytes moved) over `matrix(dtype)`."""
    xs = matrix(dtype)
    amax, read = torch.tensor(AMAX, device="cuda"), xs[0].nbytes
    codes = read // xs[0].element_size() // 2
    packed = read + codes + codes // 8
    seeds = torch.tensor(1, device="cuda"), torch.tensor(2, device="cuda")
    choice = {
        f"{metric} {'fast' if fast else 'strict'}": FourOverSix(metric, 256, fast)
        for metric in ("mae", "mse")
        for fast in (True, False)
    }
    result: dict[str, tuple[Callable[[int], object], int]] = {
        "fake quantise, amax given": (lambda i: ops.quantize_along(xs[i], 1, amax, None, PLAIN, False), 2 * read),
        "fake quantise + mask": (
            lambda i: ops.quantize_along(xs[i], 1, amax, None, PLAIN, True),
            2 * read + codes // 4,
        ),
        "fake quantise + mask + amax of the same pass": (
            lambda i: ops.quantize_and_amax(xs[i], 1, amax, None, PLAIN),
            2 * read + codes // 4,
        ),
        "fake quantise, amax found": (lambda i: dispatch.fake_quantize_nvfp4(xs[i], mask=False), 2 * read),
        "packed, amax given": (lambda i: ops.pack_along(xs[i], 1, amax, None, PLAIN, False), packed),
        "packed swizzled": (lambda i: ops.pack_along(xs[i], 1, amax, None, PLAIN, True), packed),
        "packed, amax found": (lambda i: dispatch.quantize_nvfp4(xs[i]), packed),
        "amax alone": (lambda i: ops.finite_amax(xs[i]), read),
        "row-scaled fake quantise": (
            lambda i: dispatch.fake_quantize_nvfp4(xs[i], row_scaled=True, mask=False),
            2 * read,
        ),
        "row-scaled packed": (lambda i: dispatch.quantize_nvfp4(xs[i], row_scaled=True), packed),
        "2-D packed": (lambda i: dispatch.quantize_nvfp4(xs[i], "2d", amax), packed),
        "2-D packed, 4/6": (
            lambda i: dispatch.quantize_nvfp4(xs[i], "2d", amax, four_over_six=FourOverSix("mae", 256, True)),
            packed,
        ),
        "2-D packed, stochastic": (
            lambda i: dispatch.quantize_nvfp4(xs[i], "2d", amax, rounding="stochastic"),
            packed,
        ),
        "MXFP4 packed": (lambda i: dispatch.quantize_mxfp4(xs[i]), packed),
        "stochastic packed": (lambda i: dispatch.quantize_nvfp4(xs[i], amax=amax, rounding="stochastic"), packed),
        "Hadamard + fake quantise": (
            lambda i: dispatch.fake_quantize_nvfp4(xs[i], amax=amax, hadamard=True, mask=False),
            2 * read,
        ),
    }
    result |= {
        "MS-EDEN packed, amax found": (lambda i: quantize_ms_eden(xs[i], *seeds), packed),
        "MS-EDEN + fake quantise, amax found": (lambda i: fake_quantize_ms_eden(xs[i], *seeds), 2 * read),
    }
    amaxes = {"": amax, **{f", amax {size:g}": torch.tensor(size, device="cuda") for size in TIES}}
    for name, four in choice.items():
        for suffix, given in amaxes.items() if dtype == torch.bfloat16 else [("", amax)]:
            result[f"4/6 {name} packed{suffix}"] = (
                lambda i, four=four, given=given: dispatch.quantize_nvfp4(xs[i], amax=given, four_over_six=four),
                packed,
            )
    if peers:
        result |= peer_cases(xs, amax, read)
    return result


def peer_cases(xs: list[torch.Tensor], amax: torch.Tensor, read: int) -> dict[str, tuple[Callable[[int], object], int]]:
    """torch.compile of the reference, and ModelOpt's fake quantisation where it is installed."""
    from triton_peer import fake_quantize

    compiled = torch.compile(lambda x: formats.fake_quantize_nvfp4(x, amax=amax)[0])
    result: dict[str, tuple[Callable[[int], object], int]] = {
        "peer: Triton kernel of 12 lines": (lambda i: fake_quantize(xs[i], amax), 2 * read),
        "peer: torch.compile of the reference": (lambda i: compiled(xs[i]), 2 * read),
        "peer: eager reference": (lambda i: formats.fake_quantize_nvfp4(xs[i], amax=amax), 2 * read),
    }
    try:
        from modelopt.torch.kernels.quantization.gemm.fp4_kernel_hopper import (  # type: ignore[import-not-found]
            fp4_fake_quant_block,
        )
    except Exception as error:  # an optional peer; whatever it lacks is printed
        print(f"ModelOpt is left out: {type(error).__name__}: {error}")
        return result
    for tile in product((8, 16, 32, 64, 128), (64, 128, 256, 512)):

        def run(i: int, tile: tuple[int, int] = tile) -> torch.Tensor:
            return fp4_fake_quant_block(xs[i], amax, block_size=16, tile_rows=tile[0], tile_cols=tile[1])

        result[f"peer: ModelOpt fp4_fake_quant_block, tile {tile[0]}x{tile[1]}"] = (run, 2 * read)
    return result


def image_cases() -> dict[str, tuple[Callable[[int], object], int]]:
    """Activations of a UNet of scale 1 at 352 x 480, batch 16, float16, both layouts, amax given."""
    amax, seeds = torch.tensor(4.0, device="cuda"), (torch.tensor(1, device="cuda"), torch.tensor(2, device="cuda"))
    result: dict[str, tuple[Callable[[int], object], int]] = {}
    for channels, height, width in ((64, 352, 480), (128, 176, 240), (256, 88, 120), (512, 44, 60), (1024, 22, 30)):
        xs = [torch.randn(16, channels, height, width, device="cuda").half() for _ in range(ROTATION)]
        for name, layout in (("NCHW", torch.contiguous_format), ("channels_last", torch.channels_last)):
            ys = [x.to(memory_format=layout) for x in xs]
            run = lambda i, ys=ys: ops.quantize_along(ys[i], 1, amax, None, PLAIN, False)  # noqa: E731
            result[f"{name} {channels} x {height} x {width}"] = (run, 2 * ys[0].nbytes)
        for axis, along in ((1, "the channels"), (3, "the width")):
            run = lambda i, ys=ys, axis=axis: fake_quantize_ms_eden(ys[i], *seeds, axis)  # noqa: E731
            result[f"MS-EDEN along {along}, channels_last {channels} x {height} x {width}"] = (run, 2 * ys[0].nbytes)
    return result


def measure(found: dict[str, tuple[Callable[[int], object], int]]) -> list[dict[str, Any]]:
    """A row for each case; a case that fails names its error."""
    floors: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    for name, (run, count) in found.items():
        try:
            elapsed = median_ms(run)
        except Exception as error:
            rows.append({"case": name, "error": f"{type(error).__name__}: {error}"[:300]})
            print(f"{name:55s} {rows[-1]['error'][:150]}")
            continue
        if count not in floors:
            floors[count] = copy_ms(count)
        share = floors[count] / elapsed
        rows.append({"case": name, "ms": elapsed, "bytes": count, "copy_ms": floors[count], "share_of_copy": share})
        print(f"{name:55s} {elapsed * 1e3:9.1f} us  copy {floors[count] * 1e3:9.1f} us  {share:6.1%} of copy bandwidth")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32) if arguments.only == [""] else (torch.bfloat16,):
        print(f"\n[16384, 6144] {dtype}")
        chosen = cases(dtype, arguments.peers and dtype == torch.bfloat16).items()
        kept = {name: case for name, case in chosen if any(text in name for text in arguments.only)}
        found[str(dtype)] = measure(kept)
        torch.cuda.empty_cache()
    images = {name: case for name, case in image_cases().items() if any(text in name for text in arguments.only)}
    if images:
        print("\nactivations, float16, amax given")
        found["activations"] = measure(images)
    if arguments.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        machine["python"] = platform.python_version()
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps(
                {
                    "command": f"python benchmarks/kernels.py{' --peers' if arguments.peers else ''}",
                    "machine": machine,
                    **found,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
