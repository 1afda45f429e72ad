"""Names that nnU-Net looks up here."""

from fp4deploy.interop.nnunet.trainer import nnUNetTrainerNVFP4

__all__ = ["nnUNetTrainerNVFP4"]
