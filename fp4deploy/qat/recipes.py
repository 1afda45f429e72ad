"""Recipes: which of the six operands of a layer's three GEMMs are quantised, and how.

    forward           Y  = Q(X) Q(W^T)     activation, weight
    input gradient    dX = Q(G) Q(W)       dgrad_gradient, dgrad_weight
    weight gradient   dW = Q(G^T) Q(X)     wgrad_gradient, wgrad_activation

Each operand is blocked along the contraction axis of its own GEMM, so that X and W are quantised along one axis for
the forward GEMM and along another for a gradient. An operand of a backward GEMM whose spec is None is the one the
forward GEMM used; with all four None the gradients pass straight through, as quantisation-aware training wants. With
`double_quantization` the backward quantises the forward's quantised X and W once more instead of the original ones.

    print(RECIPES["tetrajet"])                                            reads like the table in docs/numerics.md
    find_recipe("nvfp4_4o6_qat+dynamic")                                  a known one with another activation scale
    Recipe("mine", QuantSpec(scale="static"), QuantSpec(block="2d"))      a recipe of your own
    replace(RECIPES["fp4_all_the_way"], name="rn", dgrad_gradient=NVFP4)  ... or a variant of a known one

Sources: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025 (`nvfp4_train`); Chmiel et al., "FP4 All the Way",
2025; Chen et al., "Oscillation-Reduced MXFP4 Training for Vision Transformers" (TetraJet), 2025; Rouhani et al.,
"Microscaling Data Formats for Deep Learning", 2023 (`mx_baseline`); Mishra et al., "Recipes for Pre-training LLMs with
MXFP8", 2025 (`nvidia_round_to_infinity`); Chen et al., "TetraJet-v2: Accurate NVFP4 Training for Large Language Models
with Oscillation Suppression and Outlier Control", arXiv 2510.27527, 2025 (`tetrajet_v2`: its six quantisers with the
global scale of a tensor instead of one for each 128 elements, and `WeightReset`, its OsciReset;
`tetrajet_v2_outcontrol`: with its FP8 channels for outliers as well); Panferov et al., "Quartet II", arXiv
2601.22813, 2026 (`quartet_2`); Du and Rybakov, "Not All NVFP4 QAT Recipes Are Equal", arXiv 2605.27616, 2026
(`nvfp4_baseline`, `nvfp4_sr`, `nvfp4_2d_rht`, `nvfp4_forward`, `nvfp4_forward_rht`; their "chain rule" is
`nvfp4_qat+dynamic`, their "2D+RHT+SR" `nvfp4_train`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from fp4deploy.errors import InputError, suggest
from fp4deploy.formats import EIGHT_BITS, MXFP4_BLOCK, NVFP4_BLOCK, FourOverSix
from fp4deploy.precisions import LAYER_FORMATS

_CHOICES = {
    "format": ("nvfp4", "mxfp4", "mxfp8", *EIGHT_BITS),
    "block": ("1d", "2d"),
    "scale": ("dynamic", "static"),
    "scale_rule": ("floor", "ceil"),
    "rounding": ("nearest", "stochastic", "ms_eden"),
}
AMAX_TIMINGS = ("current", "delayed")
MX = ("mxfp4", "mxfp8")  # block scales that are powers of two
FP8_RULES = ("none", "convolutions")


@dataclass(frozen=True)
class QuantSpec:
    """How one operand is quantised.

    format: "nvfp4" (blocks of 16), "mxfp4" (blocks of 32, no global scale), "mxfp8" (the same of E4M3 elements), or
        without blocks "fp8" (E4M3) and "int8": one scale.
    block: "1d" (along the contraction axis) or "2d" (16 x 16 over output and input channels; NVFP4 weights only).
    scale: global scale "dynamic" (from the tensor itself) or "static" (from the tracked amax; the activation only).
    scale_rule: "floor" or "ceil", the block scale of MXFP4 and MXFP8.
    rounding: "nearest", "stochastic", or "ms_eden" (NVFP4, unbiased; both operands of a backward GEMM are rotated in
        groups of up to 128, and its scales are rounded stochastically: `formats.ms_eden`).
    four_over_six: NVFP4 blocks may map their amax to 4.
    hadamard: transform groups of 16 first; on both operands of a GEMM, so that it cancels.
    row_scaled: NVFP4 with a global scale a row; FP8 and INT8 with a scale an output channel.

    Raises:
        InputError: unknown values or a combination no format has; all of them named.

    >>> str(QuantSpec(block="2d", four_over_six=FourOverSix()))
    'RN 2D 4/6 MAE/256 strict'
    """

    format: str = "nvfp4"
    block: str = "1d"
    scale: str = "dynamic"
    scale_rule: str = "floor"
    rounding: str = "nearest"
    four_over_six: FourOverSix | None = None
    hadamard: bool = False
    row_scaled: bool = False

    @property
    def mx_rule(self) -> str | None:
        """The rule of a block scale that is a power of two; None for the other formats."""
        return self.scale_rule if self.format in MX else None

    @property
    def block_size(self) -> int:
        """Elements that share a scale, of a format with blocks."""
        return MXFP4_BLOCK if self.format in MX else NVFP4_BLOCK

    @property
    def in_four_bits(self) -> bool:
        """Its elements are E2M1."""
        return self.format in ("nvfp4", "mxfp4")

    @property
    def named(self) -> str:
        """Format and, where a format leaves one to choose, the rule of its block scales: "NVFP4", "MXFP4 floor"."""
        return " ".join(filter(None, (self.format.upper(), self.mx_rule)))

    @property
    def in_eight_bits(self) -> bool:
        """FP8 or INT8, which have no blocks."""
        return self.format in EIGHT_BITS

    def along(self, axis: str) -> str:
        """Where blocks run, where there are some."""
        return "" if self.in_eight_bits else f" along {axis}"

    def __post_init__(self) -> None:
        wrong = [
            f"{name} '{getattr(self, name)}' is not one of {', '.join(values)}"
            for name, values in _CHOICES.items()
            if getattr(self, name) not in values
        ]
        if self.format in MX and (
            self.block == "2d" or self.scale == "static" or self.four_over_six or self.row_scaled
        ):
            wrong.append(f"{self.format} has 1-D blocks and no global scale: no 2d, static, 4/6 or row_scaled")
        if self.format == "mxfp8" and (self.hadamard or self.rounding != "nearest"):
            wrong.append("mxfp8 is rounded to nearest: no hadamard or other rounding")
        if self.in_eight_bits and (
            self.block == "2d" or self.four_over_six or self.hadamard or self.rounding != "nearest"
        ):
            wrong.append(
                f"{self.format} has no blocks and is rounded to nearest: no 2d, 4/6, hadamard or other rounding"
            )
        if self.block == "2d" and (self.row_scaled or self.hadamard):
            wrong.append("2d blocks go with neither row_scaled nor hadamard")
        if self.row_scaled and self.scale == "static":
            wrong.append("a static scale is one value, not one a row")
        if self.hadamard and self.scale == "static":
            wrong.append("a static scale is tracked before the Hadamard transform, it does not fit what comes after")
        if self.four_over_six and self.rounding == "stochastic":
            wrong.append("4/6 goes with rounding to nearest")
        if self.rounding == "ms_eden" and replace(self, rounding="nearest") != QuantSpec():
            wrong.append("ms_eden has its own rotation and scales: nvfp4 in 1-D blocks and nothing else")
        if wrong:
            raise InputError("QuantSpec: " + "; ".join(wrong) + ".")

    def __str__(self) -> str:
        """RN or SR and what is special, as in the table of recipes."""
        details = [
            self.block.upper() if self.block == "2d" else "",
            str(self.four_over_six or ""),
            "RHT" if self.hadamard else "",
            "rows" if self.row_scaled else "",
            "static" if self.scale == "static" else "",
        ]
        return " ".join([_ROUNDINGS[self.rounding], *filter(None, details)])


@dataclass(frozen=True)
class WeightReset:
    """When weights that oscillate between two codes are set to the value of their code (`qat.oscillation`).

    start: share of the training after which the first window begins.
    period: steps from the beginning of a window to that of the next.
    window: steps over which the movement of a weight and that of its quantised value are summed.
    ratio: the least ratio of the second to the first that counts as oscillation.

    The defaults are those of TetraJet-v2's configurations for OLMo2-70M and 150M, which start after 59 to 69 % of the
    steps.
    """

    start: float = 0.6
    period: int = 200
    window: int = 50
    ratio: float = 8.0


@dataclass(frozen=True)
class OutlierControl:
    """Which input channels of a layer are MXFP8 instead of FP4 (`qat.outliers`).

    share: of the input channels.
    start: share of the training after which their norms are summed.
    window: steps over which they are.

    The defaults are those of TetraJet-v2's configurations; they start at step 501, 2 % of the training of OLMo2-150M.
    """

    share: float = 0.1
    start: float = 0.02
    window: int = 50


@dataclass(frozen=True)
class Recipe:
    """The six quantisers of a layer; None leaves an operand as it is (see the module's page).

    double_quantization: the backward GEMMs quantise the forward's quantised X and W, not the original ones.
    amax_decay: a static activation's amax after a training step is max(amax of the batch, amax_decay * previous).
    amax_timing: a training step quantises a static activation with the amax after it ("current"), for which the
        activation is read once before it can be quantised, or with the one before it ("delayed"), for which it is not;
        what exceeds that saturates. The very first step has only its own.
    amax_learned: a static activation's amax is not tracked but a parameter with a gradient (`qat.operators.learned`).
    fp8: "convolutions": layers that no engine can compute in FP4, because they are not a single GEMM, are FP8
        (`qat.placement`); "none": all layers have the operands above. `prepare` can be told other layers.
    weight_reset: when oscillating weights are reset; None: never.
    outlier_control: how input channels are chosen that are MXFP8; None: none is.
    original_operands: a backward operand without a quantiser is the original X or W, not the forward's.

    Raises:
        InputError: a static scale on another operand than the activation, 2-D blocks on another than a weight, a
            Hadamard transform on one operand of a GEMM only or on one that a backward GEMM reuses, a delayed
            or learned amax where there is no static one, or a reset of weights that have no code of their own.

    >>> print(Recipe("mine", activation=QuantSpec(scale="static"), weight=QuantSpec(block="2d")))
    recipe  format  X          W^T    G  W  G^T  X (dW)  double quant
    ------  ------  ---------  -----  -  -  ---  ------  ----------------
    mine    NVFP4   RN static  RN 2D  -  -  -    -       straight-through
    """

    name: str
    activation: QuantSpec | None = None
    weight: QuantSpec | None = None
    dgrad_gradient: QuantSpec | None = None
    dgrad_weight: QuantSpec | None = None
    wgrad_gradient: QuantSpec | None = None
    wgrad_activation: QuantSpec | None = None
    double_quantization: bool = False
    amax_decay: float = 0.99
    amax_timing: str = "current"
    amax_learned: bool = False
    fp8: str = "none"
    weight_reset: WeightReset | None = None
    outlier_control: OutlierControl | None = None
    original_operands: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if self.fp8 not in FP8_RULES:
            wrong.append(f"fp8 '{self.fp8}' is not one of {', '.join(FP8_RULES)}")
        eight = [name for name, spec in self.operands().items() if spec and spec.in_eight_bits]
        if (eight or self.fp8 != "none") and (not self.straight_through or self.amax_learned):
            wrong.append("fp8 and int8 go with gradients that pass straight through and an amax that is not learned")
        for operand, spec in self.operands().items():
            if spec and spec.scale == "static" and operand != "activation":
                wrong.append(f"{operand}: only the activation has a static scale")
            if spec and spec.block == "2d" and operand not in ("weight", "dgrad_weight"):
                wrong.append(f"{operand}: 2d blocks are for weights")
        for one, other in (
            ("activation", "weight"),
            ("dgrad_gradient", "dgrad_weight"),
            ("wgrad_gradient", "wgrad_activation"),
        ):
            if _transforms(getattr(self, one)) != _transforms(getattr(self, other)):
                wrong.append(f"{one} and {other}: the Hadamard transform cancels only when both have it")
        for operand in ("activation", "weight"):
            if (spec := getattr(self, operand)) and spec.rounding == "ms_eden":
                wrong.append(f"{operand}: ms_eden is for the operands of backward GEMMs")
        if _transforms(self.activation) and (self.reuses_activation or self.reuses_weight):
            wrong.append("activation and weight: the backward GEMMs reuse them, so neither may be transformed")
        if self.double_quantization and not self._quantizes_backward:
            wrong.append("double_quantization: no backward operand has a quantiser")
        if self.double_quantization and self.original_operands:
            wrong.append("double_quantization and original_operands: the backward GEMMs read one or the other")
        if not 0 <= self.amax_decay <= 1:
            wrong.append(f"amax_decay is {self.amax_decay:g}, valid values are 0 to 1")
        if self.amax_timing not in AMAX_TIMINGS:
            wrong.append(f"amax_timing '{self.amax_timing}' is not one of {', '.join(AMAX_TIMINGS)}")
        elif self.amax_timing == "delayed" and not (self.activation and self.activation.scale == "static"):
            wrong.append("amax_timing 'delayed' is of an activation with a static scale, and there is none")
        if self.amax_learned and not (self.activation and self.activation.scale == "static"):
            wrong.append("amax_learned is of an activation with a static scale, and there is none")
        if self.amax_learned and (self.amax_timing == "delayed" or not self.straight_through):
            wrong.append("amax_learned goes with amax_timing 'current' and gradients that pass straight through")
        if self.weight_reset and not (self.weight and self.weight.rounding == "nearest"):
            wrong.append("weight_reset goes with a weight that is rounded to nearest")
        if (reset := self.weight_reset) and not (0 <= reset.start < 1 <= reset.window < reset.period - 1):
            wrong.append("weight_reset: start is from 0 to below 1, window from 1 to period - 2")
        if self.outlier_control:
            wrong += self._wrong_outlier_control(self.outlier_control)
        if wrong:
            raise InputError(f"Recipe '{self.name}': " + "; ".join(wrong) + ".")

    def _wrong_outlier_control(self, control: OutlierControl) -> list[str]:
        wrong = []
        if not (0 < control.share < 1 and 0 <= control.start < 1 <= control.window):
            wrong.append("outlier_control: share and start are from 0 to below 1, share above 0, window at least 1")
        specs = self.operands().values()
        if not self.double_quantization or any(
            spec is None
            or spec.scale == "static"
            or spec.block == "2d"
            or spec.rounding == "ms_eden"
            or spec.row_scaled
            for spec in specs
        ):
            wrong.append(
                "outlier_control goes with double_quantization and six quantised operands, none of them static, 2d, "
                "ms_eden or row_scaled"
            )
        return wrong

    def in_format(self, form: str = "fp8") -> Recipe:
        """This recipe for a layer in one of `OPERANDS`: the same name, timing and decay, other operands.

        Raises:
            InputError: of FP8 and INT8, its gradients are quantised, or its amax is learned.
        """
        activation, weight = OPERANDS[form]
        changed: dict[str, Any] = {"weight": weight, "fp8": "none", "weight_reset": None}
        if activation.scale == "static" and self.activation:
            activation = replace(activation, scale=self.activation.scale)
        elif activation.scale == "dynamic":
            changed |= {"amax_timing": "current", "amax_learned": False}
        return replace(self, activation=activation, **changed)

    def operands(self) -> dict[str, QuantSpec | None]:
        """The six specs by name, in the table's order."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in _HEADINGS}

    def quantizers(self, contracted: tuple[str, str, str] = ("C", "O", "tokens")) -> str:
        """The six quantisers on one line: format, scale rule, rounding, axis; "-" where an operand has none.

        contracted: the axes that the three GEMMs contract, along which blocks of their operands run.

        >>> RECIPES["nvfp4_qat"].quantizers()
        'X NVFP4 RN static along C, W^T NVFP4 RN along C, G -, W -, G^T -, X (dW) -, straight-through'
        """
        specs, texts = self.operands().values(), self._texts().items()
        axes = [axis for axis in contracted for _ in range(2)]
        parts = [
            f"{_HEADINGS[name]} {text}" if spec is None else f"{_HEADINGS[name]} {spec.named} {text}{spec.along(axis)}"
            for (name, text), spec, axis in zip(texts, specs, axes, strict=True)
        ]
        backward = {"yes": "double quantization", "no": None}.get(self._backward(), self._backward())
        return ", ".join([*parts, *filter(None, [backward])])

    def _texts(self) -> dict[str, str]:
        texts = {name: "-" if spec is None else str(spec) for name, spec in self.operands().items()}
        if self.amax_timing == "delayed":
            texts["activation"] += " delayed"
        if self.amax_learned:
            texts["activation"] += " learned"
        return texts

    @property
    def precision(self) -> str:
        """What a layer of this recipe multiplies in: of `precisions.PRECISIONS`, or the formats of both."""
        x, w = self.activation or self.weight, self.weight or self.activation
        own = tuple(spec.format for spec in (x, w) if spec)
        known = {tuple(s.format for s in pair): name.upper() for name, pair in OPERANDS.items()}
        return known.get(own) or ("FP4" if {*own} <= {"nvfp4", "mxfp4"} else " x ".join(own).upper())

    @property
    def straight_through(self) -> bool:
        """The backward GEMMs are autograd's of the quantised forward."""
        return not (self._quantizes_backward or self.original_operands)

    @property
    def reuses_activation(self) -> bool:
        """The weight gradient reads the X that the forward quantised."""
        return self.double_quantization or (self.wgrad_activation is None and not self.original_operands)

    @property
    def reuses_weight(self) -> bool:
        """The input gradient reads the W that the forward quantised."""
        return self.double_quantization or (self.dgrad_weight is None and not self.original_operands)

    @property
    def _quantizes_backward(self) -> bool:
        return any((self.dgrad_gradient, self.dgrad_weight, self.wgrad_gradient, self.wgrad_activation))

    def __str__(self) -> str:
        cells = {"recipe": self.name, "format": self._format()}
        cells |= {_HEADINGS[name]: text for name, text in self._texts().items()}
        cells["double quant"] = self._backward()
        widths = [max(len(heading), len(cell)) for heading, cell in cells.items()]
        rows = (cells, ["-" * width for width in widths], cells.values())
        return "\n".join("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _backward(self) -> str:
        if self.straight_through or not self._quantizes_backward:
            return "straight-through" if self.straight_through else "original X, W"
        return "yes" if self.double_quantization else "no"

    def _format(self) -> str:
        names = {spec.named for spec in self.operands().values() if spec}
        return ", ".join(sorted(names | ({"FP8"} if self.fp8 != "none" else set()), reverse=self.fp8 != "none")) or "-"


def _transforms(spec: QuantSpec | None) -> str:
    """The rotation of an operand, which the other one of its GEMM must have as well; empty for none."""
    if spec is None:
        return ""
    return "ms_eden" if spec.rounding == "ms_eden" else "hadamard" if spec.hadamard else ""


_ROUNDINGS = {"nearest": "RN", "stochastic": "SR", "ms_eden": "EDEN"}


_HEADINGS = {
    "activation": "X",
    "weight": "W^T",
    "dgrad_gradient": "G",
    "dgrad_weight": "W",
    "wgrad_gradient": "G^T",
    "wgrad_activation": "X (dW)",
}

NVFP4 = QuantSpec()
NVFP4_STATIC = QuantSpec(scale="static")
NVFP4_2D = QuantSpec(block="2d")
NVFP4_STOCHASTIC = QuantSpec(rounding="stochastic")
NVFP4_HADAMARD = QuantSpec(hadamard=True)
NVFP4_ROTATED = QuantSpec(rounding="stochastic", hadamard=True)
NVFP4_EDEN = QuantSpec(rounding="ms_eden")
NVFP4_4O6 = QuantSpec(four_over_six=FourOverSix("mse"))
MXFP4_FLOOR = QuantSpec("mxfp4")
MXFP4_CEIL = QuantSpec("mxfp4", scale_rule="ceil")
MXFP8 = QuantSpec("mxfp8", scale_rule="ceil")
MXFP4_CEIL_STOCHASTIC = replace(MXFP4_CEIL, rounding="stochastic")


def _everywhere(name: str, spec: QuantSpec) -> Recipe:
    return Recipe(name, spec, spec, spec, spec, spec, spec)


OPERANDS = {  # of the formats that a layer may have in place of NVFP4: activation, weight
    name: (QuantSpec(**each.activation), QuantSpec(**each.weight)) for name, each in LAYER_FORMATS.items()
}
TETRAJET_V2 = replace(
    _everywhere("tetrajet_v2", NVFP4_ROTATED),
    activation=NVFP4,
    weight=NVFP4,
    double_quantization=True,
    weight_reset=WeightReset(),
)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _everywhere("mx_baseline", MXFP4_FLOOR),
        _everywhere("nvidia_round_to_infinity", MXFP4_CEIL),
        replace(
            _everywhere("tetrajet", MXFP4_CEIL_STOCHASTIC),
            activation=MXFP4_CEIL,
            weight=MXFP4_CEIL,
            double_quantization=True,
        ),
        Recipe("fp4_all_the_way", NVFP4, NVFP4, NVFP4_STOCHASTIC, NVFP4, NVFP4_STOCHASTIC, NVFP4_STOCHASTIC),
        Recipe("nvfp4_qat", NVFP4_STATIC, NVFP4),
        Recipe("nvfp4_qat_delayed", NVFP4_STATIC, NVFP4, amax_timing="delayed"),
        Recipe("nvfp4_qat_2d", NVFP4_STATIC, NVFP4_2D),
        Recipe(
            "nvfp4_4o6_qat",
            replace(NVFP4_STATIC, four_over_six=FourOverSix()),
            replace(NVFP4, four_over_six=FourOverSix()),
        ),
        Recipe("nvfp4_4o6_weight_qat", NVFP4_STATIC, replace(NVFP4, four_over_six=FourOverSix())),
        *(Recipe(f"{form}_qat", *operands) for form, operands in OPERANDS.items()),
        Recipe("nvfp4_fp8_qat", NVFP4_STATIC, NVFP4, fp8="convolutions"),
        Recipe(
            "nvfp4_train",
            NVFP4,
            NVFP4_2D,
            NVFP4_STOCHASTIC,
            NVFP4_2D,
            replace(NVFP4_HADAMARD, rounding="stochastic"),
            NVFP4_HADAMARD,
        ),
        _everywhere("nvfp4_baseline", NVFP4),
        Recipe("nvfp4_sr", NVFP4, NVFP4, NVFP4_STOCHASTIC, NVFP4, NVFP4_STOCHASTIC, NVFP4),
        Recipe("nvfp4_2d_rht", NVFP4, NVFP4_2D, NVFP4, NVFP4_2D, NVFP4_HADAMARD, NVFP4_HADAMARD),
        Recipe("nvfp4_forward", NVFP4, NVFP4, original_operands=True),
        Recipe("nvfp4_forward_rht", NVFP4_HADAMARD, NVFP4_HADAMARD, original_operands=True),
        TETRAJET_V2,
        replace(TETRAJET_V2, name="tetrajet_v2_outcontrol", outlier_control=OutlierControl()),
        Recipe(
            "quartet_2", NVFP4_4O6, NVFP4_4O6, NVFP4_EDEN, NVFP4_EDEN, NVFP4_EDEN, NVFP4_EDEN, double_quantization=True
        ),
    )
}

