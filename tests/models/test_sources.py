"""A card builds a network from what is on this machine: no argument reaches a hub, a server or a file.

Stand-ins take the place of the libraries, so that the tests run without them: they do what the libraries do with the
arguments that they get.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import urllib.request
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models import ModelCard
from fp4deploy.models.build import build_model, network_for
from fp4deploy.models.spec import parse_spec
from fp4deploy.system.offline import offline

SERVER = "http://localhost:9/weights.pth"


class Backbone(nn.Module):
    """Two feature maps, as of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_info = SimpleNamespace(channels=lambda: (8, 16), reduction=lambda: (8, 16))
        self.convs = nn.ModuleList((nn.Conv2d(3, 8, 8, 8), nn.Conv2d(8, 16, 2, 2)))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = self.convs[0](x)
        return [first, self.convs[1](first)]


class Library:
    """timm, segmentation-models-pytorch and MONAI in one; `asked` is what they would fetch."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        library = self

        class Unet(nn.Conv2d):
            def __init__(
                self,
                encoder_name: str = "resnet34",
                encoder_weights: str | None = "imagenet",
                classes: int = 1,
                **_: Any,
            ) -> None:
                library.fetch(encoder_weights if encoder_name.isidentifier() else encoder_name)
                super().__init__(3, classes, 1)

        class Pretrained(nn.Conv2d):
            def __init__(self, out_channels: int, pretrained: bool = True, pretrained_url: str | None = SERVER) -> None:
                library.fetch(pretrained or pretrained_url)
                super().__init__(3, out_channels, 1)

        class Asks(nn.Conv2d):
            def __init__(self, out_channels: int) -> None:
                urllib.request.urlopen(SERVER)
                super().__init__(3, out_channels, 1)

        class Norm(nn.Conv2d):
            def __init__(self, out_channels: int, norm: object = "batch") -> None:
                super().__init__(3, out_channels, 1)

        self.Unet, self.Pretrained, self.Asks, self.Norm = Unet, Pretrained, Asks, Norm

    def fetch(self, what: object) -> None:
        if what:
            self.asked.append(what)

    def is_model(self, name: str) -> bool:
        return name == "resnet18"

    def list_models(self) -> list[str]:
        return ["resnet18"]

    def create_model(self, model_name: str, pretrained: bool = False, **_: Any) -> nn.Module:
        self.fetch(model_name if model_name != "resnet18" else pretrained)
        return Backbone()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    stand_in: Any = ModuleType("stand_in")
    nets: Any = ModuleType("stand_in.networks.nets")
    for name in ("is_model", "list_models", "create_model", "Unet"):
        setattr(stand_in, name, getattr(found, name))
    for name in ("Pretrained", "Asks", "Norm"):
        setattr(nets, name, getattr(found, name))
    monkeypatch.setitem(sys.modules, "stand_in", stand_in)
    monkeypatch.setitem(sys.modules, "stand_in.networks", ModuleType("stand_in.networks"))
    monkeypatch.setitem(sys.modules, "stand_in.networks.nets", nets)
    monkeypatch.setattr("fp4deploy.models.sources._library", lambda name: stand_in)
    return found


def card(architecture: str, **arguments: Any) -> ModelCard:
    written = ModelCard(
        "fp16", 1.0, ("a", "b"), 32, 32, (0.5,) * 3, (0.5,) * 3, True, architecture=architecture, arguments=arguments
    )
    return ModelCard.from_json(written.to_json())


@pytest.mark.parametrize(
    ("architecture", "arguments", "message"),
    [
        ("timm:resnet18", {"model_name": "hf-hub:someone/model"}, "model_name is not passed on"),
        ("timm:resnet18", {"model_name": "resnet50"}, "the name says it"),
        ("timm:resnet18", {"tag": "local-dir:/home/someone"}, "may name a file"),
        ("smp:Unet", {"encoder_name": "tu-hf-hub:someone/model"}, "may name a file"),
        ("smp:Unet/resnet18", {"encoder_name": "resnet50"}, "the name says it"),
        ("monai:Norm", {"norm": ["group", {"groups": "../x"}]}, "may name a file"),
        ("monai:Norm", {"norm": "weights.PTH"}, "may name a file"),
        ("monai:Norm", {"norm": {"http://x": 1}}, "may name a file"),
        ("monai:Norm", {"norm": "a\nb"}, "may name a file"),
        ("monai:Pretrained", {"pretrained": True}, "no weights are downloaded"),
    ],
)
def test_arguments_of_a_card_name_no_place(
    library: Library, architecture: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        network_for(card(architecture, **arguments))
    assert library.asked == []


@pytest.mark.parametrize(
    ("architecture", "arguments"),
    [
        ("timm:resnet18", {"act_layer": "relu", "block_args": {"groups": 2}, "stem": [1, 2.5, None, True]}),
        ("smp:Unet", {"encoder_name": "resnet50", "decoder_attention_type": "scse"}),
        ("smp:Unet/resnet18", {}),
        ("monai:Norm", {"norm": ["group", {"num_groups": 8}]}),
        ("monai:Pretrained", {}),
    ],
)
def test_networks_are_built_without_trained_weights(
    library: Library, architecture: str, arguments: dict[str, Any]
) -> None:
    assert network_for(card(architecture, **arguments))(torch.zeros(1, 3, 32, 32)).shape[1] == 2
    assert library.asked == []


@pytest.mark.usefixtures("library")
def test_a_class_that_asks_a_server_reaches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    constants: Any = ModuleType("huggingface_hub.constants")
    constants.HF_HUB_OFFLINE = False
    monkeypatch.setitem(sys.modules, constants.__name__, constants)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(InputError, match="monai:Asks tries to reach another machine"):
        build_model(parse_spec("monai:Asks"), 2)
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert "TRANSFORMERS_OFFLINE" not in os.environ
    assert constants.HF_HUB_OFFLINE is False


def test_offline_is_of_this_thread_and_of_the_block_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        reached: list[bool] = []

        def reach() -> None:
            with socket.create_connection(address, timeout=5):
                reached.append(True)

        with offline("The test"), offline("inside"):
            with pytest.raises(ConnectionError, match="inside tries"):
                reach()
            other = threading.Thread(target=reach)
            other.start()
            other.join()
            hub: Any = sys.modules.get("huggingface_hub.constants")
            assert hub is None or hub.is_offline_mode()
        reach()
    assert reached == [True, True]


def test_a_hub_that_is_imported_inside_is_not_left_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "huggingface_hub.constants"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for switched in (False, True):
        monkeypatch.delitem(sys.modules, name, raising=False)
        constants: Any = ModuleType(name)
        if switched:
            monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
        with offline("The test"):
            constants.HF_HUB_OFFLINE = os.environ["HF_HUB_OFFLINE"] == "1"
            monkeypatch.setitem(sys.modules, name, constants)
        assert constants.HF_HUB_OFFLINE is switched
