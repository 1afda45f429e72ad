"""The plugins' kernels without a GPU, compiled for three architectures in turn.

Compilation runs in the workers of `aot.build`, because other tests import kernels for the interpreter; what the
plugins ask for then comes from the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from fp4deploy.plugins.aot import build as aot_build
from fp4deploy.plugins.aot import compile as aot_compile
from fp4deploy.plugins.aot import diagnose
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.runtime import cubin
from fp4deploy.plugins.runtime.nvcc import KernelError
from fp4deploy.plugins.tensorrt import QUANTIZE, Plugin
from fp4deploy.plugins.tensorrt.kernels import (
    MAX_SHARED,
    compile_plugin,
    node_kernels,
    plugin_launch,
    tactics,
    without_parameters,
)
from tests.plugins.tensorrt import tensorrt_offers
from tests.plugins.tensorrt.plugin_cases import CASES
from tests.plugins.tensorrt.test_tensorrt_plugins import shapes_of

pytestmark = pytest.mark.skipif(aot_compile.triton_version() is None, reason="Triton is missing: pip install triton")

ARCHES = ("sm_90", "sm_100", "sm_120")
COMPILED = ("64 channels", "17 channels, stride 2", "two sources", "up")
Node = tuple[Plugin, dict[str, list[int]]]


def nodes() -> list[Node]:
    found: list[Node] = [(QUANTIZE, {"channels": [64]})]
    for name in COMPILED:
        found += [(shapes_of(CASES[name], packed)[0], CASES[name].attributes()) for packed in (False, True)]
    return found


def first_launch(node: Node, arch: str) -> Launch:
    return plugin_launch(*node, tactics(node[0], arch)[0], arch)


Pair = tuple[Node, str]
EVERY: list[Pair] = [(node, arch) for node in nodes() for arch in ARCHES]
QUANTIZER, _, PACKED, UNEVEN, _, TWO, TWO_PACKED, _, UP_PACKED = nodes()
SAMPLE = [(QUANTIZER, "sm_120"), (PACKED, "sm_120"), (UNEVEN, "sm_90"), (TWO, "sm_100")]  # every entry point
SAMPLE += [(TWO_PACKED, "sm_90"), (UP_PACKED, "sm_100")]


@pytest.fixture(scope="module")
def compile_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[Pair]], None]]:
    """Compile the first tactic of nodes into a cache that the module uses."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP4DEPLOY_CACHE", str(cache))
        patch.delenv("FP4DEPLOY_KERNEL_PATH", raising=False)

        def compile_all(pairs: list[Pair]) -> None:
            requested = dict.fromkeys((first_launch(node, arch), arch) for node, arch in pairs)
            for _, result in aot_build.build(requested, jobs=1):  # one import of Triton
                assert result.compiled is not None, result.failure

        yield compile_all


@pytest.fixture(scope="module")
def compiled(compile_pairs: Callable[[list[Pair]], None]) -> None:
    compile_pairs(SAMPLE)


def check(node: Node, arch: str) -> None:
    """The kernel has exactly the parameters that TensorRT passes, and multiplies packed operands where the GPU can."""
    plugin = node[0]
    launch = first_launch(node, arch)
    kernel = compile_plugin(launch, arch)
    integers = len(launch.arguments) - len(plugin.inputs) - len(plugin.outputs)
    name, types = cubin.entry_point(kernel.ptx)
    assert name == kernel.name == plugin.entry
    assert types == ("u64",) * len(plugin.inputs) + ("u32",) * integers + ("u64",) * len(plugin.outputs)
    names = [argument for argument, _ in launch.arguments]
    assert names[: len(plugin.inputs)] == list(plugin.inputs)
    assert names[-len(plugin.outputs) :] == list(plugin.outputs)
    last = max(int(number) for number in re.findall(rf"\b{name}_param_(\d+)\b", kernel.ptx))
    assert last == len(types) - 1
    assert cubin.target(kernel.ptx).rstrip("a") == arch
    assert kernel.shared <= MAX_SHARED
    assert kernel.threads in (128, 256)
    if plugin is not QUANTIZE:
        result = aot_compile.compile_launch(launch, arch)
        assert diagnose.diagnostics(result) == []
        assert (f"{cubin.NATIVE}.block_scale" in result.ptx) == (arch != "sm_90")


@pytest.mark.parametrize(("node", "arch"), SAMPLE, ids=lambda each: each if isinstance(each, str) else each[0].name)
def test_a_kernel_for_each_entry_point(compiled: None, node: Node, arch: str) -> None:
    check(node, arch)


@pytest.mark.variants
def test_a_kernel_for_each_node_and_architecture(compile_pairs: Callable[[list[Pair]], None]) -> None:
    """The pairs that are not in the sample."""
    rest = [pair for pair in EVERY if pair not in SAMPLE]
    compile_pairs(rest)
    for node, arch in rest:
        check(node, arch)


def test_the_sample_has_every_entry_point_and_architecture() -> None:
    assert {node[0].entry for node, _ in SAMPLE} == {node[0].entry for node in nodes()}
    assert {arch for _, arch in SAMPLE} == set(ARCHES)


def test_an_offer_carries_the_compiled_kernel(compiled: None) -> None:
    case = CASES["64 channels"]
    plugin, shapes = shapes_of(case, True)
    ask = tensorrt_offers.stand_in("sm120")
    offer = ask(plugin, tensorrt_offers.symbolic(plugin, shapes), case.attributes(), 1)
    kernel = compile_plugin(plugin_launch(plugin, case.attributes(), tactics(plugin, "sm120")[0], "sm120"), "sm_120")
    found = offer.launch(batch=2)
    assert (offer.name.decode(), offer.ptx.decode()) == (kernel.name, kernel.ptx)
    assert (found.block, found.shared) == ((kernel.threads, 1, 1), kernel.shared)
    assert len(cubin.entry_point(kernel.ptx)[1]) == len(plugin.inputs) + len(found.integers) + len(plugin.outputs)
    patched = CASES["64 channels"].attributes()
    assert node_kernels(QUANTIZE, {"channels": patched["channels"]}, "sm120")[0].name == "quantize_entry"


PTX = """.version 8.7
.target sm_90a
.visible .entry add(
\t.param .u64 .ptr .global .align 1 add_param_0,
\t.param .u32 add_param_1,
\t.param .u64 .ptr .global .align 1 add_param_2,
\t.param .u64 .ptr .global .align 1 add_param_3
)
.reqntid 128
{
\tld.param.u32 %r1, [add_param_1];
\tld.param.u64 %rd1, [add_param_0];
\tret;
}
"""


def test_scratch_pointers_are_taken_out() -> None:
    found = without_parameters(PTX, 2)
    assert cubin.entry_point(found) == ("add", ("u64", "u32"))
    assert found[found.index(".reqntid") :] == PTX[PTX.index(".reqntid") :]
    with pytest.raises(KernelError, match="add reads its parameter 1, scratch memory that TensorRT does not give"):
        without_parameters(PTX, 3)


def test_too_much_shared_memory_is_refused(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = first_launch(UNEVEN, "sm_90")
    needed = compile_plugin(launch, "sm_90").shared
    monkeypatch.setattr("fp4deploy.plugins.tensorrt.kernels.MAX_SHARED", needed - 1)
    with pytest.raises(KernelError, match=f"needs {needed} bytes of shared memory, and a plugin can have {needed - 1}"):
        compile_plugin(launch, "sm_90")
