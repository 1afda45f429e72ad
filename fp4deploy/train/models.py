"""Training the models of a run, each from its starting point.

`schedule` says where each starts and for how long it trains. Post-training quantisation (`nvfp4_ptq`) is what QAT has
to beat: the model is prepared and calibrated exactly as the one that is fine-tuned, evaluated by the same code on the
same images, and leaves the same files: a checkpoint, a line of metrics of epoch 0, a state.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fp4deploy import provenance
from fp4deploy.data import (
    IMAGE_MEAN,
    IMAGE_STD,
    SPLITS,
    EpochLoader,
    SegmentationDataset,
    cache_dataset,
    expand,
    require_labels,
)
from fp4deploy.errors import InputError, Interrupted, suggest
from fp4deploy.graph.copies import copied
from fp4deploy.models import ModelCard, load_weights, read_card
from fp4deploy.models.build import network_for
from fp4deploy.models.initial import load_initial
from fp4deploy.models.spec import UNET
from fp4deploy.qat import calibrate_percentile, find_recipe, prepare_as, quantized_layers, set_products
from fp4deploy.qat.equalize import equalize
from fp4deploy.qat.sensitive import fp8_layers, sensitive_layers, with_sensitive
from fp4deploy.rest import RestName
from fp4deploy.runs import DEFAULT_MODELS, MODELS, Run, hold, is_first_process
from fp4deploy.system.files import write_whole
from fp4deploy.system.schema import read_json, validated
from fp4deploy.tasks import TASKS
from fp4deploy.train.batches import make_loaders
from fp4deploy.train.config import Config, changed_settings, load_config, save_config
from fp4deploy.train.distillation import make_auxiliary_losses
from fp4deploy.train.distributed import from_first, join
from fp4deploy.train.logging.trackers import check_trackers
from fp4deploy.train.loop import Trainer
from fp4deploy.train.schedule import QUANTIZED_MODELS, epochs_of, is_fine_tuned, training_job
from fp4deploy.train.state import Progress, read_progress
from fp4deploy.train.tasks import class_weights, make_head, make_task, require_same_head, require_same_task
from fp4deploy.train.volumes import at_spacing, sized, volume_input

SENSITIVE = "sensitive_layers.json"  # those that quant.fp16_macs, quant.fp8_macs and quant.fp4_macs have chosen


@dataclass(frozen=True)
class TrainResult:
    """Outcome of one model: best validation score in [0, 1], epochs trained, seconds spent, files; the score's name."""

    best_score: float
    epochs: int
    seconds: float
    checkpoint: Path
    per_class: dict[str, float | None]
    metric: str = "mIoU"

    @property
    def best_text(self) -> str:
        """The best score in %; without one, that nothing in the validation split could be scored."""
        return f"{100 * self.best_score:.2f} %" if self.best_score >= 0 else "none (nothing to score)"


def train_models(
    config: Config,
    run: Run,
    models: Sequence[str] = DEFAULT_MODELS,
    from_scratch: bool = False,
    resume: bool = False,
) -> dict[str, TrainResult]:
    """Train `models` one after the other into `run`.

    Ctrl-C ends after the running step; calling again with `resume` gives, on the same machine, bit for bit what an
    uninterrupted training would have given. Finished models are left as they are, and their results returned.

    Raises:
        InputError: unknown model or class, no data, a model that is trained already, a configuration that changed since
            the run began, a folder that another process trains into, an unwritable disk.
        GateError: the training diverged.
        Interrupted: after Ctrl-C, SIGTERM or SIGHUP, with the state saved; it names the command that resumes.
    """
    for model in models:
        if model not in MODELS:
            raise InputError(f"Unknown model '{model}'.{suggest(model, MODELS)} Valid models: {', '.join(MODELS)}.")
    if from_scratch:
        config = config.model_copy(update={"train": config.train.model_copy(update={"from_scratch": True})})
    _check_untrained(run, models, resume)
    train_data, val_data = open_splits(config)
    config = sized(config, train_data)
    _require_labels(config, train_data)
    _check_class_weights(config, val_data.class_names)
    check_trackers(config.telemetry.trackers)
    with hold(run.path):
        _check_untrained(run, models, resume)  # another process may have trained them before the run was held
        return _train_all(config, run, models, train_data, val_data, resume)


