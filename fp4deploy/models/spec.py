"""Model specs: the text that names a network.

| spec | network | source |
|---|---|---|
| `unet`, `unet:0.5` | this project's UNet, of that scale | known |
| `smp:Unet/resnet34` | segmentation-models-pytorch: architecture / encoder | known |
| `torchvision:deeplabv3_resnet50` | torchvision's segmentation models; FCOS and RetinaNet for boxes | known |
| `monai:BasicUNet` | MONAI's networks, with the spatial axes of the data | known |
| `timm:resnet18` | a timm backbone under the decoder of `models.pyramid`; to classify, timm's classifier | known |
| `hf:vit` | of transformers, the image classifier of that model type | known |
| `FILE.py:factory` | what a function (or class) of a file returns | user's code |
| `package.module:factory` | what a function (or class) of an importable module returns | user's code |
| `nnunet:FOLDER` | the network of a results folder of nnU-Net v2 | user's folder |

**A file never makes code run.** A checkpoint keeps the spec in its card. Known sources are built from it: their names
are looked up in the library, their arguments are numbers, texts and lists, and nothing is downloaded. User's code is
imported only where the user named it in this process (`name_model`, the option `--model`, `model=`), whatever a
checkpoint or a settings file says; likewise a folder of nnU-Net is read. `models.build` builds networks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError, suggest

UNET = "unet"
NNUNET = "nnunet"
KNOWN = (UNET, "smp", "torchvision", "monai", "timm", "hf")
EXAMPLES = "unet:1.0, smp:Unet/resnet34, torchvision:deeplabv3_resnet50, monai:BasicUNet, timm:resnet18, net.py:build"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")


class UnnamedCodeError(InputError):
    """A file is of a network in code that the user did not name in this process."""


@dataclass(frozen=True)
class ModelSpec:
    """A parsed spec.

    source: one of `KNOWN`, or "file" or "module" for user's code, or "nnunet". name: what follows the colon. location:
    the file or module of user's code, or the folder. scale: of a UNet, where the text gives one. arguments: further
    arguments by name. output: which of several outputs holds the logits (`models.output`).
    """

    source: str
    name: str = ""
    location: str = ""
    scale: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None

    @property
    def known(self) -> bool:
        """Whether a card is enough to build it: no code of the user is imported."""
        return self.source in KNOWN

    @property
    def text(self) -> str:
        """The spec as it is written; a UNet's without its scale, which cards and settings hold by itself."""
        if self.source == UNET:
            return UNET
        if self.source == NNUNET:
            return f"{NNUNET}:{self.location}"
        return f"{self.source if self.known else self.location}:{self.name}"

    def same_network(self, other: ModelSpec) -> bool:
        """Whether both name one network, arguments aside; a file may have moved."""
        if (self.source, self.name) != (other.source, other.name):
            return False
        if self.source in ("file", NNUNET):
            return Path(self.location).name == Path(other.location).name
        return self.location == other.location


def parse_spec(text: str, arguments: Mapping[str, object] | None = None, output: str | None = None) -> ModelSpec:
    """The spec that `text` writes.

    Raises:
        InputError: it is none; the message gives examples.

    >>> parse_spec("smp:Unet/resnet34").name
    'Unet/resnet34'
    >>> parse_spec("unet:0.5").scale
    0.5
    """
    head, colon, name = text.strip().rpartition(":")
    if not colon:
        head, name = name, ""
    rest: dict[str, Any] = {"arguments": dict(arguments or {}), "output": output}
    if text.strip().startswith(f"{NNUNET}:") and name:
        return ModelSpec(NNUNET, location=text.strip().removeprefix(f"{NNUNET}:"), **rest)
    if head == UNET:
        return ModelSpec(UNET, scale=_scale(name) if colon else None, **rest)
    if head in KNOWN and name:
        return ModelSpec(head, name, **rest)
    if head.endswith(".py") and name.isidentifier():
        return ModelSpec("file", name, head, **rest)
    if name.isidentifier() and _MODULE.match(head) and ("." in head or not suggest(head, KNOWN)):
        return ModelSpec("module", name, head, **rest)
    raise InputError(f"'{text}' names no model.{suggest(head, KNOWN)} Examples: {EXAMPLES}.")


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise InputError(f"'{text}' is not a scale. Give a number: unet:0.25, unet:0.5, unet:1.0.")
    return scale


_named: list[ModelSpec] = []
_expected: list[ModelSpec] = []
_option = ["--model"]  # by which the running command names a network


def name_model(text: str) -> ModelSpec:
    """Say that the user names this model: if it is code of theirs, this process may import it from now on.

    Raises:
        InputError: `text` is no spec.
    """
    spec = parse_spec(text)
    _named.append(spec)
    return spec


def expect_model(text: str | None, option: str = "--model") -> None:
    """`name_model`, and refuse checkpoints of another model from now on (`require_named`); where `text` is None, say
    alone by which option of a command it is named."""
    _option[:] = [option]
    if text is not None:
        _expected[:] = [name_model(text)]


def require_named(spec: ModelSpec, where: object, given: str | None = None) -> ModelSpec:
    """The spec to build a file's network from: its own, or for code of the user the one that they named.

    Args:
        where: the file, for messages.
        given: the model that the caller was given for this file.

    Raises:
        InputError: the file is of another model than the user named, or would make their code run unasked.
    """
    wanted = [parse_spec(given)] if given is not None else _expected
    if wanted and not wanted[-1].same_network(spec):
        raise InputError(f"{where} is a {spec.text}, and the model named for it is {wanted[-1].text}. Name the same.")
    if spec.known:
        return spec
    named = next((each for each in reversed([*_named, *wanted]) if each.same_network(spec)), None)
    if named is None and spec.source == NNUNET:
        raise UnnamedCodeError(
            f"{where} is of the network in a results folder of nnU-Net, and a file never says which folder is read. "
            f"Name it again: {_option[0]} {spec.text} (in Python: model=, or fp4deploy.models.name_model)."
        )
    if named is None:
        raise UnnamedCodeError(
            f"{where} is of a model in your own code, {spec.text}, and a file never makes code run. If you trust that "
            f"code, name it again: {_option[0]} {spec.text} (in Python: model=, or fp4deploy.models.name_model)."
        )
    return ModelSpec(named.source, named.name, named.location, arguments=spec.arguments, output=spec.output)
