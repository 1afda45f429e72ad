"""`fp4deploy predict`: masks, objects and overlays of the user's own images, from any artefact."""

from __future__ import annotations

import io
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fp4deploy.errors import InputError

from ... import completion
from ...console import done, note, print_json, results, shown, table
from ...numbers import finite
from ...settings import CompileOption, NetworkOption, expect
from . import nnunet

if TYPE_CHECKING:
    from fp4deploy.predict.decode import Decoder
    from fp4deploy.predict.predictor import Predictor
    from fp4deploy.predict.sources import Source

ONLY_FILES = "--decode is of image files; leave it out."
MAX_STDIN = 1 << 30  # bytes of one image; an uncompressed one of the most pixels that are decoded has half of it


def predict(
    images: Annotated[
        list[str],
        typer.Argument(
            help="Images, videos, volumes (.nii, .nii.gz), folders or patterns; - for one image from stdin; camera:0.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Artefact (.plan, .onnx, .fp4, checkpoint), or its name in the latest run.",
            show_default="the fastest of the latest run that runs here",
            autocompletion=completion.artifacts,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for masks, overlays and predictions.json.")] = Path(
        "predictions"
    ),
    tile: Annotated[
        bool, typer.Option("--tile", help="Cut images larger than the network's input into tiles.")
    ] = False,
    overlap: Annotated[
        int | None,
        typer.Option("--overlap", min=0, help="Pixels that tiles share.", show_default="a quarter of a tile"),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Images, frames or tiles given to the network at once.")
    ] = 1,
    min_score: Annotated[
        float,
        typer.Option(
            "--min-score", min=0.0, max=1.0, callback=finite, help="Least score of an object (instance models)."
        ),
    ] = 0.0,
    overlays: Annotated[
        bool, typer.Option("--overlays/--no-overlays", help="Also draw classes or objects over each image.")
    ] = True,
    times: Annotated[
        bool, typer.Option("--times", help="Time decoding, preprocessing, network and postprocessing; write no masks.")
    ] = False,
    decode: Annotated[
        Literal["cpu", "gpu"],
        typer.Option(
            "--decode", help="JPEG files by Pillow, or on the GPU by nvJPEG (torchvision), which gives other pixels."
        ),
    ] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print predictions.json on stdout instead of a table; with --nnunet seconds.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--nnunet",
            help="Results folder of nnU-Net with packed networks: IMAGES is a folder of NAME_0000 files.",
            show_default="none",
        ),
    ] = None,
    fold: nnunet.FoldOption = None,
    processes: Annotated[
        int,
        typer.Option(
            "--processes", min=0, help="With --nnunet: cases that are read and written beside the one on the device."
        ),
    ] = 3,
    mirror: Annotated[
        bool | None,
        typer.Option(
            "--mirror/--no-mirror",
            help="Of volumes: average each window over its mirror images.",
            show_default="with --nnunet yes, else no",
        ),
    ] = None,
    compiled: CompileOption = True,
    network: NetworkOption = None,
) -> None:
    """Predict images: an indexed PNG mask and an overlay of each, at its own size. With - the mask goes to stdout."""
    from fp4deploy.predict.sources import CAMERA, STDIN, find_sources
    from fp4deploy.predict.volumes import holds_volumes

    expect(network, "--network")
    if decode == "gpu" and (folder is not None or holds_volumes(images)):
        raise InputError(ONLY_FILES)
    if folder is not None:
        nnunet.predict(folder, fold, images, out, processes, mirror is not False, as_json)
        return
    if fold:
        raise InputError("--fold goes with --nnunet FOLDER.")
    if holds_volumes(images):
        _volumes(images, model, out, bool(mirror), batch, as_json, images_alone=tile or overlap is not None or times)
        return
    if mirror is not None:
        raise InputError("--mirror is of volumes (.nii, .nii.gz); leave it out.")
    piped = images == [STDIN]
    live = len(images) == 1 and images[0].startswith(CAMERA)
    if not piped and STDIN in images:
        raise InputError("- reads one image from stdin; give it alone.")
    sources = [] if piped or live else find_sources(images)
    if decode == "gpu" and all(source.is_video for source in sources):  # there is none of stdin or a camera
        raise InputError(ONLY_FILES)
    if decode == "gpu":
        _require_gpu_decoder()
    path, predictor = _predictor(model, tile, overlap, min_score, batch)
    note(f"{shown(path)} on {predictor.runtime.name}, {predictor.runtime.precision}.")
    decoder = _decoder(predictor, decode, batch)
    if times:
        _times(predictor, path, sources, as_json, decoder)
    elif piped:
        _pipe(predictor, path, as_json)
    elif live:
        _camera(predictor, images[0], out, batch)
    else:
        _files(predictor, path, sources, out, batch, overlays, as_json, decoder)


