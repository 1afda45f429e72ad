"""The file: what is written comes back, and what was damaged, cut or made by others is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fp4deploy.errors import InputError
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, read_packed, write_packed
from fp4deploy.packed.file import KEY, _digest_of
from tests.packed.small_networks import images, packed


@pytest.fixture
def written(tmp_path: Path) -> Path:
    _, file = packed()
    path = tmp_path / "unet.fp4"
    write_packed(PackedFile(path, file.card, file.graph, file.tensors, file.version))
    return path


def rewrite(path: Path, change: Callable[[dict[str, str], dict[str, torch.Tensor]], None], sign: bool = True) -> None:
    with safe_open(path, framework="pt") as file:
        metadata, tensors = json.loads(file.metadata()[KEY]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(metadata, tensors)
    if sign:
        metadata["sha256"] = _digest_of(metadata)
    save_file(tensors, path, metadata={KEY: json.dumps(metadata)})


def change_graph(path: Path, change: Callable[[dict], None]) -> None:
    def edit(metadata: dict[str, str], _: dict[str, torch.Tensor]) -> None:
        graph = json.loads(metadata["graph"])
        change(graph)
        metadata["graph"] = json.dumps(graph)

    rewrite(path, edit)


def test_what_was_written_comes_back(written: Path) -> None:
    _, file = packed()
    read = read_packed(written)
    assert (read.card, read.graph, read.version) == (file.card, file.graph, file.version)
    assert read.tensors.keys() == file.tensors.keys()
    assert all(torch.equal(read.tensors[name].view(torch.uint8), file.tensors[name].view(torch.uint8))
               for name in file.tensors if file.tensors[name].ndim)  # fmt: skip
    assert torch.equal(PackedNetwork(read)(images(1)), PackedNetwork(file)(images(1)))
    before = written.read_bytes()
    write_packed(read)
    assert written.read_bytes() == before


def test_where_it_comes_from_is_kept_and_not_needed(written: Path) -> None:
    before, plain = read_packed(written), written.read_bytes()
    write_packed(dataclasses.replace(before, about='{"palette": [null, [1, 2, 3]]}'))
    assert read_packed(written).about == '{"palette": [null, [1, 2, 3]]}'
    write_packed(dataclasses.replace(read_packed(written), about=""))
    assert written.read_bytes() == plain  # as older versions write it


@pytest.mark.parametrize("everything", [False, True])
def test_a_network_that_reads_digits_comes_back(tmp_path: Path, everything: bool) -> None:
    _, file = packed("nvfp4_qat", 0.125, True, everything)
    path = tmp_path / "digits.fp4"
    write_packed(PackedFile(path, file.card, file.graph, file.tensors, file.version))
    read = read_packed(path)
    assert read.graph.digits
    assert read.card.digits
    assert torch.equal(PackedNetwork(read)(images(1)), PackedNetwork(file)(images(1)))


def test_a_file_of_before_digits_has_none(written: Path) -> None:
    change_graph(written, lambda graph: graph.pop("digits"))
    assert not read_packed(written).graph.digits


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no packed network"):
        read_packed(tmp_path / "absent.fp4")


@pytest.mark.parametrize("keep", [0, 5, 100, 20000, -1])
def test_truncated(written: Path, keep: int) -> None:
    written.write_bytes(written.read_bytes()[:keep])
    with pytest.raises(InputError, match="not a packed network, or not a whole one"):
        read_packed(written)


@pytest.mark.parametrize("name", ["encoder.1.conv1.weight.codes", "up.0.weight.amax", "head.weight", "head.bias"])
def test_a_flipped_byte_names_its_tensor(written: Path, name: str) -> None:
    header = int.from_bytes(written.read_bytes()[:8], "little")
    content = bytearray(written.read_bytes())
    start = json.loads(content[8 : 8 + header])[name]["data_offsets"][0]
    content[8 + header + start] ^= 1
    written.write_bytes(content)
    with pytest.raises(InputError, match=f"damaged: the tensor '{name}'"):
        read_packed(written)


def test_another_safetensors_file(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "x.fp4")
    with pytest.raises(InputError, match="but not a packed network"):
        read_packed(tmp_path / "x.fp4")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": "packed/1"}', "[[[" * 20000])
def test_metadata_of_another_program(tmp_path: Path, text: str) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "x.fp4", metadata={KEY: text})
    with pytest.raises(InputError, match="x.fp4"):
        read_packed(tmp_path / "x.fp4")


@pytest.mark.parametrize("number", [12, 2, 1])
def test_another_version(written: Path, number: int) -> None:
    rewrite(written, lambda metadata, _: metadata.update(format=f"packed/{number}", version="9.9.0"))
    with pytest.raises(
        InputError,
        match=f"'packed/{number}', written by fp4deploy 9.9.0; this version .* reads packed/11 and packed/10 and .*3",
    ):
        read_packed(written)


def test_a_card_changed_afterwards(written: Path) -> None:
    def swap(metadata: dict[str, str], _: dict[str, torch.Tensor]) -> None:
        metadata["card"] = metadata["card"].replace("sky", "sea")

    rewrite(written, swap, sign=False)
    with pytest.raises(InputError, match="changed after it was written"):
        read_packed(written)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda graph: graph["nodes"][3].update(op="exec"), "nodes.3"),
        (lambda graph: graph["nodes"][0].update(code="print()"), "code"),
        (lambda graph: graph["inputs"][0].update(shape=["3"]), "inputs.0.shape"),
        (lambda graph: graph.pop("tensors"), "tensors"),
        (lambda graph: graph["nodes"][-1].update(padding=[-1, 0]), "padding"),
        (lambda graph: graph["nodes"][1].update(eps=float("nan")), "eps"),
    ],
)
def test_a_graph_of_another_language(written: Path, change: Callable[[dict], None], cause: str) -> None:
    change_graph(written, change)
    with pytest.raises(InputError, match=cause):
        read_packed(written)


def test_tensors_the_graph_does_not_list(written: Path) -> None:
    rewrite(written, lambda _, tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(InputError, match="not those the graph lists.*'extra'"):
        read_packed(written)


@pytest.mark.parametrize("name", ["head.weight", "encoder.2.conv1.weight.scales", "up.1.weight.amax"])
def test_nan_is_refused_when_written(name: str, tmp_path: Path) -> None:
    _, file = packed()
    tensors = {key: value.clone() for key, value in file.tensors.items()}
    tensors[name] = tensors[name].float().fill_(float("nan")).to(tensors[name].dtype)
    with pytest.raises(InputError, match=f"'{name}' holds NaN"):
        packed_file(tmp_path / "x.fp4", file.card, file.graph, tensors)


def test_a_full_disk_leaves_the_older_file(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4deploy.models import checkpoint

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before, file = written.read_bytes(), read_packed(written)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(InputError, match="No space left on device. Nothing was replaced"):
        write_packed(file)
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == ["unet.fp4"]
