"""One training loop for every precision, on accelerate.

On a GPU: FP16 autocast with a loss scaler over FP32 master weights. On a CPU: FP32 arithmetic, since FP16 autocast is
slow there; the weights that ship are rounded to FP16 in either case. `train.precision` asks for another arithmetic on
either: BF16 autocast, which needs no loss scaler, or FP32, in which torch computes what the fused kernels do; left at
auto, fine-tuning goes on in the precision of the checkpoint that it starts from. A step
whose gradients are not finite is skipped and counted; many consecutive ones end the training with an error instead of a
ruined checkpoint.

After every epoch, in this order: the best checkpoint, one line of metrics, and the state, unless there is no new best
and saving would cost more than a twentieth of the time. Ctrl-C ends the running step and saves the state inside the
epoch; a crash or a full disk leaves the state saved before. Either way the steps that are repeated compute the same
numbers. Meanwhile the loader's workers prepare the first batches of the next epoch.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState
from torch import nn

from fp4deploy.data import EpochLoader, end_workers, expand
from fp4deploy.errors import GateError, InputError
from fp4deploy.models import ModelCard, save_checkpoint
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize.layout import CHANNELS_LAST, place
from fp4deploy.plugins.runtime.cache import keep_compiled_private
from fp4deploy.qat import quantized_layers
from fp4deploy.qat.fused_unet import FusedUNet, fuse_unet, has_kernels
from fp4deploy.qat.fusion.compiler import backend, codes_kept
from fp4deploy.qat.fusion.fuse import mark_fusible
from fp4deploy.qat.operators.learned import keep_positive
from fp4deploy.qat.oscillation import OscillationResets
from fp4deploy.qat.outlier_selection import OutlierSelection
from fp4deploy.qat.ranges import Ranges
from fp4deploy.rest import FP16, RestName
from fp4deploy.system.files import append_line
from fp4deploy.tasks import TaskScores
from fp4deploy.train.checkpointing import checkpoint_blocks
from fp4deploy.train.cuda_graph import LAUNCHED_FIRST_OF_SEVERAL, CapturedStep
from fp4deploy.train.distributed import agreed_reason, agreed_signal, join, replicated, share_amaxes
from fp4deploy.train.interrupt import Interrupt, Pause
from fp4deploy.train.logging.jsonl_tracker import keep_epochs
from fp4deploy.train.logging.progress import Display
from fp4deploy.train.logging.running_statistics import EpochStatistics, RunningStatistics
from fp4deploy.train.logging.telemetry import Telemetry
from fp4deploy.train.losses.auxiliary import AuxiliaryLosses
from fp4deploy.train.norms import NormStatistics
from fp4deploy.train.optimizer import WeightAverage, make_optimizer, set_learning_rate, skip_where
from fp4deploy.train.schedule import TrainingJob, learning_rate
from fp4deploy.train.sections import TelemetrySection, TrainSection
from fp4deploy.train.state import Progress, SavingPace, Stateful, load_state, save_state
from fp4deploy.train.tasks import TrainingTask

MAX_CONSECUTIVE_SKIPPED = 30
STEPS_WORTH_COMPILING = 10_000  # compiling took minutes, launching layer by layer 10 to 30 ms a step, on an H200's host
STEPS_BETWEEN_READS = 10  # on a GPU; reading the loss makes the CPU wait for it


def autocast_of(precision: str, rest: RestName, on_gpu: bool) -> str:
    """What accelerate calls a `train.precision`: "fp16", "bf16" or "no"; auto, on a GPU, is that of the model's card.

    Raises:
        InputError: this machine does not have it.

    >>> autocast_of("auto", "fp16", True), autocast_of("auto", "bf16", False), autocast_of("bf16", "bf16", False)
    ('fp16', 'no', 'bf16')
    """
    if precision == "auto":
        precision = rest if on_gpu else "fp32"
    if precision == "fp16" and not on_gpu:
        raise InputError("train.precision is fp16, whose loss scaler needs a GPU. On a CPU: auto, fp32 or bf16.")
    if precision == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise InputError(
            f"The training is in BF16, which the GPU ({name}) lacks. Valid: --set train.precision=fp16, fp32."
        )
    return "no" if precision == "fp32" else precision


class Trainer:
    """Trains one model; `run` starts or resumes."""

    def __init__(
        self,
        job: TrainingJob,
        model: nn.Module,
        card: ModelCard,
        settings: TrainSection,
        loaders: tuple[EpochLoader, EpochLoader],
        task: TrainingTask,
        auxiliary: AuxiliaryLosses | None = None,
        clip_rates: tuple[float, float] = (1.0, 0.0),
        quantize_from: float = 0.0,
        telemetry: TelemetrySection | None = None,
    ) -> None:
        """Place `model` on the device and prepare it for training, in place.

        Args:
            loaders: training and validation batches.
            auxiliary: losses in addition to that of the task.
            clip_rates: of learned amaxes: learning rate over that of the weights, weight decay.
            quantize_from: share of the steps before the first that is quantised.
        """
        self.job, self.card, self.settings, self.task = job, card, settings, task
        on_gpu = torch.cuda.is_available()
        join()
        self.autocast = autocast_of(settings.precision, card.rest, on_gpu)
        if AcceleratorState._shared_state and AcceleratorState().mixed_precision != self.autocast:
            AcceleratorState._reset_state()  # of another training in this process
        self.accelerator = Accelerator(mixed_precision=self.autocast, cpu=not on_gpu)
        self.device = self.accelerator.device
        self.first_batches = loaders[0].first
        self.train_batches: Any = loaders[0]
        self.val_batches: Any = loaders[1]
        layers = quantized_layers(model)
        self.layers = tuple(layers.values())
        self.unfusable = on_gpu and self.autocast == "no"
        self.compares_features = auxiliary is not None and auxiliary.compares_features
        by_layer = settings.checkpointing or self.compares_features
        fused = bool(settings.fused) and not by_layer and available(self.device) and not self.unfusable
        self.kernels = "cuda" if fused else "torch"
        if fused and (settings.fused is True or has_kernels(model)):
            fuse_unet(model, recompute=settings.recompute is True)
        if settings.checkpointing:
            checkpoint_blocks(model)
        compilable = settings.fused == "auto" and available(self.device) and not isinstance(model, FusedUNet)
        compilable = compilable and not self.unfusable
        self.unfused = self._unfused() if compilable and self.layers else None
        self.fuses = compilable and bool(self.layers) and self.unfused is None
        self.compiled = self.fuses or (settings.compile and not isinstance(model, FusedUNet))
        channels_last = settings.channels_last or isinstance(model, FusedUNet) or self.fuses
        axes = 4 if card.volume is None else 5
        self.layout = CHANNELS_LAST[axes] if channels_last else torch.contiguous_format
        self.bare = place(model, self.device, self.layout)
        self.optimizer = make_optimizer(model, job.lr, settings.weight_decay, *clip_rates, settings.optimizer)
        self.learned = [layer.input_amax for layer in self.layers if isinstance(layer.input_amax, nn.Parameter)]
        self.average = WeightAverage(model, settings.ema) if settings.ema else None
        self.norms = NormStatistics(model)
        self.auxiliary = auxiliary and auxiliary.placed(model, self.device, self.layout, fused)
        self.stream = torch.cuda.Stream() if on_gpu and settings.cuda_graph and not self._alone else None
        self.forward = self.bare.forward  # which the next line puts under autocast, in the module itself
        self.model: Any = self.accelerator.prepare_model(self.bare, evaluation_mode=True)
        self.stepper = self.accelerator.prepare_optimizer(self.optimizer)
        if not self._alone:
            # not placed on the device there, where the copy would wait for the step before
            self.train_batches, self.val_batches = self.accelerator.prepare(*loaders, device_placement=[False, False])
            with self._on_stream():
                self.model = replicated(self.bare, self.device)
        self.loss: Any = task.loss.of
        if self.compiled or settings.compile:
            keep_compiled_private()
        if settings.compile:
            self.loss = torch.compile(self.loss)
        if self.fuses:
            mark_fusible(self.bare)
            kept = codes_kept(None if settings.recompute == "auto" else settings.recompute)
            self.model = torch.compile(self.model, backend=backend(keep_codes=kept), dynamic=False)
        elif self.compiled:
            self.model = torch.compile(self.model)
        self.telemetry = Telemetry(
            telemetry or TelemetrySection(every=0, trackers=[]),
            job.folder,
            self.bare,
            self.steps,
            active=self.accelerator.is_main_process,
            compiled=self.compiled,
            config={"model": job.model, "recipe": card.recipe, "lr": job.lr, **settings.model_dump(mode="json")},
        )
        self.first_quantized = round(quantize_from * self.steps)
        self.resets = OscillationResets(layers, self.steps)
        self.selection = OutlierSelection(layers, self.steps)
        self.parts: dict[str, Stateful] = {"resets": self.resets, "outliers": self.selection}
        if self.average is not None:
            self.parts["average"] = self.average
        self.noted: str | None = None  # why there is no CUDA graph, once it was said
        shared = (agreed_reason, LAUNCHED_FIRST_OF_SEVERAL) if not self._alone else ()
        self.captured = CapturedStep(self._compute, self._forget, self._no_graph(), *shared)
        self.images: torch.Tensor | None = None  # of the last step
        self.progress = Progress()
        self.statistics = RunningStatistics(self.device, EpochStatistics(), settings.spike)
        self.interrupt = Interrupt()
        self.pace = SavingPace(settings.save_minutes)

    def _unfused(self) -> str | None:
        """Why train.fused=auto does not compile a quantised network; None where it does."""
        few = (
            f"it compiles from {STEPS_WORTH_COMPILING:,} steps on and this training has {self.steps:,}: more epochs, "
            "or train.compile=true for torch.compile without this project's passes, change that"
        )
        reasons = {
            "train.checkpointing is true": self.settings.checkpointing,
            "distill.features compares what each layer gives": self.compares_features,
            "several processes train": not self._alone,
            "the gradients of the recipe are not straight-through": not all(
                layer.recipe.straight_through for layer in self.layers
            ),
            few: self.steps < STEPS_WORTH_COMPILING,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _no_graph(self) -> str | None:
        """Why no step of this training is captured; None where one may be."""
        auxiliary = self.auxiliary
        reasons = {
            "train.cuda_graph is false": not self.settings.cuda_graph,
            "there is no GPU": self.device.type != "cuda",
            "train.compile is true and several processes train": self.settings.compile and not self._alone,
            "train.accumulate is not 1": self.settings.accumulate != 1,
            "quant.damping changes with the step": auxiliary is not None and auxiliary.damping > 0,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole training."""
        return self.job.epochs * math.ceil(len(self.train_batches) / self.settings.accumulate)

    def run(self, resume: bool) -> Progress:
        """Train to the last epoch; with `resume`, on from the saved state where there is one.

        Raises:
            InputError: the state cannot be read, or a file cannot be written.
            GateError: the gradients stayed non-finite.
            KeyboardInterrupt: after Ctrl-C, with the state saved.
        """
        if resume and self.job.state_path.is_file():
            self._load()
        if self.accelerator.is_main_process:
            keep_epochs(self.job.metrics_path, self.progress.epoch)
            self.telemetry.resume(self.progress.step, self.progress.epoch)
        job, start = self.job, self.progress
        quiet = not self.accelerator.is_main_process
        with (
            self._on_stream(),
            self.interrupt,
            Display(job.model, job.epochs, self.steps, start.step, start.epoch + 1, quiet) as display,
        ):
            if self.unfusable and self.settings.fused and available(self.device):
                display.say(f"{job.model}: no fused kernels, since train.precision is fp32 and they have none")
            if self.unfused is not None:
                display.say(f"{job.model}: train.fused=auto does not fuse, since {self.unfused}")
            try:
                while self.progress.epoch < job.epochs:
                    self._epoch(display)
            except Pause:
                self._save_state()
                # A launcher ends all processes with the first that ends, even one that is still saving.
                self.accelerator.wait_for_everyone()
                raise self.interrupt.error() from None
            finally:
                self.telemetry.close()
                self.captured.release()
        self.accelerator.wait_for_everyone()  # the next model starts from this one's checkpoint
        self.accelerator.free_memory()
        return self.progress

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Inside, work goes to the stream of the captured step of several processes (`cuda_graph`), in order with that
        before and after."""
        if self.stream is None:
            yield
            return
        outside = torch.cuda.current_stream()
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def close(self) -> None:
        """End the workers of the loaders that accelerate has made; those of the given loaders serve the next model."""
        for loader in (self.train_batches, self.val_batches):
            if not isinstance(loader, EpochLoader):
                end_workers(loader)

    def evaluate(self, validated: Callable[[int, int], None] | None = None) -> TaskScores:
        """Score on the validation split; `validated(batches, of)` is called after each batch."""
        evaluation, total = self.task.evaluation(), len(self.val_batches)
        self.model.eval()
        with (
            self._uncompiled(),
            self._quantized(),
            self._averaged(),
            torch.inference_mode(),
            self.accelerator.autocast(),
            self._measured_norms(),
        ):
            for number, (images, labels) in enumerate(self._on_device(self.val_batches), start=1):
                self._pause_if_asked()
                evaluation.update(self.task.outputs(self.model, images), labels, self.accelerator.gather_for_metrics)
                if validated is not None:
                    validated(number, total)
        self.model.train()
        return evaluation.compute()

    def _epoch(self, display: Display) -> None:
        progress = self.progress
        images_seen, seconds = self._train_rest(display)
        start = time.perf_counter()
        last = progress.epoch + 1 == self.job.epochs
        due = last or (progress.epoch + 1) % self.settings.evaluate_every == 0
        scores = self.evaluate(display.validated) if due else None
        progress.epoch_seconds += time.perf_counter() - start
        counts = self.statistics.read()
        line: dict[str, Any] = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "loss": counts.mean_loss,
            "lr": self._learning_rate(progress.step - 1),
            **(scores.line() if scores else {self.task.metric: None, "per_class": None}),
            "seconds": round(progress.epoch_seconds, 3),
            "images_per_s": round(images_seen / seconds, 1) if images_seen else None,
            "arithmetic": "fp32" if self.autocast == "no" else f"{self.autocast} autocast",
            "kernels": self.kernels,
            "skipped_steps": counts.skipped,
            "loss_spikes": counts.spikes,
            "largest_spike": counts.largest if counts.spikes else None,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
        }
        progress.epoch += 1
        progress.seconds += progress.epoch_seconds
        progress.skipped += counts.skipped
        progress.batch, progress.epoch_seconds = 0, 0.0
        self.statistics.start(counts.next_epoch())
        self.keep(scores, line)
        display.epoch(progress.epoch, counts.mean_loss, scores.text() if scores else None, line["seconds"])
        unscored = None
        if scores is not None and not math.isfinite(scores.score):
            unscored = f"the validation split has no {self.task.metric}: nothing in it can be scored"
        for warning in filter(None, [counts.warning(), unscored, *self.task.loss.warnings()]):
            display.say(f"{self.job.model}  epoch {progress.epoch}: {warning}")

    def _train_rest(self, display: Display) -> tuple[int, float]:
        """Train on the rest of the epoch; returns the images seen and the seconds they took."""
        progress, total = self.progress, len(self.train_batches)
        progress.batches = total
        # Also of accelerate's loader of several processes, which counts its own iterations, from 0 after a resume.
        self.train_batches.set_epoch(progress.epoch)
        self.model.train()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, images_seen, elapsed = time.perf_counter(), 0, progress.epoch_seconds
        self._pause_if_asked()
        with self._rest() as batches:
            for images, masks in self._on_device(batches):
                self.step(images, masks)
                images_seen += len(images) * self.accelerator.num_processes
                progress.epoch_seconds = elapsed + time.perf_counter() - start
                if progress.batch % self.settings.accumulate == 0 or progress.batch == total:
                    self._between_steps(display)
        if progress.epoch + 1 < self.job.epochs and isinstance(self.train_batches, EpochLoader):
            self.train_batches.start(progress.epoch + 1)
        self.statistics.read()  # waits for the device, so that the time is right
        progress.epoch_seconds = elapsed + time.perf_counter() - start
        return images_seen, time.perf_counter() - start

    @contextmanager
    def _rest(self) -> Iterator[object]:
        """The batches of the epoch that are left; the loader that skips the others has workers of its own."""
        done = self.progress.batch
        if done in (0, self.progress.batches):
            yield () if done else self.train_batches
            return
        batches = skip_first_batches(self.train_batches, done)
        try:
            yield batches
        finally:
            end_workers(batches)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Forward and backward of one batch; the optimiser's step where it is the last of its group."""
        progress, accumulate = self.progress, self.settings.accumulate
        first = progress.batch - progress.batch % accumulate
        group = min(accumulate, progress.batches - first)
        last = progress.batch + 1 == first + group
        if last:
            set_learning_rate(self.optimizer, self._learning_rate(progress.step))
        self._quantize(progress.step >= self.first_quantized)
        if self.selection.update(progress.step):
            self.captured.release()
        targets, self.images = self.task.loss.targets(labels), images
        if accumulate == 1:
            self.captured(images, *targets, launch=self.telemetry.sampled(progress.step))
        else:
            self._compute(images, *targets, group=group, last=last)
        if last:
            self.resets.update(progress.step)
            if self.average is not None:
                self.average.update(progress.step)
            progress.step += 1
        progress.batch += 1

    def _quantize(self, on: bool) -> None:
        """Switch the quantisers; a graph holds the step that it was captured from."""
        changed = [layer for layer in self.layers if layer.quantizing != on]
        for layer in changed:
            layer.quantizing = on
        if changed:
            self.captured.release()

    @contextmanager
    def _quantized(self) -> Iterator[None]:
        """Inside, every layer is quantised: what is scored is what would be deployed."""
        switched = [layer for layer in self.layers if not layer.quantizing]
        for layer in switched:
            layer.quantizing = True
        try:
            yield
        finally:
            for layer in switched:
                layer.quantizing = False

    def _compute(self, images: torch.Tensor, *targets: torch.Tensor, group: int = 1, last: bool = True) -> None:
        """What the GPU does in `step`; captured, it is only replayed.

        Gradients are averaged over the processes in the backward of the `last` batch of a group. The forward decides.
        """
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            with self.accelerator.autocast(), self.telemetry.watching(images, self.progress.step, last):
                logits = self.model(images)
            loss = self.loss(logits, *targets)
            if self.auxiliary is not None:
                share = self.progress.step / self.steps
                loss = self.auxiliary(loss, images, logits, self.layers, share, self.accelerator.autocast)
            del logits  # freed once their gradient has been computed
            self.statistics.add_loss(loss.detach())
            self.accelerator.backward(loss / group)
        if last:
            self._update()
        if not self._alone:
            share_amaxes(self.layers)

    def _update(self) -> None:
        norm = self.accelerator.clip_grad_norm_(self.bare.parameters(), self.settings.clip)
        self.statistics.add_step(norm)
        self.telemetry.sample(self.progress.step, self.progress.epoch, norm, self.accelerator.scaler)
        on_gpu = self.device.type == "cuda"
        if on_gpu and self.accelerator.scaler is None:  # which tells it otherwise
            skip_where(self.optimizer, ~torch.isfinite(norm))
        if on_gpu or torch.isfinite(norm):  # the fused optimiser skips by itself
            self.stepper.step()
        self.stepper.zero_grad(set_to_none=True)
        keep_positive(self.learned)

    def _forget(self) -> None:
        """After a capture that failed: gradients without values, a scaler that thinks they are unscaled, and a
        DistributedDataParallel that waits for the rest of them."""
        self.stepper.zero_grad(set_to_none=True)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler._per_optimizer_states.clear()
        if not self._alone:
            self.model = None
            gc.collect()  # its hooks go with it
            self.model = replicated(self.bare, self.device)

    def _learning_rate(self, step: int) -> float:
        return learning_rate(step, self.steps, self.job.lr, self.settings.warmup)

    def _between_steps(self, display: Display) -> None:
        progress = self.progress
        if self.device.type == "cuda" and self.settings.cuda_graph and self.captured.refusal != self.noted:
            self.noted = self.captured.refusal
            display.say(f"{self.job.model}: no CUDA graph of the step, since {self.noted}")
        if self.device.type == "cpu" or progress.step % STEPS_BETWEEN_READS == 0:
            counts = self.statistics.read()
            self.telemetry.flush()
            display.step(progress.step, counts.mean_loss)
            if counts.consecutive >= MAX_CONSECUTIVE_SKIPPED:
                raise GateError(
                    f"{self.job.model}: the gradients were NaN or Inf in {counts.consecutive} consecutive steps in "
                    f"epoch {progress.epoch + 1}. The best checkpoint so far is kept; {self._overflow()}"
                )
        if self.device.type == "cpu" or self._alone or progress.step % STEPS_BETWEEN_READS == 0:
            self._pause_if_asked()
        if self.pace.due_within_epoch():
            self._save_state()

    @torch.no_grad()
    def _overflow(self) -> str:
        """What to do about gradients that stay NaN: another precision where activations leave FP16's range.

        They are measured on the images of the last step, in FP32.
        """
        if self.autocast == "fp16" and self.images is not None:
            self.bare.forward = self.forward  # under autocast what overflows is infinite already
            with self._uncompiled(), Ranges(self.bare, FP16) as ranges:
                self.bare(self.images)
            if beyond := ranges.beyond(advice="Start again with --set train.precision=bf16."):
                return f"its activations leave FP16's range: {beyond}"
        return "start again with a lower --set train.lr=..."

    @property
    def _alone(self) -> bool:
        return self.accelerator.num_processes == 1

    def _pause_if_asked(self) -> None:
        """Stop where a signal has come; several processes call this at the same points, and stop at the same one."""
        if not self._alone:
            number = self.interrupt.number if self.interrupt.requested else 0
            self.interrupt.note(agreed_signal(number, self.device))
        if self.interrupt.requested:
            raise Pause

    def _on_device(self, batches: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        try:
            for batch in batches:
                images, masks = expand(*(part.to(self.device, non_blocking=True) for part in batch))
                yield images.contiguous(memory_format=self.layout), masks
        except RuntimeError:
            if not self.interrupt.requested:
                raise
            # Ctrl-C reaches the loader's workers too, and they end at once
            raise (Pause() if self._alone else self.interrupt.error()) from None

    def _load(self) -> None:
        path = self.job.state_path
        self.progress = load_state(path, self.bare, self.optimizer, self.accelerator.scaler, self.parts)
        self.statistics = RunningStatistics(self.device, EpochStatistics(**self.progress.counts), self.settings.spike)
        epoch = self.progress.batches
        if epoch and epoch != len(self.train_batches):
            raise InputError(
                f"{path} was trained on {epoch} batches an epoch, and there are {len(self.train_batches)} now: the "
                "data, the batch size or the number of processes changed. Give the original ones, or start a new run."
            )

    def _uncompiled(self) -> AbstractContextManager[object]:
        """An evaluation is too short to compile for, and needs no gradient, which is what fusion is for."""
        return torch.compiler.set_stance("force_eager") if self.fuses else nullcontext()

    def _averaged(self) -> AbstractContextManager[None]:
        return self.average.applied() if self.average is not None else nullcontext()

    def _measured_norms(self) -> AbstractContextManager[None]:
        if self.settings.norm_batches and self.norms.norms:
            batches = self._on_device(self.first_batches(self.settings.norm_batches))
            self.norms.measure(self.model, (images for images, _ in batches))
        return self.norms.applied()

    def keep(self, scores: TaskScores | None, line: dict[str, object]) -> None:
        """Write the best checkpoint where this is it, a line of metrics, and the state."""
        progress, main = self.progress, self.accelerator.is_main_process
        best = progress.best_score if math.isfinite(progress.best_score) else -1.0
        # Without a score so far the latest weights are kept: a split that cannot be scored says nothing about any.
        better = scores is not None and (scores.score > best or best < 0)
        if scores is not None and better:
            progress.best_score = scores.score if math.isfinite(scores.score) else -1.0
            progress.per_class = scores.line()["per_class"]
            extra = {"fp4deploy.epoch": str(progress.epoch), f"fp4deploy.{self.task.metric}": repr(scores.score)}
            if main:
                with self._averaged(), self.norms.applied():
                    save_checkpoint(self.job.checkpoint, self.bare, self.card, extra)
        if main:
            append_line(self.job.metrics_path, line)
            self.telemetry.epoch(line)
        if better or progress.epoch == self.job.epochs or self.pace.due_after_epoch():
            self._save_state()

    def _save_state(self) -> None:
        self.progress.counts = asdict(self.statistics.read())
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            with self.pace.saving():
                save_state(self.job.state_path, self.bare, self.optimizer, scaler, self.progress, self.parts)
            self.telemetry.save()
