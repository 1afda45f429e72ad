"""What a case is: a kernel, tensors, and the bytes that must come out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.errors import UnavailableError
from fp4deploy.formats import Mxfp4Tensor, Nvfp4Tensor, quantize_mxfp4, quantize_nvfp4
from fp4deploy_emulator.faults import Fault
from fp4deploy_emulator.launch import Edit
from fp4deploy_emulator.machine import Statistics

SCALE = 2688.0  # 6 * 448: an amax of SCALE / 2^n is a global scale of 2^-n


@dataclass(frozen=True)
class Setting:
    """How a case is executed.

    arch: such as "sm_120". model: see `accumulate`. edit: changes the PTX before it runs. grid: instead of the host's.
    gpu: a CUDA device that executes the same launches, so that every byte can be compared with it. inexact: GEMMs of
    values whose sums depend on the accumulator; they are compared with the GPU alone.
    """

    arch: str = "sm_120"
    model: str = "hardware"
    seed: int = 0
    edit: Edit | None = None
    grid: tuple[int, int, int] | None = None
    gpu: int | None = None
    inexact: bool = False

    @property
    def capability(self) -> int:
        """120 for sm_120."""
        return Architecture.parse(self.arch).number


@dataclass
class Outcome:
    """What a case showed.

    wrong, values: elements that differ from the reference, and all. fault: a hazard or an unknown instruction.
    unavailable: why there is no PTX: a compiler is missing or too old. seconds: CPU time of this process; compilers
    are processes of their own.
    """

    wrong: int = 0
    values: int = 0
    kernels: int = 0
    statistics: Statistics = field(default_factory=Statistics)
    fault: str = ""
    unavailable: str = ""
    seconds: float = 0.0
    reference: bool = True  # whether there is one right answer

    @property
    def good(self) -> bool:
        """Bit-equal, without a hazard."""
        return not self.wrong and not self.fault and self.values > 0 and not self.statistics.device_wrong

    def compare(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Count elements whose bits differ."""
        assert got.shape == expected.shape, (got.shape, expected.shape)
        assert got.dtype == expected.dtype, (got.dtype, expected.dtype)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        self.values += got.numel()
        if self.reference:
            self.wrong += int((got.contiguous().view(bits) != expected.contiguous().view(bits)).sum())

    def compare_packed(self, got: Nvfp4Tensor, expected: Nvfp4Tensor) -> None:
        """Codes and scales."""
        self.compare(got.codes, expected.codes)
        self.compare(got.scales, expected.scales)

    def add(self, statistics: Statistics) -> None:
        """One more kernel."""
        self.kernels += 1
        self.statistics.instructions += statistics.instructions
        self.statistics.warps += statistics.warps
        self.statistics.lines += statistics.lines
        self.statistics.remarks |= statistics.remarks
        self.statistics.entries |= statistics.entries
        self.statistics.device_wrong += statistics.device_wrong
        self.statistics.device_bytes += statistics.device_bytes


Run = Callable[[Setting, Outcome], None]


@dataclass(frozen=True)
class Case:
    """A kernel of a family on tensors of one shape."""

    name: str
    family: str
    run: Run
    supports: Callable[[int], bool] = lambda capability: True

    def outcome(self, setting: Setting) -> Outcome:
        """Execute and compare; faults are part of the outcome, as is PTX that cannot be made here."""
        outcome = Outcome(reference=not setting.inexact)
        start = time.process_time()
        try:
            self.run(setting, outcome)
        except Fault as error:
            outcome.fault = str(error)
        except UnavailableError as error:
            outcome.unavailable = str(error)
        outcome.seconds = time.process_time() - start
        return outcome


def packed(
    setting: Setting, *shape: int, power: int = 8, seed: int = 0, weight: bool = False, binary: bool = False
) -> Nvfp4Tensor:
    """Normal values in NVFP4, whose global scale is 2^-power; inexact ones as `cancelling`.

    binary: the global scale of inexact ones is a power of two, too, so that quotients of them are exact.
    """
    values = normal(setting, *shape, seed=seed)
    if setting.inexact:
        values = cancelling(values, -1 if weight else 1)
        return quantize_nvfp4(
            values, amax=SCALE * torch.exp2((values.abs().amax() / SCALE).log2().ceil()) if binary else None
        )
    return quantize_nvfp4(values, amax=torch.tensor(SCALE / 2**power))


def packed_mx(setting: Setting, *shape: int, seed: int = 0, weight: bool = False) -> Mxfp4Tensor:
    """Normal values in MXFP4; inexact ones as `cancelling`."""
    values = normal(setting, *shape, seed=seed)
    return quantize_mxfp4(cancelling(values, -1 if weight else 1, 32, 13) if setting.inexact else values)


def cancelling(values: torch.Tensor, sign: int, block: int = 16, bits: int = 9) -> torch.Tensor:
    """Values whose products sum to little, after a long detour through large partial sums.

    Along the last axis blocks alternate: large ones, and small ones of 2^-bits their size. Every other large block
    repeats the one before it with `sign`, 1 in one operand and -1 in the other, so that products of large values cancel
    each other. What is left are the products of small values, as far as the accumulator kept them.
    """
    count = values.shape[-1] // block
    if count < 3:
        return values * 8
    values = values.clone() * 1024
    blocks = values[..., : block * count].unflatten(-1, (count, block))
    blocks[..., 1::2, :] /= 2**bits
    for first in range(0, count, 4):
        if first + 2 < count:
            blocks[..., first + 2, :] = sign * blocks[..., first, :]
        else:
            blocks[..., first, :] /= 2**bits
    return values


def normal(setting: Setting, *shape: int, seed: int = 0) -> torch.Tensor:
    """float32, N(0, 1)"""
    generator = torch.Generator().manual_seed(1000 * setting.seed + seed)
    return torch.randn(*shape, generator=generator)


def multiples(setting: Setting, *shape: int, step: float = 0.25, most: int = 16, seed: int = 0) -> torch.Tensor:
    """float32 multiples of `step`, up to `most` of them: sums of their products are exact. Inexact: `cancelling`."""
    if setting.inexact:
        return cancelling(normal(setting, *shape, seed=seed), 1) if len(shape) > 1 else torch.zeros(shape)
    generator = torch.Generator().manual_seed(1000 * setting.seed + seed)
    return torch.randint(-most, most + 1, shape, generator=generator) * step
