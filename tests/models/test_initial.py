"""Tensors that are no weights are refused by one sentence, and torch casts none of them in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models.initial import load_initial, read_weights

Change = Callable[[torch.Tensor], torch.Tensor]
WEIGHT, VARIANCE, COUNT = "0.weight", "1.running_var", "1.num_batches_tracked"


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def bytes_of(dtype: torch.dtype) -> Change:
    return lambda x: torch.zeros(x.shape, dtype=torch.uint8).view(dtype)


REFUSED: dict[str, tuple[str, Change, str]] = {
    "float64": (WEIGHT, lambda x: torch.full_like(x, 1e300, dtype=torch.float64), "beyond FP32 in 0.weight"),
    "negative float64": (WEIGHT, lambda x: torch.full_like(x, -1e39, dtype=torch.float64), "beyond FP32 in 0.weight"),
    "int64": (WEIGHT, lambda x: x.long(), "it is int64, and the network has float32 there"),
    "int8": (WEIGHT, lambda x: x.to(torch.int8), "it is int8"),
    "uint16": (WEIGHT, lambda x: x.to(torch.uint16), "it is uint16"),
    "bool": (WEIGHT, lambda x: x.bool(), "it is bool"),
    "complex": (WEIGHT, lambda x: x.to(torch.complex64), "it is complex64"),
    "fp8": (WEIGHT, lambda x: x.to(torch.float8_e4m3fn), "it is float8_e4m3fn"),
    "fp8 scales": (WEIGHT, lambda x: x.to(torch.float8_e8m0fnu), "it is float8_e8m0fnu"),
    "fp4": (WEIGHT, bytes_of(torch.float4_e2m1fn_x2), "it is float4_e2m1fn_x2"),
    "bits": (WEIGHT, bytes_of(torch.bits8), "it is bits8"),
    "sparse": (WEIGHT, lambda x: x.to_sparse(), "it is a sparse tensor .sparse_coo."),
    "sparse rows": (WEIGHT, lambda x: x.flatten(1).to_sparse_csr(), "it is a sparse tensor .sparse_csr."),
    "quantized": (WEIGHT, lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "a quantized tensor .qint8."),
    "meta": (WEIGHT, lambda x: x.to("meta"), "it is a meta tensor"),
    "nested": (WEIGHT, lambda x: torch.nested.nested_tensor(list(x)), "it is a nested tensor"),
    "jagged": (WEIGHT, lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "it is a nested tensor"),
    "variance": (VARIANCE, torch.neg, "negative variances or counts in 1.running_var"),
    "count": (COUNT, lambda x: x - 5, "negative variances or counts in 1.num_batches_tracked"),
    "fraction": (COUNT, lambda x: x + 0.5, "it is float32, and the network has int64 there"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_what_is_no_weight(tmp_path: Path, kind: str, suffix: str) -> None:
    name, change, message = REFUSED[kind]
    tensors, path = network().state_dict(), tmp_path / f"weights{suffix}"
    tensors[name] = change(tensors[name])
    if suffix == ".pth":
        torch.save(tensors, path)
    else:
        try:
            save_file(tensors, path)
        except (KeyError, NotImplementedError, RuntimeError, ValueError):
            pytest.skip("safetensors does not write it")
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=message):
        load_initial(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floating_point_types_are_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    path, source = tmp_path / "weights.pth", network().to(dtype)
    tensors = source.state_dict()
    tensors[COUNT] = tensors[COUNT].int()
    torch.save(tensors, path)
    model = network()
    load_initial(model, path)
    assert torch.equal(model.state_dict()[WEIGHT], tensors[WEIGHT].float())


@pytest.mark.parametrize("name", network().state_dict())
def test_counters_alone_may_be_missing(tmp_path: Path, name: str) -> None:
    """Tools that fold or convert batch norms leave them out; an average over all batches is not continued."""
    state = network().state_dict()
    path = tmp_path / "w.pth"
    torch.save({each: value + 1 for each, value in state.items() if each != name}, path)
    model = network()
    if name == COUNT:
        load_initial(model, path)
        assert torch.equal(model.state_dict()[WEIGHT], state[WEIGHT] + 1)
    else:
        with pytest.raises(InputError, match=f"1 tensor missing .{name}"):
            load_initial(model, path)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"weights": state, "epoch": 3, "optimizer": {}},
        lambda state: {"checkpoint": {"state_dict": {f"module.{name}": value for name, value in state.items()}}},
        lambda state: {"params_ema": {f"_fsdp_wrapped_module.{name}": value for name, value in state.items()}},
    ],
)
def test_the_only_state_dict_of_a_file_is_taken(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    state = nn.Conv2d(3, 4, 1).state_dict()
    torch.save(wrap(state), tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").keys() == state.keys()


def test_of_several_state_dicts_none_is_taken(tmp_path: Path) -> None:
    state = nn.Conv2d(3, 4, 1).state_dict()
    several: dict[str, Any] = {"student": state, "teacher": state}
    several["itself"] = several
    torch.save(several, tmp_path / "w.pth")
    with pytest.raises(InputError, match="It holds several: student, teacher"):
        read_weights(tmp_path / "w.pth")
