"""clusterlaunchcontrol: a running cluster takes over the work of one that was not launched yet (SM100 and later).

Source: PTX ISA, "Cluster Launch Control": clusterlaunchcontrol.try_cancel, clusterlaunchcontrol.query_cancel.

A request cancels the launch of some cluster of the grid; here it is the next one, and the emulator then launches it
no more. The answer, 16 opaque bytes, arrives in shared memory as a bulk copy does: of the block that asks, or with
`.multicast::cluster::all` of each block of its cluster, with a signal to the mbarrier there. It says whether a launch
was cancelled, and if so the indices of the first block of that cluster. After an answer that nothing is left, the
cluster must not ask again.

Here the bytes are x, y, z (32 bits each) and whether a launch was cancelled. Indices in an answer that nothing was
cancelled are undefined; they are all ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.bulk import begin, targets
from fp4deploy_emulator.machine import Active, Machine, Step, implements
from fp4deploy_emulator.operands import address, reader, writer, writers
from fp4deploy_emulator.ptx import Entry, Instruction

Array = NDArray[Any]
AXES = {"get_first_ctaid::x": 0, "get_first_ctaid::y": 1, "get_first_ctaid::z": 2}
CANCELLED, WORDS = 3, 4


def refused(m: Machine) -> set[int]:
    """Clusters that have seen the answer that nothing is left."""
    found: set[int] = m.units.setdefault("clusterlaunchcontrol", set())
    return found


@implements("clusterlaunchcontrol.try_cancel")
def try_cancel(entry: Entry, instruction: Instruction) -> Step:
    """Ask for the work of a cluster that was not launched yet."""
    if not {"async", "mbarrier::complete_tx::bytes", "b128"} <= {*instruction.parts}:
        raise UnknownInstruction("this form of clusterlaunchcontrol.try_cancel is not implemented")
    everywhere = "multicast::cluster::all" in instruction.parts
    to, signal = (address(entry, each) for each in instruction.operands[:2])

    def run(m: Machine, active: Active) -> None:
        starts, signals = to(m, active), signal(m, active)
        for thread in active.index.tolist():
            if int(m.block[thread]) // m.cluster in refused(m):
                raise Hazard("barrier", "a cluster asks for work after the answer that there is none")
            start, (x, y, _) = int(starts[thread]), m.launch.grid
            if start % 16:
                raise Hazard("misaligned", "an answer of clusterlaunchcontrol at an address that is no multiple of 16")
            block = m.queue.take(m.cluster)
            answer = np.full(WORDS, 0xFFFFFFFF, np.uint32)
            answer[CANCELLED] = block is not None
            if block is not None:
                answer[:CANCELLED] = block % x, block // x % y, block // (x * y)
            mask = (1 << m.cluster) - 1 if everywhere else None
            blocks = targets(m, thread, start, int(signals[thread]), mask)
            begin(m, thread, start + np.arange(16), answer.view(np.uint8), blocks)

    return run


@implements("clusterlaunchcontrol.query_cancel")
def query(entry: Entry, instruction: Instruction) -> Step:
    """Whether a launch was cancelled; the indices of the first block of that cluster."""
    what, source = instruction.parts[2], reader(entry, instruction.operands[1], "b128")
    target = instruction.operands[0]
    results = writers(entry, target) if what == "get_first_ctaid" else [writer(entry, target)]
    if what not in (*AXES, "get_first_ctaid", "is_canceled"):
        raise UnknownInstruction("this query of clusterlaunchcontrol is not implemented")

    def run(m: Machine, active: Active) -> None:
        words = np.ascontiguousarray(source(m, active)).view(np.uint32).reshape(-1, WORDS)
        cancelled = words[:, CANCELLED] == 1
        if what == "is_canceled":
            refused(m).update(np.unique(m.block[active.mask & ~cancelled] // m.cluster).tolist())
            results[0](m, active, cancelled)
            return
        for axis, result in enumerate(results, AXES.get(what, 0)):
            result(m, active, np.ascontiguousarray(words[:, min(axis, CANCELLED)]))

    return run
