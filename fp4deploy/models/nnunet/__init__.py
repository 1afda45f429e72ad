"""Results folders of nnU-Net v2: plans, data set, checkpoints and networks, read without running code of theirs."""

from fp4deploy.models.nnunet.folder import Fold, ResultsFolder, is_folder, named_folder, read_fold, read_folder
from fp4deploy.models.nnunet.network import build_network, load_fold

__all__ = [
    "Fold",
    "ResultsFolder",
    "build_network",
    "is_folder",
    "load_fold",
    "named_folder",
    "read_fold",
    "read_folder",
]
