"""Data hazards in the machine code of the sm_120 kernels, by basalt-sass; needs no GPU.

    pip install basalt-sass                                # Python 3.11 or later
    python benchmarks/hazards.py --json benchmarks/results/hazards_sm120.json

On SM120 the compiler, not the hardware, makes an instruction wait for the result of another: by a stall count and by
scoreboards in its control bits. basalt-sass disassembles a cubin (nvdisasm, which Triton brings) and compares every
wait with latencies that its authors measured on an RTX 5070 Ti. An error is a wait shorter than a measured latency; a
warning is one shorter than any that ptxas was seen to schedule, which is a lead and no proof. What a kernel computes is
not checked. One variant stands for a tile, as in `tiles.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiles import kind, representatives

from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.aot.build import build
from fp4deploy.plugins.aot.compile import triton_version

ARCH = "sm_120"
INSTALL = "pip install basalt-sass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    requested = [(launch, ARCH) for launch in representatives(ARCH)]
    done = dict(build(requested))
    found = []
    for index, (launch, _) in enumerate(requested):
        compiled, constants = done[index].compiled, dict(launch.constants)
        assert compiled is not None, done[index].failure
        tile = [constants[name] for name in ("BM", "BN", "BK")]
        found.append({"kind": kind(launch), "tile": tile, **hazards(compiled.cubin)})
        print(found[-1], flush=True)
    if arguments.json:
        machine = {"triton": triton_version(), "basalt-sass": importlib.metadata.version("basalt-sass")}
        content = {"command": "python benchmarks/hazards.py", "machine": machine, "kernels": found}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def hazards(cubin: bytes) -> dict[str, Any]:
    """Instructions, checked dependencies, errors and warnings of a cubin.

    Raises:
        UnavailableError: basalt-sass is missing, or does not read the file.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [sys.executable, "-m", "basalt.cli", "verify", "--limit", "1000000", str(file)]
        environment = {**os.environ, "BASALT_CUDA_BIN": str(tools)}
        printed = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    text = printed.stdout
    counts = re.search(r"(\d+) instructions in \d+ blocks, (\d+) dependencies checked", text)
    if counts is None:
        raise UnavailableError(f"basalt-sass gave no result ({(printed.stderr or text).strip()[-300:]}): {INSTALL}")
    marks = re.findall(r"^\s*\[(\w+)\] #", text, re.MULTILINE)
    unknown = re.search(r"opcodes not in the model: (\d+)", text)
    return {
        "instructions": int(counts[1]),
        "dependencies": int(counts[2]),
        "errors": marks.count("error"),
        "warnings": marks.count("warning"),
        "unknown opcodes": int(unknown[1]) if unknown else 0,
    }


if __name__ == "__main__":
    main()
