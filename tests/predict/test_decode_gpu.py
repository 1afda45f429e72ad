"""nvJPEG by torchvision: pixels near Pillow's, its geometry, and what it does not take by Pillow."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data.images import upright_image
from fp4deploy.errors import UnavailableError
from fp4deploy.plugins import available
from fp4deploy.predict.decode import CPU, PILLOW, Decoded, gpu, host_pixels
from fp4deploy.predict.pipeline import Pipeline
from fp4deploy.predict.predictor import Predictor
from fp4deploy.predict.sources import find_sources
from fp4deploy.predict.write import predict_files
from fp4deploy.runs import Run
from tests.contract.invoke import fp4deploy
from tests.predict.test_decode import FILES, jpeg

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]
CUDA = torch.device("cuda", 0)
MEAN, LARGEST = 2, 24  # that values of a smooth image differ by, of 255


@pytest.fixture(autouse=True)
def _torchvision() -> None:
    pytest.importorskip("torchvision.io")


def smooth(height: int, width: int, seed: int = 0) -> Image.Image:
    """Colours without edges: what decoders do at edges is their own."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def differ(found: Decoded, path: Path) -> tuple[float, int]:
    """Mean and largest difference from Pillow's pixels."""
    expected, pixels = upright_image(path).astype(int), host_pixels(found.pixels)
    assert pixels.shape == expected.shape
    differences = np.abs(expected - pixels)
    return float(differences.mean()), int(differences.max())


@pytest.mark.parametrize("batch", [1, 5])
def test_pixels_are_pillows_but_for_roundings(tmp_path: Path, batch: int) -> None:
    names = [(name, orientation) for name in FILES for orientation in range(1, 9)]
    for number, (name, orientation) in enumerate(names):
        content = jpeg(smooth(333, 517, number), orientation, **{"quality": 95, **FILES[name]})
        (tmp_path / f"{number:03}.jpg").write_bytes(content)
    paths = sorted(tmp_path.iterdir())
    found = list(gpu(CUDA, batch)(paths))
    for path, (name, orientation), each in zip(paths, names, found, strict=True):
        assert isinstance(each, Decoded)
        assert "nvJPEG" in each.decoder, name
        assert isinstance(each.pixels, torch.Tensor)
        assert each.pixels.device == CUDA
        mean, largest = differ(each, path)
        print(name, orientation, f"{mean:.2f} {largest}")
        assert mean < MEAN, (name, orientation)
        assert largest < LARGEST, (name, orientation)
    for one, other in zip(found, gpu(CUDA, batch, on_host=True)(paths), strict=True):
        assert np.array_equal(host_pixels(one.pixels), other.pixels)  # type: ignore[union-attr]


def test_what_is_no_common_jpeg_is_pillows(tmp_path: Path) -> None:
    image, whole = smooth(80, 120), jpeg(smooth(80, 120))
    for name, content in {
        "a": whole,
        "cmyk": jpeg(image.convert("CMYK")),
        "grey": jpeg(image.convert("L")),
        "half": whole[: len(whole) // 2],
        "rgb": jpeg(image, keep_rgb=True),
        "z": whole,
    }.items():
        (tmp_path / f"{name}.jpg").write_bytes(content)
    image.save(tmp_path / "b.png")
    paths = sorted(tmp_path.iterdir())
    found, expected = list(gpu(CUDA, 16)(paths)), list(CPU(paths))
    for path, one, other in zip(paths, found, expected, strict=True):
        if path.stem in "az":
            assert "nvJPEG" in one.decoder  # type: ignore[union-attr]
        elif path.stem == "half":
            assert str(one) == str(other)
            assert "truncated" in str(one)
        else:
            assert isinstance(one, Decoded)
            assert one.decoder == PILLOW
            assert np.array_equal(one.pixels, other.pixels)  # type: ignore[union-attr]


def test_a_file_that_is_broken_inside_does_not_stop_the_others(tmp_path: Path) -> None:
    """By whichever decoder: its pixels are nobody's, its size is the header's."""
    for name in "abc":
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(smooth(200, 300)))
    content = bytearray((tmp_path / "b.jpg").read_bytes())
    start = content.rfind(b"\xff\xda") + 14
    content[start:-2] = np.random.default_rng(0).integers(0, 255, len(content) - 2 - start, np.uint8).tobytes()
    (tmp_path / "b.jpg").write_bytes(content)
    paths = sorted(tmp_path.iterdir())
    found = list(gpu(CUDA, 3)(paths))
    assert [each.pixels.shape for each in found if isinstance(each, Decoded)].count((200, 300, 3)) >= 2
    for at in (0, 2):
        assert differ(found[at], paths[at])[0] < MEAN  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", ["fp16", "fp4"])
