"""The C library on a machine without a GPU: files, launches and failures, under sanitizers.

The driver is a test double that records (`recording_driver.c`): launches are compared with the plan, argument by
argument, and nothing is computed. That the bytes are right is tested on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import struct
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from fp4deploy.errors import Fp4DeployError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.card import ModelCard
from fp4deploy.models.volumes import Intensity, VolumeInput
from fp4deploy.native import Plan, record
from fp4deploy.native.bundle import KEY, SIGNED
from fp4deploy.native.plan import Buffer, Constant, CudaKernel
from fp4deploy.packed import PackedFile, read_packed
from fp4deploy.packed import file as packed_format
from fp4deploy.packed.graph import MAX_PORTS, Graph, Layer
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.system.files import digest_of
from tests.export.packable_networks import OWN_QUANTIZERS
from tests.fuzz import loaders
from tests.fuzz.mutate import of_safetensors, of_tree
from tests.native.builds import ROOT, run
from tests.native.conftest import GPU, SHAPES, written
from tests.native.plain_bundle import code, write_plain_bundle
from tests.packed.small_networks import packed
from tests.packed.test_mutations import changed
from tests.packed.test_writer import network

INPUTS, OUTPUTS = ("input.float32", "input.float16"), ("output.float32", "output.float16", "output.classes")
CASES = 12  # of each kind of mutation; thousands were compared once, without a difference


def test_what_the_sanitizers_leave_out_is_not_in_the_sources() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").iterdir())
    cast_to = set(re.findall(r"reinterpret_cast<([^>]*)>", text))
    assert cast_to <= {"const char*", "void*", "const void*", "uintptr_t", "Pointer"}  # Pointer: of a function
    assert set(re.findall(r"static_cast<([^>]*\*)>", text)) <= {"const uint8_t*"}
    assert not re.search(r"\bvirtual\b|\bdynamic_cast\b|\((?:const )?\w+ ?\*\) ?\w", text)


def statuses(program: Path, mode: list[str], paths: list[Path]) -> list[tuple[int, str]]:
    """Status and cause of each file; a sanitizer's report is a failure."""
    status, out, err = run([program, *mode], given="\n".join(map(str, paths)) + "\n")
    assert (status, err) == (0, "")
    found = [line.partition("\t") for line in out.splitlines()]
    assert len(found) == len(paths)
    return [(int(number), cause) for number, _, cause in found]


