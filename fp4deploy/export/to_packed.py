"""Checkpoint or module -> packed network, compared with torch before anything is written.

The network is captured once (`graph.capture`) with plain layers, and `packing` turns its nodes into those of a packed
file. Our UNet goes the same way as any other module; with the multi-term FP4 input encoding the graph begins after it,
since the reader of the file encodes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fp4deploy import provenance
from fp4deploy.about import about
from fp4deploy.errors import InputError
from fp4deploy.export.packing import Tensors, packed_graph
from fp4deploy.export.verify.outputs import check_request, rest_for, validation_images
from fp4deploy.export.verify.packed import PackedAgreement, require_packed, verify_packed
from fp4deploy.export.verify.sizes import packed_differs
from fp4deploy.graph import UnsettledSizes, capture
from fp4deploy.graph.capture import Inputs, arguments, of_batch
from fp4deploy.graph.copies import copied
from fp4deploy.graph.nested import flat_inputs, taking_flat_inputs
from fp4deploy.graph.randomness import refuse_random
from fp4deploy.models.input_encoding import ENCODED_CHANNELS
from fp4deploy.models.meaning import OutputMeanings, Outputs, known_outputs
from fp4deploy.packed import Graph, PackedFile, PackedNetwork, packed_file, write_packed
from fp4deploy.packed.capture import CapturedNetwork, graphs_enabled
from fp4deploy.packed.file import SUFFIX
from fp4deploy.packed.program import compile_mode
from fp4deploy.qat import load_model, round_to_deployed, unquantized
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.ranges import automatic_rest
from fp4deploy.rest import AUTO, FP16, Rest, rest_of
from fp4deploy.system.files import file_digest


@dataclass(frozen=True)
class Axes:
    """Axes of the inputs that stay free by request, and the only batch; None: any."""

    dynamic: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    batch: int | None = None


ANY_BATCH = Axes()


@dataclass(frozen=True)
class PackedResult:
    """What `pack` wrote, and how far it agrees with torch; None where nothing was verified."""

    file: PackedFile
    verification: PackedAgreement | None


def pack(
    checkpoint: Path | str | nn.Module,
    out: Path | str,
    data: Path | str | None = None,
    images: int = 16,
    verify: bool = True,
    example_inputs: Inputs | None = None,
    outputs: Outputs = None,
    rest: str | None = None,
    dynamic: Mapping[str, Iterable[int]] | None = None,
    batch: int | None = None,
) -> PackedResult:
    """Export a checkpoint or any module as a packed network, compared with torch before anything is written.

    Args:
        checkpoint: a checkpoint of this project; or a module, prepared and calibrated or plain, which is not changed.
        out: the .fp4 file; an existing one is replaced.
        data: dataset whose validation split is used to verify a checkpoint.
        images: how many of its images.
        verify: False writes without comparing.
        example_inputs: of a module: a tensor, several, or a dict of tensors, on which it is captured and compared.
            Height and width stay free where the module's code allows it.
        outputs: of a module: what its outputs are, as of `verify`.
        rest: what is not packed: "fp16", "bf16" or "fp32" (`fp4deploy.rest`), or "auto": by the ranges that are seen
            (`qat.ranges.automatic_rest`); None: as the checkpoint's card says, of a module FP16.
        dynamic: of a module: more axes that stay free, such as the length of texts, {"input_ids": {1: "L"}}; compared
            at two other sizes, and an error where the network fixes one, or that of the channels of an image.
        batch: the only number of samples that the file takes; None: any.

    Raises:
        GateError: the packed network computes something else than torch (see `verify.packed`).
        InputError: not a checkpoint of this project, a recipe or operation without packed form, no data, an unwritable
            target.

    >>> pack(checkpoint, folder / "unet.fp4", verify=False).file.path.name
    'unet.fp4'
    """
    out = Path(out)
    if isinstance(checkpoint, nn.Module):
        form = Axes({name: tuple(axes) for name, axes in (dynamic or {}).items()}, batch)
        return _pack_module(checkpoint, out, example_inputs, verify, known_outputs(said=outputs), rest, form)
    if example_inputs is not None or outputs is not None or dynamic:
        raise InputError("A checkpoint's card says what it reads and gives; these arguments are for modules.")
    checkpoint, data = Path(checkpoint), None if data is None else Path(data)
    check_request(checkpoint, out, SUFFIX, data, images, verify)
    chosen = None if rest is None else rest_for(rest, checkpoint, data, images)
    model, card = load_model(checkpoint, rest=chosen)
    example, form = torch.zeros(1, *card.input_shape), Axes(batch=batch)
    origin = json.dumps(about(card, file_digest(checkpoint)))
    packed = pack_model(model, example, card.architecture != "unet", chosen or rest_of(card), form)
    file = packed_file(out, card, *packed, about=origin)
    verification = None
    if verify and data is not None:
        samples = [of_batch(each, batch) for each in validation_images(data, card, images)]
        verification = verify_packed(model, file, samples)
        require_packed(verification, str(checkpoint))
        file = _at_sizes_of_torch(model, file, samples[0], example, form)
    write_packed(file)
    provenance.record("export", out, [checkpoint])
    return PackedResult(file, verification)


def compile(model: nn.Module, example_inputs: Inputs, rest: str = "fp16") -> CapturedNetwork:
    """A module as the network that `pack` would write, ready to run where its parameters are: for use in a program.

    On a GPU it runs as a CUDA graph, by kernels of this package or compiled, whichever is faster (FP4DEPLOY_COMPILE);
    the first call for each shape of the inputs prepares it. On a CPU it computes in FP32.

    Args:
        model: prepared and calibrated, or plain; it is not changed, and later changes of it have no effect.
        example_inputs: a tensor, several, or a dict of tensors. Height and width stay free where the module allows it.
        rest: as of `pack`.

    Returns:
        what takes the inputs in the order of the module's arguments and gives what the module gives, on a GPU in
        `rest`.

    Raises:
        InputError: as of `pack`.

    >>> network = fd.compile(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.zeros(1, 3, 16, 16))
    >>> network(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 8, 14, 14])
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model, example_inputs = taking_flat_inputs(model, example_inputs), flat_inputs(example_inputs)
    example_inputs = tree_map(_float, example_inputs)
    file = _deployed_file(model, Path("compiled.fp4"), example_inputs, _chosen(rest, model, example_inputs))[1]
    return CapturedNetwork(PackedNetwork(file, device), graphs_enabled(), compile_mode())