def _note_provenance(config: Config, run: Run, model: str, card: ModelCard, fine_tuned: bool) -> None:
    if is_first_process() and run.checkpoint(model).is_file():
        start = [_starting_point(config, run, model, card)] if fine_tuned else []
        begun = [Path(config.model.init)] if config.model.init is not None and not fine_tuned else []
        data = [Path(config.data.root)] if config.data.root is not None else []
        provenance.record("train", run.checkpoint(model), [*start, *begun, *data])


def _check_untrained(run: Run, models: Sequence[str], resume: bool) -> None:
    for model in models:
        if not resume and (run.model_dir(model) / "state").is_dir():
            raise InputError(f"{run.path} holds a {model} already. Continue it with --resume, or choose another --out.")


def _train_all(
    config: Config,
    run: Run,
    models: Sequence[str],
    train_data: SegmentationDataset,
    val_data: SegmentationDataset,
    resume: bool,
) -> dict[str, TrainResult]:
    if join().is_main_process:
        _keep_config(config, run, resume)
        run.ask_models(models)
    budget = int(config.data.cache_gib * 2**30)
    loaders = make_loaders(config, cache_dataset(train_data, budget), cache_dataset(val_data, budget))
    try:
        with closing(loaders[0]), closing(loaders[1]):
            return {model: _train(config, run, model, val_data, loaders, resume) for model in models}
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        raise Interrupted(number, f"fp4deploy train --out {shlex.quote(str(run.path))} --resume") from None


def _train(
    config: Config,
    run: Run,
    model: str,
    data: SegmentationDataset,
    loaders: tuple[EpochLoader, EpochLoader],
    resume: bool,
) -> TrainResult:
    job, fine_tuned = training_job(config, run, model), is_fine_tuned(config, model)
    resume = resume and job.state_path.is_file()
    torch.manual_seed(config.seed)
    card = model_card(config, model, data)
    started = resume and run.checkpoint(model).is_file()
    if started:
        _require_same_classes(run.checkpoint(model), card)
    if fine_tuned:
        path = run.checkpoint(model) if started else _starting_point(config, run, model, card)
    if config.train.precision == "auto":
        start = path if fine_tuned else run.checkpoint(model) if started else config.model.init
        card = replace(card, rest=_rest_of(start) or card.rest)
    network: nn.Module = network_for(card, "The configuration")
    if config.model.init is not None and not fine_tuned and not resume:
        _say(load_initial(network, Path(config.model.init)))
    if fine_tuned and not resume:
        load_weights(network, path, to_encoding=card.digits and not read_card(path).digits)
    if model in QUANTIZED_MODELS:
        if config.quant.equalize and not resume:
            names = quantized_layers(prepare_as(copied(network), card))
            equalize(network, _first_images(network, loaders[0], config), names)
        if config.quant.by_error:
            card = _without_sensitive(network, card, loaders[0], config, job.folder / SENSITIVE, resume)
        set_products(prepare_as(network, card), config.train.products)
        if (fine_tuned or find_recipe(config.recipe).amax_learned) and not resume:
            calibrate_on(network, loaders[0], config, card.rest)
    auxiliary = make_auxiliary_losses(config, model, card, partial(_starting_point, config, run, model, card))
    trainer = Trainer(
        job,
        network,
        card,
        config.train,
        loaders,
        make_task(config, card, data, class_weights(config, run, loaders[0].source)),
        auxiliary,
        (config.quant.clip_lr, config.quant.clip_decay),
        config.quant.start,
        config.telemetry,
    )
    with closing(trainer):
        progress = trainer.run(resume) if job.epochs else _evaluate_untrained(trainer, resume)
    _note_provenance(config, run, model, card, fine_tuned)
    return TrainResult(
        progress.best_score,
        progress.epoch,
        progress.seconds,
        job.checkpoint,
        dict(progress.per_class),
        TASKS[config.task].metric,
    )


def _rest_of(start: str | Path | None) -> RestName | None:
    """The precision that a checkpoint's card names; None without a card, as of weights of another tool."""
    try:
        return read_card(Path(start)).rest if start is not None else None
    except InputError:  # a file that nobody can read is refused where its weights are loaded
        return None