def _require_gpu_decoder() -> None:
    """What nvJPEG lacks is said before a model is opened, which takes longer."""
    import torch

    from fp4deploy.predict.decode import gpu

    gpu(torch.device("cuda", 0))


def _decoder(predictor: Predictor, decode: str, batch: int) -> Decoder:
    """By nvJPEG on the GPU of the network's pipeline, where it is on one; frames stay there unless tiles are cut."""
    import torch

    from fp4deploy.predict.decode import CPU, gpu

    if decode == "cpu" or predictor.pipeline is None:
        return CPU
    there = predictor.pipeline.device
    beside = there.type == "cuda"
    return gpu(there if beside else torch.device("cuda", 0), batch, on_host=predictor.tile or not beside)


def _volumes(
    given: list[str], model: Path | None, out: Path, mirror: bool, batch: int, as_json: bool, images_alone: bool
) -> None:
    from fp4deploy.predict.volumes import find_volumes, predict_volumes
    from fp4deploy.predict.write import describe
    from fp4deploy.system.files import require_writable
    from fp4deploy.system.progress import progress

    if images_alone:
        raise InputError(
            "--tile, --overlap and --times are of images: volumes are always cut into windows. Leave them out."
        )
    require_writable(out / "predictions.json")
    path, predictor = _predictor(model, False, None, 0.0, batch)
    card = predictor.card
    if card.volume is None:
        raise InputError(
            f"{shown(path)} reads images, and these are volumes. Name a model of volumes: --model FILE, or a folder of "
            "nnU-Net: --nnunet FOLDER"
        )
    sources = find_volumes(given, card.volume.channels)
    note(f"{shown(path)} on {predictor.runtime.name}, {predictor.runtime.precision}.")
    with progress("volumes") as bar:
        document, failures = predict_volumes(
            predictor.runtime, describe(predictor, path), sources, out, mirror, batch, bar.phase
        )
    if as_json:
        print_json(document)
    else:
        _print(document, out)
    _report(failures, len(sources), out)


def _report(failures: list[str], count: int, out: Path) -> None:
    """The first failures as notes.

    Raises:
        InputError: there is one.
    """
    for failure in failures[:5]:
        note(f"  {failure}")
    if failures:
        raise InputError(f"{len(failures)} of {count} files could not be predicted; the others are in {shown(out)}.")


def _predictor(
    model: Path | None, tile: bool, overlap: int | None, min_score: float, batch: int
) -> tuple[Path, Predictor]:
    from fp4deploy.bench.locate import find_artifact
    from fp4deploy.bench.runtimes.open import open_for_images
    from fp4deploy.predict.choose import best_runtime
    from fp4deploy.predict.predictor import Predictor

    if model is None:
        path, runtime = best_runtime(skipped=lambda path, reason: note(f"Not {shown(path)}: {reason}"))
    else:
        path = find_artifact(model)
        runtime = open_for_images(path)
    return path, Predictor(runtime, tile, overlap, min_score, batch)


def _times(predictor: Predictor, model: Path, sources: list[Source], as_json: bool, decoder: Decoder) -> None:
    from dataclasses import asdict

    from fp4deploy.bench.tables import milliseconds
    from fp4deploy.predict.timing import COLUMNS, stage_times

    paths = [source.path for source in sources if not source.is_video]
    found, decoders = stage_times(predictor, paths, decoder)
    if as_json:
        about = {"model": str(model), "runtime": predictor.runtime.name, "device": predictor.runtime.device}
        print_json({**about, "decoders": decoders, "images": len(paths), "stages": [asdict(row) for row in found]})
        return
    cells = [(row.stage, *map(milliseconds, (row.p50, row.p90, row.p99))) for row in found]
    results().print(table(COLUMNS, cells, right=COLUMNS[1:]))
    note(_decoded_by(decoders))


