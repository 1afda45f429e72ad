"""What each tile of the GEMM kernels compiles to on each architecture: instruction, registers, spills, shared memory.

    python benchmarks/tiles.py --json benchmarks/results/tiles_compiled.json

Compiles and inspects, runs nothing, and needs no GPU. One variant stands for a tile: float16, 3 x 3 taps (a GEMM:
1 x 1), bias, channels in whole steps of the tile. `fp4deploy kernels` compiles all variants.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

from fp4deploy.plugins.aot.build import BuildResult, build
from fp4deploy.plugins.aot.compile import triton_version
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.aot.store import TARGETS
from fp4deploy.plugins.gemm.triton.variants import all_variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(TARGETS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    requested = [(launch, arch) for arch in arguments.arch for launch in representatives(arch)]
    done = dict(build(requested))
    found = [row(done[index]) for index in range(len(requested))]
    for each in found:
        print(markdown(each))
    if arguments.json:
        machine = {"torch": torch.__version__, "triton": triton_version(), "python": platform.python_version()}
        content = {"command": "python benchmarks/tiles.py", "machine": machine, "kernels": found}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def representatives(arch: str) -> list[Launch]:
    """One launch for each tile and kind of GEMM."""
    chosen: dict[tuple[Any, ...], Launch] = {}
    for launch in all_variants(arch):
        facts = dict(launch.constants)
        plain = facts["EVEN"] and facts["BIAS"] and not facts["RELU"] and not facts["BF16"]
        if plain and facts.get("KH", 1) in (1, 3):
            chosen.setdefault((kind(launch), facts["BM"], facts["BN"], facts["BK"]), launch)
    return list(chosen.values())


def kind(launch: Launch) -> str:
    """What is multiplied, in words."""
    facts = dict(launch.constants)
    if launch.kernel.startswith("weight_only"):
        return "W4A16"
    shape = (
        "transposed" if facts["UP"] else "matrix" if facts["KH"] == 1 else "two sources" if facts["TWO"] else "3 x 3"
    )
    return f"{shape}, packed output" if facts["QUANTIZE"] else shape


def row(result: BuildResult) -> dict[str, Any]:
    """One line of the table as JSON values."""
    facts, constants = result.as_json(), dict(result.launch.constants)
    tile = [constants[name] for name in ("BM", "BN", "BK")]
    names = ("arch", "num_warps", "num_stages", "instructions", "registers", "spills", "shared", "complaints")
    return {"kind": kind(result.launch), "tile": tile} | {name: facts.get(name) for name in names}


def markdown(each: dict[str, Any]) -> str:
    """One line of the table."""
    tile = " x ".join(map(str, each["tile"]))
    instructions = ", ".join(each["instructions"] or ["does not compile"])
    numbers = [each["num_warps"], each["num_stages"], each["registers"], each["spills"], each["shared"]]
    return f"| {each['arch']} | {each['kind']} | {tile} | `{instructions}` | {' | '.join(map(str, numbers))} |"


if __name__ == "__main__":
    main()
