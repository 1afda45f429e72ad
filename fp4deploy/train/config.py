"""The configuration: defaults, a YAML file, and `--set section.key=value`, in that order, later ones winning.

The defaults train the demo: generated shapes, a UNet of scale 0.25, minutes on two CPU cores. Everything that can be
wrong with a configuration is reported at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from fp4deploy.errors import InputError, suggest
from fp4deploy.models.card import TaskName
from fp4deploy.models.spec import UNET, parse_spec
from fp4deploy.models.torchvision_detectors import LEARNING_RATES, METHODS, own_layout
from fp4deploy.models.unet import STRIDE
from fp4deploy.qat import find_recipe
from fp4deploy.qat.fp4_gemms.requirements import require_packed
from fp4deploy.qat.recipes import RULES, Recipe
from fp4deploy.system.files import write_whole
from fp4deploy.system.schema import briefly, parse_yaml, read_yaml
from fp4deploy.tasks import TASKS
from fp4deploy.train.sections import (
    AugmentSection,
    DataSection,
    DetectionSection,
    DistillSection,
    InstanceSection,
    ModelSection,
    QuantSection,
    Section,
    TelemetrySection,
    TrainSection,
    checked,
    valid_text,
)


class Config(Section):
    """A whole training."""

    seed: int = Field(0, ge=0, lt=1 << 63, description="of initial weights, shuffling and augmentation")
    task: TaskName = Field("semantic", description="segment classes or objects, find boxes, or name images")
    recipe: str = Field("nvfp4_qat", description="what is quantised, and how")
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    augment: AugmentSection = AugmentSection()
    quant: QuantSection = QuantSection()
    distill: DistillSection = DistillSection()
    telemetry: TelemetrySection = TelemetrySection()
    instance: InstanceSection = InstanceSection()
    detection: DetectionSection = DetectionSection()

    @model_validator(mode="before")
    @classmethod
    def _settings_of_the_rule(cls, values: Any) -> object:
        """Those that are given come before the rule's."""
        rule = RULES.get(str(values.get("recipe"))) if isinstance(values, dict) else None
        quant = values.get("quant", {}) if rule else None
        if not rule or not isinstance(quant, dict):
            return values
        return {**values, **rule, "quant": {**rule["quant"], **quant}}

    @model_validator(mode="before")
    @classmethod
    def _rates_of_the_network(cls, values: Any) -> object:
        """torchvision's detectors have learning rates of their own; those that are given come first."""
        model, train = (values.get(name, {}) if isinstance(values, dict) else None for name in ("model", "train"))
        if not isinstance(model, dict) or not isinstance(train, dict):
            return values
        source, _, name = str(model.get("spec")).partition(":")
        return (
            {**values, "train": {**LEARNING_RATES, **train}} if source == "torchvision" and name in METHODS else values
        )

    @model_validator(mode="after")
    def _serves_the_task(self) -> Config:
        for key, why in TASKS[self.task].unused.items():
            section, _, name = key.partition(".")
            settings = getattr(self, section)
            value = getattr(settings, name)
            if value and value != type(settings).model_fields[name].default:
                raise ValueError(f"{key} = {briefly(value)}: {why}")
        if not any(self.train.tversky):
            raise ValueError("train.tversky = [0, 0] leaves no Dice loss; switch that off with train.dice=0")
        return self

    @model_validator(mode="after")
    def _has_the_head_of_its_network(self) -> Config:
        own, usual = own_layout(parse_spec(self.model.spec)), DetectionSection()
        fixed = ["width", "depth"] if own else []
        fixed += ["centre_loss"] if own.get("method") == "retinanet" else []
        changed = [name for name in fixed if getattr(self.detection, name) != getattr(usual, name)]
        if changed:
            raise ValueError(
                f"detection.{changed[0]} is of this project's head; {self.model.spec} has its own; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _multiplies_fp4(self) -> Config:
        if self.train.products == "fp4":
            checked(find_recipe(self.recipe), require_packed)
        return self

    @model_validator(mode="after")
    def _starts_with_an_amax(self) -> Config:
        if self.quant.start and find_recipe(self.recipe).amax_learned:
            raise ValueError(
                f"quant.start = {self.quant.start:g}: a learned amax has no gradient before quantisation begins; leave "
                "it 0, or take the recipe without +learned"
            )
        return self

    @model_validator(mode="after")
    def _measures_a_trained_network(self) -> Config:
        on = [name for name in ("fp16_macs", "fp8_macs", "fp4_macs") if getattr(self.quant, name)]
        if on and self.train.from_scratch:
            raise ValueError(
                f"quant.{on[0]} measures what a trained network loses, and train.from_scratch starts from random "
                "weights; leave out one"
            )
        if "fp8" in self.quant.by_error:
            checked(find_recipe(self.recipe), Recipe.in_format)
        return self

    @model_validator(mode="after")
    def _calls_its_layers(self) -> Config:
        on = [name for name in ("compile", "checkpointing") if getattr(self.train, name)]
        if self.distill.features and on:
            raise ValueError(
                f"distill.features compares what each layer gives, which train.{on[0]} does not show; leave out one"
            )
        return self

    @model_validator(mode="after")
    def _fits_the_strides(self) -> Config:
        """The strides of other networks are not known before they run."""
        wrong = _off_stride(self.model.spec, {"height": self.data.height, "width": self.data.width})
        if wrong and self.data.depth is None:  # of volumes the poolings follow the size
            raise ValueError(wrong[0])
        return self

    @field_validator("recipe")
    @classmethod
    def _exists(cls, value: str) -> str:
        checked(value, find_recipe)
        return value


def load_config(file: Path | None = None, sets: Sequence[str] = ()) -> Config:
    """Read a YAML file over the defaults, then apply settings such as "train.lr=0.001".

    Raises:
        InputError: the file is missing or not YAML, or listing every unknown or invalid setting.
    """
    tree = _read(Path(file)) if file is not None else {}
    return _validate(tree, sets, str(file) if file is not None else "The configuration")


def with_settings(config: Config, sets: Sequence[str]) -> Config:
    """A copy of `config` with settings applied."""
    return _validate(config.model_dump(mode="json"), sets, "The configuration")


def save_config(config: Config, path: Path) -> None:
    """Write `config` as YAML; `load_config` reads the same configuration back."""
    write_whole(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def changed_settings(old: Config, new: Config) -> list[str]:
    """Settings that differ and would change what a resumed training computes, as "key: old -> new"."""
    harmless = {"data.workers", "data.cache_gib", "data.root", "train.save_minutes"}
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = list(dict.fromkeys([*before, *after]))  # the names in class_weights may differ
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in keys
        if before.get(key) != after.get(key) and key not in harmless and not key.startswith("telemetry.")
    ]


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"There is no configuration file {file}.")
    tree = read_yaml(file) or {}
    if not isinstance(tree, dict):
        raise InputError(f"{file} holds no settings: it must be a mapping such as 'train: {{epochs: 20}}'.")
    sections = {name for name, field in Config.model_fields.items() if isinstance(field.default, Section)}
    return {key: {} if value is None and key in sections else value for key, value in tree.items()}