def test_frames_that_stay_on_the_gpu_give_the_masks_of_their_pixels(
    untrained: Run, tmp_path: Path, suffix: str
) -> None:
    """Bit for bit, while memory of earlier ones is used again."""
    for number in range(48):
        (tmp_path / f"{number:02}.jpg").write_bytes(jpeg(smooth(700 + number % 3, 900, number)))
    paths, run = sorted(tmp_path.iterdir()), untrained
    path = run.checkpoint("fp16") if suffix == "fp16" else run.exported("nvfp4").with_suffix(".fp4")
    pipeline = Pipeline(open_runtime(path))
    host = [host_pixels(each.pixels) for each in gpu(CUDA, 4, on_host=True)(paths) if isinstance(each, Decoded)]
    expected = [mask for answer in pipeline(host[at : at + 4] for at in range(0, 48, 4)) for mask in answer.outputs]

    def batches() -> Iterator[list[np.ndarray | torch.Tensor]]:
        chosen: list[np.ndarray | torch.Tensor] = []
        for number, each in enumerate(gpu(CUDA, 4)(paths)):
            chosen.append(each.pixels if number % 5 else host[number])  # type: ignore[union-attr]
            if len(chosen) == 4:
                yield chosen
                chosen = []

    def same(_: int) -> bool:
        found = [mask for answer in pipeline(batches()) for mask in answer.outputs]
        return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(same, range(4)))


@pytest.mark.parametrize("tile", [False, True])
def test_files_are_predicted(untrained: Run, tmp_path: Path, tile: bool) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}.jpg").write_bytes(jpeg(smooth(100, 140, number), 1 + number % 8))
    smooth(100, 140).save(folder / "7.png")
    decoder, decoded = gpu(CUDA, 3, on_host=tile), tmp_path / "decoded"
    decoded.mkdir()  # the same pixels, without loss
    for path, each in zip(sorted(folder.iterdir()), decoder(sorted(folder.iterdir())), strict=True):
        assert isinstance(each, Decoded)
        Image.fromarray(host_pixels(each.pixels)).save(decoded / f"{path.stem}.png")
    predictor, masks = Predictor(open_runtime(untrained.checkpoint("fp16")), tile=tile), []
    for photos, by, names in ((folder, decoder, [decoder.name] * 7 + [PILLOW]), (decoded, CPU, [PILLOW] * 8)):
        out = tmp_path / f"{photos.name}.out"
        document, failures = predict_files(predictor, Path("m"), find_sources([str(photos)]), out, 3, decoder=by)
        assert not failures
        assert [entry["decoder"] for entry in document["images"]] == names  # type: ignore[attr-defined]
        masks.append([np.asarray(Image.open(path)) for path in sorted(out.glob("*.mask.png"))])
        assert len(list(out.glob("*.overlay.png"))) == 8
    for one, other in zip(*masks, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_command(untrained: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(smooth(100, 140), 6))
    command = ("predict", "a.jpg", "--model", untrained.checkpoint("fp16"), "--decode", "gpu")
    done = fp4deploy(*command, folder=tmp_path)
    assert done.code == 0, done.stderr
    assert "Decoded by nvJPEG (torchvision" in done.stdout
    assert Image.open(tmp_path / "predictions" / "a.mask.png").size == (100, 140)
    timed = fp4deploy(*command, "--times", "--json", folder=tmp_path)
    assert timed.code == 0, timed.stderr
    (name,) = json.loads(timed.stdout)["decoders"]
    assert name.startswith("nvJPEG (torchvision")


def test_a_torchvision_without_nvjpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torchvision.io")

    def decode_jpeg(*given: object) -> None:
        raise RuntimeError("torchvision not compiled with nvJPEG support")

    module.decode_jpeg, module.ImageReadMode = decode_jpeg, sys.modules["torchvision.io"].ImageReadMode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision.io", module)
    with pytest.raises(UnavailableError, match=r"cannot decode here \(torchvision not compiled"):
        gpu(CUDA)
