"""The emulated GPU: threads, registers, and who runs next.

**Vectorised.** All threads of all thread blocks of a batch run together. A register is one array over the threads, and
an instruction is executed once for all threads that are at it.

**Schedule.** Threads at the same instruction form a group; the group that is furthest behind in the program runs until
it branches, waits, or meets another group. Compilers place code so that threads that separated meet again in this way.
Threads of one warp may separate, and warps may do different work (producers and consumers): whoever waits at a barrier
or an mbarrier is put aside until it completes. Asynchronous work is done as late as possible, when nobody else can run,
so that a missing wait is seen.

**Registers** hold bits. An instruction views them as the type that its name says. Reading a register that was never
written is a hazard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Fault, Hazard, UnknownInstruction
from fp4deploy_emulator.memory import GlobalMemory
from fp4deploy_emulator.order import Order
from fp4deploy_emulator.ptx import Entry, Instruction, Variable
from fp4deploy_emulator.shared import SharedMemory

Array = NDArray[Any]
WARP = 32
SHARED_BASE = 1024  # of a block's window: addresses below are reserved for the system, and null is no address
WINDOW = 1 << 24  # an address in shared memory is rank in the cluster * WINDOW + offset
GENERIC_SHARED, GENERIC_PARAMETER = 0x7F << 56, 0x7E << 56
MAX_THREADS = 8192  # of a batch
EXTRA_AGENTS, MAX_AGENTS = 24, 96  # mbarriers on which bulk copies complete; of a kernel that initialises many
MAX_CLOCKS = 1 << 28  # of the accesses to shared memory, in a batch
EARLY = "registers of tcgen05.ld are read before tcgen05.wait::ld"
REGISTER_TYPES = {"pred": np.bool_, "16": np.uint16, "32": np.uint32, "64": np.uint64, "8": np.uint8}

Continue = list[tuple[int, Array]]
Step = Callable[["Machine", "Active"], "Continue | None"]
Builder = Callable[[Entry, Instruction], Step]
BUILDERS: dict[str, Builder] = {}
CONTROL: set[str] = set()  # these evaluate their predicate themselves


def implements(*names: str, control: bool = False) -> Callable[[Builder], Builder]:
    """Register what builds the steps of opcodes that begin with one of `names`."""

    def register(builder: Builder) -> Builder:
        for name in names:
            BUILDERS[name] = builder
            if control:
                CONTROL.add(name)
        return builder

    return register


class Active:
    """The threads that execute an instruction."""

    __slots__ = ("_index", "full", "mask")

    def __init__(self, mask: Array, full: bool | None = None) -> None:
        self.mask = mask
        self.full = bool(mask.all()) if full is None else full
        self._index: Array | None = None

    @property
    def index(self) -> Array:
        """Their numbers."""
        if self._index is None:
            self._index = np.flatnonzero(self.mask)
        return self._index


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    grid, block: blocks and threads; cluster: blocks of a cluster along x; shared: bytes of dynamic shared memory;
    parameters: the parameter buffer; model: see `accumulate`; capability: of the architecture, such as 120;
    unwritten: whether shared memory and registers may be read before they were written (all bits are set then, of
    floats a NaN): Inductor masks loads and computes with what they left;
    unallocated: whether tensor memory may be used that nobody has allocated, which is a remark then; prompt: whether
    bulk copies from shared memory read it at once, not as late as they may; resident: the most blocks that run at the
    same time, 0 for as many as the emulator can hold.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    parameters: bytes
    model: str = "hardware"
    capability: int = 120
    cluster: int = 1
    unwritten: bool = False
    unallocated: bool = False
    prompt: bool = False
    resident: int = 0


@dataclass
class Statistics:
    """instructions: steps of groups of threads; warps: steps times warps; lines: different instructions executed;
    remarks: what the PTX ISA does not allow and compilers nevertheless rely on; device_wrong, device_bytes: of all
    tensors, compared with a GPU's (`device`); entries: names of the kernels.
    """

    instructions: int = 0
    warps: int = 0
    lines: int = 0
    remarks: set[str] = field(default_factory=set)
    device_wrong: int = 0
    device_bytes: int = 0
    entries: set[str] = field(default_factory=set)


def execute(entry: Entry, launch: Launch, memory: GlobalMemory) -> Statistics:
    """Run a kernel to its end.

    Raises:
        UnknownInstruction: the kernel has an instruction that is not implemented (found before anything runs).
        Hazard: see `faults`.
    """
    steps = compiled(entry)
    total, lines = Statistics(entries={entry.name}), np.zeros(len(steps), bool)
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    cluster = max(launch.cluster, entry.cluster)
    if launch.grid[0] % cluster:
        raise Hazard("barrier", f"a grid of {launch.grid[0]} blocks does not consist of clusters of {cluster}")
    memory.begin()
    queue, size = Queue(blocks), _batch(entry, launch, cluster)
    while queue.first < blocks:
        first, count = queue.first, min(size, blocks - queue.first)
        queue.first += count
        machine = Machine(entry, steps, launch, memory, first, count, cluster, queue)
        machine.run()
        total.instructions += machine.statistics.instructions
        total.warps += machine.statistics.warps
        total.remarks |= machine.statistics.remarks
        lines |= machine.visited
    total.lines = int(lines.sum())
    return total


@dataclass
class Queue:
    """Blocks of the grid that were not launched yet: from `first` on."""

    blocks: int
    first: int = 0

    def take(self, cluster: int) -> int | None:
        """The first block of the next cluster, which is then not launched; None where nothing is left."""
        found = self.first
        self.first += cluster
        return found if found < self.blocks else None


def _batch(entry: Entry, launch: Launch, cluster: int) -> int:
    """Blocks that run at the same time: whole clusters, as many as there is memory for their clocks."""
    warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // WARP)
    cells = layout(entry.variables, launch.shared)[1] * agents(entry, cluster, warps)[2]
    fits = min(MAX_THREADS // (warps * WARP), MAX_CLOCKS // max(cells, 1), launch.resident or MAX_THREADS)
    return max(cluster, fits // cluster * cluster)


def agents(entry: Entry, cluster: int, warps: int) -> tuple[int, int, int]:
    """Of a cluster: where the units of wgmma begin, where the tensor cores do, and how many agents there are."""
    families = {instruction.parts[0] for instruction in entry.instructions}
    bulk = any(
        {"bulk", "try_cancel"} & {*each.parts} or each.parts[:3] == ("cp", "async", "mbarrier")
        for each in entry.instructions
    )
    barriers = sum(instruction.parts[:2] == ("mbarrier", "init") for instruction in entry.instructions)
    units = cluster * warps + min(max(EXTRA_AGENTS, barriers), MAX_AGENTS) * bulk
    tensor = units + cluster * warps * ("wgmma" in families)
    return units, tensor, tensor + cluster * ("tcgen05" in families)


def compiled(entry: Entry) -> list[Step]:
    """A step for each instruction; kept for the next launch.

    Raises:
        UnknownInstruction: one is not implemented; the message has the line.
    """
    if entry.steps is not None:
        return entry.steps
    steps: list[Step] = []
    for instruction in entry.instructions:
        name = _builder(instruction.parts)
        try:
            if name is None:
                raise UnknownInstruction("not implemented")
            step = BUILDERS[name](entry, instruction)
        except (UnknownInstruction, KeyError, ValueError, AttributeError, TypeError) as error:
            what = f"{error}" if isinstance(error, UnknownInstruction) else f"not implemented ({error!r})"
            raise UnknownInstruction(f"{what}: {instruction.text}  (line {instruction.line} of the PTX)") from error
        steps.append(step if instruction.guard is None or name in CONTROL else _guarded(step, instruction))
    entry.steps = steps
    return steps


@lru_cache(4096)
def _builder(parts: tuple[str, ...]) -> str | None:
    """The longest beginning of an opcode that is implemented."""
    return next((key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in BUILDERS), None)


def _guarded(step: Step, instruction: Instruction) -> Step:
    def run(m: Machine, active: Active) -> Continue | None:
        chosen = m.guard(instruction, active)
        if chosen is active:
            return step(m, active)
        if chosen.mask.any():
            step(m, chosen)
        return None

    return run


class Machine:
    """A batch of thread blocks."""

    def __init__(
        self,
        entry: Entry,
        steps: list[Step],
        launch: Launch,
        memory: GlobalMemory,
        first: int,
        blocks: int,
        cluster: int,
        queue: Queue,
    ) -> None:
        self.entry, self.steps, self.launch, self.memory = entry, steps, launch, memory
        self.blocks, self.cluster, self.queue = blocks, cluster, queue
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.warps = -(-threads // WARP)
        self.padded = self.warps * WARP
        self.count = blocks * self.padded
        self.symbols, size = layout(entry.variables, launch.shared)
        families = {instruction.parts[0] for instruction in entry.instructions}
        self.units_from, self.tensor_from, self.agents = agents(entry, cluster, self.warps)
        self.order = Order(blocks // cluster, self.agents)
        self.shared = SharedMemory(self.order, blocks, max(size, 16), launch.unwritten)
        thread = np.tile(np.arange(self.padded), blocks)
        self.block = np.repeat(np.arange(blocks), self.padded)
        domain, rank = self.block // cluster, self.block % cluster
        self.row = domain * self.agents + rank * self.warps + thread // WARP
        self.exited = thread >= threads
        self.started = ~self.exited
        self.window = rank.astype(np.int64) * WINDOW
        self.special = self._special(thread, self.block + first, rank)
        self.registers: dict[str, Array] = {}
        self.partial: dict[str, Array] = {}
        self.flying: dict[str, tuple[Array, Array]] = {}  # registers that an asynchronous instruction writes
        self.frozen: dict[str, tuple[Array, Array]] = {}  # and those that it reads
        self.loading: dict[str, Array] = {}  # registers that tcgen05.ld has loaded and nobody has waited for
        self.early: Callable[[str, Array], None] = lambda name, threads: None  # one of them is read
        self.fresh: dict[str, Array] | None = {} if "wgmma" in families else None  # written since wgmma.fence
        self.ready: dict[int, Array] = {0: self.started.copy()}
        self.parked: dict[int, Array] = {}  # at an mbarrier
        self.held: dict[int, Array] = {}  # until the other lanes of a warp come
        self.waiting: dict[tuple[int, int], Any] = {}
        self.asynchronous: list[Callable[[], None]] = []
        self.units: dict[str, Any] = {}  # state of the instruction families
        self.final: list[Callable[[], None]] = []  # checks when every thread has ended
        self.statistics = Statistics()
        self.visited = np.zeros(len(steps), bool)
        self.pc = 0

    def run(self) -> None:
        """Until every thread has ended."""
        try:
            while self._round():
                pass
            for check in self.final:
                check()
        except Fault as error:
            instruction = self.entry.instructions[min(self.pc, len(self.steps) - 1)]
            error.args = (f"{error.args[0]}\n  line {instruction.line}: {instruction.text}",)
            raise

    def _round(self) -> bool:
        if not self.ready:
            if self.asynchronous:
                self.asynchronous.pop(0)()
                return True
            if self.held:
                self.pc = min(self.held)
                raise Hazard("barrier", "lanes wait for other lanes of their warp, which never come")
            if (~self.exited).any():
                raise Hazard("deadlock", f"{int((~self.exited).sum())} threads wait, and nothing can wake them")
            return False
        self.pc = min(self.ready)
        active = Active(self.ready.pop(self.pc))
        while True:
            if self.pc >= len(self.steps):
                self.exited |= active.mask
                return True
            self.visited[self.pc] = True
            self.statistics.instructions += 1
            self.statistics.warps += (
                self.count // WARP if active.full else int(active.mask.reshape(-1, WARP).any(1).sum())
            )
            followers = self.steps[self.pc](self, active)
            if followers is None:
                self.pc += 1
            else:
                followers = [pair for pair in followers if pair[1].any()]
                if len(followers) == 1 and not self.ready and followers[0][1] is active.mask:
                    self.pc = followers[0][0]
                    continue
                for pc, mask in followers:
                    self.wake(pc, mask)
                return True
            if self.ready and min(self.ready) <= self.pc:
                self.wake(self.pc, active.mask)
                return True

    def wake(self, pc: int, mask: Array) -> None:
        """Let threads run from an instruction on."""
        self.ready[pc] = self.ready[pc] | mask if pc in self.ready else mask

    def guard(self, instruction: Instruction, active: Active) -> Active:
        """The active threads whose predicate allows the instruction."""
        if instruction.guard is None:
            return active
        value = self.get(instruction.guard, active)
        if instruction.negated:
            value = ~value
        if active.full:
            return active if value.all() else Active(value, False)
        mask = active.mask & value
        return active if np.array_equal(mask, active.mask) else Active(mask, False)

    def get(self, name: str, active: Active) -> Array:
        """The bits of a register, of all threads."""
        self._waited(name, active)
        value = self.registers.get(name)
        if value is None:
            value = self.special.get(name)
            if value is None and self.launch.unwritten:
                return self.get_filled(name, active)
            if value is None:
                raise Hazard("uninitialised", f"the register {name} is read before it was written")
            return value
        known = self.partial.get(name)
        if known is not None and not (known.all() if active.full else known[active.mask].all()):
            if self.launch.unwritten:
                return np.where(known, value, ~value.dtype.type(0))
            raise Hazard("uninitialised", f"the register {name} is read before it was written")
        return value

    def _waited(self, name: str, active: Active) -> None:
        """What an asynchronous instruction writes must have been waited for.

        Raises:
            Hazard: it was not; of tcgen05.ld that is a remark.
        """
        if name in self.flying and (self.flying[name][0] & active.mask).any():
            raise Hazard("unwaited copy", f"the register {name} is read before wgmma was waited for")
        if name in self.loading and (self.loading[name] & active.mask).any():
            self.statistics.remarks.add(EARLY)
            self.early(name, active.mask)

    def get_filled(self, name: str, active: Active) -> Array:
        """As `get`, with all bits set where nothing was written.

        For a half that is packed with another one: compilers leave halves unwritten that are dropped later. What comes
        out must not depend on them.
        """
        self._waited(name, active)
        value, known = self.registers.get(name), self.partial.get(name)
        if value is None and name not in self.special:
            return np.full(self.count, 0xFFFFFFFF)
        return (
            self.get(name, active) if value is None or known is None else np.where(known, value, ~value.dtype.type(0))
        )

    def put(self, name: str, value: Array, active: Active) -> None:
        """Write the bits of a register; `value` is never changed afterwards."""
        for busy in (self.flying, self.frozen):
            if name in busy and (busy[name][0] & active.mask).any():
                raise Hazard("unwaited copy", f"the register {name} is written before wgmma was waited for")
        if value.ndim == 0:
            value = np.full(self.count, value)
        if self.fresh is not None:
            before = None if active.full else self.fresh.get(name)
            self.fresh[name] = active.mask if before is None else before | active.mask
        if active.full:
            self.registers[name] = value
            self.partial.pop(name, None)
            return
        old = self.registers.get(name)
        if old is None:
            old = np.zeros(self.count, value.dtype)
            self.partial[name] = np.zeros(self.count, bool)
        self.registers[name] = np.where(active.mask, value, old)
        known = self.partial.get(name)
        if known is not None:
            known = known | active.mask
            self.partial[name] = known
            if known.all():
                del self.partial[name]

    def whole_warps(self, active: Active, what: str) -> Array:
        """The warps that execute an instruction all threads of which must do so together.

        Raises:
            Hazard: threads of a warp are missing.
        """
        lanes = active.mask.reshape(-1, WARP)
        some = lanes.any(1)
        if (lanes[some] != self.started.reshape(-1, WARP)[some]).any():
            raise Hazard("barrier", f"{what} is executed by a part of a warp")
        return np.flatnonzero(some)

    def writer(self, threads: Any) -> Any:
        """The number by which global memory knows the blocks of threads."""
        return self.special["%ctaid.x"][threads] + self.special["%ctaid.y"][threads] * np.uint32(1 << 16)

    def tensor_row(self, block: int) -> int:
        """The agent that is the tensor core of a block."""
        return block // self.cluster * self.agents + self.tensor_from + block % self.cluster

    def position(self, addresses: Array, size: int, block: Array) -> Array:
        """Positions [n, size] in `shared` of addresses in shared memory.

        Raises:
            Hazard: outside, or not a multiple of the size.
        """
        addresses = addresses.astype(np.int64)
        window, offset = addresses // WINDOW, addresses % WINDOW - SHARED_BASE
        if (offset < 0).any() or (offset + size > self.shared.size).any() or (window >= self.cluster).any():
            bad = np.flatnonzero((offset < 0) | (offset + size > self.shared.size) | (window >= self.cluster))[0]
            raise Hazard("out of bounds", f"{size} bytes of shared memory at {int(offset[bad])} of {self.shared.size}")
        if size in (1, 2, 4, 8, 16) and (offset % size).any():
            raise Hazard(
                "misaligned", f"{size} bytes of shared memory at {int(offset[np.flatnonzero(offset % size)[0]])}"
            )
        there = block // self.cluster * self.cluster + window
        return (there * self.shared.size + offset)[:, None] + np.arange(size)

    def _special(self, thread: Array, block: Array, rank: Array) -> dict[str, Array]:
        (x, y, z), (gx, gy, gz) = self.launch.block, self.launch.grid
        values: dict[str, Any] = {
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
            "%ntid.x": x,
            "%ntid.y": y,
            "%ntid.z": z,
            "%nctaid.x": gx,
            "%nctaid.y": gy,
            "%nctaid.z": gz,
            "%ctaid.x": block % gx,
            "%ctaid.y": block // gx % gy,
            "%ctaid.z": block // (gx * gy),
            "%laneid": thread % WARP,
            "%warpid": thread // WARP,
            "%WARP_SZ": WARP,
            "%cluster_ctarank": rank,
            "%cluster_nctarank": self.cluster,
            "%cluster_ctaid.x": rank,
            "%cluster_nctaid.x": self.cluster,
            "%cluster_nctaid.y": 1,
            "%cluster_nctaid.z": 1,
        }
        return {name: np.broadcast_to(np.asarray(value, np.uint32), thread.shape) for name, value in values.items()}


def layout(variables: Sequence[Variable], dynamic: int) -> tuple[dict[str, int], int]:
    """Addresses of the variables in shared memory, and bytes of a block: static ones first, then the dynamic part."""
    addresses: dict[str, int] = {}
    size = 0
    for each in variables:
        if each.space == "shared" and each.size:
            size = -(-size // each.align) * each.align
            addresses[each.name] = SHARED_BASE + size
            size += each.size
    for each in variables:
        if each.space == "shared" and not each.size:
            start = -(-size // max(each.align, 16)) * max(each.align, 16)
            addresses[each.name] = SHARED_BASE + start
    start = max(
        [size, *(addresses[each.name] - SHARED_BASE for each in variables if each.name in addresses and not each.size)]
    )
    return addresses, start + dynamic
