"""Tables of kernels, GEMMs and convolutions."""

from __future__ import annotations

import statistics
from typing import Any

from docs.tables.results import markdown, microseconds, result
from docs.tables.steps import span

KERNEL_ROWS = {
    "fake quantise": ("fake quantise, amax given",),
    "fake quantise with in-range mask": ("fake quantise + mask",),
    "the same, and the amax for the next step (delayed)": ("fake quantise + mask + amax of the same pass",),
    "Hadamard transform + fake quantise": ("Hadamard + fake quantise",),
    "fake quantise, amax computed in the call (two passes; 67 % is the limit)": ("fake quantise, amax found",),
    "packed codes and scales": ("packed, amax given",),
    "packed, scales in the 128x4 layout": ("packed swizzled",),
    "packed 4/6, MAE, fast / strict": ("4/6 mae fast packed", "4/6 mae strict packed"),
    "packed 4/6, MSE, fast / strict": ("4/6 mse fast packed", "4/6 mse strict packed"),
    "packed MXFP4": ("MXFP4 packed",),
    "packed, stochastic rounding": ("stochastic packed",),
    "packed, 16 x 16 blocks": ("2-D packed",),
    "packed, 16 x 16 blocks, stochastic rounding": ("2-D packed, stochastic",),
    "packed, 16 x 16 blocks, 4/6": ("2-D packed, 4/6",),
    "packed, a global scale a row, found in the call": ("row-scaled packed",),
    "packed, MS-EDEN (Hadamard, amax found, stochastic scales)": ("MS-EDEN packed, amax found",),
}


def _kernels() -> dict[str, dict[str, float]]:
    return {row["case"]: row for row in result("kernels_h200")["torch.bfloat16"]}


def kernels() -> str:
    """Quantisation kernels on a bfloat16 matrix, against a copy that moves as many bytes."""
    found = _kernels()
    rows = []
    for label, cases in KERNEL_ROWS.items():
        times = " / ".join(microseconds(found[case]) for case in cases)
        shares = " / ".join(f"{100 * found[case]['share_of_copy']:.1f} %" for case in cases)
        rows.append([label, times, shares])
    return markdown(["", "µs", "share of copy bandwidth"], rows)


def activation_shares(layout: str) -> str:
    """Share of copy bandwidth of fake quantisation along the channels over shapes in a layout: from and to, percent."""
    rows = [row for row in result("kernels_h200")["activations"] if row["case"].startswith(f"{layout} ")]
    return span((100 * row["share_of_copy"] for row in rows), ".0f")


MODES = [(metric, mode) for metric in ("mae", "mse") for mode in ("fast", "strict")]


def four_over_six_cost() -> dict[str, str]:
    """Time of packing with 4/6 over that of packing without, by "metric mode"."""
    found = _kernels()
    plain = found["packed, amax given"]["ms"]
    return {f"{metric} {mode}": f"{found[f'4/6 {metric} {mode} packed']['ms'] / plain:.2f}" for metric, mode in MODES}


def four_over_six_ties() -> str:
    """The same for amax values at which products fall on rounding ties."""
    found = _kernels()
    plain = found["packed, amax given"]["ms"]
    rows = []
    for amax in ("5.8125", "5.0625", "5.25"):
        times = [found[f"4/6 {metric} {mode} packed, amax {amax}"]["ms"] for metric, mode in MODES]
        rows.append([amax, *(f"{time / plain:.2f}" for time in times)])
    return markdown(["amax", *(f"{metric.upper()}, {mode}" for metric, mode in MODES)], rows)