def _evaluate_untrained(trainer: Trainer, resume: bool) -> Progress:
    """Score a calibrated model and save it; with `resume`, read the result that is there already."""
    if resume:
        return read_progress(trainer.job.state_path)
    start = time.perf_counter()
    scores = trainer.evaluate()
    progress = trainer.progress
    progress.epoch_seconds = progress.seconds = time.perf_counter() - start
    line = {
        "epoch": 0,
        "step": 0,
        "loss": None,
        **scores.line(),
        "seconds": round(progress.seconds, 3),
        "kernels": trainer.kernels,
    }
    trainer.keep(scores, line)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    return progress


def open_splits(config: Config) -> tuple[SegmentationDataset, SegmentationDataset]:
    """The training and the validation split that a configuration names, as its task needs them.

    Raises:
        InputError: it names no data, or the data cannot be read or does not serve the task.
    """
    if config.data.root is None:
        raise InputError("The configuration names no data. Set data.root, or give --data DIR.")
    root = Path(config.data.root)
    classes, stuff = config.data.classes, config.instance.stuff
    task = TASKS[config.task]
    train, val = (
        at_spacing(config, task.open(root, split, classes, stuff, labelled=split == SPLITS[0])) for split in SPLITS
    )
    if train.class_names == val.class_names:
        return train, val
    lacking = [name for name in train.class_names if name not in val.class_names]
    if lacking:
        common = [name for name in train.class_names[train.background :] if name in val.class_names]
        remedy = f", or learn those of both: --classes {','.join(common)}" if common else ""
        raise InputError(
            f"The validation split of {root} does not list {', '.join(lacking[:8])}, which the training split does. It "
            f"lists {', '.join(val.class_names[:8])}. List the same names in both{remedy}."
        )
    named = train.class_names[train.background :]  # in the order of the training split, whose numbers are learned
    return train, task.open(root, SPLITS[1], named, stuff, labelled=False)


def _require_labels(config: Config, train: SegmentationDataset) -> None:
    empty = require_labels(train, Path(str(config.data.root)))
    if empty:
        more = f" and {len(empty) - 8} more" if len(empty) > 8 else ""
        _say(f"No label among those looked at in the training split: {', '.join(empty[:8])}{more}.")


def _starting_point(config: Config, run: Run, model: str, target: ModelCard) -> Path:
    given = config.train.init_checkpoint
    path = Path(given) if given else run.checkpoint("fp16")
    if not given:
        _check_finished(config, run, model)
    if not path.is_file():
        raise InputError(
            f"{model} is fine-tuned from an FP16 checkpoint, and there is none at {path}. Train both with "
            "--models fp16,nvfp4, name one with --set train.init_checkpoint=FILE, or train --from-scratch."
        )
    card = read_card(path)
    require_same_task(path, card, target)
    if not card.spec.same_network(target.spec) or dict(card.arguments) != dict(target.arguments):
        raise InputError(
            f"{path} is a {_named(card)}, and this run trains {_named(target)}. Choose --model {card.architecture} "
            "with the same model.args, or another checkpoint."
        )
    if card.architecture == UNET and card.scale != config.model.scale:
        raise InputError(
            f"{path} is a UNet of scale {card.scale:g}, and this run has scale {config.model.scale:g}. "
            f"Set --set model.scale={card.scale:g}, or choose another checkpoint."
        )
    if card.digits and not target.digits:
        raise InputError(
            f"{path} encodes its images in several FP4 terms (model.digits), and this run does not. Set "
            "--set model.digits=true, or choose another checkpoint. (The other way round works: the weights of a model "
            "without digits are expanded.)"
        )
    _require_same_classes(path, target)
    require_same_head(path, card.head, target.head)
    return path


def _require_same_classes(path: Path, target: ModelCard) -> None:
    """The channels of a checkpoint are those of the data, by name."""
    found = read_card(path).class_names
    if found != target.class_names:
        raise InputError(
            f"{path} was trained on the classes {', '.join(found)}, and this run has "
            f"{', '.join(target.class_names)}. Choose the same, in the same order (--classes), or another checkpoint."
        )


def _named(card: ModelCard) -> str:
    """A network and its arguments, for messages."""
    arguments = ", ".join(f"{name}={value}" for name, value in card.arguments.items())
    return f"{card.architecture} ({arguments})" if arguments else card.architecture


def _say(text: str) -> None:
    if join().is_main_process:
        print(text, file=sys.stderr)


