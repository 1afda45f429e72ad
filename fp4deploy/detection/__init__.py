"""Object detection: decoding, COCO results and average precision, kinds of errors, boxes over images."""

from fp4deploy.detection.decode import Detections, decode_boxes
from fp4deploy.detection.evaluation import DetectionEvaluation

__all__ = ["DetectionEvaluation", "Detections", "decode_boxes"]
