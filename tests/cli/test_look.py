"""Commands that look without making anything: check, inspect, doctor, data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command_line import Invoke


def test_check_gives_every_layer_a_reason(invoke: Invoke) -> None:
    result = invoke("check", "unet:0.25", "--json")
    layers = json.loads(result.stdout)["layers"]
    kinds = {layer["name"]: (layer["precision"], layer["reason"]) for layer in layers}
    assert kinds["encoder.0.conv1"][0] == kinds["head"][0] == kinds["encoder.2.norm1"][0] == "FP16"
    assert kinds["encoder.0.conv2"][0] == kinds["up.0"][0] == "FP4"
    assert all(reason for _, reason in kinds.values())
    assert result.stderr == ""


@pytest.mark.usefixtures("whole_unets")
def test_check_counts_layers_and_shares_in_every_form(invoke: Invoke) -> None:
    result = invoke("check", "unet")
    assert result.exit_code == 0
    assert "unet: 41 layers, 21 quantised to FP4." in result.stdout
    assert "Of these, TensorRT-RTX with --conv auto multiplies 4 in FP4 and 17 in FP8." in result.stdout
    rows = {
        row[1]: row[-3:] for line in result.stdout.splitlines() if (row := re.split(r" {2,}|(?<=--conv) ", line))[1:]
    }
    assert rows["auto"] == rows["fp8"]


def test_check_counts_the_multiply_accumulates_of_a_network_of_ones_own(invoke: Invoke, tmp_path: Path) -> None:
    """Of a 1x1 convolution, a 3x3 one, and a first and a last layer."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make(num_classes):\n"
        "    inner = [nn.Conv2d(16, 144, 1), nn.Conv2d(144, 16, 3, padding=1)]\n"
        "    return nn.Sequential(nn.Conv2d(3, 16, 1), *inner, nn.Conv2d(16, num_classes, 1))\n"
    )
    found = json.loads(invoke("check", f"{tmp_path}/net.py:make", "--classes", "4", "--size", "8x16", "--json").stdout)
    assert [layer["macs"] for layer in found["layers"]] == [128 * n for n in (48, 2304, 20736, 64)]
    total = 48 + 2304 + 20736 + 64
    assert found["shares"]["requested"] == {"FP4": (2304 + 20736) / total, "FP16": (48 + 64) / total}
    assert found["shares"]["conv"]["auto"] == {"FP8": 20736 / total, "FP4": 2304 / total, "FP16": (48 + 64) / total}
    assert found["shares"]["conv"]["gemm"] == found["shares"]["requested"]


def test_check_says_which_shares_it_does_not_know(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make(num_classes):\n"
        "    fixed = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 32 * 16), nn.Unflatten(1, (32, 4, 4)))\n"
        "    return nn.Sequential(nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 1), fixed, nn.Conv2d(32, num_classes, 1))\n"
    )
    assert "not known" not in invoke("check", f"{tmp_path}/net.py:make", "--size", "4x4").stdout
    result = invoke("check", f"{tmp_path}/net.py:make")
    assert result.exit_code == 0
    assert "are not known: the network fails on images of 256x256 (--size names another)" in result.stdout
    found = json.loads(invoke("check", f"{tmp_path}/net.py:make", "--json").stdout)
    assert "256x256" in found["shares_unknown"]
    assert found["shares"]["requested"] == {}


def test_check_reads_checkpoints(invoke: Invoke, checkpoint: Path) -> None:
    names = [layer["name"] for layer in json.loads(invoke("check", checkpoint, "--json").stdout)["layers"]]
    assert names == [layer["name"] for layer in json.loads(invoke("check", "unet:0.125", "--json").stdout)["layers"]]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("unet:big",), "'big' is not a scale"),
        (("unet:0.3",), "Valid scales are multiples of 0.125"),
        (("resnet",), "names no model"),
        (("unet", "--recipe", "nvfp4_qta"), "Did you mean 'nvfp4_qat'?"),
    ],
)
def test_check_refuses(invoke: Invoke, arguments: tuple[str, ...], cause: str) -> None:
    result = invoke("check", *arguments)
    assert result.exit_code == 2
    assert cause in result.stderr
    assert result.stdout == ""


