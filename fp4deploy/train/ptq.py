"""Post-training quantisation: the FP16 checkpoint with calibrated activation scales, and not one training step.

What QAT has to beat. The model is prepared and calibrated exactly as the one that is fine-tuned, evaluated by the same
code on the same images, and leaves the same files: a checkpoint, a line of metrics of epoch 0, a state.
"""

from __future__ import annotations

import time

from fp4deploy.train.loop import Trainer
from fp4deploy.train.state import Progress, read_progress


def evaluate_untrained(trainer: Trainer, resume: bool) -> Progress:
    """Score a calibrated model and save it; with `resume`, take the result that is there already.

    Raises:
        InputError: a file cannot be written, or the state cannot be read.
    """
    state = trainer.plan.state_path
    if resume and state.is_file():
        return read_progress(state)
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
