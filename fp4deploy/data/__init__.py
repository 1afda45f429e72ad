"""Datasets: reading COCO annotations, PNG masks and NIfTI volumes, joint augmentation, generated scenes, checking."""

from fp4deploy.data.augmentation.letterbox import BoxTrainTransform, LetterboxTransform, letterbox
from fp4deploy.data.augmentation.transforms import EvalTransform, NumberedEvalTransform, TrainTransform, expand
from fp4deploy.data.cache import CachedDataset, cache_dataset
from fp4deploy.data.coco.annotations import Defect
from fp4deploy.data.coco.boxes import BoxDataset
from fp4deploy.data.coco.dataset import CocoDataset
from fp4deploy.data.dataset import has_split, open_boxes, open_dataset, open_instances
from fp4deploy.data.for_model import box_set, instance_set, validation_set
from fp4deploy.data.generated.shapes import generate_shapes
from fp4deploy.data.importing.anything import import_folder
from fp4deploy.data.importing.folder import import_coco
from fp4deploy.data.inspection.balance import ClassCounts, cached_counts, class_balance, count_classes
from fp4deploy.data.inspection.check import check_dataset
from fp4deploy.data.inspection.labels import require_labels
from fp4deploy.data.inspection.summary import parse_splits, summarise
from fp4deploy.data.loader import EpochLoader, end_workers, eval_loader, train_loader
from fp4deploy.data.part import repeated
from fp4deploy.data.photos import PhotoDataset, are_photos, usual_size
from fp4deploy.data.sample import (
    IGNORE,
    IMAGE_MEAN,
    IMAGE_STD,
    MEASURED,
    SPLITS,
    TEST,
    VAL,
    Sample,
    SegmentationDataset,
)

__all__ = [
    "IGNORE",
    "IMAGE_MEAN",
    "IMAGE_STD",
    "MEASURED",
    "SPLITS",
    "TEST",
    "VAL",
    "BoxDataset",
    "BoxTrainTransform",
    "CachedDataset",
    "ClassCounts",
    "CocoDataset",
    "Defect",
    "EpochLoader",
    "EvalTransform",
    "LetterboxTransform",
    "NumberedEvalTransform",
    "PhotoDataset",
    "Sample",
    "SegmentationDataset",
    "TrainTransform",
    "are_photos",
    "box_set",
    "cache_dataset",
    "cached_counts",
    "check_dataset",
    "class_balance",
    "count_classes",
    "end_workers",
    "eval_loader",
    "expand",
    "generate_shapes",
    "has_split",
    "import_coco",
    "import_folder",
    "instance_set",
    "letterbox",
    "open_boxes",
    "open_dataset",
    "open_instances",
    "parse_splits",
    "repeated",
    "require_labels",
    "summarise",
    "train_loader",
    "usual_size",
    "validation_set",
]
