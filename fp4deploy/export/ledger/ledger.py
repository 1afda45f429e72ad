"""The precision ledger: which layer of the model runs in which precision in the engine, and why.

A compiler is free to decode FP4 weights and compute in FP16 without a word, so a request for FP4 proves nothing. The
evidence is the compiler's own list of engine layers, one line a kernel:

    Name: up.0.gemm.matmul_U30, LayerType: gemm, Inputs: [ { ..., Datatype: FP4E2M1, ... }, ...], Constants: [...],
    Outputs: [...], TacticName: ..., Metadata: [ONNX Layer: up.0.gemm.matmul]...

With TensorRT-RTX it comes from the verbose build log, which needs no GPU; with TensorRT from the engine inspector. ONNX
node names start with torch module names, which leads from a kernel back to a layer. A layer is read as

| field | from |
|---|---|
| requested | the recipe, carried in the ONNX metadata; of another tool's file, the format of both operands |
| planned | the lowering: FP4 for a GEMM or a plugin, FP8 or FP16 for a convolution |
| actual | the operand types of the kernel that multiplies: FP4 only where *both* operands are FP4 |
| weights | the type of the layer's constants inside the plan |

In JSON and in the columns of `rows`, the keys of requested and actual precision are `wanted` and `realised`.

A plugin is a kernel of this project. The engine stores its compiled code and sees its FP4 codes as INT8. Such a layer
has its planned precision where the engine lists a plugin for it that reads INT8: FP4, or FP16 on GPUs before Blackwell,
where the kernel decodes.

A layer is **not as requested** when it requested FP4, FP8 or INT8 and is multiplied in another precision, by plan or
not: a 3x3 convolution that the default `--conv auto` makes FP8, too. `--strict` fails on it. It **fell back** when its
actual precision or its weight storage is not even the planned one, or when no kernel was found for it: without evidence
nothing is claimed. The plan was built and inspected, not run; the ledger speaks of the kernels that were chosen, not of
time or accuracy.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.errors import GateError, InputError, counted
from fp4deploy.export.ledger.build_log import EngineLayer
from fp4deploy.export.ledger.shares import in_words, shares_of
from fp4deploy.models.card import ModelCard
from fp4deploy.precisions import OF_ENGINES
from fp4deploy.system.schema import Bool, Count, Float, parse_json, read_text, validated

FORMAT = 1
STATEMENT = "built and inspected, not run"
UNKNOWN = "unknown"
BITS = {"FP4": 4, "FP8": 8, "INT8": 8, "FP16": 16, "BF16": 16, "FP32": 32, "Int32": 32, "Int64": 64}
Extent = tuple[Count, Count]
_JSON_KEYS = {"requested": "wanted", "actual": "realised"}  # attribute -> key in ledger files, which are a contract
COLUMNS = ("layer", "kind", "wanted", "realised", "weights", "form", "input", "reason")


@dataclass(frozen=True)
class PlannedLayer:
    """What one torch layer should become in the engine.

    `requested` is the recipe's precision; `form` is "gemm", "qdq", "fp8", "int8", "plugin" or "plain"; `compute` and
    `weights` are what this lowering can reach, and `reason` says why where that is less than requested. `nodes` are
    the layer's ONNX nodes, `compute_nodes` the one that multiplies. `macs` counts multiply-accumulates for one image.
    `input` is the operator whose result the layer's quantiser reads (`lowering.placement`), "" where none does.
    `largest` is the largest magnitude of the layer's result when the file was verified, "" where it was not.
    """

    name: str
    kind: str
    requested: str
    form: str
    compute: str
    weights: str
    reason: str
    macs: int
    nodes: tuple[str, ...]
    compute_nodes: tuple[str, ...]
    input: str = ""
    largest: str = ""


@dataclass(frozen=True)
class LedgerRow:
    """One torch layer: requested, planned and actual precision, and the engine kernels and ONNX nodes that show it.

    largest: the largest magnitude of its result that the export saw; FP16 holds 65504.
    """

    layer: str
    kind: str
    requested: str
    planned: str
    actual: str
    weights: str
    form: str
    reason: str
    macs: Count
    fell_back: Bool
    kernels: tuple[str, ...]
    onnx_nodes: tuple[str, ...]
    input: str = ""
    largest: str = ""


@dataclass(frozen=True)
class Totals:
    """Counts over the rows.

    `fp4_mac_share` is the part of all multiply-accumulates that FP4 tensor cores do, `requested` and `actual` those of
    each precision; `constant_bytes` what weights and other constants take in the plan (the rest of it is compiled code,
    about 60 kB a kernel).
    """

    requested: dict[str, float]
    actual: dict[str, float]
    not_as_requested: int

    fp4_gemms: int
    fp16_with_fp4_weights: int
    fp16: int
    fell_back: int
    engine_layers: int
    macs: int
    fp4_mac_share: float
    constant_bytes: int
    plugins: int = 0


@dataclass(frozen=True)
class Ledger:
    """Everything known about one built plan; `card` is the model card as plain JSON, None for a foreign ONNX file.

    `batch` and `sizes` are (min, opt, max); `sizes` (height, width) of an engine with a range of them. `interface`:
    where input and output are not those of the ONNX file (`lowering.interface`). `options`: how the plan was written,
    such as "stripped". `about`: the version that built it, the checkpoint of the source, colours of the classes
    (`fp4deploy.about`); None in ledgers of older versions.
    """

    backend: str
    backend_version: str
    arch: str
    conv: str
    evidence: str
    source: str
    source_sha256: str
    plan: str
    plan_sha256: str
    plan_bytes: Count
    build_seconds: Float
    batch: tuple[Count, Count, Count]
    card: dict[str, Any] | None
    layers: tuple[LedgerRow, ...]
    engine: tuple[EngineLayer, ...]
    statement: str = STATEMENT
    sizes: tuple[Extent, Extent, Extent] | None = None
    interface: dict[str, str | None] | None = None
    options: tuple[str, ...] = ()
    about: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Ledger({self.plan}: {self.summary()})"

    @property
    def precision(self) -> str:
        """Precision of the model in the plan: "nvfp4" where any weights are FP4, else "fp8", "int8" or "fp16"."""
        kept = {row.weights for row in self.layers}
        return "nvfp4" if "FP4" in kept else next((each.lower() for each in OF_ENGINES if each in kept), "fp16")

    def model_card(self) -> ModelCard | None:
        """Model card of the source, or None for a foreign ONNX file."""
        return ModelCard.from_json(json.dumps(self.card), f"The model card of {self.plan}") if self.card else None

    def fallbacks(self) -> tuple[LedgerRow, ...]:
        """Layers that requested FP4, FP8 or INT8 and do not have the planned precision or weight storage."""
        return tuple(row for row in self.layers if row.fell_back)

    def not_as_requested(self) -> tuple[LedgerRow, ...]:
        """Layers that requested FP4, FP8 or INT8 and are multiplied in another precision."""
        return tuple(row for row in self.layers if row.requested in OF_ENGINES and row.actual != row.requested)

    def require_no_fallback(self) -> None:
        """Of an engine whose plan is what is wanted.

        Raises:
            GateError: a layer fell back; the message lists all of them.
        """
        self._refuse(self.fallbacks(), "fell back", "planned")

    def require_requested(self) -> None:
        """The gate of `--strict`.

        Raises:
            GateError: a layer is not as requested, or fell back; the message lists all of them.
        """
        failed = tuple(dict.fromkeys((*self.not_as_requested(), *self.fallbacks())))
        other = "" if self.conv == "gemm" else ", or choose another form with: --conv gemm"
        advice = f" No engine was written. Build without --strict to keep the engine and its ledger{other}"
        self._refuse(failed, "are not as requested", "requested", advice)

    def _refuse(self, failed: tuple[LedgerRow, ...], what: str, expected: str, advice: str = "") -> None:
        if not failed:
            return
        listed = "; ".join(
            f"{row.layer} ({expected} {getattr(row, expected)}, actual {row.actual}, weights {row.weights}: "
            f"{row.reason})"
            for row in failed
        )
        raise GateError(f"{len(failed)} of {len(self.layers)} layers {what}: {listed}.{advice}")

    def require_fp4_share(self, share: float) -> None:
        """The gate of `--require-fp4`: a plan that keeps convolutions in FP16 has no fallback, and may be too little.

        Raises:
            GateError: FP4 tensor cores do less than `share` of the multiply-accumulates; the message lists the layers
                that do most of the rest.
        """
        found = self.totals().fp4_mac_share
        if found >= share:
            return
        rest = sorted((row for row in self.layers if row.actual != "FP4"), key=lambda row: -row.macs)[:3]
        total = max(1, sum(row.macs for row in self.layers))
        listed = "; ".join(f"{row.layer} ({100 * row.macs / total:.1f} %, {row.actual}): {row.reason}" for row in rest)
        raise GateError(
            f"{100 * found:.1f} % of the multiply-accumulates are in FP4, and --require-fp4 asks for "
            f"{100 * share:.1f} %. Most of the rest: {listed}. No engine was written. "
            "Choose another form with: --conv gemm"
        )

    def totals(self) -> Totals:
        """Counts for a summary line."""
        macs = sum(row.macs for row in self.layers)
        fp4 = sum(row.macs for row in self.layers if row.actual == "FP4")
        return Totals(
            requested=self.shares("requested"),
            actual=self.shares("actual"),
            not_as_requested=len(self.not_as_requested()),
            fp4_gemms=sum(layer.type == "gemm" and layer.precision == "FP4" for layer in self.engine),
            fp16_with_fp4_weights=sum(row.actual == "FP16" and row.weights == "FP4" for row in self.layers),
            fp16=sum(row.actual == "FP16" and row.weights == "FP16" for row in self.layers),
            fell_back=len(self.fallbacks()),
            engine_layers=len(self.engine),
            macs=macs,
            fp4_mac_share=fp4 / macs if macs else 0.0,
            constant_bytes=_constant_bytes(self.engine),
            plugins=sum(row.form == "plugin" and not row.fell_back for row in self.layers),
        )

    def rows(self) -> list[dict[str, str]]:
        """One dict of strings a layer, keys `COLUMNS`, ready for a table."""
        attributes = {key: attribute for attribute, key in _JSON_KEYS.items()}
        return [{key: str(getattr(row, attributes.get(key, key))) for key in COLUMNS} for row in self.layers]

    def shares(self, which: str = "actual") -> dict[str, float]:
        """Precision -> share of the multiply-accumulates; which: "requested", "planned" or "actual"."""
        return shares_of((getattr(row, which), row.macs) for row in self.layers)

    def summary(self) -> str:
        """One sentence: shares of the multiply-accumulates, layers that are not as requested, fallbacks."""
        requested, actual = in_words(self.shares("requested")), in_words(self.shares())
        asked = f", requested: {requested}" if actual != requested else ""
        missed = Counter(row.requested for row in self.not_as_requested())
        texts = [f"{counted(number, 'layer')} requested {name} and got another" for name, number in missed.items()]
        texts.append(counted(len(self.fallbacks()), "fallback"))
        return (
            f"multiply-accumulates in {actual or UNKNOWN}{asked}; "
            f"{', '.join(texts)} among {counted(len(self.layers), 'layer')}; {self.statement}."
        )

    def to_json(self) -> str:
        """Serialise; `from_json` gives the same ledger back."""
        fields = dataclasses.asdict(self) | {"format": FORMAT, "totals": dataclasses.asdict(self.totals())}
        for name in ("sizes", "interface", "options", "about"):  # older versions do not know them
            if not fields[name]:
                del fields[name]
        fields["layers"] = [
            {_JSON_KEYS.get(name, name): value for name, value in row.items() if value or name != "largest"}
            for row in fields["layers"]
        ]
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str, source: object = "The ledger") -> Ledger:
        """Parse what `to_json` wrote; `source` begins the message of an error.

        Raises:
            InputError: the text is not a ledger, or of a later format.
        """
        advice = "Build the engine again: fp4deploy build"
        fields = parse_json(text, source, advice)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise InputError(f"{source} cannot be read: format is not {FORMAT}. {advice}")
        layers = fields.get("layers")
        if isinstance(layers, list):
            fields["layers"] = [_with_attribute_names(entry) for entry in layers]
        return validated(cls, fields, source, advice)


def _constant_bytes(engine: Iterable[EngineLayer]) -> int:
    constants = {tensor.name: tensor for layer in engine for tensor in layer.constants}
    return sum(math.prod(tensor.shape) * BITS.get(tensor.precision, 0) for tensor in constants.values()) // 8


def _with_attribute_names(entry: object) -> object:
    attributes = {key: attribute for attribute, key in _JSON_KEYS.items()}
    return {attributes.get(key, key): value for key, value in entry.items()} if isinstance(entry, dict) else entry


def ledger_path(plan: Path) -> Path:
    """Where the ledger of a plan lies: engines/unet.plan -> engines/unet.ledger.json."""
    return plan.with_name(f"{plan.stem}.ledger.json")


def load_ledger(path: Path) -> Ledger:
    """Read a ledger file.

    Raises:
        InputError: the file is missing or not a ledger.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist. Build the engine with: fp4deploy build MODEL.onnx")
    return Ledger.from_json(read_text(path), path)