def rewritten(content: bytes, change: Callable[[dict[str, str]], None], key: str, signed: tuple[str, ...]) -> bytes:
    """A file whose metadata was changed and signed again."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = json.loads(header["__metadata__"][key])
    change(metadata)
    metadata["sha256"] = digest_of(metadata[each].encode() for each in signed)
    header["__metadata__"][key] = json.dumps(metadata)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def of_graph(content: bytes, draw: random.Random) -> bytes:
    """Values of the graph exchanged for others of the graph."""

    def change(metadata: dict[str, str]) -> None:
        metadata["graph"] = json.dumps(changed(json.loads(metadata["graph"]), draw))

    return rewritten(content, change, loaders.PACKED_KEY, loaders.PACKED_SIGNED)


def python_accepts(path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_packed(path)
        except Fp4DeployError:
            return False
    return True


@pytest.mark.variants
def test_mutated_files(sanitized: Path, tmp_path: Path) -> None:
    seeds, draw = loaders._packed(tmp_path), random.Random(0)
    paths = []
    for number in range(CASES + len(seeds)):
        seed = seeds[number % len(seeds)]
        content = seed if number < len(seeds) else (of_graph if number % 4 < 2 else loaders._of_packed)(seed, draw)
        paths.append(tmp_path / f"{number}.fp4")
        paths[-1].write_bytes(content)
    found = statuses(sanitized, ["check"], paths)
    expected = [python_accepts(path) for path in paths]
    assert expected[: len(seeds)] == [True] * len(seeds)
    assert 0 < sum(status == 0 for status, _ in found) < len(paths)
    for path, accepted, (status, cause) in zip(paths, expected, found, strict=True):
        assert not accepted or status == 0, (path, cause)
        assert (status == 0) == (cause == "")


@pytest.fixture
def narrow(tmp_path: Path) -> PackedFile:
    """A smaller UNet than `unet`, written: most of a sanitized program's time is a file's SHA-256."""
    file = dataclasses.replace(packed("nvfp4_qat", 0.125)[1], path=tmp_path / "narrow.fp4")
    packed_format.write_packed(file)
    return file


def test_formats(sanitized: Path, narrow: PackedFile, tmp_path: Path) -> None:
    """Every format that Python reads, whatever the nodes are."""

    def rewritten_as(name: str) -> Path:
        def change(metadata: dict[str, str]) -> None:
            metadata["format"] = name
            metadata["graph"] = metadata["graph"].replace('"op":"group_norm_relu"', '"op":"another"')

        path = tmp_path / f"{name.replace('/', '-')}.fp4"
        path.write_bytes(rewritten(narrow.path.read_bytes(), change, loaders.PACKED_KEY, loaders.PACKED_SIGNED))
        return path

    read = [rewritten_as(name) for name in packed_format.FORMATS]
    refused = [rewritten_as(f"packed/{number}") for number in (99, 1)] + [tmp_path / "missing.fp4", tmp_path]
    found = statuses(sanitized, ["check"], [*read, *refused])
    assert [status for status, _ in found] == [0] * len(read) + [1] * len(refused)
    assert "reads packed/3 to packed/11" in found[len(read)][1]
    assert "cannot be" in found[-2][1]


@pytest.mark.parametrize("name", OWN_QUANTIZERS)
def test_files_of_layers_that_quantise_what_they_read(sanitized: Path, tmp_path: Path, name: str) -> None:
    """Codes of eight bits among the tensors; damaged ones are refused."""
    path = tmp_path / "own.fp4"
    packed_format.write_packed(dataclasses.replace(network(name)[0], path=path))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    damaged = tmp_path / "damaged.fp4"
    damaged.write_bytes(content)
    (read, _), (refused, cause) = statuses(sanitized, ["check"], [path, damaged])
    assert (read, refused) == (0, 1)
    assert "damaged" in cause


def test_caches_of_a_decoder(sanitized: Path, narrow: PackedFile, tmp_path: Path) -> None:
    """As many inputs and outputs as Python takes: the keys and values of every layer."""

    def change(metadata: dict[str, str]) -> None:
        graph = json.loads(metadata["graph"])
        for ports in ("inputs", "outputs"):
            graph[ports] = [graph[ports][0] | {"name": f"{ports} {number}"} for number in range(MAX_PORTS)]
        metadata["graph"] = Graph.model_validate(graph).to_json()

    path = tmp_path / "decoder.fp4"
    path.write_bytes(rewritten(narrow.path.read_bytes(), change, loaders.PACKED_KEY, loaders.PACKED_SIGNED))
    assert statuses(sanitized, ["check"], [path]) == [(0, "")]


@pytest.mark.parametrize("channels", [1, 4])
def test_cards_of_volumes(sanitized: Path, narrow: PackedFile, tmp_path: Path, channels: int) -> None:
    """Their means and standard deviations are of as many channels as the volumes have."""
    assert narrow.card is not None
    names = tuple(map(str, range(channels)))
    volume = VolumeInput(16, (1.0, 1.0, 1.0), names, (Intensity(),) * channels)
    card = dataclasses.replace(narrow.card, mean=(0.0,) * channels, std=(1.0,) * channels, volume=volume)

    def change(metadata: dict[str, str]) -> None:
        metadata["card"] = ModelCard.from_json(card.to_json()).to_json()

    path = tmp_path / "volumes.fp4"
    path.write_bytes(rewritten(narrow.path.read_bytes(), change, loaders.PACKED_KEY, loaders.PACKED_SIGNED))
    assert statuses(sanitized, ["check"], [path]) == [(0, "")]


@pytest.mark.variants
def test_mutated_bundles(sanitized: Path, driver: Path, unet: PackedFile, bundle: Path, tmp_path: Path) -> None:
    """Refused with a cause, or every argument still lies inside its buffer."""
    draw, content, paths = random.Random(0), bundle.read_bytes(), [bundle]

    def change(metadata: dict[str, str]) -> None:
        metadata["body"] = json.dumps(of_tree(json.loads(metadata["body"]), draw))

    for number in range(CASES):
        mutated = of_safetensors(content, draw) if number % 3 == 0 else rewritten(content, change, KEY, SIGNED)
        paths.append(tmp_path / f"{number}.kernels")
        paths[-1].write_bytes(mutated)
    given = "\n".join(map(str, [*paths, unet.path])) + "\n"
    status, out, err = run([sanitized, "bundle", unet.path], driver, given)
    assert (status, err) == (0, "")
    found = [line.partition("\t") for line in out.splitlines()]
    assert found[0][0] == "0"
    assert {number for number, *_ in found} <= {"0", "1", "2", "4"}
    assert all((number == "0") == (cause == "") for number, _, cause in found)
    assert "fp4deploy kernels --for" in found[-1][2]


def test_bundles_of_another_network_or_gpu_are_refused(
    sanitized: Path, driver: Path, unet: PackedFile, narrow: PackedFile, bundle: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.fp4"  # what Python has not checked: the same tensors, one number of the graph exchanged

    def another(metadata: dict[str, str]) -> None:
        metadata["graph"] = metadata["graph"].replace('"stride":[1,1]', '"stride":[2,2]', 1)

    other.write_bytes(rewritten(unet.path.read_bytes(), another, loaders.PACKED_KEY, loaders.PACKED_SIGNED))
    for path in (narrow.path, other):
        _, out, _ = run([sanitized, "bundle", path], driver, f"{bundle}\n")
        assert "another network" in out
    _, out, _ = run([sanitized, "bundle", unet.path], driver, f"{bundle}\n", RECORDING_DRIVER_ARCH="120")
    assert out == "4\tthe kernel bundle is for sm90, and CUDA device 0 is sm120\n"
    _, out, _ = run([sanitized, "bundle", unet.path], None, f"{bundle}\n")
    assert out.startswith("4\tthe CUDA driver was not loaded")


def test_launches(
    sanitized: Path, driver: Path, unet: PackedFile, bundle: Path, plans: list[Plan], tmp_path: Path
) -> None:
    """Every function of the interface; the launches are the plan's, the constants are those that Python decodes."""
    log = tmp_path / "log"
    status, out, err = run([sanitized, "run", unet.path, bundle], driver, RECORDING_DRIVER_LOG=str(log))
    assert (status, err) == (0, ""), out
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[-1].split()[:6] == ["released", *"00000"]  # contexts, allocations, modules, streams, retained contexts
    allocated = [int(line.split()[1]) for line in lines if line.startswith("allocate")]
    constants = list(dict.fromkeys(constant for plan in plans for constant in plan.constants))
    offsets = [sum(-(-each.size // 256) * 256 for each in constants[:number]) for number in range(len(constants))]
    launches = iter([line.split() for line in lines if line.startswith("launch")])
    arenas: list[set[int]] = [set(), set()]
    for (plan, arena), output, given in product(zip(plans, arenas, strict=True), OUTPUTS, INPUTS):
        for each in (*plan.stages[given], *plan.stages["body"], *plan.stages[output]):
            words, compiled = next(launches), code(each.kernel)
            sizes = [*each.grid, compiled.block or each.block, 1, 1, each.shared if compiled.shared is None else 65536]
            assert (words[1], [int(word) for word in words[2:9]]) == (compiled.name, sizes)
            seen = struct.unpack("@" + compiled.parameters, bytes.fromhex(words[10]))
            for letter, mine, value in zip(compiled.parameters, seen, each.arguments, strict=True):
                if isinstance(value, Buffer) and value.kind == "arena":
                    arena.add(mine - value.at)
                elif isinstance(value, Buffer) and value.kind == "constant":
                    assert mine == allocated[0] + offsets[constants.index(plan.constants[value.at])]
                elif isinstance(value, Buffer):
                    assert mine
                else:
                    assert struct.pack(letter, mine) == struct.pack(letter, value or 0)
    assert next(launches, None) is None
    assert [len(arena) for arena in arenas] == [1, 1]
    assert arenas[0] == {allocated[1]}
    content = Path(f"{log}.0").read_bytes()
    for constant, offset in zip(constants, offsets, strict=True):
        found, wanted = content[offset : offset + constant.size], bytes_of(unet, constant)
        assert found == wanted, constant


def test_a_rest_in_bf16(sanitized: Path, driver: Path, tmp_path: Path) -> None:
    """Weights keep their type, norms' are widened, kernels write BF16."""
    files = {rest: written(tmp_path / f"{rest}.fp4", rest) for rest in ("fp16", "bf16")}
    found = statuses(sanitized, ["check"], [file.path for file in files.values()])
    assert [status for status, _ in found] == [0, 0], found
    plans = {rest: record(files[rest], GPU, SHAPES[0]) for rest in ("fp16", "bf16")}
    launched = [[len(launches) for launches in plan.stages.values()] for plan in plans.values()]
    assert launched[0] == launched[1]
    kernels = {each.kernel for stage in plans["bf16"].stages.values() for each in stage}
    macros = [dict(each.macros) for each in kernels if isinstance(each, CudaKernel) and "HALF" in dict(each.macros)]
    assert {each["HALF"] for each in macros} == {"__nv_bfloat16"}
    bundle, log = tmp_path / "bf16.kernels", tmp_path / "log"
    write_plain_bundle(bundle, files["bf16"], [plans["bf16"], record(files["bf16"], GPU, SHAPES[1])])
    status, out, err = run([sanitized, "run", files["bf16"].path, bundle], driver, RECORDING_DRIVER_LOG=str(log))
    assert (status, err) == (0, ""), out
    content, offset = Path(f"{log}.0").read_bytes(), 0
    for constant in plans["bf16"].constants:
        assert content[offset : offset + constant.size] == bytes_of(files["bf16"], constant), constant
        offset += -(-constant.size // 256) * 256


def bytes_of(file: PackedFile, constant: Constant) -> bytes:
    """A constant as Python makes it."""
    if constant.kind == "planes":
        node = next(node for node in file.graph.nodes if isinstance(node, Layer) and node.layer == constant.tensor)
        parts = [file.tensors[f"{constant.tensor}.weight.{part}"] for part in ("codes", "scales", "amax")]
        shape = torch.Size((*parts[0].shape[:3], sum(constant.sources)))
        weight = Nvfp4Tensor(*parts, shape, node.e4m3_max)
        return decode_weight(weight, constant.sources, constant.up).planes.numpy().tobytes()
    tensor = file.tensors[constant.tensor]
    tensor = tensor.float() if constant.kind == "float32" else tensor
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("name", "at"),
    [("cuInit", 1), ("cuDevicePrimaryCtxRetain", 1), ("cuModuleLoadData", 3), ("cuModuleGetFunction", 2),
     ("cuMemAlloc_v2", 1), ("cuMemcpyHtoD_v2", 1), ("cuMemAlloc_v2", 4), ("cuStreamCreate", 1), ("cuLaunchKernel", 40),
     ("cuStreamSynchronize", 2), ("cuMemcpyDtoH_v2", 1)],
)  # fmt: skip
def test_failures_of_the_driver_leave_nothing_behind(
    sanitized: Path, driver: Path, unet: PackedFile, bundle: Path, tmp_path: Path, name: str, at: int
) -> None:
    """The status and the driver's text; LeakSanitizer finds nothing, and the driver has everything back."""
    log = tmp_path / "log"
    failing = {"RECORDING_DRIVER_FAIL": name, "RECORDING_DRIVER_AT": str(at), "RECORDING_DRIVER_LOG": str(log)}
    status, out, err = run([sanitized, "run", unet.path, bundle], driver, **failing)
    assert (status in (0, 6), err) == (True, "")
    assert "a planted failure" in out or "out of memory" in out
    if name != "cuInit" and name != "cuDevicePrimaryCtxRetain":
        assert log.read_text(encoding="utf-8").splitlines()[-1].split()[:6] == ["released", *"00000"]


def test_a_bundle_of_one_plan(
    sanitized: Path, driver: Path, unet: PackedFile, plans: list[Plan], tmp_path: Path
) -> None:
    """A shape without a plan is refused with those that have one."""
    path = tmp_path / "one.kernels"
    write_plain_bundle(path, unet, plans[1:])
    status, out, err = run([sanitized, "run", unet.path, path], driver)
    assert (status, err) == (0, ""), out
    assert out.count("workspace") == 1
