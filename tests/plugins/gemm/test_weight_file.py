"""A packed weight as a file: every bit comes back, and whatever else a file can hold is refused in words."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix
from fp4deploy.plugins import FP4WeightCache, fp4_quantize
from fp4deploy.plugins.gemm import weight_file

KEY = "fp4deploy.weight"


def cache(seed: int = 0, bias: bool = True) -> FP4WeightCache:
    generator = torch.Generator().manual_seed(seed)
    return fp4_quantize(torch.randn(7, 40, generator=generator), torch.randn(7) if bias else None)


def metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()[KEY])
    return found


def rewrite(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, Any] | str) -> None:
    save_file(tensors, path, metadata={KEY: about if isinstance(about, str) else json.dumps(about)})


def sign(path: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    """What a writer of other files could make: a digest that fits."""
    about = metadata(path) | changes
    about["sha256"] = weight_file._digest(about, tensors)
    rewrite(path, tensors, about)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [((7, 40), {}), ((1, 1), {}), ((0, 16), {}), ((5, 33), {"four_over_six": FourOverSix()}), ((4, 17, 3, 3), {})],
    ids=str,
)
def test_every_bit_comes_back(tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any], bias: bool) -> None:
    written = fp4_quantize(torch.randn(shape), torch.randn(shape[0]) if bias else None, **options)
    path = tmp_path / "made" / "for it" / "layer.safetensors"
    written.save(path)
    for read in (FP4WeightCache.load(path), FP4WeightCache.load(str(path), device="cpu")):
        one, two = written.weight, read.weight
        assert (one.shape, one.e4m3_max) == (two.shape, two.e4m3_max)
        assert torch.equal(one.codes, two.codes)
        assert torch.equal(one.scales.view(torch.uint8), two.scales.view(torch.uint8))
        assert torch.equal(one.amax, two.amax)
        assert (read.bias is None) == (written.bias is None)
        if written.bias is not None:
            assert torch.equal(read.bias, written.bias)
        assert read.nbytes == written.nbytes


def test_the_file_holds_what_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    cache().save(path)
    tensors = load_file(path)
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    assert kinds == {
        "codes": (torch.uint8, (7, 24)),
        "scales": (torch.float8_e4m3fn, (7, 3)),
        "amax": (torch.float32, ()),
        "bias": (torch.float32, (7,)),
    }
    about = metadata(path)
    assert set(about) == {"format", "version", "shape", "e4m3_max", "sha256"}
    assert (about["format"], about["shape"], about["e4m3_max"]) == ("weight/1", [7, 40], 448)
    assert [file.name for file in tmp_path.iterdir()] == ["layer.safetensors"]


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    cache().save(path)
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    for at in range(header, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InputError, match=r"SHA-256.*FP4WeightCache\.save"):
            FP4WeightCache.load(path)
    for length in (0, 7, header - 1, header, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="not a packed weight, or not a whole one"):
            FP4WeightCache.load(path)


def drop(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path)
        del tensors[name]
        rewrite(path, tensors, metadata(path))

    return change


def retype(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path)
        sign(path, {**tensors, name: tensors[name].to(dtype)})

    return change


def about(**changes: Any) -> Callable[[Path], None]:
    return lambda path: sign(path, load_file(path), **changes)


def without(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        rest = metadata(path)
        del rest[key]
        rewrite(path, load_file(path), rest)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("codes"), "damaged: it lacks codes"),
        (drop("scales"), "damaged: it lacks scales"),
        (drop("amax"), "damaged: it lacks amax"),
        (drop("bias"), "damaged: it is not what was written"),
        (retype("codes", torch.int16), "damaged: it has torch.int16 codes"),
        (retype("scales", torch.float16), "damaged: it has torch.float16 scales"),
        (retype("amax", torch.float64), "damaged: it has torch.float64 amax"),
        (retype("bias", torch.float16), "damaged: it has torch.float16 bias"),
        (lambda path: sign(path, {**load_file(path), "code": torch.ones(1)}), "it has 'code', which no weight has"),
        (about(shape=[7, 41]), None),
        (about(shape=[7, 60]), "codes (7, 32)"),
        (about(shape=[8, 40]), "codes (8, 24)"),
        (about(shape=[7]), "one amax"),
        (about(shape=[7, -40]), "its shape is [7, -40]"),
        (about(shape=["7", 40]), "its shape is ['7', 40]"),
        (about(shape=40), "its shape is 40"),
        (about(e4m3_max=0), "its e4m3_max is 0"),
        (about(e4m3_max="448"), "its e4m3_max is 448"),
        (about(format="weight/2"), "has the format 'weight/2'"),
        (without("sha256"), "lacks sha256 in its metadata"),
        (without("shape"), "lacks shape in its metadata"),
        (lambda path: rewrite(path, load_file(path), "{"), "cannot be read"),
        (lambda path: rewrite(path, load_file(path), "[" * 100_000), "cannot be read"),
        (lambda path: rewrite(path, load_file(path), "7"), "cannot be read"),
        (lambda path: save_file(load_file(path), path), "lacks the metadata 'fp4deploy.weight'"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), "not a packed weight"),
        (lambda path: path.unlink(), "no packed weight at"),
        (lambda path: (path.unlink(), path.mkdir()), "no packed weight at"),
    ],
)
def test_what_is_not_such_a_file(tmp_path: Path, change: Callable[[Path], None], words: str | None) -> None:
    path = tmp_path / "layer.safetensors"
    cache().save(path)
    change(path)
    if words is None:  # another K of as many blocks, signed: a valid file
        assert FP4WeightCache.load(path).weight.shape == (7, 41)
        return
    with pytest.raises(InputError) as caught:
        FP4WeightCache.load(path)
    assert words in str(caught.value)


def test_a_failure_to_write_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "layer.safetensors"
    cache().save(path)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        InputError, match=r"could not be written: No space left on device. Nothing was replaced; free some space or"
    ):
        cache(1).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["layer.safetensors"]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="could not be written"):
        cache().save(tmp_path / "file" / "layer.safetensors")


def test_a_file_has_the_mode_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    cache().save(tmp_path / "layer.safetensors")
    assert (tmp_path / "layer.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_threads_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    caches = [cache(seed) for seed in range(4)]
    threads = [threading.Thread(target=each.save, args=(path,)) for each in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = FP4WeightCache.load(path)
    assert any(torch.equal(read.weight.codes, each.weight.codes) for each in caches)
    assert [file.name for file in tmp_path.iterdir()] == ["layer.safetensors"]
