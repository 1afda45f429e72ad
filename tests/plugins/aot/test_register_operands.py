"""SM90: registers that a running wgmma reads are not written before it was waited for, in the machine code.

PTX has no such order to give: it has a register for every value. ptxas before CUDA 13.3 (12.8, 12.9 and 13.0 were
tried) gives the registers of A to other values while the multiplication may still read them, where a loop goes on to
its next step meanwhile. Results are then wrong now and then. So no loop here goes on: `triton.decode.finished`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.tiles import representatives
from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.aot.compile import compile_launch, triton_version
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.triton.tiles import Tile

LABEL = re.compile(r"\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
MULTIPLICATION = re.compile(r"HGMMA\.\d+x(\d+)x\d+\S*\s+R(\d+),\s+R(\d+)")
JUMP = re.compile(r"^(@!?U?P\w+ )?BRA\b.*`\((\.L_x_\d+)\)")
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
FRAGMENT = 4  # registers of A
PARTS = 8  # of the list of GEMMs, each a test
NO_RESULT = {"ST", "STG", "STS", "STL", "STSM", "RED", "LDGSTS", "BAR", "BRA", "EXIT", "ISETP", "FSETP", "WARPGROUP"}
TILES = [(256, 128, 64, 8, 3), (256, 128, 32, 8, 3), (128, 64, 32, 4, 4), (128, 32, 32, 4, 3), (128, 16, 32, 4, 3)]


def overwritten(text: str) -> tuple[int, list[str]]:
    """Multiplications with A in registers, and instructions that write these registers too early."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := INSTRUCTION.match(line):
            code.append(instruction[1])
    found, count = [], 0
    for at, text_of in enumerate(code):
        if not (operands := MULTIPLICATION.search(text_of)):
            continue
        count += 1
        busy = {*range(int(operands[3]), int(operands[3]) + FRAGMENT)}
        seen, left = set(), [at + 1]
        while left:
            here = left.pop()
            if here in seen or here >= len(code) or WAIT in code[here]:
                continue
            seen.add(here)
            if results(code[here]) & busy:
                found.append(f"{text_of}: {code[here]}")
                break
            jump = JUMP.match(code[here])
            if jump:
                left.append(labels[jump[2]])
            if not (jump and not jump[1]) and not code[here].startswith("EXIT"):
                left.append(here + 1)
    return count, found


def results(instruction: str) -> set[int]:
    """The registers that an instruction writes."""
    name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
    parts = name.split(".")
    first = re.match(r"\s*(?:U?P\w+,\s*)*R(\d+)\b", operands)
    if first is None or parts[0] in NO_RESULT:
        return set()
    size = 1
    if multiplication := MULTIPLICATION.search(instruction):
        size = int(multiplication[1]) // 2
    elif parts[0].startswith("LD") or parts[0] == "CS2R" or "WIDE" in parts:
        size = 4 if {"128", "4"} & {*parts} else 2 if {"64", "2", "CS2R", "WIDE"} & {*parts} else 1
    return {*range(int(first[1]), int(first[1]) + size)}


LOOP = """
.L_x_1:
        /*0010*/                   LDS.64 R4, [R2] ;
        /*0020*/                   HGMMA.64x64x16.F32 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0030*/                   {} ;
        /*0040*/              @P0 BRA `(.L_x_1) ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   EXIT ;
"""


def test_a_register_that_is_written_too_early_is_found() -> None:
    assert overwritten(LOOP.format("NOP"))[1] == ["HGMMA.64x64x16.F32 R24, R4, gdesc[UR4], R24, gsb0: LDS.64 R4, [R2]"]
    assert overwritten(LOOP.format("@P1 IMAD.WIDE R6, R1, R1, RZ"))[1][0].endswith("IMAD.WIDE R6, R1, R1, RZ")
    assert overwritten(LOOP.format(WAIT)) == (1, [])


def decoded_launch(tile: Tile, channels: tuple[int, ...]) -> Launch:
    calls: list[Call] = []
    sources: tuple[Nvfp4Tensor, ...] = tuple(quantize_nvfp4(torch.zeros(1, 16, 32, count)) for count in channels)
    weight = quantize_nvfp4(torch.zeros(max(tile.bn, 16), 3, 3, sum(channels)))
    planes = decode_weight(weight, channels)
    decoded.conv2d(sources, planes, padding=1, chosen=decoded.Plan(tile), launch=calls.append)
    return calls[0].launch


def require_order(launch: Launch, folder: Path) -> None:
    if triton_version() is None:
        pytest.skip("Triton is missing: pip install triton")
    import triton.backends.nvidia as backend

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_launch(launch, "sm_90").cubin)
    tool = Path(backend.__file__).parent / "bin" / "nvdisasm"
    done = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True)
    count, early = overwritten(done.stdout)
    assert count or dict(launch.constants)["BM"] < 64
    assert not early, f"{launch}: {early[0]}, and {len(early) - 1} more"


@pytest.mark.parametrize(
    ("tile", "channels"),
    [
        pytest.param(
            tile, channels, marks=() if (tile[0], len(channels)) == (128, 2) and tile[1] == 64 else pytest.mark.variants
        )
        for tile in TILES
        for channels in ((128,), (128, 128))
    ],
    ids=str,
)
def test_decoded_weights(tile: tuple[int, int, int, int, int], channels: tuple[int, ...], tmp_path: Path) -> None:
    require_order(decoded_launch(Tile(*tile), channels), tmp_path)


@pytest.mark.variants
@pytest.mark.parametrize("part", range(PARTS))
def test_other_gemms(part: int, tmp_path: Path) -> None:
    for launch in representatives("sm_90")[part::PARTS]:
        require_order(launch, tmp_path)
