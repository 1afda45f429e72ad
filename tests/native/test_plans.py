"""Launch plans: what is recorded, where buffers lie, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError
from fp4deploy.export.packing import packed_graph
from fp4deploy.export.to_packed import pack_model
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.graph import capture
from fp4deploy.native import Gpu, Plan, record
from fp4deploy.native.arena import Lifetime, place
from fp4deploy.native.bundle import KEY, graph_digest, write_bundle
from fp4deploy.native.plan import Buffer, CudaKernel
from fp4deploy.packed import PackedFile, packed_file
from fp4deploy.packed.graph import Conv2d, GroupNormReLU, Layer
from fp4deploy.packed.shapes import Shape, shapes_of
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight, planes_shape
from fp4deploy.qat import calibrate, prepare, round_to_deployed
from tests.native.conftest import GPU, SHAPES
from tests.native.plain_bundle import write_plain_bundle
from tests.packed.small_networks import packed


def names(plan: Plan, stage: str = "body") -> list[str]:
    kernels = [each.kernel for each in plan.stages[stage]]
    return [each.name if isinstance(each, CudaKernel) else each.kernel.partition(":")[2] for each in kernels]


def narrow(file: PackedFile, node: Layer) -> bool:
    """Whether a layer reads sources of at most 32 channels."""
    shapes = shapes_of(file.graph)
    return all(shapes[name][1] <= 32 for name in node.inputs)


def test_a_unet(unet: PackedFile, plans: list[Plan]) -> None:
    """One product a layer, one pass a normalisation, and nothing that the network does not need."""
    found = names(plans[0])
    layers = [node for node in unet.graph.nodes if isinstance(node, Layer)]
    norms = [node for node in unet.graph.nodes if isinstance(node, GroupNormReLU)]
    assert found.count("plain_conv") == sum(node.precision == "fp16" for node in layers) == 2
    assert found.count("decoded_conv_kernel") == len(layers) - 2
    assert not {"implicit_gemm_kernel", "direct_conv"} & set(found)
    large = names(record(unet, GPU, (1, 3, 352, 480)))
    assert large.count("direct_conv") == 3  # 3x3 convolutions of 16 channels that have tiles for every multiprocessor
    assert large.count("decoded_conv_kernel") == len(layers) - 2 - 3
    many = names(record(unet, GPU, (16, 3, 352, 480)))
    few = [node for node in layers if node.precision == "nvfp4" and isinstance(node, Conv2d) and narrow(unet, node)]
    assert many.count("direct_conv") == len(few) == 8
    assert found.count("norm_pack") + found.count("norm_pool_pack") == found.count("combine_moments") == len(norms)
    assert {"input.float32": ["read_image"], "output.classes": ["class_map"]}.items() <= {
        stage: names(plans[0], stage) for stage in plans[0].stages
    }.items()
    assert plans[1].outputs == ((2, 5, 64, 32),)


def test_every_layer_in_fp4(unet: PackedFile) -> None:
    """The multi-term encoding is the first launch; on Blackwell weights stay packed."""
    _, file = packed("nvfp4_qat", 0.25, digits=True, everything=True)
    plan = record(file, Gpu(Architecture(12, 0), "", 170), SHAPES[0])
    assert names(plan, "input.float16") == ["encode_image"]
    assert "implicit_gemm_kernel" in names(plan)
    assert not {"plain_conv", "decoded_conv_kernel"} & set(names(plan))
    assert "planes" not in {each.kind for each in plan.constants}
    kept = record(unet, GPU, SHAPES[0], weights="packed")
    assert "implicit_gemm_kernel" in names(kept)


def test_layers_of_other_forms() -> None:
    """Unequal strides and paddings, and a transposed convolution of one tap: by the kernels of `PackedNetwork`."""
    layers = nn.Conv2d(32, 32, (1, 3), 1, (0, 1)), nn.Conv2d(32, 32, 3, (2, 1), 1), nn.ConvTranspose2d(32, 32, 1)
    network, x = (
        nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *layers, nn.Conv2d(32, 5, 1)).eval(),
        torch.randn(1, 3, 16, 16),
    )
    prepare(network, "nvfp4_qat", include=["1", "2", "3"])
    calibrate(network, [x])
    round_to_deployed(network)
    plan = record(packed_file(Path("own.fp4"), None, *pack_model(network, x)), GPU, (1, 3, 16, 16))
    assert plan.generated == ""
    found = [each for each in plan.stages["body"] if isinstance(each.kernel, Launch)]
    constants = [dict(cast(Launch, each.kernel).constants) for each in found]
    kernels = [cast(Launch, each.kernel).kernel.partition(":")[2] for each in found]
    assert kernels == ["decoded_conv_kernel", "decoded_conv_kernel", "implicit_gemm_kernel"]
    assert [(each["KD"], each["KH"], each["KW"]) for each in constants] == [(1, 1, 3), (1, 3, 3), (1, 1, 1)]
    names_of = [[name for name, _ in cast(Launch, each.kernel).arguments] for each in found]
    given = [dict(zip(names, each.arguments, strict=False)) for names, each in zip(names_of, found, strict=True)]
    assert [(each["padding"], each["padding_x"], each["stride"], each["stride_x"]) for each in given[:2]] == [
        (0, 1, 1, 1),
        (1, 1, 2, 1),
    ]


def test_buffers_that_live_together_lie_apart(plans: list[Plan]) -> None:
    for plan in plans:
        for launches in plan.stages.values():
            for each in launches:
                places = [value.at for value in each.arguments if isinstance(value, Buffer) and value.kind == "arena"]
                assert all(0 <= at < plan.arena for at in places)


def test_placing() -> None:
    draw = random.Random(0)
    for _ in range(30):
        firsts = [draw.randrange(20) for _ in range(40)]
        buffers = [Lifetime(draw.randrange(1, 5000), at, at + draw.randrange(6)) for at in firsts]
        offsets, total = place(buffers)
        for number, (one, at) in enumerate(zip(buffers, offsets, strict=True)):
            assert at % 256 == 0
            assert at + one.size <= total
            for other, there in zip(buffers[:number], offsets, strict=False):
                together = {*range(one.first, one.last + 1)} & {*range(other.first, other.last + 1)}  # launches
                assert one.meets(other) == bool(together)
                assert not together or at + one.size <= there or there + other.size <= at


def test_planes_have_the_shape_of_the_decoded_weight() -> None:
    for shape, channels, transposed in (((3, 3, 3, 40), (16, 24), False), ((5, 2, 2, 20), (20,), True)):
        blocks = -(-shape[-1] // 16)
        codes = torch.zeros((*shape[:-1], 8 * blocks), dtype=torch.uint8)
        scales = torch.zeros((*shape[:-1], blocks)).to(torch.float8_e4m3fn)
        weight = Nvfp4Tensor(codes, scales, torch.tensor(1.0), torch.Size(shape), 448)
        assert tuple(decode_weight(weight, channels, transposed).planes.shape) == planes_shape(
            shape, channels, transposed
        )


def test_refusals(unet: PackedFile) -> None:
    with pytest.raises(InputError, match="multiples of 4, such as"):
        record(unet, GPU, (1, 3, 30, 30))
    with pytest.raises(InputError, match="takes RGB images"):
        record(unet, GPU, (1, 4, 32, 32))
    second = unet.graph.inputs[0].model_copy(update={"name": "second"})
    two = dataclasses.replace(unet, graph=unet.graph.model_copy(update={"inputs": [unet.graph.inputs[0], second]}))
    with pytest.raises(InputError, match="has 2 inputs, and 1 shapes were given"):
        record(two, GPU, SHAPES[0])


def test_what_kernels_of_this_package_do_not_cover_is_generated(
    unet: PackedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow norms, other nodes, a rest in FP32; the plan says which."""
    seen: list[PackedFile] = []

    def generate(file: PackedFile, gpu: Gpu, shapes: Sequence[Shape]) -> Plan:
        seen.append(file)
        return Plan(gpu, tuple(shapes), (), 0, (), {})

    monkeypatch.setattr(sys.modules["fp4deploy.native.record"], "record_program", generate)
    network = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1), nn.MaxPool2d(2))
    own, tensors = packed_graph(capture(network.eval(), torch.zeros(SHAPES[0])), network)
    wide = unet.graph.model_copy(update={"rest": "fp32"})
    files = [
        packed("nvfp4_qat", 0.125)[1],
        packed_file(Path("own.fp4"), None, own, tensors),
        dataclasses.replace(unet, graph=wide),
    ]
    causes = [record(file, GPU, SHAPES[0]).generated for file in files]
    assert [id(file) for file in seen] == [id(file) for file in files]
    assert "multiples of 16 channels" in causes[0]
    assert "do not compute all its nodes" in causes[1]
    assert causes[1] == causes[2]
    assert record(unet, GPU, SHAPES[0]).generated == ""


