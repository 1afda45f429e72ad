"""`import-modelopt` on the command line: from a file of ModelOpt to a checkpoint that export takes."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile

import torch

from fp4deploy.models import load_weights, read_card
from fp4deploy.models.checkpoint import network_of
from fp4deploy.provenance import links, verify_run
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.runs import create_run
from tests.cli.command_line import Invoke
from tests.interop.test_modelopt import FILE


def of_modelopt(checkpoint: Path, target: Path) -> None:
    """The checkpoint as ModelOpt saves it, with the states of quantisers that it wrote for another network."""
    held = torch.load(FILE, weights_only=True)
    mode, state = held["modelopt_state"]["modelopt_state_dict"][0]
    states = state["metadata"]["quantizer_state"]
    network = network_of(checkpoint, read_card(checkpoint))
    load_weights(network, checkpoint)
    tensors = dict(network.state_dict())
    written = {}
    for layer, like in (("encoder.1.conv1", "2"), ("encoder.1.conv2", "4"), ("up.0", "5")):
        for own in ("input_quantizer", "weight_quantizer"):
            written[f"{layer}.{own}"] = states[f"{like}.{own}"]
            tensors[f"{layer}.{own}._amax"] = torch.tensor(1.5)
    state["metadata"]["quantizer_state"] = written
    held["modelopt_state"]["modelopt_state_dict"] = [(mode, state)]
    torch.save({"modelopt_state": held["modelopt_state"], "model_state_dict": tensors}, target)


def test_a_file_of_modelopt_becomes_a_checkpoint(invoke: Invoke, checkpoint: Path, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    run.config_path.touch()
    like = run.checkpoint("fp16")
    like.parent.mkdir()
    copyfile(checkpoint, like)
    of_modelopt(checkpoint, tmp_path / "mo.pt")
    result = invoke("import-modelopt", "mo.pt", "--like", like)
    assert result.exit_code == 0, result.stderr
    assert "mo.safetensors (2 of 3 quantised layers, 1 of them in FP8)" in result.stdout
    assert "its format, INT8" in result.stdout
    model, card = load_model(tmp_path / "mo.safetensors")
    assert (card.include, card.formats) == (("encoder.1.conv1", "encoder.1.conv2"), {"fp8": ("encoder.1.conv2",)})
    assert {name: round(float(layer.input_amax), 3) for name, layer in quantized_layers(model).items()} == {  # type: ignore[arg-type]
        "encoder.1.conv1": 1.5, "encoder.1.conv2": 1.5
    }  # fmt: skip
    assert "--baseline run/fp16/best.safetensors --data DIR; export it with" in result.stderr
    [link] = links(run)
    assert link.stage == "import-modelopt"
    assert [Path(each.path).name for each in link.inputs] == ["best.safetensors", "mo.pt"]
    assert [finding.status for finding in verify_run(run)] == ["ok"]


def test_what_it_refuses(invoke: Invoke, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"nothing")
    for arguments, message in (
        (("x.pt", "--like", checkpoint), "x.pt"),
        (("absent.pt", "--like", checkpoint), "There is no file absent.pt"),
        (("x.pt", "--like", checkpoint, "--out", "x.pt"), "should be a .safetensors file"),
    ):
        result = invoke("import-modelopt", *arguments)
        assert result.exit_code == 2, result.stderr
        assert message in result.stderr
