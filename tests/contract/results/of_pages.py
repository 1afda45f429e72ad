"""Of pages and records: reports, comparisons, studies, searches, sweeps and ledgers, as text, of invented numbers."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp4deploy.bench import layers
from fp4deploy.bench.records import Evidence
from fp4deploy.experiments.search import files as search_files
from fp4deploy.experiments.search.costs import PROJECTED, LayerCost
from fp4deploy.experiments.search.run import Budget, Found, Point
from fp4deploy.experiments.sensitivity import files as study_files
from fp4deploy.experiments.sensitivity import layer_files
from fp4deploy.experiments.sensitivity.layers import LayerError, LayerStudy
from fp4deploy.experiments.sensitivity.study import LayerDamage, Study, TensorTails
from fp4deploy.experiments.sweep import results as sweep
from fp4deploy.experiments.sweep.spec import load_sweep
from fp4deploy.export.ledger.ledger import Ledger, LedgerRow, load_ledger
from fp4deploy.precisions import PRECISIONS
from fp4deploy.report import comparison, summary
from fp4deploy.report.figures import curves, lost
from fp4deploy.report.history import history
from fp4deploy.report.markdown import render_markdown
from fp4deploy.report.model import EngineEntry, ModelEntry, ReportData, StageTime, engine_row
from fp4deploy.report.run_folder import read_run
from fp4deploy.train import estimate
from fp4deploy.train.config import Config, with_settings
from fp4deploy.train.schedule import training_job
from fp4deploy.train.state import Progress, save_state
from tests.contract.results.of_scores import ROWS
from tests.contract.results.plain import Answer, each
from tests.report.test_compare import make


def model_entry(score: float | None, epochs: int) -> ModelEntry:
    return ModelEntry(
        precision="fp16", architecture="unet", scale=0.25, digits=False, recipe=None, target=None, height=32, width=48,
        class_names=["a", "b"], epochs=epochs, checkpoint="best", task="semantic", miou=score, ap=None, ap50=None,
        per_class={"a": score, "b": None}, accuracy_from="measured",
    )  # fmt: skip


def report(control: bool, epochs: int, score: float, tuned: bool, status: str) -> Any:
    models = {"fp16": model_entry(0.61, 10), "nvfp4": model_entry(score, epochs)}
    models |= {"fp16_control": model_entry(0.6, 4)} if control else {}
    engine = EngineEntry(engine="c.plan", model="nvfp4", built="today", statement="s", summary="3 of 4", counts={"FP4": 3}, fp4_mac_share=0.4,
                         requested={"FP4": 0.9}, actual={"FP4": 0.5, "FP16": 0.5}, not_as_requested=1,
                         columns=["layer", "is"], layers=[["a", "FP4"]])  # fmt: skip
    rows = [
        row if row.status == "ok" else row.model_copy(update={"status": status, "reason": "no GPU"}) for row in ROWS
    ]
    data = ReportData(
        run="r", created="today", data="d", task="semantic", fine_tuned=tuned, models=models, artifacts=rows,
        sizes={".onnx": (300, 1000), ".plan": (5_000_000, 9_000_000)}, ledgers=[engine],
        stages=[StageTime(stage="train", seconds=95.4)], remarks=["x"], commands=["y"], environment=None,
    )  # fmt: skip
    return summary.summary(data), *([render_markdown(data), engine_row(engine)] if control and epochs == 4 else [])


def in_a_folder(of: Callable[[Path], Any]) -> Answer:
    def answer() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return of(Path(folder))

    return answer


def compared(folder: Path) -> Any:
    one = make(folder / "one", {"fp16": [{"cat": 0.2, "dog": 0.4}, {"cat": 0.4, "dog": 0.6}],
                                "fp16_control": [{"cat": 0.5, "dog": 0.45}], "nvfp4": [{"cat": 0.3, "dog": 0.5}] * 3})  # fmt: skip
    two = make(folder / "two", {"fp16": [{"cat": 0.25, "dog": 0.41}], "nvfp4_ptq": [{"cat": 0.1, "dog": 0.7}],
                                "nvfp4": [{"cat": 0.33, "dog": 0.44}, {"cat": 0.31, "dog": 0.2}]},
               train__lr=0.5, data__workers=3, recipe="nvfp4_4o6_qat")  # fmt: skip
    runs = [read_run(run, name) for run, name in ((one, "one"), (two, "two"))]
    found = comparison.compare(runs)
    return found.model_dump(mode="json", exclude={"runs"}), comparison.summary(found)


def _points(svg: str | None) -> list[float]:
    """The places of all lines of a picture."""
    return [sum(map(float, re.findall(r"-?[0-9]+\.[0-9]+", path))) for path in re.findall(r' d="([^"]*)"', svg or "")]


def drawn(tuned: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        scores = {"fp16": [{"a": 0.2}, {"a": 0.4}], "nvfp4": [{"a": 0.3}, {"a": 0.5}]}
        run = make(Path(folder) / "run", scores)
        epochs = {model: history(run, model) for model in scores}
        return _points(curves.draw_curves(epochs, tuned)), epochs


COST = LayerCost(
    {"FP4": 100, "W4A8": 110, "FP8": 200, "INT8": 210, "FP16": 400},
    {"FP4": 0.5, "W4A8": 0.55, "FP8": 0.6, "FP16": 1.25},
)
POINTS = tuple(Point({"FP4": names[:1], "W4A8": (), "FP8": names[1:2], "INT8": names[2:]}, 0.01 * n, 5e6 / n, 3.0 / n, 0.61 - 0.013 * n)
               for n, names in enumerate((("a", "b", "c"), ("a", "b"), ("b",)), 1))  # fmt: skip
SEARCH = Found(Budget("drop", 1.0), POINTS[1], Point(dict.fromkeys(PRECISIONS, ()), 0.0, 8e6, 4.0, 0.61), POINTS,
               {name: {"FP4": 0.1, "W4A8": 0.05, "FP8": 0.01, "INT8": 0.02} for name in "abc"}, dict.fromkeys("abc", COST),
               "B200", PROJECTED, "amax", 7, "mIoU")  # fmt: skip
STUDY = Study("c", "fp16", 4, [
    TensorTails("a", "Conv2d", what, kept, 100 + n, 3.5 * n or None, 2.5, 20.0 - n, 0.01 * n)
    for n, (what, kept) in enumerate((("weight", ""), ("input", "first layer"), ("bias", "norm")))
], [LayerDamage(name, "Conv2d", what, kept, 0.01 * n, 0.1 * n, 0.3, 0.2) for n, (name, what, kept) in enumerate((
    ("a", "weight and input", ""), ("b", "parameters", "a norm"), ("b", "input", "a norm"), ("c", "weight and input", "first layer")))])  # fmt: skip
LAYERS = LayerStudy("c", "nvfp4_qat", 4, {"input": 0.1, "weight": 0.2, "both": 0.25}, 0.03, [
    LayerError(name, "Conv2d", 16 * n, 0.25 * n, {"input": 0.1 * n, "weight": 0.05, "both": 0.12 * n}, 0.01,
               {"input": 0.2, "weight": 0.3 / n, "both": 0.4}, 0.01 * n, {"input": 0.5, "weight": None}, 0.2,
               [(3, 0.5), (1, 0.25)]) for n, name in enumerate("abc", 1)])  # fmt: skip
TIMES = layers.LayerTimes("n.fp4", "GPU", 2, layers.Limits(2e12, 5e14), 1.5, tuple(
    layers.LayerTime(name, "conv2d", form, ("packed",), 0.1 * n, 1000 * n, 10**9 * n, 0.3 / n, bound)
    for n, (name, form, bound) in enumerate((("a", "FP4", "memory"), ("b", "FP16", "arithmetic"), ("a", "FP4", "memory")), 1)))  # fmt: skip
KINDS = (("fp16", "nvfp4", "nvfp4_ptq"), (True, False))


def estimated(gpus: int, share: float, model: str) -> Any:
    config = with_settings(Config(), ["train.epochs=10", "train.finetune_epochs=3", "train.evaluate_every=2"])
    speeds = [estimate.Speed(model, training, 200.0, 500.0, loader, 10**9)
              for training, loader in ((100.0, 90.0), (190.0, 1000.0), (20.0, 21.0))]  # fmt: skip
    return estimate.estimate(config, speeds, 12_000, 1_500, gpus, share)


LAYER = torch.nn.Linear(2, 2)


def swept(folder: Path) -> Any:
    file = folder / "sweep.yaml"
    file.write_text(
        "set: {train.epochs: 2, train.finetune_epochs: 2}\nseeds: [0, 1]\nagainst: control\nvariants:\n"
        "  control: {model: fp16_control}\n  qat: {model: nvfp4, set: {recipe: nvfp4_qat}, note: text}\n"
        "  wide: {model: nvfp4, set: {model.scale: 0.5, data.workers: 3}, against: qat}\n"
        "  apart: {model: nvfp4, base: fp16, against: null}\n"
    )
    found = load_sweep(file)
    for number, variant in enumerate(found.variants):
        for seed in found.seeds:
            run = sweep.run_of(folder / "out", variant, seed)
            epochs = [{"a": 0.1 * number + 0.05 * seed + 0.01 * epoch, "b": 0.3} for epoch in range(2 - (number == 3))]
            make(run.path, {variant.model: epochs})
            progress = Progress(2 - (number == 4), 2, 0.5, 3.0, {"a": 0.5}, number, 1, 4, 0.5, {"loss": 1.5})
            state = training_job(found.config(variant, seed), run, variant.model).state_path
            save_state(state, LAYER, torch.optim.Adam(LAYER.parameters()), None, progress)
    results = sweep.collect(found, folder / "out")
    return (
        [(v.name, v.model, v.sets, v.against, v.base, v.needs) for v in found.variants],
        results,
        sweep.markdown(results),
    )


def ledger(folder: Path) -> Any:
    rows = [LedgerRow(name, "Linear", asked, planned, actual, weights, form, reason, macs, fell, ("k",), ("n",), "relu", "3")
            for name, asked, planned, actual, weights, form, reason, macs, fell in (
                ("a", "FP4", "FP4", "FP4", "FP4", "gemm", "", 900, False), ("b", "FP4", "FP16", "FP16", "FP16", "qdq", "x", 50, True),
                ("c", "FP8", "FP8", "INT8", "FP8", "fp8", "y", 40, False), ("d", "FP16", "FP16", "FP16", "FP16", "plain", "", 10, False))]  # fmt: skip
    found = Ledger("tensorrt-rtx", "1.7", "sm120", "auto", "build log", "u.onnx", "0" * 64, "u.plan", "1" * 64, 10, 0.5,
                   (1, 1, 8), None, tuple(rows), ())  # fmt: skip
    (folder / "u.ledger.json").write_text(found.to_json(), encoding="utf-8")
    assert load_ledger(folder / "u.ledger.json") == found
    properties = [name for name, each in vars(Ledger).items() if isinstance(each, property)]
    return found.rows(), found.summary(), {name: getattr(found, name) for name in properties}, found.to_json()


RESULTS: dict[str, Answer] = {
    "reports": each(report, (True, False), (4, 7), (0.6, 0.62), (True,), ("not run", "failed")),
    "comparison": in_a_folder(compared),
    "names of runs": each(comparison.labels, [[Path(each) for each in paths] for paths in (
        ("/a/one", "/a/two"), ("/a/b/one", "/a/c/one", "/a/two"), ("/a/b/one", "/c/b/one", "/c/d/one"), ("/a", "/a"), ("/a",))]),
    "curves": each(drawn, (True, False)),
    "most wrong": lambda: lost.most_wrong(Evidence(kind="pixels", classes=["a", "b"], images=["1", "2", "3"],
                                                   lines=["5/6/7 1/9/3", "0/4/0 -", "9/9/9 2/2/2"])),
    "search": lambda: (search_files.render(SEARCH), search_files._document(SEARCH), SEARCH.drop,
                       [search_files.pareto_front(POINTS, cost) for cost in (lambda p: p.ms, lambda p: -p.bytes)]),
    "study": lambda: study_files.render_study(STUDY),
    "layer study": lambda: layer_files.render_layers(LAYERS),
    "layer times": lambda: (layers.table_rows(TIMES), layers.summary(TIMES), layers.chrome_trace(TIMES)),
    "estimates": each(estimated, (1, 4), (0.9, 1.0), ("fp16", "nvfp4", "nvfp4_ptq")),
    "sweep": in_a_folder(swept),
    "ledger": in_a_folder(ledger),
}  # fmt: skip