# Names that stand for a recipe and settings of a training. Every file has a form of 4/6 of weights, and nine tenths of
# the work stays in FP4. Measured fact: H200, `sweep configs/sweep_parity_*.yaml --only control,rule,rule_first`, four
# networks: quantised from a half on they lose 0.0 to 0.35 points (2026-12-01, 853bc39b), from the first step on 0.07 to
# 0.42 (2026-11-30, 24808f6a); paired by seed only one split shows the difference (docs/results.md, "One rule").
RULES: dict[str, dict[str, Any]] = {
    "nvfp4_best": {"recipe": "nvfp4_4o6_weight_qat", "quant": {"fp4_macs": 0.9, "start": 0.5}}
}

MODIFIERS = ("static", "dynamic", "delayed", "learned")


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Look a recipe up by name; a `Recipe` is returned as it is.

    A name may end in one modifier of the activation's global scale: "nvfp4_qat+dynamic" makes it from the tensor
    itself, "+static" tracks its amax, "+delayed" tracks it with one step of delay, "+learned" trains it.

    Raises:
        InputError: there is no recipe or modifier of that name, or the two do not go together.

    >>> find_recipe("nvfp4_qat+dynamic").activation.scale
    'dynamic'
    """
    if isinstance(recipe, Recipe):
        return recipe
    name, plus, modifier = recipe.partition("+")
    if name in RULES and plus:
        alone = RULES[name]["recipe"]
        raise InputError(f"'{recipe}': {name} is a rule, and rules take no modifier; the recipe alone is {alone}.")
    if name in RULES:
        raise InputError(
            f"'{name}' chooses layers by what a trained network loses in them, which fp4deploy train measures; the "
            f"recipe alone is {RULES[name]['recipe']}."
        )
    if name not in RECIPES:
        valid = [*RECIPES, *RULES]
        raise InputError(f"Unknown recipe '{recipe}'.{suggest(name, valid)} Valid recipes: {', '.join(valid)}.")
    return _modified(RECIPES[name], modifier) if plus else RECIPES[name]


def _modified(recipe: Recipe, modifier: str) -> Recipe:
    name = f"{recipe.name}+{modifier}"
    if modifier not in MODIFIERS:
        near = suggest(modifier, MODIFIERS)
        raise InputError(f"Unknown recipe '{name}'.{near} A name may end in: +{', +'.join(MODIFIERS)}.")
    if recipe.activation is None:
        raise InputError(f"'{name}': {recipe.name} does not quantise activations, so '+{modifier}' changes nothing.")
    return replace(
        recipe,
        name=name,
        activation=replace(recipe.activation, scale="dynamic" if modifier == "dynamic" else "static"),
        amax_timing="delayed" if modifier == "delayed" else "current",
        amax_learned=modifier == "learned",
    )