def _pipe(predictor: Predictor, model: Path, as_json: bool) -> None:
    from fp4deploy.data.images import upright_image
    from fp4deploy.predict.decode import PILLOW
    from fp4deploy.predict.sources import STDIN
    from fp4deploy.predict.write import describe, png_bytes
    from fp4deploy.system.progress import progress

    content = io.BytesIO()
    while chunk := sys.stdin.buffer.read(1 << 20):
        content.write(chunk)
        if content.tell() > MAX_STDIN:
            raise InputError(f"stdin gave more than {MAX_STDIN >> 20} MiB, the limit for one image.")
    if not content.tell():
        raise InputError("stdin gave nothing; pipe an image into it: fp4deploy predict - < photo.jpg > mask.png")
    content.seek(0)
    pixels = upright_image(content)
    with progress("image") as bar:
        predictor.progress = bar.phase
        prediction = predictor.predict(pixels)
    if as_json:
        height, width = prediction.mask.shape
        entry = {"file": STDIN, "decoder": PILLOW, "height": height, "width": width, **prediction.to_json()}
        print_json({**describe(predictor, model), "images": [entry]})
        return
    if not prediction.has_mask:
        raise InputError("This model gives boxes or classes and no mask: add --json, or predict a file into a folder.")
    if sys.stdout.isatty():
        raise InputError(
            "The mask is a PNG and stdout is a terminal; redirect it: fp4deploy predict - < in.jpg > mask.png"
        )
    sys.stdout.buffer.write(png_bytes(prediction.mask_image()))
    sys.stdout.buffer.flush()


def _camera(predictor: Predictor, source: str, out: Path, batch: int) -> None:
    from fp4deploy.predict.video import opened, predict_frames
    from fp4deploy.system.progress import progress

    target = out / "camera.overlay.mp4"
    with opened(source) as capture:
        note("Recording; stop with Ctrl-C.")
        with progress("frames") as bar:
            found = predict_frames(
                predictor, capture, source, target, batch, lambda frames: bar.phase("frames", frames)
            )
    done(f"{found['frames']} frames in {shown(target)}")


def _files(
    predictor: Predictor,
    model: Path,
    sources: list[Source],
    out: Path,
    batch: int,
    overlays: bool,
    as_json: bool,
    decoder: Decoder,
) -> None:
    from fp4deploy.predict.write import predict_files
    from fp4deploy.system.progress import progress

    done_images = 0

    def within(what: str, done: int, of: int | None) -> None:
        bar.phase(f"image {done_images + 1} of {len(sources)}, {what}" if len(sources) > 1 else what, done, of)

    def after(number: int, _: str) -> None:
        nonlocal done_images
        done_images = number
        bar.phase("images", number, len(sources))

    predictor.progress = within
    with progress("images") as bar:
        document, failures = predict_files(predictor, model, sources, out, batch, overlays, after, decoder)
    if as_json:
        print_json(document)
    else:
        _print(document, out)
    _report(failures, len(sources), out)


def _decoded_by(counts: dict[str, int]) -> str:
    return f"Decoded by {', '.join(f'{name}: {count}' for name, count in counts.items())}."


def _print(document: dict[str, Any], out: Path) -> None:
    from fp4deploy.predict.decode import PILLOW
    from fp4deploy.predict.write import likeliest_classes, mean_shares, objects_of_classes

    entries = document["images"]
    boxes = sorted(objects_of_classes(entries), key=lambda row: -row[2])
    labels = likeliest_classes(entries)
    volumes = any("spacing_mm" in entry for entry in entries)
    figure = "objects" if boxes else "score" if labels else "voxels" if volumes else "pixels"
    head = ("class", "volumes" if volumes else "images", figure)
    rows = [(name, str(count), str(objects)) for name, count, objects in boxes]
    rows += [(name, str(count), f"{100 * share:.1f} %") for name, count, share in (*mean_shares(entries), *labels)]
    console = results()
    if rows:
        console.print(table(head, rows, right=head[1:]))
    counted = [entry["objects"] for entry in entries if "objects" in entry]
    if counted:
        console.print(f"{sum(counted)} objects in {len(counted)} images.", markup=False)
    decoders = Counter(entry["decoder"] for entry in entries if "decoder" in entry)
    if set(decoders) - {PILLOW}:
        console.print(_decoded_by(decoders), markup=False)
    written = sum("error" not in entry for entry in entries)
    done(f"{written} of {len(entries)} predicted into {shown(out)}; the list is {shown(out / 'predictions.json')}")
