"""Model specs: what they name, what they build, and that no file makes code run."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.models import ModelCard, build_model, name_model, parse_spec, save_checkpoint, spec
from fp4deploy.models.initial import load_initial
from fp4deploy.models.sources import SOURCES
from fp4deploy.models.volumes import IMAGES
from fp4deploy.qat import load_model
from tests.models.libraries import need_library_of

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, x):
        return self.classifier(torch.relu(self.body(torch.relu(self.stem(x)))))

class Outputs(Net):
    def __init__(self, num_classes, width=16, output="tensor"):
        super().__init__(num_classes, width)
        self.output = output

    def forward(self, x):
        y = super().forward(x)
        if self.output == "dict":
            return {"aux": y[:, :1], "out": y}
        if self.output == "tuple":
            return y.mean(), y
        return float(y.mean()) if self.output == "number" else y

build = Outputs

def unaware():
    return Net(7)

def nothing(classes):
    return "a network"

def failing(classes):
    raise RuntimeError("out of ideas")
"""


@pytest.fixture(autouse=True)
def _nothing_named() -> Iterator[None]:
    yield
    spec._named.clear()
    spec._expected.clear()


@pytest.fixture
def net(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return str(path)


def card(architecture: str, **fields: object) -> ModelCard:
    return ModelCard(
        "fp16", 1.0, ("a", "b", "c"), 32, 48, (0.5,) * 3, (0.2,) * 3, False, architecture=architecture, **fields
    )


@pytest.mark.parametrize(
    ("text", "source", "name"),
    [
        ("unet", "unet", ""),
        ("unet:0.5", "unet", ""),
        ("smp:Unet/resnet34", "smp", "Unet/resnet34"),
        ("torchvision:deeplabv3_resnet50", "torchvision", "deeplabv3_resnet50"),
        ("folder/net.py:build", "file", "build"),
        ("my.nets:Net", "module", "Net"),
    ],
)
def test_parts_of_a_spec(text: str, source: str, name: str) -> None:
    found = parse_spec(text)
    assert (found.source, found.name) == (source, name)
    assert parse_spec(found.text).same_network(found)
    assert found.known == (source not in ("file", "module"))


@pytest.mark.parametrize(
    "text",
    ["", "resnet", "smp:", "smpp:Unet", "unet:wide", "net.py", "net.py:", "a b:c", "x:1", "unet:nan", "unet:inf"],
)
def test_what_is_no_spec(text: str) -> None:
    with pytest.raises(InputError, match=r"Examples: unet:1\.0|is not a scale"):
        parse_spec(text)


def test_a_factory_of_a_file_gets_classes_and_arguments_and_logits_are_resized(net: str) -> None:
    model = build_model(parse_spec(f"{net}:build", {"width": 32}), 5)
    assert model.body.in_channels == 32
    x = torch.randn(2, 3, 32, 48)
    assert model(x).shape == (2, 5, 32, 48)
    assert next(iter(model.state_dict())) == "stem.weight"
    small = nn.functional.conv2d(
        torch.relu(model.body(torch.relu(model.stem(x)))), model.classifier.weight, model.classifier.bias
    )
    expected = nn.functional.interpolate(small, (32, 48), mode="bilinear", align_corners=False)
    assert torch.allclose(model(x), expected)


@pytest.mark.parametrize(("output", "key"), [("dict", None), ("dict", "out"), ("tuple", "1")])
def test_logits_among_several_outputs(net: str, output: str, key: str | None) -> None:
    model = build_model(parse_spec(f"{net}:build", {"output": output}, key), 5)
    assert model(torch.randn(2, 3, 32, 48)).shape == (2, 5, 32, 48)


@pytest.mark.parametrize(
    ("factory", "arguments", "output", "message"),
    [
        ("nothing", {}, None, "returned str and not a torch.nn.Module"),
        ("failing", {}, None, "RuntimeError: out of ideas"),
        ("missing", {}, None, "has no function or class 'missing'"),
        ("build", {"depth": 3}, None, "has no parameter depth.* width"),
        ("build", {"width": "many"}, None, "cannot be built with .*width='many'"),
    ],
)
def test_factories_that_give_no_network(
    net: str, factory: str, arguments: dict[str, object], output: str | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build_model(parse_spec(f"{net}:{factory}", arguments, output), 5)


@pytest.mark.parametrize(
    ("factory", "arguments", "output", "message"),
    [
        ("build", {"output": "number"}, None, "returns float and no tensor"),
        ("build", {"output": "tuple"}, None, r"shape \[\].*\[N, 5, h, w\]"),
        ("build", {"output": "tuple"}, "9", "returns 2 outputs"),
        ("build", {"output": "tuple"}, "--1", "returns 2 outputs"),
        ("build", {"output": "tuple"}, "²", "returns 2 outputs"),
        ("build", {"output": "dict"}, "mask", "returns aux, out, and no 'mask'"),
        ("build", {"output": "dict"}, "aux", r"has the shape \[2, 1, 16, 24\]"),
        ("unaware", {}, None, r"has the shape \[2, 7, 16, 24\].*take the number of classes"),
    ],
)
def test_outputs_that_are_no_logits_map(
    net: str, factory: str, arguments: dict[str, object], output: str | None, message: str
) -> None:
    model = build_model(parse_spec(f"{net}:{factory}", arguments, output), 5)
    with pytest.raises(InputError, match=message):
        model(torch.randn(2, 3, 32, 48))


def test_files_and_modules_that_cannot_be_imported(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nowhere_to_be_found")
    for text, message in (
        (f"{broken}:build", "cannot be imported: ModuleNotFoundError"),
        (f"{tmp_path / 'absent.py'}:build", "There is no file"),
        ("nowhere_to_be_found:build", "Known sources are"),
    ):
        with pytest.raises(InputError, match=message):
            build_model(parse_spec(text), 3)


def test_a_checkpoint_imports_code_of_the_user_only_when_it_is_named_again(net: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    Path(net).write_text(f"open({str(mark)!r}, 'a').close()\n{NET}")
    path, text = tmp_path / "best.safetensors", f"{net}:build"
    model = build_model(parse_spec(text, {"width": 32}), 3)
    save_checkpoint(path, model, card(text, arguments={"width": 32}))
    mark.unlink()
    with pytest.raises(InputError, match=f"a file never makes code run.*--model {re.escape(text)}"):
        load_model(path)
    assert not mark.exists()
    loaded, found = load_model(path, model=text)
    assert mark.exists()
    assert found.arguments == {"width": 32}
    assert torch.equal(loaded.body.weight, model.body.weight.half().float())
    with pytest.raises(InputError, match="the model named for it is .*other"):
        load_model(path, model=f"{net}:other")
    name_model(text)
    assert load_model(path)[1] == found


def test_a_checkpoint_of_another_spec_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    unet = ModelCard("fp16", 0.125, ("a", "b"), 32, 32, (0.5,) * 3, (0.2,) * 3, False)
    save_checkpoint(path, build_model(parse_spec("unet:0.125"), 2), unet)
    assert load_model(path, model="unet")[1] == unet
    with pytest.raises(InputError, match="is a unet, and the model named for it is smp:Unet/resnet34"):
        load_model(path, model="smp:Unet/resnet34")


def test_a_card_keeps_spec_arguments_and_output() -> None:
    kept = card("smp:Unet/resnet34", arguments={"decoder_channels": [64, 32], "x": None}, output="out")
    assert ModelCard.from_json(kept.to_json()) == kept
    plain = card("unet")
    assert "arguments" not in plain.to_json()
    with pytest.raises(InputError, match="architecture = 'smpp:Unet'"):
        ModelCard.from_json(plain.to_json().replace('"unet"', '"smpp:Unet"'))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_initial_weights(net: str, tmp_path: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    source, path = build_model(parse_spec(f"{net}:build"), 5), tmp_path / f"weights{suffix}"
    tensors = source.state_dict()
    if suffix == ".pth":
        torch.save({"state_dict": {f"module.{name}": value for name, value in tensors.items()}, "epoch": 3}, path)
    else:
        save_file(tensors, path)
    same, other = (build_model(parse_spec(f"{net}:build"), classes) for classes in (5, 9))
    assert "6 tensors" in load_initial(same, path)
    assert all(torch.equal(value, tensors[name]) for name, value in same.state_dict().items())
    before = other.classifier.weight.clone()
    assert "classifier.bias, classifier.weight start from random weights" in load_initial(other, path)
    assert torch.equal(other.stem.weight, source.stem.weight)
    assert torch.equal(other.classifier.weight, before)
    with pytest.raises(InputError, match=r"does not fit this network: .*body\.weight \[16, 16, 3, 3\] instead of"):
        load_initial(build_model(parse_spec(f"{net}:build", {"width": 32}), 5), path)
    with pytest.raises(InputError, match=r"tensors missing \(0\.weight.*unknown \("):
        load_initial(nn.Sequential(nn.Conv2d(3, 16, 3)), path)


def test_weights_of_a_backbone_fit_a_child(tmp_path: Path) -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    path = tmp_path / "backbone.pth"
    torch.save({**backbone.state_dict(), "fc.weight": torch.zeros(10, 8)}, path)
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), "head": nn.Conv2d(8, 3, 1)})
    assert "all of encoder" in load_initial(model, path)
    assert torch.equal(model["encoder"][0].weight, backbone[0].weight)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path, mark = tmp_path / "weights.pth", tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return open, (str(mark), "a")

    torch.save({"weight": Evil()}, path)
    with pytest.raises(InputError, match="holds more than tensors"):
        load_initial(nn.Linear(2, 2), path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("smp:Unet/resnet34", {"encoder_weights": "imagenet"}, "no weights are downloaded"),
        ("torchvision:fcn_resnet50", {"weights": "DEFAULT"}, "no weights are downloaded"),
        ("timm:resnet18", {"pretrained_cfg": {"file": "x"}}, "no weights are downloaded"),
        ("timm:hf_hub:some/model", {}, "names no model"),
        ("smp:Unett/resnet34", {}, "Did you mean 'Unet'"),
        ("torchvision:resnet50", {}, "There is no 'resnet50'"),
    ],
)
def test_libraries_are_asked_for_nothing_but_networks(text: str, arguments: dict[str, object], message: str) -> None:
    if text.count(":") == 1:
        need_library_of(text)
    with pytest.raises(InputError, match=message):
        build_model(parse_spec(text, arguments), 3)


def test_a_missing_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UnavailableError, match=r"timm.*pip install -e"):
        build_model(parse_spec("timm:resnet18"), 3)
    assert set(SOURCES) == set(spec.KNOWN) - {"unet"}


