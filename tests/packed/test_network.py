"""What a packed network computes on the CPU: the fake-quantised model, node by node and as a whole."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fp4deploy.data import EvalTransform, generate_shapes, open_dataset
from fp4deploy.errors import InputError
from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.nodes import compare_nodes
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models import build_unet
from fp4deploy.models.input_encoding import encode_input as written
from fp4deploy.packed import PackedNetwork, packed_file
from fp4deploy.packed import network as network_module
from fp4deploy.packed.graph import Concat, Conv2d, Form, Layer, Take
from fp4deploy.packed.network import allowing_tf32, decoded_form, packed_form
from fp4deploy.packed.operators import Context, compute
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference
from fp4deploy.plugins.quantize.input_encoding import packed_image
from fp4deploy.qat import calibrate, prepare, round_to_deployed
from tests.export.packable_networks import packed_network
from tests.packed.small_networks import CLASSES, SIZE, images, packed


# At 0.125 a concatenation is written, at 0.25 none is.
@pytest.mark.parametrize(
    ("recipe", "scale"),
    [("nvfp4_qat", 0.125), ("nvfp4_qat", 0.25), ("nvfp4_qat_2d", 0.125), ("nvfp4_4o6_weight_qat", 0.25)],
)
def test_every_step_computes_what_torch_computes(recipe: str, scale: float) -> None:
    model, file = packed(recipe, scale)
    with torch.inference_mode():
        errors = compare_nodes(model, PackedNetwork(file), images(2)).errors
    assert len(errors) == 23  # 13 convolutions and 10 normalisations
    assert max(errors.values()) < 2e-4, errors


@pytest.mark.parametrize(
    ("digits", "everything", "scale"),
    [(True, False, 0.125), (False, True, 0.25), (True, True, 0.125), (True, True, 0.25)],
)
def test_every_step_where_the_image_is_digits_or_packed(digits: bool, everything: bool, scale: float) -> None:
    model, file = packed("nvfp4_qat", scale, digits, everything)
    with torch.inference_mode():
        errors = compare_nodes(model, PackedNetwork(file), images(2)).errors
    assert len(errors) == 23
    assert max(errors.values()) < 2e-4, errors
    convolutions = [node for node in file.graph.nodes if isinstance(node, Layer)]
    assert sum(node.precision == "nvfp4" for node in convolutions) == (13 if everything else 11)


def test_the_digits_that_a_packed_network_reads_are_those_of_torch() -> None:
    _, file = packed("nvfp4_qat", 0.125, True, True)
    read = PackedNetwork(file).read(images(2))
    assert isinstance(read, Nvfp4Tensor)
    assert torch.equal(read.dequantize(torch.float16), written(images(2)).half().permute(0, 2, 3, 1))


def test_a_packed_image_is_read_in_the_place_of_an_image() -> None:
    """Of a network whose activations are codes, as on a GPU, and packed with its own amax."""
    file, x = packed("nvfp4_qat", 0.25, True, True)[1], images(2)
    network, decoding = PackedNetwork(file), PackedNetwork(file)
    network.pack = packed_form
    amax = network.image_amax
    assert amax is not None
    operand = packed_image(x, amax)
    assert torch.equal(network(operand), network(x))  # type: ignore[arg-type]
    assert not torch.equal(network(packed_image(-x, amax)), network(x))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="multiples of 4, such as"):
        network(packed_image(images(2, size=30), amax))
    for refused, given in ((network, packed_image(x, amax.clone())), (decoding, operand)):
        with pytest.raises(InputError, match="packed with its image_amax"):
            refused(given)


@pytest.mark.parametrize(
    ("recipe", "digits", "everything"), [("nvfp4_qat", False, True), ("nvfp4_qat", True, False), (None, True, False)]
)
def test_networks_whose_image_is_read_otherwise_take_none_packed(
    recipe: str | None, digits: bool, everything: bool
) -> None:
    network = PackedNetwork(packed(recipe, 0.25, digits, everything)[1])
    network.pack = packed_form
    assert network.image_amax is None


def test_two_readers_of_an_image_read_no_operand() -> None:
    network = PackedNetwork(packed("nvfp4_qat", 0.25, True, True)[1])
    network.pack, (image,) = packed_form, network.inputs
    assert network.image_amax is not None
    for more in ([Form(name="plain")], [image.outputs[0].model_copy(update={"name": "again"})]):
        network.inputs = [image.model_copy(update={"outputs": [*image.outputs, *more]})]
        assert network.image_amax is None


def test_an_fp16_model_with_digits_is_exact() -> None:
    model, file = packed(None, 0.25, True)
    with torch.inference_mode():
        torch.testing.assert_close(PackedNetwork(file)(images(2)), model(images(2)), rtol=0, atol=2e-5)


def test_an_fp16_model_is_exact() -> None:
    model, file = packed(None)
    with torch.inference_mode():
        expected, got = model(images(2)), PackedNetwork(file)(images(2))
    assert got.shape == (2, len(CLASSES), SIZE, SIZE)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_a_trained_model_gives_the_same_classes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Fake quantisation in torch and the packed network, on generated scenes: at least 99.9 % of the pixels."""
    generate_shapes(tmp_path / "data", train=24, val=16, size=32, seed=0)
    transform = EvalTransform(32, 32, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    splits = {}
    for split in ("train", "val"):
        data = open_dataset(tmp_path / "data", split)
        pairs = [transform(data.load(index)) for index in range(len(data))]
        splits[split] = tuple(torch.stack([torch.as_tensor(pair[at]) for pair in pairs]) for at in (0, 1))
    torch.manual_seed(0)
    names = open_dataset(tmp_path / "data", "val").class_names
    model = build_unet(len(names), 0.25)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = splits["train"]
    for step in range(15):
        part = slice(step % 3 * 8, step % 3 * 8 + 8)
        loss = nn.functional.cross_entropy(model(x[part]), y[part].long(), ignore_index=255)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    prepare(model)
    calibrate(model, [x[:8]])
    round_to_deployed(model)
    model.eval()
    _, other = packed()
    file = packed_file(tmp_path / "unet.fp4", _named(other.card, names), *pack_model(model, x[:1], False))
    with torch.inference_mode():
        expected = model(splits["val"][0]).argmax(1)
        got = PackedNetwork(file)(splits["val"][0]).argmax(1)
    assert len(expected.unique()) > 1
    assert float((got == expected).float().mean()) >= 0.999


def _named(card, names):  # type: ignore[no-untyped-def]
    import dataclasses

    return dataclasses.replace(card, class_names=names)


def test_no_concatenation_is_written_where_blocks_do_not_cross_it() -> None:
    _, file = packed()
    assert not [node for node in file.graph.nodes if isinstance(node, Concat)]
    pairs = [node for node in file.graph.nodes if isinstance(node, Conv2d) and len(node.inputs) == 2]
    assert [node.layer for node in pairs] == [f"decoder.{level}.conv1" for level in range(2)]
    _, narrow = packed("nvfp4_qat", 0.125)
    (concat,) = (node for node in narrow.graph.nodes if isinstance(node, Concat))
    (reader,) = (node for node in narrow.graph.nodes if node.inputs == [concat.outputs[0].name])
    assert isinstance(reader, Conv2d)
    assert (reader.layer, concat.outputs[0].amax) == ("decoder.1.conv1", "decoder.1.conv1.input_amax")


@pytest.mark.parametrize("scale", [0.25, 0.375])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_cpu_multiplies_what_codes_and_scales_decode_to(scale: float, bad: float | None) -> None:
    file, x = packed("nvfp4_qat", scale)[1], images(2)
    if bad is not None:
        x[0, 0, 3, 3] = bad
    network = PackedNetwork(file)
    found = network(x)
    network.pack = packed_form
    assert torch.equal(found.nan_to_num(7.0), network(x).nan_to_num(7.0))


def test_other_sizes_and_batches() -> None:
    _, file = packed()
    network = PackedNetwork(file)
    both = network(images(3, size=48))
    assert both.shape == (3, len(CLASSES), 48, 48)
    torch.testing.assert_close(network(images(3, size=48)[1:2]), both[1:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 3, 38, 32), (1, 3, 32, 6)])
