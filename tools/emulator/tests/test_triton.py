"""The Triton kernels' PTX for SM120, executed: bit-equal to the reference, and planted faults are found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from unittest import mock

import pytest

from benchmarks.tiles import representatives as tiles
from fp4deploy.plugins.aot.compile import compile_launch, too_old
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.aot.store import TARGETS
from fp4deploy.plugins.gemm.triton.variants import all_variants
from fp4deploy.plugins.tensorrt.definitions import PLUGINS, Attributes
from fp4deploy.plugins.tensorrt.kernels import compile_plugin, plugin_launch, tactics
from fp4deploy_emulator.cases import CUDA, TRITON, cases, decoded, gemms, training
from fp4deploy_emulator.cases.case import Case, Outcome, Setting
from fp4deploy_emulator.machine import Statistics, compiled
from fp4deploy_emulator.ptx import parse
from tests.plugins.aot.test_compile_aot import representatives
from tools.emulator.tests import planted
from tools.emulator.tests.test_cuda import FAULTS as CUDA_FAULTS
from tools.emulator.tests.test_decoded import FAULTS as DECODED_FAULTS

pytest.importorskip("triton")

SAME = {"sm_103": "sm_100", "sm_107": "sm_100", "sm_110": "sm_100", "sm_121": "sm_120"}
FIRST = (
    *("linear", "conv 3x3", "conv 3x3, packed output", "conv 3x3x3, 20 channels, stride 2", "W4A16, K = 36"),
    *("dgrad 3x3, stride 2", "wgrad, two splits"),
)
FAMILIES = tuple(dict.fromkeys(case.family for case in TRITON if case not in decoded.CASES))


def _marked(case: Case) -> object:
    return pytest.param(case, marks=() if case.name in FIRST else pytest.mark.emulate, id=case.name)


@pytest.mark.parametrize("case", [_marked(case) for case in TRITON if case.supports(120)])
def test_sm120_is_bit_equal_to_the_reference(case: Case) -> None:
    outcome = case.outcome(Setting())
    assert outcome.good, outcome


@pytest.mark.emulate
@pytest.mark.parametrize("case", [case for case in TRITON if case.supports(90)], ids=lambda case: case.name)
def test_sm90_is_bit_equal_to_the_reference(case: Case) -> None:
    outcome = case.outcome(Setting(arch="sm_90"))
    assert outcome.good, outcome


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name == "linear" else pytest.mark.emulate, id=case.name)
        for case in TRITON
        if case.supports(100)
    ],
)
def test_sm100_is_bit_equal_to_the_reference(case: Case) -> None:
    outcome = case.outcome(Setting(arch="sm_100"))
    assert outcome.good, outcome


TENSOR_MEMORY_FAULTS = {
    "the multiplication is not waited for": planted.replaced(r"mbarrier\.try_wait[^;]*;", "mov.pred complete, -1;", 0),
    "the commit is missing": planted.replaced(r"^\s*@%p\d+ tcgen05\.commit[^;]*;", "", 0),
    "the scales of A are those of B": planted.replaced(
        r"(tcgen05\.mma[^;]*\[ )(%r\d+)( \+ 0 \], \[ )(%r\d+)( \+ 0 \], %p)", r"\1\4\3\2\5", 0
    ),
    "the instruction descriptor names another N": planted.replaced(
        r"(tcgen05\.mma\S+ \[[^;]*%rd\d+, %rd\d+, )%r\d+", r"\g<1>136316032", 0
    ),
    "the old sum is dropped": planted.replaced(r"(tcgen05\.mma[^;]*\], )%p\d+;", r"\g<1>0;", -1),
    "a barrier is missing": planted.without_barrier(0),
    "copies are waited for too late": planted.late_wait(0),
    "tensor memory beyond what was allocated": planted.replaced(
        r"(tcgen05\.ld\S+ \{[^}]*\}, \[%r\d+) \+ 0\]", r"\1 + 512]", 0
    ),
}


@pytest.mark.emulate
@pytest.mark.parametrize("fault", TENSOR_MEMORY_FAULTS)
def test_a_fault_planted_into_tcgen05_is_found(fault: str) -> None:
    (case,) = cases(["conv 3x3"])
    outcome = case.outcome(Setting(arch="sm_100", edit=TENSOR_MEMORY_FAULTS[fault]))
    assert not outcome.good


TENSOR_OPERAND_FAULTS = {
    "the proxy fences are missing": (planted.replaced(r"fence\.proxy\.async[^;]*;", "", None), "race"),
    "stores to tensor memory are not waited for": (
        planted.replaced(r"tcgen05\.wait::st\.sync\.aligned;", "", None),
        "unwaited copy",
    ),
    "the multiplication is not waited for": (
        planted.replaced(r"mbarrier\.try_wait[^;]*;", "mov.pred complete, -1;", None),
        "",
    ),
    "barriers are missing": (planted.replaced(r"^\s*bar\.sync\s+0;", "", None), ""),
    "A is read from other columns": (
        planted.replaced(r"(tcgen05\.mma\S+ \[[^]]*\], \[ %r\d+ \+) 8 \]", r"\1 16 ]", 0),
        "",
    ),
    "the commit is missing": (planted.replaced(r"^\s*@%p\d+ tcgen05\.commit[^;]*;", "", 0), "deadlock"),
}


@pytest.mark.emulate
@pytest.mark.parametrize("fault", TENSOR_OPERAND_FAULTS)
def test_a_fault_planted_where_an_operand_is_in_tensor_memory_is_found(fault: str) -> None:
    (case,) = cases(["W4A16, 100 rows"])
    edit, kind = TENSOR_OPERAND_FAULTS[fault]
    outcome = case.outcome(Setting(arch="sm_100", edit=edit))
    assert not outcome.good
    assert outcome.fault.startswith(kind)


WARPGROUP_FAULTS = {
    "the proxy fences are missing": (planted.replaced(r"fence\.proxy\.async[^;]*;", "", None), "race"),
    "wgmma is not waited for": (planted.replaced(r"wgmma\.wait_group\.sync\.aligned 0;", "", None), "race"),
    "barriers are missing in the loop": (planted.without_first_barriers(), "race"),
    "copies are waited for too late": (planted.late_wait(0), "unwaited copy"),
    "the descriptor of B is shifted": (
        planted.replaced(
            r"(wgmma\.mma_async[^;]*\}, )(%rd\d+)(, %p[^;]*;)", r"{ .reg .b64 x; add.s64 x, \2, 1; \1x\3 }", 0
        ),
        "",
    ),
    "the old sum is dropped": (planted.replaced(r"(wgmma\.mma_async[^;]*%rd\d+, )%p\d+", r"\g<1>0", 1), ""),
}


@pytest.mark.emulate
@pytest.mark.parametrize("fault", WARPGROUP_FAULTS)
def test_a_fault_planted_into_wgmma_is_found(fault: str) -> None:
    (case,) = cases(["conv 3x3"])
    edit, kind = WARPGROUP_FAULTS[fault]
    outcome = case.outcome(Setting(arch="sm_90", edit=edit))
    assert not outcome.good
    assert outcome.fault.startswith(kind)


@pytest.mark.emulate
@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("model", ["exact", "mmasim"])
def test_exact_sums_are_the_same_in_every_model(name: str, model: str) -> None:
    (case,) = cases([name])[:1]
    assert case.outcome(Setting(model=model, seed=1)).good


GEMM_FAULTS = {
    "barriers are missing in the loop": (planted.without_first_barriers(), "race"),
    "a barrier is missing in the epilogue": (planted.without_barrier(-1), "race"),
    "copies are waited for too late": (planted.late_wait(0), "unwaited copy"),
    "a copy is missing": (planted.without_copy(0), "uninitialised"),
    "scales are swapped": (planted.swapped_scales(0), ""),
    "registers of a fragment are swapped": (planted.swapped_operands(0), ""),
    "the mask of the stores is inverted": (planted.inverted_mask(r"st\.global", 0), ""),
    "an address is misaligned": (planted.other_offset("ldmatrix", 4), "misaligned"),
    "a store goes beyond shared memory": (planted.other_offset(r"st\.shared\S*", 1 << 16), "out of bounds"),
    "an accumulator is not set to zero": (planted.unwritten_register(0), "uninitialised"),
}
WEIGHT_ONLY_FAULTS = {
    name: GEMM_FAULTS[name]
    for name in GEMM_FAULTS
    if name not in ("scales are swapped", "a copy is missing", "an address is misaligned")
} | {"barriers are missing in the loop": (planted.without_first_barriers(3), "race")}


# Of products in FP32: no scales, and no fragments of tensor cores.
WITHOUT_TENSOR_CORES = (
    "scales are swapped",
    "registers of a fragment are swapped",
    "an accumulator is not set to zero",
)
# Every scale of FP8 is one: what is swapped is the same.
EIGHT_BIT_FAULTS = {name: GEMM_FAULTS[name] for name in GEMM_FAULTS if name != "scales are swapped"} | {
    "a scale is two": (planted.replaced(r"^(\s*mov\.b32\s+%r\d+), 127;", r"\1, 128;", 0), "")
}
FAULTS = {
    "FP8": EIGHT_BIT_FAULTS,
    "W4A16": WEIGHT_ONLY_FAULTS,
    "contractions": {name: fault for name, fault in GEMM_FAULTS.items() if name not in WITHOUT_TENSOR_CORES},
}


def _faults() -> list[object]:
    found = []
    for family in FAMILIES:
        (case,) = [case for case in TRITON if case.family == family][:1]
        faults = FAULTS.get(family, GEMM_FAULTS)
        marks = () if family == "conv" else pytest.mark.emulate
        found += [pytest.param(case, *fault, id=f"{family}: {name}", marks=marks) for name, fault in faults.items()]
    return found


@pytest.mark.parametrize(("case", "edit", "kind"), _faults())
def test_a_planted_fault_is_found(case: Case, edit: planted.Edit, kind: str) -> None:
    """`kind`: of the hazard; empty where the bytes are wrong."""
    outcome = case.outcome(Setting(edit=edit))
    assert not outcome.good
    assert outcome.fault.startswith(kind) if kind else outcome.wrong or "unwritten" in outcome.fault or outcome.fault


def test_every_family_has_five_planted_faults() -> None:
    families = {case.family for case in (*TRITON, *CUDA)}
    faults = {family: len(FAULTS.get(family, GEMM_FAULTS)) for family in FAMILIES}
    for case in (*CUDA, *decoded.CASES):
        planted_here = {**CUDA_FAULTS, **DECODED_FAULTS}.get(case.name, ())
        faults[case.family] = max(faults.get(case.family, 0), len(planted_here))
    assert {family for family in families if faults.get(family, 0) < 5} == set()


def test_too_small_a_grid_is_found() -> None:
    (case,) = [case for case in TRITON if "two blocks" in case.name]
    outcome = case.outcome(Setting(grid=(1, 1, 1)))
    assert "unwritten" in outcome.fault


def test_an_unknown_instruction_is_named() -> None:
    (case,) = cases(["linear"])[:1]
    outcome = case.outcome(
        Setting(edit=lambda ptx: ptx.replace("ldmatrix.sync.aligned.m8n8", "ldmatrix.sync.aligned.m8n16"))
    )
    assert "not implemented: ldmatrix.sync.aligned.m8n16" in outcome.fault
    assert "line" in outcome.fault


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("arch", "name"),
    [(arch, name) for arch in ("sm_107", "sm_110") for name in ("linear, bfloat16", "transposed 2x2, 24 outputs")]
    + [(arch, name) for arch in ("sm_103", "sm_110", "sm_121") for name in ("W4A16, K = 36", "plugin, quantiser")],
)
def test_other_architectures_are_bit_equal_to_the_reference(arch: str, name: str) -> None:
    (case,) = cases([name])
    outcome = case.outcome(Setting(arch=arch))
    if outcome.unavailable:
        pytest.skip(outcome.unavailable.splitlines()[0])
    assert outcome.good, outcome


@pytest.mark.emulate
@pytest.mark.parametrize("arch", [arch for arch in TARGETS if arch not in SAME])
def test_every_instruction_of_every_kernel_is_implemented(arch: str) -> None:
    """`compiled` raises at the first unknown instruction.

    Of the hundreds of variants a sample: two tiles of every kind of kernel, and what is lacking, with those that the
    cases launch, for SM100 and SM120 every pair of constants (tile and dtype, for instance), for others every constant.
    """
    sample = two_tiles(arch) + (tiles(arch) if arch == "sm_90" else [])
    sample += covering(all_variants(arch), arch in ("sm_100", "sm_120"), [*sample, *launched(arch)])
    for launch in dict.fromkeys(sample):
        code = compile_launch(launch, arch)
        compiled(parse(code.ptx, code.name))
    for plugin in PLUGINS.values() if arch in ("sm_100", "sm_120") else ():
        attributes: Attributes = {key: [1] for key in ("stride", "padding", "dilation", "relu")}
        attributes |= {
            "kernel": [3 - plugin.transposed] * 2,
            "channels": [64, 32][: plugin.sources],
            "out_channels": [40],
        }
        for tile in tactics(plugin, arch)[1:]:  # the first is a case
            kernel = compile_plugin(plugin_launch(plugin, attributes, tile, arch), arch)
            compiled(parse(kernel.ptx, kernel.name))


@pytest.mark.emulate
@pytest.mark.parametrize("arch", SAME)
def test_other_blackwell_gpus_have_the_same_ptx(arch: str) -> None:
    """Of two tiles of every kind of kernel: running it for one GPU runs it for the others."""
    if why := too_old(arch, native=True):
        pytest.skip(why)
    for launch in two_tiles(arch):
        assert instructions(compile_launch(launch, arch).ptx) == instructions(compile_launch(launch, SAME[arch]).ptx)


def instructions(ptx: str) -> list[str]:
    """PTX without its target, version, comments and debug information."""
    text = re.sub(r"//[^\n]*|\.section\s+\.debug[\s\S]*", "", ptx)
    return [line for line in text.splitlines() if not line.strip().startswith((".target", ".version", ".loc", ".file"))]


def two_tiles(arch: str) -> list[Launch]:
    """The first and the largest tile of every kind of kernel."""
    return [launch for both in representatives() for launch, found in both if found == arch]


def launched(arch: str) -> list[Launch]:
    """The variants that the cases launch."""
    found: list[Launch] = []

    def record(call: Call, *rest: object) -> Statistics:
        found.append(call.launch)
        return Statistics()

    with mock.patch.object(gemms, "emulate_triton", record), mock.patch.object(training, "emulate_triton", record):
        for case in (*gemms.CASES, *training.GEMMS):
            case.run(Setting(arch=arch), Outcome())
    return found


def covering(launches: list[Launch], pairs: bool, given: Sequence[Launch]) -> list[Launch]:
    """Launches in which every constant (every pair of constants) of all of them occurs, or in `given`."""

    def facts(launch: Launch) -> set[object]:
        own = {(launch.kernel, *each) for each in launch.constants}
        return {*combinations(sorted(own, key=str), 2)} if pairs else {*own}

    seen = set().union(*map(facts, given))
    left = {launch: rest for launch in launches if (rest := facts(launch) - seen)}
    chosen = []
    while left:
        best = max(left, key=lambda launch: len(left[launch]))
        found = left.pop(best)
        chosen.append(best)
        left = {launch: rest for launch, own in left.items() if (rest := own - found)}
    return chosen