def _check_finished(config: Config, run: Run, model: str) -> None:
    state, epochs = training_job(config, run, "fp16").state_path, epochs_of(config, "fp16")
    done = read_progress(state).epoch if state.is_file() else epochs
    if done < epochs:
        raise InputError(
            f"{model} is fine-tuned from this run's fp16, which has trained {done} of {epochs} epochs. "
            f"Finish both with: fp4deploy train --out {run.path} --models fp16,{model} --resume"
        )


def _check_class_weights(config: Config, class_names: tuple[str, ...]) -> None:
    for name in config.train.class_weights or {}:
        if name not in class_names:
            raise InputError(
                f"train.class_weights names the class '{name}', which the data does not have."
                f"{suggest(name, class_names)} Its classes are: {', '.join(class_names)}."
            )


def calibrate_on(network: nn.Module, loader: EpochLoader, config: Config, rest: RestName) -> None:
    """Set the activation scales of a prepared network from the first training batches, as the configuration says."""
    calibrate_percentile(network, _first_images(network, loader, config), config.quant.percentile, rest)


def _without_sensitive(
    network: nn.Module, card: ModelCard, loader: EpochLoader, config: Config, path: Path, resume: bool
) -> ModelCard:
    """The card with the layers in FP16 and FP8 that lose most in FP4, on the images of the calibration; kept for a
    resume."""

    def measured(share: float, card: ModelCard) -> list[str]:
        probe = prepare_as(copied(network), card)
        calibrate_on(probe, loader, config, card.rest)
        return sensitive_layers(probe, _first_images(probe, loader, config), share, config.quant.fp4_macs)

    chosen = validated(dict[str, list[str]], read_json(path), path) if resume else {}
    for form, share in config.quant.by_error.items():
        if not resume:
            chosen[form] = from_first(partial(measured, share, card))
            _say(f"In {form.upper()}, for the largest errors in FP4: {', '.join(chosen[form]) or 'no layer'}")
            if form == "fp8" and chosen[form] and form not in card.formats:
                chosen[form] += fp8_layers(prepare_as(copied(network), card))
        card = with_sensitive(card, form, chosen.get(form, ()))
    if is_first_process() and not resume:
        write_whole(path, json.dumps(chosen) + "\n")
    return card


def _first_images(network: nn.Module, loader: EpochLoader, config: Config) -> Iterator[torch.Tensor]:
    """The images that quantisers are calibrated on; the network goes to the device where they are."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device)
    for pixels, labels in loader.first(config.train.calibration):
        yield expand(pixels.to(device), labels.to(device))[0]


def rest_trained_for(config: Config) -> RestName:
    """What models that start from random weights are deployed in, if nothing else is asked for; on a GPU also what they
    are trained in."""
    return "bf16" if config.train.precision == "bf16" else "fp16"


def model_card(config: Config, model: str, data: SegmentationDataset) -> ModelCard:
    """The card of one model of a run."""
    quantized = model in QUANTIZED_MODELS
    selected = config.quant.selections if quantized else {}
    chosen = {name: tuple(patterns) for name, patterns in selected.items()}
    volume = volume_input(config, data)
    mean, std = (IMAGE_MEAN, IMAGE_STD) if volume is None else ((value,) * len(volume.channels) for value in (0.0, 1.0))
    return ModelCard(
        precision="nvfp4" if quantized else "fp16",
        scale=config.model.scale,
        digits=config.model.digits,
        architecture=config.model.spec,
        arguments=config.model.args,
        output=config.model.output,
        class_names=data.class_names,
        height=config.data.height,
        width=config.data.width,
        mean=mean,
        std=std,
        volume=volume,
        background=data.background,
        recipe=config.recipe if quantized else None,
        rest=rest_trained_for(config),
        include=chosen.pop("include", None),
        exclude=chosen.pop("exclude", None),
        formats=chosen,
        target=config.quant.target if quantized else None,
        task=config.task,
        head=make_head(config, data),
    )


def _keep_config(config: Config, run: Run, resume: bool) -> None:
    """Write config.yaml; a resumed run must have the one it began with."""
    if resume and run.config_path.is_file():
        changed = changed_settings(load_config(run.config_path), config)
        if changed:
            raise InputError(
                f"{run.path} began with other settings ({'; '.join(changed)}). "
                "Resume it without them, or start a new run without --resume."
            )
    save_config(config, run.config_path)