def test_sizes_that_cannot_be_halved_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="multiples of 4, such as"):
        PackedNetwork(packed()[1])(torch.zeros(shape))


@pytest.mark.parametrize("digits", [False, True])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 4, 32, 32), (0, 3, 32, 32), (1, 13, 32, 32), (1, 3, 32, 0)])
def test_what_is_not_rgb_images_is_refused(shape: tuple[int, ...], digits: bool) -> None:
    with pytest.raises(InputError, match=r"\[N, 3, H, W\]"):
        PackedNetwork(packed("nvfp4_qat", 0.25, digits)[1])(torch.zeros(shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("digits", "everything"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_broken_image_shows(bad: float, digits: bool, everything: bool) -> None:
    broken = images(1)
    broken[0, 1, 5, 5] = bad
    assert PackedNetwork(packed("nvfp4_qat", 0.25, digits, everything)[1])(broken).isnan().any()


class Reordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)[:, [2, 0, 1]]


class Selected(TorchFunctionMode):
    """Remembers the positions of each `index_select` of tensors with data."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.index_select and args[2].device.type == "cpu":
            self.positions.append(weakref.ref(args[2]))
        return func(*args, **(kwargs or {}))


def test_positions_live_as_long_as_the_network() -> None:
    """A CUDA graph reads them wherever they were, however many other networks were run since."""
    x = images(2)
    model = Reordered().eval()
    round_to_deployed(model)
    network = PackedNetwork(packed_file(Path("own.fp4"), None, *pack_model(model, x)))
    with Selected() as selected:
        torch.testing.assert_close(network(x), model(x))
        for at in range(300):
            node = Take(dim=1, indices=[at % 3] * (at + 2), inputs=["x"], outputs=[Form(name="y")])
            compute(node, [x], Context(network._vectors.__getitem__, {}))
        network(x)
    first, *_, last = [each() for each in selected.positions]
    assert first is not None
    assert first is last


class WithoutKernels(nn.Module):
    """Quantised layers that no kernel multiplies: in groups, of uneven dilations, transposed by more than 2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 64, 3, padding=1, groups=2)
        self.uneven, self.up = nn.Conv2d(64, 32, 3, 1, 1, (1, 2)), nn.ConvTranspose2d(32, 16, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.relu(self.uneven(torch.relu(self.grouped(torch.relu(self.stem(x)))))))


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_weights_without_a_kernel_are_decoded_once(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device, at load: no node decodes one, the codes are freed, and the decoded weights counted."""
    torch.manual_seed(0)
    model, x = WithoutKernels().eval(), images(1)
    prepare(model, "nvfp4_qat", include=["grouped", "uneven", "up"])
    calibrate(model, x)
    round_to_deployed(model)
    network = PackedNetwork(packed_file(Path("own.fp4"), None, *pack_model(model, x)))
    nodes = [node for node in network.graph.nodes if isinstance(node, Layer) and node.precision == "nvfp4"]
    assert [node.layer for node in nodes] == ["grouped", "uneven", "up"]
    network.device = torch.device(on)  # as far as the choice of what runs a layer goes
    monkeypatch.setattr(Nvfp4Tensor, "dequantize", None)
    for node in nodes:
        layer = model.get_submodule(node.layer)
        given = torch.randn(1, layer.in_channels, 8, 8)
        (y,) = network.run_node(node.model_copy(update={"outputs": [Form(name="y")]}), [given.movedim(1, -1)])
        assert y.shape[1] == layer.out_channels  # type: ignore[union-attr]
        assert network.weight_bytes(node) == 4 * layer.weight.numel()
    assert network._packed == {}


def test_a_network_of_volumes_is_multiplied_in_packed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels of volumes run: every layer by `dispatch`, from codes, with the strides and paddings of each axis.

    Two sources are read in place, and what one layer alone reads is packed by the layer.
    """
    file, x = packed_network("InstanceNorm UNet, volumes", True)
    here, there = PackedNetwork(file), PackedNetwork(file)
    there.device = torch.device("cuda")  # as far as the choice of what runs a layer goes
    there.pack = here.pack = packed_form
    multiplied = []
    for name in ("conv2d", "conv_transpose2d"):
        run = getattr(network_module, name)
        monkeypatch.setattr(network_module, name, lambda x, *a, run=run, **o: multiplied.append(x) or run(x, *a, **o))
    image = file.graph.inputs[0]
    live = dict(zip([form.name for form in image.outputs], here.read_input(image, x, packed_form), strict=True))
    for node in file.graph.nodes:
        inputs = [live[name] for name in node.inputs]
        got = here.run_node(node, inputs)
        if isinstance(node, Layer) and node.precision == "nvfp4":
            assert all(isinstance(source, Nvfp4Tensor) for source in inputs)
            for one, other in zip(there.run_node(node, inputs), got, strict=True):
                torch.testing.assert_close(decoded_form(one, torch.float32), decoded_form(other, torch.float32))
        live.update(zip([form.name for form in node.outputs], got, strict=True))
    layers = [node for node in file.graph.nodes if isinstance(node, Layer) and node.precision == "nvfp4"]
    assert len(multiplied) == len(layers) == 11
    assert [len(node.inputs) for node in layers if "decoder" in node.layer] == [2, 1, 2, 1]


@pytest.mark.parametrize(("name", "measured"), [("InstanceNorm UNet", False), ("InstanceNorm UNet, volumes", True)])
def test_before_blackwell_layers_are_multiplied_with_decoded_weights(
    name: str, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the strides and paddings of each axis; of volumes a compiled network with cuDNN is timed as well."""
    file, x = packed_network(name, True)
    here = PackedNetwork(file)
    assert not here.decodes_layers
    weights: dict[int, Nvfp4Tensor] = {}
    decode = network_module.decode_weight

    def decoded_weight(weight: Nvfp4Tensor, *more: Any) -> Any:
        made = decode(weight, *more)
        weights[id(made)] = weight
        return made

    def conv2d(sources: Any, weight: Any, bias: Any, *, transposed: bool = False, relu: bool, **place: Any) -> Any:
        assert weight.channels == tuple(source.shape[-1] for source in sources)
        place = {name: place[name] for name in ("stride", "padding", "dilation", "dtype", "out_amax") if name in place}
        multiply = conv_transpose2d_reference if transposed else conv2d_reference
        return multiply(sources[0] if transposed else sources, weights[id(weight)], bias, relu=relu, **place), None

    monkeypatch.setattr(network_module.decoded, "available", lambda _: True)
    monkeypatch.setattr(network_module, "decode_weight", decoded_weight)
    monkeypatch.setattr(network_module.decoded, "conv2d", conv2d)
    there = PackedNetwork(file)
    layers = [node for node in file.graph.nodes if isinstance(node, Layer) and node.precision == "nvfp4"]
    assert len(layers) - len(there._decoded) == 2  # those that read 48 channels
    assert there.decodes_layers == measured
    assert not PackedNetwork(file, weights="packed").decodes_layers
    there.pack = here.pack = packed_form
    image = file.graph.inputs[0]
    live = dict(zip([form.name for form in image.outputs], here.read_input(image, x, packed_form), strict=True))
    for node in file.graph.nodes:
        inputs = [live[each] for each in node.inputs]
        got = here.run_node(node, inputs)
        if node in layers:
            for one, other in zip(there.run_node(node, inputs), got, strict=True):
                torch.testing.assert_close(decoded_form(one, torch.float32), decoded_form(other, torch.float32))
        live.update(zip([form.name for form in node.outputs], got, strict=True))


def test_a_volume_with_little_contrast_is_normalised_as_by_torch() -> None:
    """Its mean is 3000 deviations: torch's GroupNorm of channels_last on a CPU, off by 0.1 there, is not used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 8, 1), nn.GroupNorm(8, 8), nn.Conv3d(8, 8, 1)).eval()
    nn.init.constant_(model[0].weight, 1e-3)  # type: ignore[arg-type]
    nn.init.constant_(model[0].bias, 3.0)  # type: ignore[arg-type]
    round_to_deployed(model)
    x = torch.randn(1, 1, 16, 32, 32)
    network = PackedNetwork(packed_file(Path("net.fp4"), None, *pack_model(model, x)))
    with torch.no_grad():
        torch.testing.assert_close(network(x), model(x), atol=1e-3, rtol=0)


def test_flags_of_the_process_are_one_threads_at_a_time() -> None:
    """Another thread that comes and goes meanwhile neither changes them inside nor leaves them changed."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32

    def visit() -> None:
        with allowing_tf32(True):
            pass

    other = threading.Thread(target=visit)
    with allowing_tf32(False):
        other.start()
        other.join(0.05)
        assert other.is_alive()  # it waits
        with allowing_tf32(True):  # its own thread may change them within
            assert torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
    other.join()
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before
