"""The file of a sweep: one configuration, variants of it by name, seeds.

    # fp4deploy sweep configs/sweep_camvid.yaml --data CAMVID
    config: camvid.yaml                 in the folder of this file
    set: {train.epochs: 200}            for every variant and for the FP16 base
    seeds: [0, 1, 2]
    against: control                    the variant that the others are compared with, seed by seed
    variants:
      control: {model: fp16_control}
      qat: {model: nvfp4}
      four_over_six: {model: nvfp4, set: {recipe: nvfp4_4o6_qat}}
      qad_control: {model: fp16_control, set: {distill.weight: 1}}
      qad: {model: nvfp4, set: {distill.weight: 1}, against: qad_control}

Every variant that is fine-tuned starts from the FP16 model of its seed, which is trained once, so that a difference
within a seed is not that of two FP16 trainings. A variant that changes the network, its head or the data
(`model.*`, `data.*`) has an FP16 model of its own, or starts from the one that `base` names: a network with
`model.digits` can start from one without. `fp16` names the common model as a variant. The teacher of a distillation is
the model that fine-tuning starts from, or the variant that `teacher` names, of the same seed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from fp4deploy.errors import InputError, suggest
from fp4deploy.runs import MODELS
from fp4deploy.system.schema import problems, read_yaml
from fp4deploy.tasks import TASKS
from fp4deploy.train.config import Config, load_config
from fp4deploy.train.schedule import is_fine_tuned
from fp4deploy.train.sections import Section

BASE = "fp16"
OF_THE_BASE = (
    "model.", "data.", "instance.method", "instance.channels", "instance.stuff", "detection.width", "detection.depth",
)  # fmt: skip
NOT_OF_THE_BASE = ("data.root", "data.workers", "data.cache_gib")


class VariantSection(Section):
    """model: what is trained; set: settings; against: the variant to compare with, null for none; note: a text.

    base: the FP16 variant to start from, where it is not the one that the settings ask for; a control for what should
        start from a network that has been trained as long as it.
    teacher: the FP16 or control variant that distils it (`distill`), where it is not the one it starts from.
    """

    model: Literal["fp16", "nvfp4", "fp16_control", "nvfp4_ptq"] = "nvfp4"
    set: dict[str, Any] = Field(default_factory=dict)
    against: str | None = ""
    base: str | None = None
    teacher: str | None = None
    note: str = ""


class SweepSection(Section):
    """The whole file; score: the epoch whose mIoU or AP counts, the best or the last."""

    config: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    seeds: list[int] = Field([0], min_length=1)
    against: str | None = None
    score: Literal["best", "last"] = "best"
    variants: dict[str, VariantSection] = Field(min_length=1)


@dataclass(frozen=True)
class Variant:
    """One row of the sweep: what is trained, its settings over the common ones, and what it is compared with.

    base: name of the FP16 model it starts from; None where it starts from random weights or a checkpoint of its own.
    teacher: name of the variant that distils it; None where it is not one of the sweep.
    """

    name: str
    model: str
    sets: tuple[str, ...]
    against: str | None
    base: str | None
    note: str
    teacher: str | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the variants that must have been trained before this one."""
        return tuple(name for name in (self.base, self.teacher) if name is not None)


@dataclass(frozen=True)
class Sweep:
    """A sweep that can be run: `variants` in order with their FP16 bases first; `config` gives a variant's settings.

    named: models that the user named, whose code the processes of the sweep may import (`models.spec.name_model`).
    """

    file: Path
    configuration: Path | None
    sets: tuple[str, ...]
    seeds: tuple[int, ...]
    score: str
    variants: tuple[Variant, ...]
    named: tuple[str, ...] = ()

    def config(self, variant: Variant, seed: int) -> Config:
        """The configuration of one run; later settings win, the seed last."""
        return load_config(self.configuration, [*self.sets, *variant.sets, f"seed={seed}"])

    @cached_property
    def metric(self) -> str:
        """What is compared, "mIoU" or "AP"; all variants have one task."""
        return TASKS[self.config(self.variants[0], self.seeds[0]).task].metric

    def variant(self, name: str) -> Variant:
        """Look a variant up.

        Raises:
            InputError: there is none of that name.
        """
        names = [variant.name for variant in self.variants]
        if name not in names:
            raise InputError(f"{self.file} has no variant '{name}'.{suggest(name, names)} It has: {', '.join(names)}.")
        return self.variants[names.index(name)]


def load_sweep(
    file: Path, sets: tuple[str, ...] = (), seeds: tuple[int, ...] | None = None, named: tuple[str, ...] = ()
) -> Sweep:
    """Read a sweep; every configuration in it is checked now, not hours later.

    Args:
        sets: settings for all variants, over those of the file.
        seeds: instead of those of the file.
        named: models in the user's own code that they named; a sweep's file names none.

    Raises:
        InputError: the file, a variant or a setting is wrong; all wrong variants are named at once.
    """
    file = Path(file)
    section = _read(file)
    common = (*_settings(section.set), *sets)
    configuration = file.parent / section.config if section.config else None
    rows = _with_bases([_variant(name, row, section, configuration, common) for name, row in section.variants.items()])
    chosen = tuple(section.seeds) if seeds is None else seeds
    sweep = Sweep(file, configuration, common, chosen, section.score, tuple(rows), named)
    _check(sweep)
    return sweep


