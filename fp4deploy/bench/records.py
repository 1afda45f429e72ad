"""What a bench leaves, as types: the entry of an artefact and the machine it was measured on.

`bench --json`, report.json and commands.jsonl are written and read through these models, so that whatever a report
prints as a number was parsed as one. Accuracies lie in [0, 1], latencies are milliseconds, sizes bytes. A file of an
older version lacks keys: they have defaults; keys that this version does not know are ignored. NaN and infinity are
refused: None says "not measured".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fp4deploy.system.schema import Name

Scores = dict[str, int | float | None]  # by the name of a class, or of a kind of AP
MAX_IMAGES = 1_000_000
NOT_MEASURED = "not measured"


class Record(BaseModel):
    """A JSON object of a result file."""

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")


class Evidence(Record):
    """Counts of every image of a split, one line of text an image; the form is in `bench.evidence`."""

    kind: Literal["pixels", "voxels", "labels", "matches"]
    classes: Annotated[list[Name], Field(max_length=1000)]
    images: Annotated[list[Name], Field(max_length=MAX_IMAGES)]
    lines: Annotated[list[str], Field(max_length=MAX_IMAGES)]


class Quantiles(Record):
    """Latency of one run over a batch, milliseconds."""

    p50: float
    p90: float
    p99: float


class ArtifactEntry(Record):
    """A checkpoint, ONNX file, packed network or engine, and what was measured of it; `path` as a report shows it.

    `data_sha256` is the digest of the split's images and labels. `evidence` is not part of the JSON of an entry:
    `bench --json` writes it once, apart from the entries, and a report leaves it out.
    """

    path: str
    model: str | None = None
    backend: str = "–"
    precision: str = "–"
    size_bytes: int | None = None
    sha256: str | None = None
    miou: float | None = None
    ap: float | None = None
    ap50: float | None = None
    top1: float | None = None
    instances: Scores | None = None
    pixel_accuracy: float | None = None
    dice: float | None = None  # of volumes: mean over the classes but the background
    dice_per_class: Scores = Field(default_factory=dict)
    hd95_mm: float | None = None  # of volumes: 95 % Hausdorff distance, likewise
    hd95_mm_per_class: Scores = Field(default_factory=dict)
    per_class: Scores = Field(default_factory=dict)
    errors: dict[str, Scores] = Field(default_factory=dict)  # of detectors: kind -> count and AP50 that it costs
    confusion: dict[str, dict[str, int]] = Field(default_factory=dict)  # of detectors: class -> detected as -> count
    boundary_f1: float | None = None
    recall_by_size: Scores = Field(default_factory=dict)
    never_predicted: list[str] = Field(default_factory=list)  # classes of the truth that no pixel was given
    split: str | None = None
    data_sha256: str | None = None
    latency_ms: Quantiles | None = None
    images_per_s: float | None = None
    batch: int | None = None
    timed_runs: int | None = None
    device: str | None = None
    memory: dict[str, int] | None = None
    status: str = NOT_MEASURED
    reason: str | None = None
    evidence: Evidence | None = Field(default=None, exclude=True, repr=False)

    @property
    def metric(self) -> str:
        """Name of the accuracy."""
        if self.top1 is not None:
            return "top-1"
        return "AP" if self.instances else "Dice" if self.dice is not None else "mIoU"

    @property
    def accuracy(self) -> float | None:
        """mIoU of a semantic model, of volumes Dice, AP of an instance model, top-1 of a classifier; None where it was
        not measured.
        """
        return next((value for value in (self.dice, self.miou, self.top1) if value is not None), self.ap)


class Gpu(Record):
    """One CUDA device; `arch` as "sm120"."""

    name: str
    arch: str
    memory_bytes: int | None = None


class Machine(Record):
    """CPU, GPUs and versions, as `environment.environment` records them; `packages` is name -> version."""

    python: str
    platform: str
    cpu: str
    cores: int
    threads: int | None = None
    gpus: list[Gpu]
    packages: dict[str, str]
