"""Networks, their model cards and checkpoints."""

from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.build import build_model
from fp4deploy.models.card import CARD_KEY, ModelCard
from fp4deploy.models.checkpoint import load_weights, read_card, save_checkpoint
from fp4deploy.models.heads import InstanceHead
from fp4deploy.models.spec import ModelSpec, name_model, parse_spec
from fp4deploy.models.unet import UNet, build_unet

__all__ = [
    "CARD_KEY",
    "DetectionHead",
    "InstanceHead",
    "ModelCard",
    "ModelSpec",
    "UNet",
    "build_model",
    "build_unet",
    "load_weights",
    "name_model",
    "parse_spec",
    "read_card",
    "save_checkpoint",
]