def _read(file: Path) -> SweepSection:
    if not file.is_file():
        raise InputError(f"There is no sweep file {file}. An example is configs/sweep_camvid.yaml.")
    try:
        return SweepSection.model_validate(read_yaml(file) or {})
    except ValidationError as error:
        valid = ", ".join(SweepSection.model_fields)
        raise InputError(f"{file} is no sweep: {'; '.join(problems(error))}. Its keys are: {valid}.") from None


def _settings(values: dict[str, object]) -> tuple[str, ...]:
    return tuple(f"{key}={json.dumps(value)}" for key, value in values.items())


def _variant(
    name: str, row: VariantSection, section: SweepSection, configuration: Path | None, common: tuple[str, ...]
) -> Variant:
    sets = _settings(row.set)
    try:
        config = load_config(configuration, [*common, *sets])
        starts_alone = not is_fine_tuned(config, row.model) or config.train.init_checkpoint is not None
    except InputError:  # `_check` names all wrong variants at once
        starts_alone = row.model == "fp16"
    against = section.against if row.against == "" else row.against
    if row.base is not None and starts_alone:
        raise InputError(f"{name} starts from no FP16 model of the sweep, so that base: {row.base} has no effect.")
    if row.base is not None and row.base not in (BASE, *section.variants):
        raise InputError(f"{name} has base: {row.base}, which is no variant.{suggest(row.base, section.variants)}")
    different = [
        f"{key}={json.dumps(value)}"
        for key, value in sorted(row.set.items())
        if key.startswith(OF_THE_BASE) and key not in NOT_OF_THE_BASE
    ]
    base = None if starts_alone else row.base or "-".join([BASE, *(_plain(text) for text in different)])
    return Variant(name, row.model, sets, None if against == name else against, base, row.note, row.teacher)


def _plain(text: str) -> str:
    """A setting as the end of a folder's name."""
    return "".join(c if c.isalnum() or c in "._" else "_" for c in text.replace('"', ""))


def _with_bases(rows: list[Variant]) -> list[Variant]:
    names = {row.name for row in rows}
    bases: dict[str, Variant] = {}
    for row in rows:
        if row.base and row.base not in names and row.base not in bases:
            own = row.sets if row.base != BASE else ()
            sets = tuple(s for s in own if s.startswith(OF_THE_BASE) and not s.startswith(NOT_OF_THE_BASE))
            bases[row.base] = Variant(row.base, "fp16", sets, None, None, "the model that fine-tuning starts from")
    return [*bases.values(), *rows]


def _check(sweep: Sweep) -> None:
    problems: list[str] = []
    tasks: set[str] = set()
    by_name = {variant.name: variant for variant in sweep.variants}
    for variant in sweep.variants:
        if _plain(variant.name) != variant.name.replace("-", "_") or variant.name in ("", ".", ".."):
            problems.append(f"the name '{variant.name}' becomes a folder: letters, digits, ., _ and - only")
        if variant.against is not None and variant.against not in by_name:
            near = suggest(variant.against, by_name)
            problems.append(f"{variant.name} is compared with '{variant.against}', which is no variant.{near}")
        if variant.base is not None and not _trained_in_fp16(by_name[variant.base], by_name):
            problems.append(f"'{variant.base}' is the FP16 model that {variant.name} starts from; rename the variant")
        if variant.teacher is not None:
            problems += _wrong_teacher(sweep, variant, by_name)
        try:
            tasks.add(sweep.config(variant, sweep.seeds[0] if sweep.seeds else 0).task)
        except InputError as error:
            problems.append(f"{variant.name}: {error}")
    if len(tasks) > 1:
        problems.append("variants have different tasks, whose scores cannot be compared: set task for the whole sweep")
    if len(set(sweep.seeds)) < len(sweep.seeds) or not sweep.seeds or min(sweep.seeds) < 0:
        problems.append("seeds are distinct whole numbers from 0 on, at least one")
    if problems:
        raise InputError(f"{sweep.file} is not a valid sweep: {'; '.join(problems)}")


def _trained_in_fp16(base: Variant, by_name: dict[str, Variant]) -> bool:
    """Or the control of one that was."""
    start = by_name.get(str(base.base))
    return base.model == BASE or (base.model == "fp16_control" and start is not None and start.model == BASE)


def _wrong_teacher(sweep: Sweep, variant: Variant, by_name: dict[str, Variant]) -> list[str]:
    """What is wrong with the teacher that a variant names; it may not wait for one that waits for it."""
    teacher = by_name.get(str(variant.teacher))
    if teacher is None:
        near = suggest(str(variant.teacher), by_name)
        return [f"{variant.name} has teacher: {variant.teacher}, which is no variant.{near}"]
    if teacher.model not in (BASE, "fp16_control") or teacher.teacher is not None:
        return [
            f"{variant.name} has teacher: {teacher.name}, and a teacher is FP16 or a control without one of its own"
        ]
    try:
        distilled = sweep.config(variant, sweep.seeds[0] if sweep.seeds else 0).distill.teaches
    except InputError:  # reported by `_check`
        return []
    return (
        []
        if distilled
        else [
            f"{variant.name} has a teacher and distill.weight and distill.features 0, so that it learns nothing from it"
        ]
    )


assert set(MODELS) == set(VariantSection.model_fields["model"].annotation.__args__)  # type: ignore[union-attr]