def test_inspect_checkpoint(invoke: Invoke, checkpoint: Path) -> None:
    result = invoke("inspect", checkpoint, "--json")
    facts = json.loads(result.stdout)
    assert (facts["precision"], facts["scale"], facts["height"]) == ("fp16", 0.125, 32)
    assert {"tensor": "head.weight", "type": "F32", "shape": [7, 8, 1, 1]} in facts["layers"]
    assert "head.weight" in invoke("inspect", checkpoint).stdout


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a"])
def test_inspect_refuses_other_kinds(invoke: Invoke, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    result = invoke("inspect", name)
    assert result.exit_code == 2
    assert ".onnx, .fp4, .plan, .ledger.json, .safetensors" in result.stderr


def test_inspect_plan_without_ledger(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "unet.plan").write_bytes(b"vtrt")
    result = invoke("inspect", "unet.plan")
    assert result.exit_code == 2
    assert "no ledger (unet.ledger.json) in its folder" in result.stderr


def test_doctor_json_is_alone_on_stdout(invoke: Invoke) -> None:
    result = invoke("doctor", "--json")
    facts = json.loads(result.stdout)
    names = [tool["name"] for tool in facts["tools"]]
    assert names == ["torch", "onnx", "onnxruntime", "tensorrt_rtx", "tensorrt", "pycuda", "triton", "cv2", "nvcc"]
    assert facts["abilities"]["train"]["able"] is True
    assert result.stderr == ""


def test_doctor_tells_a_library_that_does_not_load_from_a_missing_one(
    monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    from fp4deploy.requirements import Fault, Library

    fault, find = Fault("does not load", "libhalf.so: cannot open"), Library.find
    monkeypatch.setattr(Library, "find", lambda library: fault if library.name == "onnx" else find(library))
    lines = {line.split()[0]: line for line in invoke("doctor").stdout.splitlines() if line}
    assert "does not load" in lines["onnx"]
    assert lines["onnx"].rstrip().endswith("libhalf.so: cannot open")
    found = {each["name"]: each for each in json.loads(invoke("doctor", "--json").stdout)["tools"]}
    assert found["onnx"]["fault"] == {"state": "does not load", "reason": "libhalf.so: cannot open"}
    assert found["torch"]["fault"] is None


def test_doctor_says_how_to_add_what_is_missing(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    import fp4deploy.bench.environment as environment
    from fp4deploy.requirements import Fault, Library

    monkeypatch.setattr(Library, "version", lambda library: Fault() if library.name == "tensorrt_rtx" else "1.0")
    monkeypatch.setattr(environment, "gpus", list)
    text = invoke("doctor").stdout
    lines = [line for line in text.splitlines() if line.startswith("tensorrt_rtx")]
    assert "missing" in lines[0]
    assert "pip install tensorrt-rtx" in lines[0]
    assert "tensorrt_rtx is missing" in text
    assert "CUDA GPU: none" in text


def test_data_shapes_then_check(invoke: Invoke, tmp_path: Path) -> None:
    made = invoke("data", "shapes", "set", "--train", 3, "--val", 2, "--size", 32, "--seed", 5)
    assert made.exit_code == 0
    assert "set: 3 training and 2 validation scenes" in made.stdout
    assert len(list((tmp_path / "set" / "train2017").iterdir())) == 3
    result = invoke("data", "check", "set", "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["folder"], facts["defects"]) == (0, "set", [])
    assert [(split["split"], split["images"]) for split in facts["splits"]] == [("train", 3), ("val", 2)]


def test_data_check_lists_every_defect(invoke: Invoke, tmp_path: Path) -> None:
    invoke("data", "shapes", "set", "--train", 3, "--val", 2, "--size", 32)
    path = tmp_path / "set" / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["image_id"] = 99
    content["annotations"][1]["category_id"] = 77
    path.write_text(json.dumps(content))
    image = tmp_path / "set" / "val2017" / "000000000001.jpg"
    image.write_bytes(image.read_bytes()[:300])
    result = invoke("data", "check", "set", "--json")
    assert result.exit_code == 1
    defects = json.loads(result.stdout)["defects"]
    assert {defect["annotation_id"] for defect in defects} >= {1, 2}
    assert any(defect["file"].endswith("000000000001.jpg") for defect in defects)
    assert f"{len(defects)} defects" in result.stderr
    text = invoke("data", "check", "set").stdout
    assert sum(line.endswith("]") for line in text.splitlines()) == len(defects)
    assert "annotations/instances_train2017.json: annotation 1 names the image id 99," in text
    assert text.count("annotation 1 ") == 1


def test_check_plans_a_unet_with_digits(invoke: Invoke) -> None:
    layers = json.loads(invoke("check", "unet:0.25", "--digits", "--json").stdout)["layers"]
    assert layers[0]["reason"] == "first layer: reads the image (13 input channels, a block has 16)"
    assert sum(layer["precision"] == "FP4" for layer in layers) == 11


def test_check_and_inspect_a_checkpoint_with_digits(invoke: Invoke, tmp_path: Path) -> None:
    from fp4deploy.models import ModelCard, build_unet, save_checkpoint

    card = ModelCard("fp16", 0.125, ("a", "b"), 32, 32, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), False, digits=True)
    save_checkpoint(tmp_path / "best.safetensors", build_unet(2, 0.125, digits=True), card)
    assert "13 input channels" in invoke("check", "best.safetensors").stdout
    assert "digits: True" in invoke("inspect", "best.safetensors").stdout
    facts = json.loads(invoke("inspect", "best.safetensors", "--json").stdout)
    assert facts["digits"] is True
    assert {"tensor": "encoder.0.conv1.weight", "type": "F32", "shape": [8, 13, 3, 3]} in facts["layers"]


def test_check_tells_fp8_layers_from_fp4_ones(invoke: Invoke) -> None:
    result = invoke("check", "unet:0.125", "--recipe", "nvfp4_fp8_qat", "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["name"]: (row["precision"], row["engine"]) for row in json.loads(result.stdout)["layers"]}
    assert rows["encoder.1.conv1"] == ("FP8", "FP8")
    assert rows["up.0"] == ("FP4", "FP4")
    assert rows["head"] == ("FP16", "FP16")
