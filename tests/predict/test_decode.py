"""Files to pixels by another decoder than Pillow: the same geometry, and Pillow's answer for what is no common JPEG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fp4deploy.data.images import Jpeg, common_jpeg, upright_image
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.predict.decode import CPU, PILLOW, Decoded, Decoder, gpu, host_pixels, upright, with_fallback
from fp4deploy.predict.predictor import Predictor
from fp4deploy.predict.sources import find_sources
from fp4deploy.predict.write import predict_files
from tests.contract.invoke import fp4deploy
from tests.predict.pointwise import Pointwise, card, photo

OTHER = "another decoder"
FILES: dict[str, dict[str, Any]] = {  # that are common
    "baseline": {},
    "whole colours": {"subsampling": 0},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_rows": 1},
    "optimised": {"optimize": True, "quality": 30},
}


def jpeg(image: Image.Image, orientation: int = 1, **options: Any) -> bytes:
    exif, target = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(target, format="JPEG", exif=exif, **options)
    return target.getvalue()


def stored(jpegs: Sequence[Jpeg]) -> list[torch.Tensor]:
    """A decoder that reads pixels as they are stored, by Pillow."""
    images = [Image.open(io.BytesIO(each.content)) for each in jpegs]
    tensors = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    return [upright(image, each.orientation) for image, each in zip(tensors, jpegs, strict=True)]


def decoded(path: Path, decode: Any = stored) -> Decoded:
    (found,) = with_fallback([path], decode, OTHER)
    assert isinstance(found, Decoded), found
    return found


def test_what_is_wrong_with_the_gpu_is_no_fault_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg(Image.fromarray(photo(37, 53))))

    def fails(error: Exception) -> Any:
        def decode(jpegs: Sequence[Jpeg]) -> list[torch.Tensor]:
            raise error

        return decode

    with pytest.raises(torch.AcceleratorError):
        with_fallback([path, path], fails(torch.AcceleratorError("illegal memory access")), OTHER)
    for error in (RuntimeError("not this file"), torch.OutOfMemoryError("of memory")):
        assert decoded(path, fails(error)).decoder == PILLOW


@pytest.mark.parametrize("name", FILES)
def test_common_files_are_decoded_by_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg(Image.fromarray(photo(37, 53)), **FILES[name]))
    found = decoded(path)
    assert found.decoder == OTHER
    assert np.array_equal(host_pixels(found.pixels), upright_image(path))


def test_a_file_with_bytes_between_its_segments_is_not_common(tmp_path: Path) -> None:
    """What stands there has the form of a segment but for its first byte, and Pillow skips it."""
    whole, path = jpeg(Image.fromarray(photo(37, 53))), tmp_path / "a.jpg"
    first = 4 + int.from_bytes(whole[4:6], "big")
    for between, common in ((b"", True), (b"\xff\xfe\x00\x04ab", True), (b"\x00\xfe\x00\x04ab", False)):
        path.write_bytes(whole[:first] + between + whole[first:])
        with Image.open(path) as image:
            assert image.size == (53, 37)
        assert (common_jpeg(path) is not None) == common


@pytest.mark.parametrize("orientation", range(10))
def test_exif_turns_pixels_as_pillow_does(tmp_path: Path, orientation: int) -> None:
    path, pixels = tmp_path / "a.jpg", photo(37, 53)
    path.write_bytes(jpeg(Image.fromarray(pixels), orientation))
    found, expected = decoded(path), upright_image(path)
    assert found.decoder == OTHER
    assert expected.shape[:2] == ((53, 37) if orientation in range(5, 9) else (37, 53))
    assert found.pixels.is_contiguous()  # type: ignore[union-attr]
    assert np.array_equal(host_pixels(found.pixels), expected)


def test_other_files_are_decoded_by_pillow(tmp_path: Path) -> None:
    image = Image.fromarray(photo(37, 53))
    png = io.BytesIO()
    image.save(png, format="PNG")
    others = {
        "grey": jpeg(image.convert("L"), 6),
        "cmyk": jpeg(image.convert("CMYK"), 6),
        "stored as RGB": jpeg(image, 6, keep_rgb=True),
        "PNG": png.getvalue(),
    }
    others["stored as RGB, by its components"] = others["stored as RGB"].replace(b"Adobe", b"Other")
    numbered = others["stored as RGB"].replace(b"R\x11\0G\x11\0B\x11\0", b"\1\x11\0\2\x11\0\3\x11\0")
    others["stored as RGB, by Adobe"] = numbered.replace(b"R\0G\0B\0", b"\1\0\2\0\3\0")
    for name, content in others.items():
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(content)
        assert decoded(path, None).decoder == PILLOW, name
        assert np.array_equal(decoded(path, None).pixels, upright_image(path)), name
    (tmp_path / "folder.jpg").mkdir()
    for path in (tmp_path / "missing.jpg", tmp_path / "folder.jpg"):
        with pytest.raises(InputError) as raised:
            upright_image(path)
        (found,) = with_fallback([path], stored, OTHER)
        assert str(found) == str(raised.value)


def test_a_file_that_ends_early_is_never_decoded_by_it(tmp_path: Path) -> None:
    """Also where a thumbnail, a whole JPEG in the header, has an end of its own. Bytes may follow a whole one."""
    thumbnail, path = jpeg(Image.fromarray(photo(8, 8))), tmp_path / "a.jpg"
    content = jpeg(Image.fromarray(photo(37, 53)), comment=thumbnail, progressive=True)
    assert thumbnail in content
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert common_jpeg(path) is None
    for trailer in (b"", b"\0" * 9, b"trailer"):
        path.write_bytes(content + trailer)
        assert decoded(path).decoder == OTHER


def test_what_it_refuses_or_turns_is_decoded_by_pillow(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(Image.fromarray(photo(37, 53, ord(name)))))
    paths = sorted(tmp_path.iterdir())
    bad = paths[1].read_bytes()

    def decode(jpegs: Sequence[Jpeg]) -> list[torch.Tensor]:
        if any(each.content == bad for each in jpegs):
            raise RuntimeError("Error while decoding JPEG images")
        frames = stored(jpegs)
        return [
            frame.mT if each.content == paths[2].read_bytes() else frame
            for frame, each in zip(frames, jpegs, strict=True)
        ]

    found = [each for each in with_fallback(paths, decode, OTHER) if isinstance(each, Decoded)]
    assert [each.decoder for each in found] == [OTHER, PILLOW, PILLOW, OTHER]
    for path, each in zip(paths, found, strict=True):
        assert np.array_equal(host_pixels(each.pixels), upright_image(path))


class OnDevice(Pointwise):
    """A runtime that takes tensors."""

    where = torch.device("cpu")

    def on_device(self, images: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return torch.from_numpy(self.infer(images.numpy()))


@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_files_of_two_decoders_get_their_masks(tmp_path: Path, batch: int, tile: bool) -> None:
    for number, name in enumerate(("a.jpg", "b.png", "c.jpg", "d.jpg", "e.jpg")):
        Image.fromarray(photo(40 + number // 3, 60, number)).save(tmp_path / name)
    (tmp_path / "c.jpg").write_bytes((tmp_path / "c.jpg").read_bytes()[:-40])
    sources = find_sources([str(tmp_path)])
    mixed = Decoder(OTHER, lambda paths: with_fallback(paths, stored, OTHER, on_host=tile), 2, batch)
    documents = {}
    for decoder in (CPU, mixed):
        predictor, out = Predictor(OnDevice(card()), tile=tile), tmp_path / decoder.name
        documents[decoder.name], failures = predict_files(predictor, Path("m"), sources, out, batch, decoder=decoder)
        assert len(failures) == 1
        assert "c.jpg" in failures[0]
    decoders = [entry.get("decoder") for entry in documents[OTHER]["images"]]  # type: ignore[attr-defined]
    assert decoders == [OTHER, PILLOW, None, OTHER, OTHER]
    for name in "abde":
        for kind in ("mask", "overlay"):
            one, other = ((tmp_path / each / f"{name}.{kind}.png").read_bytes() for each in (CPU.name, OTHER))
            assert one == other


def test_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(UnavailableError, match="--decode gpu needs an NVIDIA GPU"):
        gpu(torch.device("cuda"))


def test_what_is_missing_is_said_before_a_model_is_opened(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    (tmp_path / "none.safetensors").write_bytes(b"no model")
    done = fp4deploy("predict", "a.jpg", "--model", "none.safetensors", "--decode", "gpu", folder=tmp_path)
    assert done.code == 3
    assert "--decode gpu needs an NVIDIA GPU" in done.stderr


@pytest.mark.parametrize("given", [("-",), ("camera:0",), ("a.nii",), ("a.mp4",), (".", "--nnunet", ".")])
def test_only_image_files_are_decoded_on_a_gpu(tmp_path: Path, given: tuple[str, ...]) -> None:
    for name in ("a.nii", "a.mp4"):
        (tmp_path / name).touch()
    done = fp4deploy("predict", *given, "--decode", "gpu", folder=tmp_path)
    assert done.code == 2
    assert "--decode is of image files" in done.stderr
