"""MLflow: one run a model, in a store of files beside the model unless MLFLOW_TRACKING_URI names a server.

MLflow keeps every value that was logged, so after a resume the steps that were repeated are there twice, with equal
values. Code histograms, for which it has no chart, become one metric a code: the share of elements that have it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4deploy.system.files import write_whole
from fp4deploy.system.schema import read_text
from fp4deploy.train.logging.tracker import Entry, required

RUN_ID = "run_id"  # file in the tracker's folder
MAX_METRICS = 1000  # in one call, MLflow's own limit
LOCAL = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}  # nothing leaves the machine unasked


class MlflowTracker:
    """Metrics, parameters and pictures of one model."""

    def __init__(self, folder: Path, name: str, project: str, config: dict[str, object]) -> None:
        for variable, value in LOCAL.items():
            os.environ.setdefault(variable, value)
        required("mlflow")
        self.folder, self.name, self.project, self.config = folder, name, project, config
        self.client: Any = None
        self.run = ""

    def resume(self, step: int, epoch: int) -> None:
        """Open the run, or continue the one whose id the folder has."""
        from mlflow import MlflowClient

        self.folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (self.folder.resolve() / "mlruns").as_uri()
        self.client = MlflowClient(tracking_uri=uri)
        known = self.folder / RUN_ID
        if step and known.is_file():
            self.run = read_text(known).strip()
            self.client.update_run(self.run, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(self.project)
        experiment = found.experiment_id if found else self.client.create_experiment(self.project)
        self.run = self.client.create_run(experiment, run_name=self.name).info.run_id
        for key, value in self.config.items():
            self.client.log_param(self.run, key, value)
        write_whole(known, self.run + "\n")

    def log(self, entry: Entry) -> None:
        """Log scalars, and the share of each code."""
        from time import time

        from mlflow.entities import Metric

        if self.client is None:
            self.resume(0, 0)
        values = {**entry.scalars(), "epoch": float(entry.epoch)}
        for name, counts in entry.histograms().items():
            whole = max(1, sum(counts))
            values |= {f"{name}/{code:02d}": count / whole for code, count in enumerate(counts)}
        now = int(1000 * time())
        metrics = [Metric(name, value, now, entry.step) for name, value in values.items()]
        for start in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run, metrics=metrics[start : start + MAX_METRICS])

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """Keep pictures as artefacts of the run, under their names."""
        if self.client is None:
            self.resume(step, 0)
        for name, path in files.items():
            self.client.log_artifact(self.run, str(path), name.rpartition("/")[0] or None)

    def close(self) -> None:
        """Finish the run."""
        if self.client is not None:
            self.client.set_terminated(self.run)
            self.client = None