@pytest.mark.parametrize(
    "text",
    [
        *("smp:Unet/resnet18", "torchvision:lraspp_mobilenet_v3_large", "monai:BasicUNet", "timm:resnet18"),
        "timm:mambaout_femto",  # its feature maps are NHWC
    ],
)
def test_networks_of_libraries(text: str) -> None:
    need_library_of(text)
    model = build_model(parse_spec(text), 5).eval()
    with torch.inference_mode():
        assert model(torch.randn(1, 3, 64, 96)).shape == (1, 5, 64, 96)


class Pyramid(nn.Module):
    """As a backbone of timm: two feature maps, in the layout that `output_fmt` names."""

    def __init__(self, output_fmt: str) -> None:
        super().__init__()
        self.output_fmt = output_fmt
        self.feature_info = SimpleNamespace(channels=lambda: (8, 16), reduction=lambda: (4, 8))
        self.convs = nn.ModuleList((nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 16, 2, 2)))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        maps = [self.convs[0](x)]
        maps.append(self.convs[1](maps[0]))
        return [each.permute(0, 2, 3, 1) for each in maps] if self.output_fmt == "NHWC" else maps


def test_feature_maps_of_timm_in_either_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = iter(("NCHW", "NHWC"))
    stand_in = SimpleNamespace(is_model=lambda name: True, create_model=lambda **_: Pyramid(next(layouts)))
    monkeypatch.setattr("fp4deploy.models.sources._library", lambda name: stand_in)
    plain, last = (SOURCES["timm"]("net", 5, {}, IMAGES).eval() for _ in range(2))
    last.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 32, 64)
    torch.testing.assert_close(last(x), plain(x))


def test_a_compressed_archive_is_no_file_of_torch(tmp_path: Path) -> None:
    """A few kilobytes could ask for any memory."""
    path = tmp_path / "weights.pth"
    torch.save({"weight": torch.zeros(1 << 20)}, path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for part in archive.infolist():
            bomb.writestr(part.filename, archive.read(part))
    assert (tmp_path / "bomb.pth").stat().st_size < 1 << 16
    with pytest.raises(InputError, match="it is compressed"):
        load_initial(nn.Linear(2, 2), tmp_path / "bomb.pth")


def test_a_tensor_of_more_elements_than_the_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"weight": torch.zeros(1).expand(1 << 40, 2), "bias": torch.zeros(2)}, path)
    assert "weight start from random weights" in load_initial(nn.Linear(2, 2), path)
    torch.save({"weight": torch.zeros(1).expand(2, 1 << 40), "bias": torch.zeros(2)}, path)
    with pytest.raises(InputError, match="does not fit"):
        load_initial(nn.Linear(2, 2), path)