def _apply(tree: dict[str, Any], setting: str) -> None:
    """Put one setting into the tree; raises ValueError where it has no place there."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ValueError(f"--set takes section.key=value, such as train.epochs=20, not '{setting}'")
    *sections, last = key.strip().split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ValueError(f"'{section}' in --set {setting} is not a section")
    try:
        tree[last] = parse_yaml(text, setting) if text else None
    except InputError:
        tree[last] = text
    if isinstance(tree[last], str) and _is_number(text):  # YAML 1.1 reads 1e-3 as text; in quotes it is one
        tree[last] = float(tree[last])
    elif text.lstrip("+-").lower() in (".nan", ".inf"):  # no value of any setting; the error names it as a number
        tree[last] = float(text.replace(".", ""))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _validate(tree: dict[str, object], sets: Sequence[str], source: str) -> Config:
    problems = []
    if str(tree.get("recipe")) not in RULES and isinstance(quant := tree.get("quant"), dict):
        # The zeros of a saved configuration, which holds every default, are not given to a rule that `sets` names.
        keys = {key for rule in RULES.values() for key in rule["quant"]}
        tree["quant"] = {key: value for key, value in quant.items() if key not in keys or value != 0}
    for setting in sets:
        try:
            _apply(tree, setting)
        except ValueError as error:
            problems.append(str(error))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(entry) for entry in error.errors()]
        model, data = (part if isinstance(part := tree.get(name), dict) else {} for name in ("model", "data"))
        problems += [text for text in _off_stride(model.get("spec", UNET), data) if text not in problems]
    if problems:
        raise InputError(f"{source} is not valid: {'; '.join(problems)}.")
    return config


def _off_stride(spec: object, data: dict[str, object]) -> list[str]:
    """Sizes that this project's UNet does not take; those that other networks take are not known before they run."""
    sizes = {name: data.get(name) for name in ("height", "width")}
    return [
        f"data.{name} = {size}: input should be a multiple of {STRIDE}"
        for name, size in sizes.items()
        if isinstance(size, int) and size % STRIDE and str(spec).partition(":")[0] == UNET
    ]


def _problem(entry: Any) -> str:
    path = [str(part) for part in entry["loc"]]
    key = ".".join(path)
    if entry["type"] == "extra_forbidden":
        valid = setting_names()
        near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
        if near:
            return f"unknown setting {key} (did you mean {near[0]}?)"
        return f"unknown setting {key}, valid are {', '.join(valid)}"
    if entry["type"] == "model_type":
        return f"{key} is a section; set one of {', '.join(name for name in setting_names() if name.startswith(key))}"
    message = entry["msg"].removeprefix("Value error, ").rstrip(".")
    message = message[0].lower() + message[1:]
    given = str(entry["input"])
    return (
        f"{key} = {given if len(given) <= 80 and given.isprintable() else briefly(given)}: {message}"
        if key
        else message
    )


def setting_names() -> list[str]:
    """Every key that `--set` takes, such as "train.lr"."""
    return list(_flat(Config().model_dump(mode="json")))


@dataclass(frozen=True)
class Setting:
    """One key of the configuration; `valid` and `meaning` as a person reads them."""

    key: str
    value: Any
    default: Any
    valid: str
    meaning: str


def describe_settings(config: Config, prefix: str = "") -> list[Setting]:
    """The settings of `config` whose key begins with `prefix`, in the order of a configuration file.

    Raises:
        InputError: no key begins so.
    """
    values, defaults = _flat(config.model_dump(mode="json")), _flat(Config().model_dump(mode="json"))
    found = [
        Setting(key, values.get(key), default, valid_text(field), field.description or "")
        for key, default in defaults.items()
        if key.startswith(prefix) and (field := _field(key)) is not None
    ]
    if not found:
        raise InputError(
            f"No setting begins with '{prefix}'.{suggest(prefix, defaults)} List all with: fp4deploy settings"
        )
    return found


def _field(key: str) -> FieldInfo | None:
    section, dot, name = key.partition(".")
    if not dot:
        return Config.model_fields.get(section)
    return type(Config.model_fields[section].default).model_fields.get(name)


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
