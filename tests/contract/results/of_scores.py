"""Of metrics, the gate, tables, objects, boxes, studies and searches."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import numpy as np
import torch

from fp4deploy import metrics, peaks
from fp4deploy.bench import detail, evidence, tables
from fp4deploy.bench.gate import bootstrap
from fp4deploy.bench.records import ArtifactEntry
from fp4deploy.detection import decode as box_decode
from fp4deploy.detection import errors as box_errors
from fp4deploy.experiments.search import choose
from fp4deploy.experiments.search import run as search
from fp4deploy.experiments.sensitivity import files as study_files
from fp4deploy.experiments.sensitivity import study
from fp4deploy.experiments.sweep import results as sweep
from fp4deploy.instances import draw, matches, panoptic
from fp4deploy.instances.decode import decode as decode_objects
from fp4deploy.models import boxes as head_boxes
from fp4deploy.models.heads import InstanceHead
from fp4deploy.report.figures import task_pictures
from fp4deploy.timing.library import library_time
from tests.contract.results.arguments import (
    _random,
    classes,
    gathered,
    objects,
    picture,
    real,
    volume,
)
from tests.contract.results.plain import Answer, each

ROWS = [
    ArtifactEntry(path=path, model=model, backend=backend, precision=precision, size_bytes=size, sha256="0", miou=score,
                  per_class={"a": score, "b": None}, latency_ms=times, images_per_s=rate, batch=2, status=status,
                  boundary_f1=score and score / 2, recall_by_size={"small": score, "large": None},
                  memory={"weight_bytes": 10_000, "weight_bytes_fp16": 33_000, "activation_bytes": 2_500_000, "activation_bytes_fp16": 2_600_000}, timed_runs=30, never_predicted=["b"])
    for path, model, backend, precision, size, score, times, rate, status in (
        ("a.onnx", "fp16", "ort", "FP16", 12_345_678, 0.61234, {"p50": 2.0, "p90": 2.1, "p99": 9.0}, 480.5, "ok"),
        ("b.fp4", "nvfp4", "packed", "FP4", 3_456, 0.59876, {"p50": 1.0, "p90": 1.9, "p99": 2.0}, 1000.25, "ok"),
        ("c.plan", "nvfp4", "trt", "FP4", None, None, None, None, "not run"),
    )
]  # fmt: skip
TRUTH = {
    "images": [{"id": n, "height": 40, "width": 50} for n in (1, 2)],
    "categories": [{"id": n, "name": f"c{n}"} for n in (3, 7)],
    "annotations": [
        {"id": n, "image_id": 1 + n % 2, "category_id": (3, 7)[n % 3 > 0], "iscrowd": int(n == 5), "area": w * h,
         "bbox": [x, y, w, h]}
        for n, (x, y, w, h) in enumerate([(1, 2, 10, 12), (5, 5, 20, 20), (20, 3, 9, 9), (30, 20, 15, 10),
                                          (2, 25, 12, 9), (10, 10, 30, 25)], 1)
    ],
}  # fmt: skip
FOUND = [
    {"image_id": 1 + n % 2, "category_id": (3, 7)[n % 5 < 2], "bbox": [x, y, w, h], "score": score}
    for n, (x, y, w, h, score) in enumerate([
        (1, 2, 10, 12, 0.9), (5, 6, 19, 20, 0.8), (21, 3, 9, 9, 0.8), (31, 24, 15, 10, 0.3), (2, 25, 12, 9, 0.6),
        (12, 12, 20, 20, 0.5), (5, 5, 20, 20, 0.7), (40, 1, 5, 5, 0.4), (1, 2, 10, 7, 0.55), (30, 20, 15, 10, 0.2),
    ], 1)
]  # fmt: skip
COUNTS = [
    kind([f"{n}" for n in range(7)], "abc", np.sort(_random(seed).integers(0, 90, (7, 3, 3)), -1)[..., [0, 1, 2]])
    for kind, seed in itertools.product((evidence.PixelCounts, evidence.VoxelCounts, evidence.LabelCounts), (0, 1))
]
HEADS = [head_boxes.DetectionHead(cast(Any, method), 2, (4, 8), 8, 1, threshold, nms, most)
         for method, threshold, nms, most in (("fcos", 0.05, 0.6, 100), ("fcos_relu", 0.4, 0.3, 5),
                                              ("retinanet", 0.6, 0.9, 9))]  # fmt: skip
OBJECT_HEADS = [InstanceHead("centres", 3, stuff=(2,), nms=3, threshold=0.55, max_detections=7),
                InstanceHead("centres", 2), InstanceHead("set", 3, 6, stuff=(1,)), InstanceHead("set", 0, 4)]  # fmt: skip


def scored() -> Any:
    score, labelled = metrics.SegmentationScore(4, "abcd"), metrics.LabelScore("abc")
    for seed in (0, 1):
        score.update(real(2, 4, 9, 14, seed=seed), classes(2, 9, 14, seed=seed))
        labelled.update(classes(9, seed=seed, void=False), classes(9, seed=seed + 2, void=False).clamp(max=1))
    return score.compute(), labelled.compute()


def detailed(background: bool) -> Any:
    truth, found = classes(2, 40, 66), classes(2, 40, 66, seed=1, void=False)
    truth[0, :34, :34] = 0
    truth[0, :32, :32] = 1  # as many pixels as a small object has not
    counted = detail.SegmentationDetail(("background", "b", "c", "d"), background)
    counted.update(found, truth)
    return counted.boundary_f1(), counted.recall_by_size(), counted.counts(["1", "2"]).per_class(np.ones(2))


def box_outputs(head: Any) -> torch.Tensor:
    places = sum(h * w for h, w in head_boxes.map_sizes(head.strides, 24, 40))
    return real(head.channels, places, scale=0.7)


OPTIONS = {
    (layer, each): 0.1 * (1 + n) * (1 + m) for n, layer in enumerate("abc") for m, each in enumerate(("FP4", "FP8"))
}
SAVED = {(layer, each): (3.0 + n) / (1 + m) for n, layer in enumerate("abc") for m, each in enumerate(("FP4", "FP8"))}
RESULTS: dict[str, Answer] = {
    "scores": scored,
    "hausdorff": each(metrics.hausdorff95, (volume().mask == 1, volume().mask == 9), (volume().mask == 2, volume().mask > 0),
                      ((3.0, 1.0, 0.5), (1.0, 1.0, 1.0))),
    "detail": each(detailed, (True, False)),
    "counts": lambda: [(c.constant(), c.never_predicted(), c.per_class(np.array([1.0, 0, 2, 1, 1, 0, 3])), bootstrap.value(c))
                       for c in COUNTS],
    "drops": lambda: [bootstrap.paired_drop(one, other, level, 200, 1) for level in (0.95, 0.5)
                      for one, other in zip(COUNTS[::2], COUNTS[1::2], strict=True)],
    "mean drop": lambda: bootstrap.mean_drop([(COUNTS[0], COUNTS[1]), (COUNTS[1], COUNTS[0])]),
    "table": lambda: (tables.head(ROWS), tables.rows(ROWS), tables.details(ROWS), tables.names(ROWS)),
    "cells": lambda: [function(value) for function in (tables.points, tables.percent, tables.milliseconds, tables.rate)
                      for value in (None, 0.0, 0.005, 0.12345, 1.0, 12.3456, 999.95, 123456.0)],
    "sizes": each(tables.size, (None, 0, 999, 1000, 1_234_567, 9_999_999_999)),
    "durations": each(tables.duration, (0.0, 0.4, 59.6, 60, 3599, 3600, 100_000)),
    "changes": each(tables.change, (None, 0.5, 0.6), (None, 0.0, 0.5, 0.7)),
    "library times": each(library_time, ("FP4", "FP8", "INT8", "FP16"), (36, 10**6), (64,), (576,), (1e6, 1e9), peaks.GPUS),
    "boxes": gathered(HEADS, lambda head: box_decode.decode_boxes(box_outputs(head), head, (24, 40), (31, 90))),
    "candidates": gathered(HEADS, lambda head: box_decode.candidates(box_outputs(head), head, (24, 40))),
    "errors": each(box_errors.error_kinds, (TRUTH,), (FOUND,), (100, 2)),
    "confusion": each(box_errors.confusion, (TRUTH,), (FOUND,), (100, 2)),
    "objects": gathered(OBJECT_HEADS, lambda head: decode_objects(real(head.channels, 24, 40, scale=2), head, (31, 66))),
    "panoptic": lambda: [panoptic.panoptic(decode_objects(real(head.channels, 24, 40, scale=2), head, (31, 66)),
                                           {0: 1, 1: 5, 2: 9}, (2,)) for head in OBJECT_HEADS[:1]],
    "drawn": lambda: [draw.draw_instances(picture(), objects()), draw.draw_instances(picture(), objects(), objects() == 2),
                      draw.outline(objects()), panoptic.to_rgb(objects() * 300)],
    "average precision": lambda: [
        matches.Matches(("1", "2", "3"), ("a", "b"), np.array([[2, 0], [1, 3], [0, 1]]), tuple(
            matches.ClassMatches(_random(n).integers(0, 3, 9), np.sort(_random(n).random(9))[::-1].round(1),
                                 _random(n).random((10, 9)) > 0.4, _random(n + 5).random((10, 9)) > 0.8) for n in (0, 1)),
        ).__getattribute__(name)(*more) for name, more in (
            ("per_class", (np.array([1.0, 2, 1]),)), ("ap", (np.array([1.0, 0, 1]),)), ("found", ()))],
    "unmatched boxes": lambda: [task_pictures.unmatched(one, other) for one, other in itertools.permutations(
        [box_decode.decode_boxes(box_outputs(head), head, (24, 40), (31, 90)) for head in HEADS], 2)],
    "different objects": lambda: task_pictures.different(objects(), np.roll(objects(), 2, 1)),
    "least cost": each(choose.least_cost, (OPTIONS,), (SAVED,), (0.0, 0.2, 0.45, 9.0)),
    "least error": each(choose.least_error, (OPTIONS,), (SAVED,), (0.0, 3.0, 7.5, 12.0, 13.0)),
    "sqnr": each(search.sqnr, (0.0, 1e-6, 0.5, 4.0)),
    "difference": lambda: study.difference_of([real(2, 3, 5, 6), real(1, 3, 5, 6, seed=1)], [real(2, 3, 5, 6, seed=2), real(1, 3, 5, 6)]),
    "lost": each(study._lost, ({"std": s, "dequantized_std": d, "correlation": c} for s in (0.0, 1.0) for d in (0.0, 1.0)
                               for c in (0.5, math.nan))),
    "groups": each(study_files.group_of, ("", "the first layer", "a norm"), ("weight and input", "parameters", "input")),
    "interval": each(sweep.interval, ([], [1.0], [1.0, 2.0, 4.0], [0.5, 0.5]), (0.95, 0.9)),
    "gaps": each(sweep.paired, ({str(n): {"status": s, "best": 0.1 * n} for n, s in enumerate(["done", "done", "failed", "done"])},),
                 ({str(n): {"status": "done", "best": 0.05 * n * n} for n in range(4)},), ("best", "last")),
}  # fmt: skip
