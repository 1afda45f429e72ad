"""Training: configuration, losses, and one loop for every precision."""

from fp4deploy.train.config import Config, load_config, save_config, with_settings
from fp4deploy.train.losses.segmentation import SegmentationLoss, dice_loss
from fp4deploy.train.models import TrainResult, train_models

__all__ = [
    "Config",
    "SegmentationLoss",
    "TrainResult",
    "dice_loss",
    "load_config",
    "save_config",
    "train_models",
    "with_settings",
]
