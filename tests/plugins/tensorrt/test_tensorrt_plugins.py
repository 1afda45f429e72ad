"""The TensorRT plugins without a GPU: what is registered, and what is handed over.

Three ask the plugins as TensorRT does: a stand-in for `tensorrt.plugin`; TensorRT's own Python package of that name
over a stand-in for the native library; the same package over the real library, TensorRT Lean. FP4DEPLOY_TENSORRT_PLUGIN
names a folder of the package (`plugin` in a wheel of the bindings); by default it is that of the installed bindings.

With TensorRT Lean the registry, creators, plugin classes, capability interfaces, attributes and data types are real.
Stand-ins remain for what it lacks (`tensorrt_native.LACKED_BY_LEAN`): `TensorFormat`, `ITensor`, `IDimensionExpr`,
`ISymExpr`, `DimsExprs`, `PluginTensorDesc` and `DynamicPluginTensorDesc`, and the builder's own objects, which set the
launch.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.formats import quantize_nvfp4
from fp4deploy.plugins import tensorrt
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.arguments import SIZES, gemm_call
from fp4deploy.plugins.tensorrt import PLUGINS, QUANTIZE, Plugin, convolution_plugin, register_plugins
from fp4deploy.plugins.tensorrt.kernels import PluginKernel, plugin_launch, tactics
from tests.plugins.tensorrt import tensorrt_offers, tensorrt_plugin
from tests.plugins.tensorrt.plugin_cases import CASES, IMAGES, Case
from tests.plugins.tensorrt.tensorrt_native import DataType, lean_module, native_module

ARCHES = ("sm90", "sm100", "sm120")


def no_compiler(launch: Launch, arch: str) -> PluginKernel:
    return PluginKernel(f"{launch.kernel} {dict(launch.constants)}", arch, 32 * launch.num_warps, 1000)


def shapes_of(case: Case, packed: bool) -> tuple[Plugin, list[tuple[int, ...]]]:
    """A node's plugin and the shapes of its inputs."""
    plugin = convolution_plugin(len(case.channels), packed, case.transposed)
    taps = 2 if case.transposed else case.kernel
    shapes: list[tuple[int, ...]] = []
    blocks = [-(-count // 16) for count in case.channels]
    for count in blocks:
        shapes += [(*case.size, 8 * count), (*case.size, count), (1,)]
    rows = (case.outputs, taps, taps)
    shapes += [(*rows, 8 * sum(blocks)), (*rows, sum(blocks)), (1,), (case.outputs,)]
    return plugin, shapes + ([(1,)] if packed else [])


def questions() -> list[Any]:
    found = []
    for name, case in CASES.items():
        for packed in (False, True):
            plugin, shapes = shapes_of(case, packed)
            found.append(pytest.param(plugin, shapes, case.attributes(), id=f"{name}{', packed' if packed else ''}"))
    for name, shape in IMAGES.items():
        found.append(pytest.param(QUANTIZE, [shape, (1,)], {"channels": [shape[1]]}, id=f"quantise {name}"))
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", CASES)
def test_convolutions_are_launched_as_the_products_are(name: str, arch: str) -> None:
    """Grid, integers and constants are those of `products`, which are tested on a GPU."""
    case = CASES[name]
    ask = tensorrt_offers.stand_in(arch, no_compiler)
    for packed in (False, True):
        plugin, shapes = shapes_of(case, packed)
        for position, tile in enumerate(tactics(plugin, arch)):
            offer = ask(plugin, tensorrt_offers.symbolic(plugin, shapes), case.attributes(), position + 1)
            assert offer.tactics == tuple(range(1, len(tactics(plugin, arch)) + 1))
            for batch in (case.size[0], 5):
                found = offer.launch(batch=batch)
                call = expected_call(case, batch, packed, int(arch[2:]), tile)
                values = dict(zip((argument for argument, _ in call.launch.arguments), call.values, strict=True))
                expected = [values[size] for size in SIZES if size != "CB2" or len(case.channels) == 2]
                assert list(found.integers) == expected
                assert found.grid == call.grid
                out, scales = values["out"], values["out_scales"]
                assert found.shapes == ((out.shape, scales.shape) if packed else (out.shape,))
            launch = plugin_launch(plugin, case.attributes(), tile, arch)
            constants = dict(call.launch.constants)
            assert {key: constants[key] for key, _ in launch.constants} == dict(launch.constants)
            assert (launch.num_warps, launch.num_stages) == (tile.warps, tile.stages)
            assert set(launch.divisible) >= set(call.launch.divisible) - {"x2", "x2_scales", "CB2"}


def expected_call(case: Case, batch: int, packed: bool, capability: int, tile: Any) -> Any:
    size = (batch, *case.size[1:])
    images = tuple(quantize_nvfp4(torch.zeros(*size, count)) for count in case.channels)
    taps = 2 if case.transposed else case.kernel
    weight = quantize_nvfp4(torch.zeros(case.outputs, taps, taps, sum(case.channels)))
    reach = case.dilation * (case.kernel - 1) + 1
    pixels = tuple((extent + 2 * case.padding - reach) // case.stride + 1 for extent in size[1:])
    walked = size if case.transposed else (batch, *pixels)
    shape = (batch, 2 * size[1], 2 * size[2]) if case.transposed else walked
    blocks = -(-case.outputs // 16)
    out = torch.empty((*shape, 8 * blocks if packed else case.outputs), dtype=torch.uint8 if packed else torch.float16)
    scales = torch.empty((*shape, blocks), dtype=torch.uint8) if packed else None
    numbers: dict[str, Any] = {"taps": (1, 1), "transposed": True}
    if not case.transposed:
        numbers = {"taps": (taps, taps), "stride": case.stride, "padding": case.padding, "dilation": case.dilation}
    amax = torch.ones(()) if packed else None
    arguments = (images, weight, torch.zeros(case.outputs), size, walked, out, scales, amax, torch.float16, capability)
    return gemm_call(*arguments, relu=case.relu, tile=tile, **numbers)


@pytest.mark.parametrize("name", IMAGES)
def test_quantising(name: str) -> None:
    n, c, h, w = IMAGES[name]
    offer = tensorrt_offers.stand_in("sm100", no_compiler)(QUANTIZE, [("batch", c, h, w), (1,)], {"channels": [c]}, 1)
    found = offer.launch(batch=n)
    blocks = -(-c // 16)
    assert found.shapes == ((n, h, w, 8 * blocks), (n, h, w, blocks))
    assert found.integers == (c, h * w)
    assert found.grid == (n * -(-h * w // 64), -(-16 * blocks // 64), 1)
    assert offer.types == (DataType.INT8, DataType.INT8)
    assert offer.combination == (DataType.HALF, DataType.FLOAT, DataType.INT8, DataType.INT8)


def lean() -> Any:
    """TensorRT Lean, or the test is skipped."""
    found = lean_module()
    if found is None:
        pytest.skip("TensorRT Lean is missing: pip install tensorrt-lean-cu13-bindings tensorrt-lean-cu13-libs")
    return found


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize("native", ["stand-in", "TensorRT Lean"])
@pytest.mark.parametrize(("plugin", "shapes", "attributes"), questions())
def test_tensorrts_own_package_gets_the_same(
    plugin: Plugin, shapes: list[tuple[int, ...]], attributes: dict[str, list[int]], native: str
) -> None:
    symbols = tensorrt_offers.symbolic(plugin, shapes)
    with tensorrt_offers.real("sm100", no_compiler, lean() if native == "TensorRT Lean" else native_module()) as ask:
        real = ask(plugin, symbols, attributes, 1)
    ours = tensorrt_offers.stand_in("sm100", no_compiler)(plugin, symbols, attributes, 1)
    assert real.launch(batch=3) == ours.launch(batch=3)
    assert (real.name, real.ptx, real.types) == (ours.name, ours.ptx, ours.types)
    assert (real.tactics, real.combination) == (ours.tactics, ours.combination)


def test_the_real_registry_has_the_plugins() -> None:
    trt = lean()
    registry = trt.get_plugin_registry()

    def ours() -> set[tuple[str, str]]:
        return {
            (each.name, each.plugin_version) for each in registry.all_creators if each.plugin_namespace == "fp4deploy"
        }

    before = len(registry.all_creators)
    with tensorrt_offers.own_package(trt) as (native, trtp):
        assert ours() == set()
        register_plugins(native, trtp, "sm100", no_compiler)
        assert ours() == {(name, "1") for name in PLUGINS}
        for name in PLUGINS:
            creator = registry.get_creator(name, "1", "fp4deploy")
            assert isinstance(creator, trt.IPluginCreatorV3Quick)
        with pytest.raises(ValueError, match="already"):
            register_plugins(native, trtp, "sm100", no_compiler)
    assert len(registry.all_creators) == before


@pytest.mark.parametrize("name", PLUGINS)
def test_real_plugins_have_the_interfaces_that_the_builder_asks_for(name: str) -> None:
    trt, plugin = lean(), PLUGINS[name]
    attributes = {"channels": [32]} if plugin is QUANTIZE else CASES["64 channels"].attributes()
    with tensorrt_offers.own_package(trt) as (native, trtp):
        register_plugins(native, trtp, "sm100", no_compiler)
        made: Any = tensorrt_offers.create(native, plugin, attributes)
        kinds = trt.PluginCapabilityType
        assert isinstance(made, trt.IPluginV3)
        assert isinstance(made.get_capability_interface(kinds.CORE), trt.IPluginV3QuickCore)
        assert isinstance(made.get_capability_interface(kinds.BUILD), trt.IPluginV3QuickAOTBuild)
        assert (made.plugin_name, made.plugin_namespace, made.plugin_version) == (name, "fp4deploy", "1")
        assert made.num_outputs == len(plugin.outputs)
        with pytest.raises(ValueError, match="JIT implementation requested, but not defined"):
            tensorrt_offers.create(native, plugin, attributes, "STRICT_JIT")
        with pytest.raises(AssertionError, match="Unexpected attribute other"):
            creator = native.get_plugin_registry().get_creator(name, "1", "fp4deploy")
            field = trt.PluginField("other", np.array([1], np.int32), trt.PluginFieldType.INT32)
            fields = trt.PluginFieldCollection([field])
            request = trt.QuickPluginCreationRequest.STRICT_AOT
            creator.create_plugin(name, "fp4deploy", fields, trt.TensorRTPhase.BUILD, request)


def test_what_lean_lacks_is_what_stays_a_stand_in() -> None:
    """A later version that has one of these makes this fail: then it can be real too."""
    lean()
    bindings: Any = importlib.import_module("tensorrt_lean_bindings")
    assert [name for name in ("TensorFormat", "ITensor") if hasattr(bindings, name)] == []
    with pytest.raises(TypeError, match="No constructor defined"):
        bindings.IDimensionExpr()
    with pytest.raises(TypeError, match="Unable to convert"):
        _ = bindings.PluginTensorDesc().format


def test_tactics_are_tiles_and_kernels_are_compiled_once() -> None:
    compiled: list[Launch] = []

    def compile_kernel(launch: Launch, arch: str) -> PluginKernel:
        compiled.append(launch)
        return no_compiler(launch, arch)

    ask = tensorrt_offers.stand_in("sm90", compile_kernel)
    plugin, shapes = shapes_of(CASES["64 channels"], False)
    symbols = tensorrt_offers.symbolic(plugin, shapes)
    offers = {tactic: ask(plugin, symbols, CASES["64 channels"].attributes(), tactic) for tactic in (1, 2, 3, 1, 0)}
    assert [dict(launch.constants)["BM"] for launch in compiled] == [tile.bm for tile in tactics(plugin, "sm90")]
    assert offers[0].name == offers[1].name  # 0 is TensorRT's word for no choice
    assert offers[1].launch(batch=64).grid != offers[2].launch(batch=64).grid


def test_once_a_process() -> None:
    trtp: Any = tensorrt_plugin.module()
    register_plugins(native_module(), trtp, "sm100", no_compiler)
    assert list(trtp.definitions) == [plugin.identifier for plugin in PLUGINS.values()]
    with pytest.raises(ValueError, match="already"):
        register_plugins(native_module(), trtp, "sm100", no_compiler)


def test_what_cannot_be_registered() -> None:
    old: Any = tensorrt_plugin.module()
    del old.aot_impl
    with pytest.raises(UnavailableError, match=r"tensorrt\.plugin lacks aot_impl.*pip install --upgrade tensorrt"):
        register_plugins(native_module(), old, "sm100", no_compiler)
    trtp: Any = tensorrt_plugin.module()
    with pytest.raises(InputError, match="'sm75' is not a supported GPU architecture"):
        register_plugins(native_module(), trtp, "sm75", no_compiler)
    assert not trtp.definitions


def wrong(kind: str) -> tuple[Any, Any]:
    """Signatures with one mistake each, for `register` and `aot_impl`."""
    desc, numbers = tensorrt_plugin.TensorDesc, npt.NDArray[np.int32]
    right = {"x": desc, "channels": numbers}
    tail = {"outputs": tuple[desc], "tactic": int}
    made = tuple[bytes, bytes, tensorrt_plugin.KernelLaunchParams, tensorrt_plugin.SymIntExprs]
    register: dict[str, Any] = {
        "list of integers": {"x": desc, "channels": list[int]},
        "attribute first": {"channels": numbers, "x": desc},
        "reserved name": {"x": desc, "tactic": numbers},
        "no annotation": {"x": desc, "channels": inspect.Parameter.empty},
    }.get(kind, right)
    aot: dict[str, Any] = {
        "no tactic": {**right, "outputs": tail["outputs"]},
        "another order": {"channels": numbers, "x": desc, **tail},
        "another type": {**right, "channels": npt.NDArray[np.int64], **tail},
        "an attribute less": {"x": desc, **tail},
    }.get(kind, {**right, **tail})
    return signed(register, desc), signed(aot, None if kind == "no result" else made)


def signed(fields: dict[str, Any], returned: Any) -> Any:
    def function() -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=each) for name, each in fields.items()]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize(
    "kind",
    [
        *("list of integers", "attribute first", "reserved name", "no annotation"),
        *("no tactic", "another order", "another type", "an attribute less", "no result"),
    ],
)
def test_the_stand_in_refuses_what_tensorrt_refuses(kind: str) -> None:
    def add(register: Any, aot: Any) -> None:
        trtp: Any = tensorrt_plugin.module()
        trtp.register("mine::plugin")(register)
        trtp.aot_impl("mine::plugin")(aot)

    add(*wrong("nothing"))
    with pytest.raises(AssertionError):
        add(*wrong(kind))


def test_shapes_cannot_be_looked_at_while_the_engine_is_built() -> None:
    size = tensorrt_plugin.SymInt32(tensorrt_offers.extent("batch"))
    with pytest.raises(RuntimeError, match="no truth value"):
        bool(size + 1)
    with pytest.raises(TypeError):
        _ = size == 1
    with pytest.raises(ValueError, match="symbolic"):
        tensorrt_plugin.cdiv(5, 2)


def test_every_plugin_has_its_kernel() -> None:
    """Entry points are looked up by name when an engine is built; read here as text, since Triton may be missing."""
    source = Path(inspect.getfile(tensorrt)).parents[1] / "gemm" / "triton" / "plugin_entries.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    defined = {name for name in functions if not name.startswith("_")}
    assert {plugin.entry for plugin in PLUGINS.values()} == defined


def test_entry_points_exist_with_the_parameters_of_the_plugins() -> None:
    """Read from the source, because Triton may be missing: a renamed entry point breaks only the build of an engine."""
    source = find_spec("fp4deploy.plugins.gemm.triton.plugin_entries")
    assert source is not None
    assert source.origin is not None
    found = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse(Path(source.origin).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for plugin in PLUGINS.values():
        parameters = found[plugin.entry]
        assert tuple(parameters[: len(plugin.inputs)]) == plugin.inputs
        assert set(plugin.outputs) < set(parameters[len(plugin.inputs) :])