def _convolutions(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        channels = f"{' + '.join(map(str, row['channels']))} -> {row['outputs']}"
        times = [f"{row[name] * 1e3:.0f}" for name in ("fp16_ms", "packed_ms")]
        cells.append([row["layer"], channels, f"{row['height']} x {row['width']}", *times, f"{row['ratio']:.2f}"])
    return markdown(["layer", "channels", "feature map", "cuDNN FP16, µs", "packed, µs", "speed ratio"], cells, 3)


def convolutions() -> str:
    """Every quantised convolution of the UNet at scale 1.0, batch 16."""
    return _convolutions(result("products_h200")["convolutions"])


def main_loops() -> str:
    """Shares of dense FP4 peak that the machine code of SM120's convolutions allows."""
    names = {"block_scaled": "ours", "triton": "Triton's"}
    rows = []
    for row in result("main_loops_sm120")["rows"]:
        counts = (row[name] for name in ("registers", "stack", "shared", "resident", "mma", "issued", "stall"))
        shares = (f"{100 * row[name]:.0f} %" for name in ("scheduled", "at_twice_the_latency"))
        equal = f"{row['different']} differ" if row["different"] else "yes"
        rows.append(
            [
                row["layer"],
                names[row["kernel"]],
                *map(str, counts),
                f"{row['copied_bytes_a_cycle']:.1f}",
                *shares,
                equal,
            ]
        )
    head = ["layer", "kernel", "registers", "spilled bytes", "shared memory, bytes", "blocks", "mma a step"]
    head += ["instructions", "stall cycles", "copied bytes a cycle", "scheduled", "at twice the latency", "bit-equal"]
    return markdown(head, rows, 2)


def few_channels() -> str:
    """Layers with few channels: the first and the last layer, and those of scale 0.25."""
    return _convolutions(result("products_h200")["few_channels"])


def gemms() -> str:
    """GEMM and GEMV of packed operands against cuBLAS."""
    labels = {"M=1": "W4A16, 1 x 8192 x 8192", "M=8": "W4A16, 8 x 8192 x 8192", "M=16": "W4A16, 16 x 8192 x 8192"}
    rows = []
    for row in result("products_h200")["matrices"]:
        label = labels.get(row["case"].split()[-1], "W4A4, 4096 x 4096 x 4096")
        small = (
            [f"{100 * row['share_of_copy']:.0f} %", microseconds(row, "ordered_ms")] if "copy_ms" in row else ["", ""]
        )
        rows.append(
            [label, microseconds(row, "fp16_ms"), microseconds(row, "packed_ms"), f"{row['ratio']:.2f}", *small]
        )
    head = [
        "GEMM, M x N x K",
        "cuBLAS FP16, µs",
        "packed, µs",
        "speed ratio",
        "share of copy bandwidth",
        "in stream order, µs",
    ]
    return markdown(head, rows)


def direct_convolutions() -> str:
    """Convolutions of few channels: implicit GEMM and direct."""
    rows = []
    for row in result("direct_conv_h200")["rows"]:
        times = [f"{row[key]:.0f}" for key in ("implicit_us", "direct_us", "floor_us")]
        rows.append([row["case"], *times, f"{row['implicit_us'] / row['direct_us']:.2f}"])
    return markdown(["images, channels", "implicit GEMM, us", "direct, us", "floor, us", "faster by"], rows, 1)


def warpgroup_convolutions() -> str:
    """Convolutions of whole chunks of 64 channels: implicit GEMM, wgmma, cuDNN in FP16."""
    rows = []
    for row in result("warpgroup_conv_h200")["rows"]:
        times = [f"{row[f'{form}_us']:.0f}" for form in ("triton", "wgmma", "cudnn", "bytes_floor", "operations_floor")]
        rows.append([row["case"], *times, f"{row['cudnn_us'] / row['wgmma_us']:.2f}"])
    head = ["images, channels", "implicit GEMM, us", "wgmma, us", "cuDNN FP16, us", "bytes, us", "operations, us"]
    return markdown([*head, "speed against cuDNN"], rows, 1)


def wgmma_share(kind: str, median: bool = False) -> str:
    """Speed of the convolutions by wgmma that have `kind` in their name, over cuDNN's: from and to, or the median."""
    rows = (row for row in result("warpgroup_conv_h200")["rows"] if kind in row["case"])
    found = sorted(row["cudnn_us"] / row["wgmma_us"] for row in rows)
    return f"{statistics.median(found):.2f}" if median else f"{found[0]:.2f} to {found[-1]:.2f}"


def small_k_convolutions() -> str:
    """FP16 convolutions of small K: torch and the kernel."""
    rows = []
    for row in result("small_k_conv_h200")["rows"]:
        times = [f"{row[key]:.0f}" for key in ("torch_us", "kernel_us", "floor_us")]
        rows.append([row["case"], *times, f"{row['torch_us'] / row['kernel_us']:.2f}"])
    return markdown(["images, channels", "torch, us", "kernel, us", "floor, us", "faster by"], rows, 1)


def depthwise_convolutions() -> str:
    """Depthwise convolutions: torch and the kernel."""
    rows = []
    for row in result("depthwise_conv_h200")["rows"]:
        times = [f"{row[key]:.0f}" for key in ("torch_us", "kernel_us", "floor_us")]
        rows.append([row["case"], *times, f"{row['torch_us'] / row['kernel_us']:.2f}"])
    return markdown(["images, channels", "torch, us", "kernel, us", "floor, us", "faster by"], rows, 1)


def training_convolutions() -> str:
    """Products of a training step with a choice of kernels: torch's and this package's, the slowest of these first."""
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in result("training_convolutions_h200")["rows"]:
        operands = ", ".join(" x ".join(map(str, shape)) for shape in row["shapes"])
        found.setdefault((row["product"], operands), {})[row["autocast"]] = row
    rows = []
    for (product, operands), both in found.items():
        times = [f"{both[each][which]:.0f}" for each in ("fp16", "bf16") for which in ("torch_us", "own_us")]
        share = max(row["own_us"] / row["torch_us"] for row in both.values())
        rows.append((share, [product, operands, *times]))
    head = ["product", "operands", "FP16: torch, us", "kernel, us", "BF16: torch, us", "kernel, us"]
    return markdown(head, (cells for _, cells in sorted(rows, key=lambda row: -row[0])), 2)


def experts() -> str:
    """Grouped GEMMs of experts beside torch's in BF16, the slowest first."""
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in result("grouped_linear_h200")["rows"]:
        found.setdefault((row["tokens"], row["experts"]), {})[row["what"]] = row
    cells = []
    for (tokens, experts), rows in found.items():
        ours, peers = rows["plain"], [rows["BF16"], rows["BF16 loop"]]
        forward, backward = (min(peer[f"{which}_ms"] for peer in peers) for which in ("forward", "backward"))
        times = [f"{ours[f'{which}_ms']:.2f}" for which in ("forward", "backward", "cached", "gemm")]
        ratios = [ours["forward_ms"] / forward, ours["backward_ms"] / backward, ours["cached_ms"] / forward]
        row = [f"{tokens:,}, {experts}", f"{forward:.2f}, {backward:.2f}", *times, *(f"{each:.2f}" for each in ratios)]
        cells.append((ratios[0], row))
    head = [
        "tokens, experts",
        "BF16: forward, backward, ms",
        "NVFP4: forward",
        "backward",
        "weights packed before",
        "GEMM alone",
    ]
    head += ["forward / BF16", "backward / BF16", "packed before / BF16"]
    return markdown(head, [row for _, row in sorted(cells, reverse=True)])


def plain_convolutions() -> str:
    """FP16 convolutions by this package and by cuDNN: elements that differ from the reference, microseconds."""
    rows = []
    for row in result("plain_conv_h200")["rows"]:
        times = [f"{1000 * row[name]:.0f}" for name in ("kernel_ms", "cudnn_ms")]
        label = f"{row['layer']} layer, scale {row['scale']}"
        rows.append([label, str(row["batch"]), f"{row['different']} of {row['values']:,}", *times])
    return markdown(["UNet, 352 x 480", "batch", "differ from the reference", "kernel, us", "cuDNN, us"], rows)


def triton_share(case: int) -> str:
    """Per cent of copy bandwidth of the Triton peer (1) and of the kernel here (0)."""
    return f"{100 * result('kernels_triton_h200')['torch.bfloat16'][case]['share_of_copy']:.0f}"
