"""Instance segmentation: decoding, COCO results, average precision, panoptic files and overlays."""

from fp4deploy.instances.decode import Instances, decode
from fp4deploy.instances.evaluation import InstanceEvaluation
from fp4deploy.instances.results import read_results, write_results
from fp4deploy.instances.scores import InstanceScores, average_precision

__all__ = [
    "InstanceEvaluation",
    "InstanceScores",
    "Instances",
    "average_precision",
    "decode",
    "read_results",
    "write_results",
]