def test_the_digest_of_a_graph_ignores_its_weights(unet: PackedFile, tmp_path: Path) -> None:
    graph = unet.graph
    other = {name: info.model_copy(update={"sha256": "0" * 64}) for name, info in graph.tensors.items()}
    assert graph_digest(graph.model_copy(update={"tensors": other})) == graph_digest(graph)
    assert graph_digest(graph.model_copy(update={"digits": True})) != graph_digest(graph)


def test_a_bundle_holds_what_the_library_reads(unet: PackedFile, plans: list[Plan], tmp_path: Path) -> None:
    """Its limits, before anything is compiled."""
    many = [dataclasses.replace(plans[0], arena=number) for number in range(257)]
    with pytest.raises(InputError, match="at most 256 plans, and here are 257"):
        write_bundle(tmp_path / "many.kernels", unet, many)
    assert not (tmp_path / "many.kernels").exists()


def test_a_kernel_may_have_what_any_of_its_launches_needs(unet: PackedFile, plans: list[Plan], tmp_path: Path) -> None:
    """Dynamic shared memory: here the first launch of each kernel has more than the others, in all plans."""
    changed, seen = [], set[CudaKernel]()
    for plan in plans:
        body = []
        for each in plan.stages["body"]:
            if isinstance(each.kernel, CudaKernel):
                each = dataclasses.replace(each, shared=100 if each.kernel in seen else 9000)
                seen.add(each.kernel)
            body.append(each)
        changed.append(dataclasses.replace(plan, stages={**plan.stages, "body": tuple(body)}))
    write_plain_bundle(tmp_path / "a.kernels", unet, changed)
    with safe_open(tmp_path / "a.kernels", framework="pt") as file:
        body = json.loads(json.loads(file.metadata()[KEY])["body"])
    rows = [row for plan in body["plans"] for stage in plan["stages"].values() for row in stage]
    needed = [{row[5] for row in rows if row[0] == number} for number in range(len(body["kernels"]))]
    assert {100, 9000} in needed
    assert [kernel["shared"] for kernel in body["kernels"]] == list(map(max, needed))
