"""The same weights give the same files, and files of older versions stay readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp4deploy.plugins import FP4WeightCache, fp4_cached_linear
from tests.contract import fixed_models, frozen, internals, written

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.timeout(1200)  # the shared fixture takes half a minute, on a busy machine more


def test_checkpoints_packed_networks_and_weights(written_files: Path) -> None:
    assert frozen.lost(frozen.recorded("bytes")["files"], written.digests(written_files)["files"]) == []


def test_constants_of_quantised_layers_in_onnx(written_files: Path) -> None:
    before, now = frozen.recorded("bytes")["onnx"], written.digests(written_files)["onnx"]
    assert before.keys() <= now.keys()
    part = "quantised constants"
    assert {name: now[name][part] for name in before} == {name: before[name][part] for name in before}


def test_onnx(written_files: Path) -> None:
    before, now = frozen.recorded("bytes"), written.digests(written_files)
    if before["versions"] != now["versions"]:
        pytest.skip(f"ONNX was recorded with {before['versions']}, and here are {now['versions']}")
    assert frozen.lost(before["onnx"], now["onnx"]) == []


def test_only_the_version_is_left_out_of_the_digest(written_files: Path) -> None:
    from fp4deploy import __version__

    content = (written_files / "linear.weight").read_bytes()
    plain = frozen.without_version(content, __version__)
    quoted = f'\\"{__version__}\\"'.encode()
    assert content.count(quoted) == 1
    assert quoted not in plain
    assert len(content) - 8 - len(plain) < len(__version__) + 64 + 8
    with pytest.raises(ValueError, match="the file says version"):
        frozen.without_version(content, "9.9.9")


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("unet-*.gz")))
def test_packed_networks_of_every_format(name: str, tmp_path: Path) -> None:
    path = fixed_models.unpacked(FILES / name, tmp_path)
    weights = {name: fixed_models.sha256(value) for name, value in internals.decoded_weights(path).items()}
    assert weights == EXPECTED["weights"]
    logits = internals.run_packed(path, fixed_models.whole_numbers(1, 3, 16, 16)).flatten()[::7]
    expected = torch.tensor(EXPECTED["logits"])
    # A sum in another order can move a value across a boundary of E2M1, which a normalisation spreads a little.
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("linear-*")))
def test_packed_weights_of_every_format(name: str) -> None:
    cache = FP4WeightCache.load(FILES / name)
    weight, bias = fixed_models.exact_weight()
    assert torch.equal(cache.dequantize(), weight)
    assert cache.bias is not None
    assert torch.equal(cache.bias, bias)
    x = fixed_models.whole_numbers(5, 48)
    y = fp4_cached_linear(x.half(), cache)
    assert torch.equal(y, (x @ weight.T + bias).half())
    assert fixed_models.sha256(cache.dequantize()) == EXPECTED["linear"]["weight"]
    assert fixed_models.sha256(y) == EXPECTED["linear"]["output"]
