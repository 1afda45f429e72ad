"""The table of architectures in its small form: this project's UNet, a network of a file, and a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import own_networks
from benchmarks.architectures import ARCHITECTURES, UNTUNED, _kept, measure
from fp4deploy.models import spec
from tests.models.libraries import need_library_of

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Conv2d(32, classes, 1)

    def forward(self, x):
        return self.head(torch.relu(self.body(torch.relu(self.stem(x)))))

class Branching(Net):
    def forward(self, x):
        if x.mean() > 0:
            x = x + 1
        return super().forward(x)
"""


@pytest.mark.variants
def test_a_row_says_what_became_of_a_network(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    row = measure(f"{tmp_path / 'net.py'}:Net", {}, engine=False, size=(16, 24), scenes=4)
    assert (row["prepare"]["layers"], row["prepare"]["fp4_layers"]) == (3, 1)
    assert row["train"]["finite"]
    assert row["canonical"]["passed"]
    assert row["packed"]["passed"]
    assert row["portable"]["argmax"] > 0.99
    assert not [stage for stage in row.values() if isinstance(stage, dict) and "error" in stage]


def test_dynamic_control_flow_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    row = measure(f"{tmp_path / 'net.py'}:Branching", {}, engine=False, size=(16, 24), scenes=4)
    assert row["train"]["finite"]
    for stage in ("canonical", "packed"):
        assert "traceback" not in row[stage]
        assert "net.py, line 15" in row[stage]["error"]
        assert "torch.where" in row[stage]["error"]


def test_the_table_has_at_least_twelve_architectures() -> None:
    assert len(ARCHITECTURES) >= 12
    assert len(UNTUNED) >= 3
    sources = {spec.parse_spec(text).source for text in (*ARCHITECTURES, *UNTUNED)}
    assert sources == {*spec.KNOWN, "file"} - {"hf"}  # which has classifiers


@pytest.mark.parametrize("factory", [own_networks.enet, own_networks.bisenetv2])
def test_own_networks_give_logits_of_the_size_of_the_image(factory: Callable[[int], nn.Module]) -> None:
    with torch.inference_mode():
        assert factory(5).eval()(torch.zeros(1, 3, 32, 64)).shape == (1, 5, 32, 64)


def test_adding_rows_keeps_the_others_and_both_commands() -> None:
    table = {"command": "first", "rows": [{"model": "a"}, {"model": "b"}]}
    kept = _kept(table, ["b"], "second")
    assert kept == {"command": "first; second", "rows": [{"model": "a"}]}
    assert _kept(kept, [], "second")["command"] == "first; second"


@pytest.mark.parametrize("text", ["smp:FPN/resnet18", "torchvision:lraspp_mobilenet_v3_large", "timm:convnext_atto"])
def test_rows_of_libraries(text: str) -> None:
    need_library_of(text)
    row = measure(text, {}, engine=False, scenes=4)
    assert row["canonical"]["passed"]
    assert row["packed"]["passed"]