def _chosen(rest: str | None, model: nn.Module, example_inputs: Inputs) -> Rest:
    return automatic_rest(model, [example_inputs]) if rest == AUTO else rest_of(rest)


def _float(x: object) -> object:
    """A tensor on the CPU, numbers as float32; anything else as it is, to be refused by name."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.cpu().float() if x.is_floating_point() else x.cpu()


def _deployed_file(
    model: nn.Module, out: Path, example_inputs: Inputs, rest: Rest, form: Axes = ANY_BATCH
) -> tuple[nn.Module, PackedFile]:
    """A module as it is deployed, on the CPU, and its packed network."""
    deployed = copied(model).cpu().float().eval()  # also of a module in FP16
    round_to_deployed(deployed, rest)
    packed = pack_model(deployed, example_inputs, rest=rest, form=form)
    return deployed, packed_file(out, None, *packed, about=json.dumps(about(None, None)))


def pack_model(
    model: nn.Module, example_inputs: Inputs, dynamic_size: bool = True, rest: Rest = FP16, form: Axes = ANY_BATCH
) -> tuple[Graph, Tensors]:
    """Graph and tensors of a module, prepared or plain, with its parameters as deployed (`qat.round_to_deployed`).

    Args:
        dynamic_size: capture height and width as free sizes, where every node can be packed so; else as they are, with
            a warning that says why. A network whose nodes hold no sizes, such as our UNet, takes any size without.
        rest: the precision of what is not packed.
        form: axes that have to stay free, and a batch that does not.

    Raises:
        InputError: a module that cannot be captured, an operation or recipe without packed form, a value that is not
            finite.
    """
    if not any(True for _ in model.children()):  # a single layer has no name of its own
        model = nn.Sequential(model)
    digits = bool(getattr(model, "digits", False))
    plain = unquantized(copied(model))
    refuse_random(plain, *arguments(example_inputs))
    # Not `quantized_layers`, which names each once: a captured layer may have another of its names.
    quantised = {name for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, QuantizedLayer)}
    if digits:  # the graph begins with the encoded image
        plain.digits = False  # type: ignore[assignment]
        if not isinstance(example_inputs, torch.Tensor):
            raise InputError("The FP4 input encoding reads one image [N, 3, H, W].")
        n, _, *size = example_inputs.shape
        example_inputs = torch.zeros(n, ENCODED_CHANNELS, *size)

    def written(dynamic: bool) -> tuple[Graph, Tensors]:
        captured = capture(plain, example_inputs, dynamic, quantised, form.dynamic, form.batch)
        return packed_graph(captured, model, digits, not dynamic_size, rest, form.dynamic)

    if not dynamic_size:
        return written(False)
    try:
        return written(True)
    except InputError as error:  # such as positions of pixels that the code makes for each size
        refused = error
    fixed = written(False)  # an error that is no matter of sizes is raised again
    warnings.warn(f"{_cause(refused)} The packed network takes inputs of the example's size alone.", stacklevel=2)
    return fixed


def _cause(error: InputError) -> str:
    """Why sizes do not stay free, without advice that is of the other case."""
    return error.cause if isinstance(error, UnsettledSizes) else f"With free sizes: {str(error).partition('. ')[0]}."


def _at_sizes_of_torch(
    model: nn.Module,
    file: PackedFile,
    sample: Inputs,
    example: Inputs,
    form: Axes,
    meanings: OutputMeanings | None = None,
) -> PackedFile:
    """A packed network that takes the example's size alone if it computes something else than torch at others."""

    def packed(plain: nn.Module) -> PackedFile:
        return packed_file(file.path, file.card, *pack_model(plain, example, rest=rest_of(file.graph), form=form))

    differs = packed_differs(model, file, sample, packed, meanings)
    if not differs:
        return file
    if form.dynamic:
        raise InputError(f"{differs} Nothing was written. Pack it for one size, without dynamic.")
    warnings.warn(f"{differs} The packed network takes inputs of the example's size alone.", stacklevel=3)
    fixed = [each.model_copy(update={"free": [axis for axis in each.free if axis == 0]}) for each in file.graph.inputs]
    return replace(file, graph=file.graph.model_copy(update={"inputs": fixed}))


def _pack_module(
    model: nn.Module,
    out: Path,
    example_inputs: Inputs | None,
    verify: bool,
    meanings: OutputMeanings,
    rest: str | None,
    form: Axes,
) -> PackedResult:
    if example_inputs is None:
        raise InputError(
            "Give example_inputs, such as torch.zeros(1, 3, 256, 256): a module says nothing of its inputs."
        )
    if out.suffix != SUFFIX:
        raise InputError(f"The name of a packed network should end in {SUFFIX}, and {out.name} does not.")
    model, example_inputs = taking_flat_inputs(model, example_inputs), flat_inputs(example_inputs)
    example_inputs = of_batch(tree_map(_float, example_inputs), form.batch)
    deployed, file = _deployed_file(model, out, example_inputs, _chosen(rest, model, example_inputs), form)
    verification = None
    if verify:
        verification = verify_packed(deployed, file, [example_inputs], meanings)
        require_packed(verification, type(model).__name__)
        file = _at_sizes_of_torch(deployed, file, example_inputs, example_inputs, form, meanings)
    write_packed(file)
    return PackedResult(file, verification)
