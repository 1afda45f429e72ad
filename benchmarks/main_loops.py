"""Main loops of NVFP4 convolutions on SM120, ours and Triton's, by their machine code; needs no GPU.

    python benchmarks/main_loops.py --json benchmarks/results/main_loops_sm120.json

Nothing here was measured on Blackwell. The share of dense FP4 peak is what the multiplications of a step take on the
tensor core of a sub-core, over the cycles that the warps of the sub-core take for the step.

**Peak.** An RTX 5090 has 1,676 dense FP4 TFLOP/s at 2.407 GHz with 170 multiprocessors (NVIDIA RTX Blackwell GPU
Architecture whitepaper, appendix A): 4,096 operations a cycle of a multiprocessor, 1,024 of each of its four sub-cores.
mma.m16n8k64 has 2 x 16 x 8 x 64 = 16,384, so that a sub-core takes one in 16 cycles.

**Scheduled.** The warps that are resident on one sub-core run their loops, cycle by cycle. An instruction is issued if
its warp has waited out the stall count of the one before, the scoreboards that it waits for are free, and the tensor
core is, if it multiplies; one instruction a cycle, of the warps in turn. Shared memory moves 128 bytes a cycle of a
multiprocessor, which all four sub-cores share. What has no fixed latency takes `LATENCY` cycles, a barrier of the block
`BARRIER` (both assumed; the last column has twice as much). Producer warps run up to as many steps ahead as there are
stages.

Copies from global memory have always come: neither L2 nor DRAM limits anything. It is the steady state of the innermost
loop, not of a layer: prologue and epilogue, the loops around it (over rows of a filter and chunks of channels in ours,
whose producers also copy the pixels of a tile there, once for all taps; Triton's has none) and bank conflicts are left
out. So the shares are upper bounds, and 98 % of a filter with four steps says less than of one with 72.

| in a row | |
|---|---|
| mma, issued, stall | of one warp in a step: multiplications, instructions, the sum of their stall counts |
| issued_copying | instructions of a producer warp in a step |
| resident | blocks of a multiprocessor |
| copied_bytes_a_cycle | of a multiprocessor, if tensor cores multiplied all the time |
| compared, different | values of 9 x 17 pixels in `fp4deploy_emulator`; those that differ from the reference |
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.aot.compile import compile_launch, triton_version
from fp4deploy.plugins.gemm.arguments import gemm_call
from fp4deploy.plugins.gemm.convolution import block_scaled
from fp4deploy.plugins.runtime.cubin import main_loop, resources, shortest_loop
from fp4deploy.plugins.runtime.nvcc import compile_cubin, find_nvcc, nvcc_version
from fp4deploy_emulator.cases.block_scaled import Convolution
from fp4deploy_emulator.cases.case import Case, Setting
from fp4deploy_emulator.cases.gemms import Gemm

ARCH, NUM_SMS = "sm_120", 170
SUB_CORES, MMA_CYCLES = 4, 16
LATENCY, BARRIER = 30, 20
SHARED_BYTES = 128  # a cycle of a multiprocessor
REGISTERS = 65_536
STEPS, FIRST, LAST = 40, 10, 30  # that are executed; those between which cycles are counted
OMMA, LDS, LDSM, LDGSTS, BAR, ARRIVE = 0x47F, 0x984, 0x83B, 0xFAE, 0xB1D, 0x9B0


@dataclass(frozen=True)
class Layer:
    """A convolution of `side` x `side` pixels; channels of each source."""

    name: str
    channels: tuple[int, ...]
    outputs: int
    size: int = 3
    stride: int = 1
    packed: bool = False
    side: int = 256


LAYERS = (
    Layer("3x3, 128 to 128", (128,), 128),
    Layer("3x3, 128 to 128, packed output", (128,), 128, packed=True),
    Layer("3x3, 256 to 256", (256,), 256),
    Layer("3x3, 128 + 128 to 128", (128, 128), 128),
    Layer("3x3, 128 to 64", (128,), 64),
    Layer("3x3, 128 to 256, stride 2", (128,), 256, stride=2),
    Layer("1x1, 256 to 256", (256,), 256, size=1),
)


@dataclass
class Warp:
    """A warp that executes a loop, of a block; it may be `ahead` steps in front of the block's other kind of warps."""

    body: Sequence[int]
    block: int
    produces: bool = False
    ahead: int = 0
    at: int = 0
    step: int = 0
    ready: int = 0
    waits: bool = False
    scoreboards: list[int] = field(default_factory=lambda: [0] * 6)
    ends: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Kernel:
    """Machine code, with loops of warps that multiply and, if there are any, of those that copy.

    consumers, producers: warps of a block; copied: bytes that a block copies for a step.
    """

    cubin: bytes
    name: str
    consumers: int
    producers: int
    stages: int
    shared: int
    copied: float

    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        registers, _ = resources(self.cubin)
        warps = self.consumers + self.producers
        return min(
            REGISTERS // (-(-registers // 8) * 8 * 32 * warps),
            block_scaled.SHARED // (self.shared + block_scaled.RESERVED),
        )

    def loop(self, produces: bool) -> list[int]:
        """Of a producer warp or a consumer warp."""
        found = shortest_loop(self.cubin, self.name, {ARRIVE if produces else OMMA})
        assert found is not None, self.name
        return found

    def warps(self) -> list[Warp]:
        """Those of a sub-core."""
        found = []
        for block in range(self.resident()):
            found += [Warp(self.loop(False), block) for _ in range(max(1, self.consumers // SUB_CORES))]
            if self.producers:
                copies = self.loop(True)
                found += [Warp(copies, block, True, self.stages) for _ in range(max(1, self.producers // SUB_CORES))]
        return found

    def row(self) -> dict[str, Any]:
        """What the table has."""
        registers, stack = resources(self.cubin)
        loop, resident = main_loop(self.cubin, self.name), self.resident()
        assert loop is not None, self.name
        tensor = MMA_CYCLES * loop.matrix * resident * self.consumers / SUB_CORES

        shares = [
            tensor / cycles(self.warps(), latency, barrier)
            for latency, barrier in ((LATENCY, BARRIER), (2 * LATENCY, 2 * BARRIER))
        ]
        return {
            "registers": registers,
            "stack": stack,
            "shared": self.shared,
            "resident": resident,
            "stages": self.stages,
            "mma": loop.matrix,
            "issued": loop.issued,
            "stall": loop.stall,
            "issued_copying": len(self.loop(True)) if self.producers else 0,
            "copied_bytes_a_cycle": resident * self.copied / tensor,
            "scheduled": shares[0],
            "at_twice_the_latency": shares[1],
        }


def moved(word: int) -> int:
    """Bytes of shared memory that an instruction of a warp reads or writes."""
    operation = word & 0xFFF
    if operation == LDSM:
        return 128 * (1, 2, 4)[word >> 72 & 3]
    if operation == LDS:
        return 32 * {5: 8, 6: 16}.get(word >> 73 & 7, 4)
    return 32 * (16 if word >> 75 & 1 else 4) if operation == LDGSTS else 0


def cycles(warps: list[Warp], latency: int, barrier: int) -> float:
    """Cycles of a step, in the steady state."""
    now, tensor, memory, last = 0, 0, 0.0, 0
    consumers = [each for each in warps if not each.produces]
    while any(each.step < STEPS for each in consumers):
        for turn in range(1, len(warps) + 1):
            each = warps[(last + turn) % len(warps)]
            if not can_issue(each, warps, now, tensor):
                continue
            last = (last + turn) % len(warps)
            word = each.body[each.at]
            done = now + latency
            if moved(word):
                memory = max(memory, now) + SUB_CORES * moved(word) / SHARED_BYTES
                done = int(memory) + latency
            if word & 0xFFF == OMMA:
                tensor = now + MMA_CYCLES
            for number in (word >> 110 & 7, word >> 113 & 7):
                if number < 6:
                    each.scoreboards[number] = done
            each.ready = now + max(1, word >> 105 & 15)
            if word & 0xFFF == BAR:
                each.waits = True
                others = [other for other in consumers if other.block == each.block]
                if all(other.waits for other in others):
                    for other in others:
                        other.waits, other.ready = False, max(other.ready, now + barrier)
            each.at += 1
            if each.at == len(each.body):
                each.at, each.step = 0, each.step + 1
                each.ends.append(now)
            break
        now += 1
    return max(each.ends[LAST] - each.ends[FIRST] for each in consumers) / (LAST - FIRST)


def can_issue(each: Warp, warps: list[Warp], now: int, tensor: int) -> bool:
    """Whether a warp issues its next instruction in this cycle."""
    word = each.body[each.at]
    if each.waits or each.ready > now or each.step >= STEPS or (word & 0xFFF == OMMA and tensor > now):
        return False
    waits = word >> 116 & 63
    if any(waits >> number & 1 and each.scoreboards[number] > now for number in range(6)):
        return False
    others = [other.step for other in warps if other.block == each.block and other.produces != each.produces]
    return not others or (min(others) + each.ahead > each.step)


def executed(layer: Layer, kernel: str) -> dict[str, int]:
    """The kernel of a layer on a few pixels, in the emulator, against the reference."""
    around, amax = layer.size // 2, 24.0 if layer.packed else None
    place: dict[str, Any] = {"image": (1, 9, 17), "stride": layer.stride, "amax": amax}
    run: Convolution | Gemm
    if kernel == "triton":
        run = Gemm(layer.channels, layer.outputs, layer.size, padding=around, **place)
    else:
        tile = block_scaled.WIDE if layer.outputs > 64 else block_scaled.TALL
        taps = (layer.size, layer.size)
        run = Convolution(layer.channels, layer.outputs, taps, padding=(around, around), tile=tile, **place)
        assert run.variant() == variant(layer), layer.name
    outcome = Case(layer.name, "main loops", run).outcome(Setting(arch=ARCH))
    assert not outcome.fault, outcome.fault
    assert not outcome.unavailable, outcome.unavailable
    return {"compared": outcome.values, "different": outcome.wrong}


def variant(layer: Layer) -> block_scaled.Variant:
    """Of `block_scaled`."""
    side = layer.side // layer.stride
    pixels = (1, side, side) if layer.size > 1 else (1, 1, side * side)
    taps = (layer.size, layer.size)
    return block_scaled.variant(layer.channels, layer.outputs, taps, layer.stride, 1, pixels, NUM_SMS)


def ours(layer: Layer) -> Kernel:
    """By `block_scaled`."""
    chosen = variant(layer)
    cubin = compile_cubin(block_scaled.SOURCE, f"{ARCH}a", chosen.macros(torch.float16, layer.packed, layer.outputs))
    tile = chosen.tile
    copied = chosen.stage_bytes + (chosen.buffer_bytes / layer.size**2 if chosen.halo else 0)
    consumers = tile.threads // 32 - tile.producers
    return Kernel(cubin, "block_scaled_conv", consumers, tile.producers, chosen.stages, chosen.shared_bytes, copied)


def tritons(layer: Layer) -> Kernel:
    """By `triton.gemm`."""

    def empty(*shape: int) -> Nvfp4Tensor:
        codes, scales = (torch.empty((*shape[:-1], shape[-1] // each), dtype=torch.uint8) for each in (2, 16))
        return Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.ones(()), torch.Size(shape))

    sources = tuple(empty(1, 1, 1, channels) for channels in layer.channels)
    weight = empty(layer.outputs, layer.size, layer.size, sum(layer.channels))
    side, around = layer.side // layer.stride, layer.size // 2
    out = torch.empty(0, dtype=torch.uint8 if layer.packed else torch.float16)
    scales, amax = (out, sources[0].amax) if layer.packed else (None, None)
    extent, pixels, taps = (1, layer.side, layer.side), (1, side, side), (layer.size, layer.size)
    call = gemm_call(
        sources, weight, torch.zeros(layer.outputs), extent, pixels, out, scales, amax, torch.float16, 120, taps,
        layer.stride, around, 1, True,
    )  # fmt: skip
    made, constants = compile_launch(call.launch, ARCH), dict(call.launch.constants)
    copied = (constants["BM"] + constants["BN"]) * constants["BK"] * 1.125
    return Kernel(made.cubin, made.name, made.num_warps, 0, call.launch.num_stages, made.shared, copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for layer in LAYERS:
        for name, make in (("block_scaled", ours), ("triton", tritons)):
            rows.append({"layer": layer.name, "kernel": name, **make(layer).row(), **executed(layer, name)})
            print(rows[-1], flush=True)
    if arguments.json:
        nvcc = find_nvcc()
        assert nvcc is not None
        machine = {"triton": triton_version(), "nvcc": nvcc_version(nvcc), "torch": torch.__version__}
        content = {"command": "python benchmarks/main_loops.py", "machine": machine, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
