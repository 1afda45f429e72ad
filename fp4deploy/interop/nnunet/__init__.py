"""nnU-Net v2: its results folders quantised, packed, exported and predicted with; its trainer in NVFP4.

    quantize_folder(read_folder(FP32), "nnUNet_raw/Dataset004_Hippocampus", out)   a folder that nnUNetv2_predict runs
    nnUNet_extTrainer=TRAINERS nnUNetv2_train ... -tr nnUNetTrainerNVFP4           quantisation-aware training
    pack_folder(read_folder(out)); export_folder(...)                              .fp4 and ONNX of each fold
    predictor(out).predict_from_files(...)                                         nnU-Net's predictor, packed inside

Planning, preprocessing, resampling, sliding window and the writing of segmentations are nnU-Net's own.
"""

from pathlib import Path

from fp4deploy.interop.nnunet.folders import export_folder, pack_folder
from fp4deploy.interop.nnunet.predictor import predict_folder, predictor
from fp4deploy.interop.nnunet.quantization import Quantization, load_network
from fp4deploy.interop.nnunet.quantize import quantize_folder

TRAINERS = Path(__file__).resolve().parent / "trainers"
"""The folder that the environment variable nnUNet_extTrainer has to name for nnU-Net to find nnUNetTrainerNVFP4."""

__all__ = [
    "TRAINERS",
    "Quantization",
    "export_folder",
    "load_network",
    "pack_folder",
    "predict_folder",
    "predictor",
    "quantize_folder",
]
