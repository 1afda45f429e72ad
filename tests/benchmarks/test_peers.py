"""What benchmarks measure can be built: the networks of their tables, as `fp4deploy train --model` builds them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp4deploy.models import build_unet
from fp4deploy.models.spec import parse_spec

FOLDER = Path(__file__).parents[2] / "benchmarks"


CHILD = """
import fcntl, pathlib, sys, time
folder, number = pathlib.Path(sys.argv[1]), sys.argv[2]
if number == "1":
    sys.exit(3)
if number == "2":
    time.sleep(60)
(folder / f"{number}.ready").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
(folder / f"{number}.json").write_text("{}")
"""


def test_cases_compile_at_once_and_what_is_late_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four, one ends before its turn and one is not ready in time."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import peers

    commands = [[sys.executable, "-c", CHILD, str(tmp_path), str(number)] for number in range(4)]
    assert peers.at_once(commands, tmp_path, 3.0, 10.0) == [1, 2]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["0.json", "3.json"]


def test_the_networks_of_the_tables_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import packed_latency
    import peers

    for name in ("packed_latency", "peers", "training_step"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))  # gone afterwards
    assert peers.network("0.125", 5)(torch.zeros(1, 3, 16, 16)).shape == (1, 5, 16, 16)
    for case in packed_latency.NETWORKS:
        spec, _, size = case.rpartition(":")
        assert parse_spec(spec).known
        assert len(size.split("x")) == 3
    made = packed_latency.model("0.125", "fp16", (16, 16))
    assert made(torch.zeros(1, 3, 16, 16)).shape[1] == len(packed_latency.CLASSES)


@pytest.mark.variants
@pytest.mark.parametrize("autocast", ["fp16", "bf16"])
def test_a_training_step_of_the_tables_moves_the_weights_in_either_precision(
    monkeypatch: pytest.MonkeyPatch, autocast: str
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import training_step

    for name in ("peers", "training_step"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    monkeypatch.setattr(training_step, "HEIGHT", 16)
    monkeypatch.setattr(training_step, "WIDTH", 16)
    network = build_unet(training_step.CLASSES, 0.125)
    before = [weight.clone() for weight in network.parameters()]
    seen: list[torch.dtype] = []
    network.register_forward_hook(lambda *each: seen.append(each[-1].dtype))
    training_step.make_step(network, torch.channels_last, batch=2, autocast=autocast)()
    assert seen == [{"fp16": torch.float16, "bf16": torch.bfloat16}[autocast]]
    assert any(not torch.equal(*each) for each in zip(before, network.parameters(), strict=True))


@pytest.mark.parametrize("network", ["timm:vit_small_patch16_224", "transformers:gpt2"])
def test_a_training_step_of_a_transformer_minimises_its_loss(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import transformer_steps

    for name, value in {"IMAGES": 2, "SIZE": 8, "LABELS": 10, "SEQUENCES": 2, "LENGTH": 6, "TOKENS": 10}.items():
        monkeypatch.setattr(transformer_steps, name, value)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    of_images = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    of_tokens = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10))
    model = of_images if network.startswith("timm:") else of_tokens
    seen: list[float] = []
    monkeypatch.setattr(
        transformer_steps, "_cross_entropy", lambda *each, own=transformer_steps._cross_entropy: noted(own(*each), seen)
    )
    step = transformer_steps.make_step(network, model, "bf16")
    for _ in range(20):
        step()
    assert len(seen) == 20
    assert seen[-1] < seen[0]


def noted(loss: torch.Tensor, seen: list[float]) -> torch.Tensor:
    seen.append(loss.item())
    return loss


def test_rows_beside_those_of_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import packed_latency
    import training_step

    for name in ("packed_latency", "peers", "training_step"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    case = {"scale": 1.0, "case": "fp16 fused"}
    rows = [{**case, "autocast": "fp16", "ms": 9.0, "graph_ms": 4.0}, {**case, "autocast": "bf16", "graph_ms": 5.0}]
    training_step.over_fp16([*rows, {**case, "scale": 2.0, "autocast": "bf16", "ms": 1.0}], "scale", "case")
    assert [row.get("over_fp16") for row in rows] == [None, 1.25]
    runs = {"packed nvfp4": 2.0, "packed nvfp4, compiled": 1.0, "packed nvfp4, rest bf16": 1.5, "fp16, compiled": 2.0}
    row = {"runs": {name: {"graph_ms": ms} for name, ms in runs.items()}}
    packed_latency.compare(row)
    assert row["over_fp16"] == {"packed nvfp4, rest bf16": 0.75, "packed nvfp4, faster, rest bf16": 1.5}
    assert row["ratio_nvfp4"] == 0.5
