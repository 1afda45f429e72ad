"""A sweep from its file to its table: shared starting points, failures, going on, the paired interval."""

from __future__ import annotations

import _thread
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from benchmarks.sweep_result import gather
from fp4deploy.errors import InputError
from fp4deploy.experiments.sweep import variant as module
from fp4deploy.experiments.sweep.plot import draw_sweep
from fp4deploy.experiments.sweep.results import interval, markdown, outcome, paired, run_of
from fp4deploy.experiments.sweep.run import run_sweep
from fp4deploy.experiments.sweep.spec import load_sweep
from fp4deploy.models.spec import _named, parse_spec, require_named
from fp4deploy.train import Config
from fp4deploy.train.loop import Trainer
from fp4deploy.train.schedule import training_job
from fp4deploy.train.state import Progress, save_state
from tests.processes import LIMIT, wait_until

SWEEPS = sorted((Path(__file__).parents[2] / "configs").glob("sweep_*.yaml"))
TINY = (
    "model.scale: 0.125, data.height: 32, data.width: 32, train.epochs: 1, train.finetune_epochs: 1, telemetry.every: 0"
)
FILE = f"""
set: {{{TINY}, train.batch_size: 4, data.root: ROOT}}
seeds: [0, 1]
against: control
variants:
  control: {{model: fp16_control}}
  ptq: {{model: nvfp4_ptq}}
  bad: {{model: nvfp4, set: {{quant.include: ["nothing*"]}}}}
  qat: {{model: nvfp4}}
  wide: {{model: nvfp4, set: {{model.scale: 0.25}}, against: null}}
  scratch: {{set: {{train.from_scratch: true}}, against: fp16}}
"""


def written(folder: Path, root: Path, text: str = FILE) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text.replace("ROOT", json.dumps(str(root))))
    return path


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """SIGINT ignored, as by whatever a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN


@pytest.fixture(scope="module")
def swept(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    folder, said = tmp_path_factory.mktemp("sweep"), []
    results = run_sweep(load_sweep(written(folder, tiny_data)), folder / "out", say=said.append)
    return folder, results, said


def test_the_nearest_setting_wins(tmp_path: Path) -> None:
    """A variant's over the command's, those over the sweep's, over its configuration's; the seed is the run's."""
    (tmp_path / "base.yaml").write_text("seed: 9\ntrain: {lr: 0.1, epochs: 2, batch_size: 2, warmup: 0.2}\n")
    common = "config: base.yaml\nset: {train.lr: 0.2, train.epochs: 3, train.batch_size: 3}\nseeds: [4]\n"
    own = "variants: {plain: {model: fp16}, mine: {model: fp16, set: {train.lr: 0.4, seed: 5}}}\n"
    (tmp_path / "sweep.yaml").write_text(common + own)
    sweep = load_sweep(tmp_path / "sweep.yaml", ("train.lr=0.3", "train.epochs=4"))
    for name, rate in (("plain", 0.3), ("mine", 0.4)):
        config = sweep.config(sweep.variant(name), 4)
        train = config.train
        assert (train.lr, train.epochs, train.batch_size, train.warmup, config.seed) == (rate, 4, 3, 0.2, 4)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_shipped_sweeps_are_valid_and_open_with_their_command(path: Path) -> None:
    sweep = load_sweep(path)
    assert path.read_text().startswith(f"# fp4deploy sweep configs/{path.name} ")
    for variant in sweep.variants:
        for seed in sweep.seeds:
            assert sweep.config(variant, seed).seed == seed


def test_a_seed_has_one_fp16_model_and_everything_starts_from_it(swept: tuple[Path, dict[str, Any], list[str]]) -> None:
    folder, results, _ = swept
    assert list(results["variants"]) == [
        "fp16", "fp16-model.scale_0.25", "control", "ptq", "bad", "qat", "wide", "scratch",
    ]  # fmt: skip
    for seed in (0, 1):
        from fp4deploy.train import load_config

        start = folder / "out" / "fp16" / f"seed{seed}" / "fp16" / "best.safetensors"
        for name in ("control", "ptq", "qat"):
            config = load_config(folder / "out" / name / f"seed{seed}" / "config.yaml")
            assert Path(config.train.init_checkpoint) == start
            assert config.seed == seed
        wide = load_config(folder / "out" / "wide" / f"seed{seed}" / "config.yaml")
        assert "scale_0.25" in wide.train.init_checkpoint
        assert load_config(folder / "out" / "scratch" / f"seed{seed}" / "config.yaml").train.init_checkpoint is None
    assert start.is_file()


def test_a_failing_variant_is_written_down_and_the_others_go_on(swept: tuple[Path, dict[str, Any], list[str]]) -> None:
    folder, results, _ = swept
    for name, row in results["variants"].items():
        statuses = {run["status"] for run in row["runs"].values()}
        assert statuses == ({"failed"} if name == "bad" else {"done"}), name
    assert "No layer matches 'nothing*'" in results["variants"]["bad"]["runs"]["1"]["error"]
    assert results["variants"]["bad"]["gap_best"] is None
    text = (folder / "out" / "sweep.md").read_text()
    assert "| bad | nvfp4 |" in text
    assert "* bad, seed 0, failed: No layer matches" in text
    assert json.loads((folder / "out" / "sweep.json").read_text()) == results


def test_the_scores_are_those_of_the_runs_and_gaps_are_paired(swept: tuple[Path, dict[str, Any], list[str]]) -> None:
    folder, results, _ = swept

    def best(variant: str, model: str, seed: int) -> float:
        lines = (folder / "out" / variant / f"seed{seed}" / model / "metrics.jsonl").read_text().splitlines()
        return max(json.loads(line)["miou"] for line in lines)

    gap = results["variants"]["qat"]["gap_best"]
    expected = [100 * (best("qat", "nvfp4", seed) - best("control", "fp16_control", seed)) for seed in (0, 1)]
    assert [gap["by_seed"][str(seed)] for seed in (0, 1)] == pytest.approx(expected)
    low, high = stats.t.interval(0.95, 1, sum(expected) / 2, stats.sem(expected))
    assert (gap["low"], gap["high"]) == pytest.approx((low, high))
    assert results["variants"]["scratch"]["against"] == "fp16"
    assert results["variants"]["wide"]["gap_best"] is None


def test_the_same_sweep_again_trains_nothing_but_what_failed(
    swept: tuple[Path, dict[str, Any], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, results, _ = swept
    tried: list[str] = []
    original = module.train_models

    def noted(config: Config, run: Any, models: Any, **rest: Any) -> Any:
        tried.append(run.path.parent.name)
        return original(config, run, models, **rest)

    monkeypatch.setattr(module, "train_models", noted)
    again = run_sweep(load_sweep(folder / "mine.yaml"), folder / "out", say=lambda text: None)
    assert tried == ["bad", "bad"]
    assert again == results


def test_ctrl_c_keeps_what_there_is_and_the_same_command_goes_on(
    swept: tuple[Path, dict[str, Any], list[str]], tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, original = load_sweep(written(tmp_path, tiny_data)), Trainer.step

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        if self.job.model == "nvfp4" and self.progress.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        original(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(sweep, tmp_path / "out", ("qat",), say=lambda text: None)
    kept = json.loads((tmp_path / "out" / "sweep.json").read_text())["variants"]
    assert (kept["fp16"]["runs"]["0"]["status"], kept["qat"]["runs"]["0"]["status"]) == ("done", "unfinished")
    said: list[str] = []
    results = run_sweep(sweep, tmp_path / "out", ("qat",), say=said.append)
    assert "qat, seed 0: continuing" in said
    assert results["variants"]["control"]["runs"]["0"]["status"] == "missing"
    straight = swept[1]["variants"]["qat"]["runs"]
    for seed in ("0", "1"):
        assert results["variants"]["qat"]["runs"][seed]["best"] == straight[seed]["best"]


@pytest.mark.parametrize("where", [None, "in_the_background"])
def test_a_sweep_stops_when_its_minutes_are_over(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, where: str | None
) -> None:
    if where is not None:
        request.getfixturevalue(where)
    original, interrupt, training = Trainer.step, _thread.interrupt_main, threading.Event()

    def in_a_training(number: int) -> None:
        assert training.wait(LIMIT)
        interrupt(number)

    def until_interrupted(self: Trainer, *batch: torch.Tensor) -> None:
        training.set()
        wait_until(lambda: self.interrupt.requested, "the end of the minutes")
        original(self, *batch)

    monkeypatch.setattr(Trainer, "step", until_interrupted)
    monkeypatch.setattr(_thread, "interrupt_main", in_a_training)
    said: list[str] = []
    results = run_sweep(load_sweep(written(tmp_path, tiny_data)), tmp_path / "out", minutes=1 / 600, say=said.append)
    assert said[-1].startswith("0.00166667 minutes are over")
    assert results["variants"]["fp16"]["runs"]["0"]["status"] == "unfinished"
    assert results["variants"]["scratch"]["runs"]["1"]["status"] == "missing"
    assert (tmp_path / "out" / "sweep.md").is_file()


def test_without_its_fp16_model_a_variant_fails_alone(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.train_models

    def broken(config: Config, run: Any, models: Any, **rest: Any) -> Any:
        if models == ("fp16",):
            raise RuntimeError("CUDA out of memory")
        return original(config, run, models, **rest)

    monkeypatch.setattr(module, "train_models", broken)
    results = run_sweep(load_sweep(written(tmp_path, tiny_data), seeds=(0,)), tmp_path / "out", say=lambda text: None)
    runs = {name: row["runs"]["0"] for name, row in results["variants"].items()}
    assert runs["fp16"]["error"] == "RuntimeError: CUDA out of memory"
    assert "fp16 of seed 0, is not there" in runs["qat"]["error"]
    assert runs["scratch"]["status"] == "done"


def test_a_variant_with_digits_starts_from_the_model_without(tiny_data: Path, tmp_path: Path) -> None:
    text = FILE[: FILE.index("  ptq:")] + "  qat: {base: fp16, set: {model.digits: true, quant.include: ['*']}}\n"
    sweep = load_sweep(written(tmp_path, tiny_data, text), seeds=(0,))
    assert [(row.name, row.base) for row in sweep.variants] == [("fp16", None), ("control", "fp16"), ("qat", "fp16")]
    results = run_sweep(sweep, tmp_path / "out", say=lambda _: None)
    status = {name: row["runs"]["0"]["status"] for name, row in results["variants"].items()}
    assert status == {"fp16": "done", "control": "done", "qat": "done"}
    shapes = [
        load_file(tmp_path / "out" / name / "seed0" / model / "best.safetensors")["encoder.0.conv1.weight"].shape
        for name, model in (("fp16", "fp16"), ("qat", "nvfp4"))
    ]
    assert shapes == [(8, 3, 3, 3), (8, 13, 3, 3)]


def test_a_control_is_calibrated(tiny_data: Path, tmp_path: Path) -> None:
    text = FILE[: FILE.index("  ptq:")] + "  ptq: {model: nvfp4_ptq, base: control}\n"
    sweep = load_sweep(written(tmp_path, tiny_data, text), seeds=(0,))
    run_sweep(sweep, tmp_path / "out", ("ptq",), say=lambda _: None)
    control, ptq = (
        load_file(tmp_path / "out" / name / "seed0" / model / "best.safetensors")
        for name, model in (("control", "fp16_control"), ("ptq", "nvfp4_ptq"))
    )
    assert all(ptq[key].equal(value) for key, value in control.items())
    rows = gather(tmp_path / "out", share=True)["variants"]
    assert 0.9 < rows["ptq"]["runs"]["0"]["fp4_macs"] < 1
    assert "fp4_macs" not in rows["control"]["runs"]["0"]


def test_a_control_teaches_the_model_that_is_compared_with_it(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the taught variant is asked for, and the file names it before its teacher."""
    original, teachers = module.train_models, dict[str, str | None]()

    def noted(config: Config, run: Any, models: Any, **rest: Any) -> Any:
        teachers[models[0]] = config.distill.teacher
        return original(config, run, models, **rest)

    monkeypatch.setattr(module, "train_models", noted)
    text = FILE[: FILE.index("  control:")]
    text += "  taught: {teacher: control, set: {distill.weight: 1}}\n"
    text += "  control: {model: fp16_control}\n  other: {model: nvfp4_ptq}\n"
    sweep = load_sweep(written(tmp_path, tiny_data, text), seeds=(0,))
    assert sweep.variant("taught").needs == ("fp16", "control")
    results = run_sweep(sweep, tmp_path / "out", ("taught",), say=lambda _: None)
    status = {name: row["runs"]["0"]["status"] for name, row in results["variants"].items()}
    assert status == {"fp16": "done", "control": "done", "other": "missing", "taught": "done"}
    control = tmp_path / "out" / "control" / "seed0" / "fp16_control" / "best.safetensors"
    assert teachers == {"fp16": None, "fp16_control": None, "nvfp4": str(control)}


def test_the_picture_is_drawn_where_there_is_something_to_see(
    swept: tuple[Path, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    _, results, _ = swept
    path = draw_sweep(results, tmp_path)
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert path.stat().st_size > 10_000
    empty = {**results, "variants": {"a": {**results["variants"]["bad"], "best": None}}}
    assert draw_sweep(empty, tmp_path / "no") is None


def left_by(folder: Path, progress: Progress, lines: list[dict[str, Any]], error: str | None = None) -> dict[str, Any]:
    """The outcome of a run whose state and metrics are these; two epochs are asked for."""
    sweep = load_sweep(written(folder, folder, "{set: {train.epochs: 2}, variants: {a: {model: fp16, against: null}}}"))
    variant = sweep.variant("a")
    run = run_of(folder / "out", variant, 0)
    job = training_job(sweep.config(variant, 0), run, "fp16")
    job.state_path.parent.mkdir(parents=True)
    model = torch.nn.Linear(2, 2)
    save_state(job.state_path, model, torch.optim.Adam(model.parameters()), None, progress)
    job.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if error is not None:
        (run.path / "error.json").write_text(json.dumps({"error": error}))
    return outcome(sweep, folder / "out", variant, 0)


@pytest.mark.parametrize(
    ("epoch", "score", "error", "status"),
    [
        (2, 0.6, None, "done"),
        (3, 0.6, None, "done"),
        (2, 0.0, None, "done"),
        (2, 0.6, "of an earlier attempt", "done"),
        (2, -1.0, None, "unfinished"),
        (1, 0.6, None, "unfinished"),
        (2, -1.0, "no labels", "failed"),
        (1, 0.6, "disk full", "failed"),
    ],
)
def test_a_run_is_done_with_all_epochs_and_a_score(
    tmp_path: Path, epoch: int, score: float, error: str | None, status: str
) -> None:
    lines = [{"epoch": each, "miou": score} for each in range(1, epoch + 1) if score >= 0]
    found = left_by(tmp_path, Progress(epoch=epoch, best_score=score, seconds=9.0, skipped=3), lines, error)
    assert (found["status"], found["epochs"], found["seconds"]) == (status, epoch, 9.0)
    assert (found.get("error"), found["best"] is None) == (error if status == "failed" else None, score < 0)


def test_epochs_that_the_state_does_not_have_do_not_count(tmp_path: Path) -> None:
    """They were logged by a process that ended before its state was written, and are trained again."""
    rows = [(1, 0.3, 10.0, 1), (2, None, 45.0, 0), (3, 0.5, 20.0, 2), (4, 0.4, None, 0), (5, 0.9, 999.0, 7)]
    lines = [dict(zip(("epoch", "miou", "images_per_s", "loss_spikes"), row, strict=True)) for row in rows]
    found = left_by(tmp_path, Progress(epoch=4, best_score=0.5, skipped=3), lines)
    shown = ("best", "best_epoch", "last", "loss_spikes", "images_per_s", "skipped_steps")
    assert [found[key] for key in shown] == [0.5, 3, 0.4, 3, 20.0, 3]


def test_gaps_are_of_the_seeds_that_both_have_done() -> None:
    def runs(*scores: float, status: str = "done") -> dict[str, Any]:
        return {str(seed): {"status": status, "best": score} for seed, score in enumerate(scores)}

    second = runs(0.4, 0.55, 0.7)
    second["2"]["status"] = "unfinished"
    found = paired(runs(0.5, 0.6, 0.9), second, "best")
    assert found is not None
    assert found["by_seed"] == pytest.approx({"0": 10.0, "1": 5.0})
    assert found["mean"] == pytest.approx(7.5)
    assert paired(runs(0.5), runs(0.4, status="failed"), "best") is None
    assert paired(runs(0.5), runs(0.4), "test") is None


def test_the_interval_is_student_s() -> None:
    values = [0.1, -0.3, 0.4, 0.25]
    low, high = interval(values)
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 3, sum(values) / 4, stats.sem(values)))
    assert interval([1.0]) == (None, None)


def test_a_table_of_one_seed_has_no_interval(swept: tuple[Path, dict[str, Any], list[str]], tmp_path: Path) -> None:
    folder, _, _ = swept
    one = run_sweep(load_sweep(folder / "mine.yaml", seeds=(0,)), folder / "out", say=lambda text: None)
    row = next(line for line in markdown(one).splitlines() if line.startswith("| qat |"))
    assert re.search(r"\| 1/1 \| \d+\.\d\d \| \d+\.\d\d \| control \| [+-]\d+\.\d\d \|", row)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variants: [", "not valid YAML"),
        ("seeds: [0]", "variants is missing"),
        ("variants: {a: {modell: nvfp4}}", r"variants\.a\.modell is not a known field"),
        ("variants: {a: {model: nvfp5}}", "nvfp4_ptq"),
        ("variants: {a: {against: b}}", "compared with 'b', which is no variant"),
        ("variants: {a: {set: {train.lrr: 1}}}", r"a: The configuration is not valid: .*did you mean train\.lr\?"),
        ("variants: {a/b: {}}", "becomes a folder"),
        ("variants: {a: {base: fp17}}", "a has base: fp17, which is no variant"),
        ("variants: {a: {}, b: {base: a}}", "'a' is the FP16 model that b starts from"),
        ("variants: {a: {teacher: fp17}}", "a has teacher: fp17, which is no variant"),
        ("variants: {a: {teacher: b}, b: {}}", "teacher: b, and a teacher is FP16 or a control"),
        ("variants: {a: {teacher: b}, b: {model: fp16_control}}", "distill.features 0"),
        ("variants: {a: {model: fp16, base: fp16}}", "starts from no FP16 model of the sweep"),
        ("variants: {fp16: {model: nvfp4_ptq}}", "rename the variant"),
        ("{seeds: [1, 1], variants: {a: {}}}", "distinct whole numbers"),
        ("{config: none.yaml, variants: {a: {}}}", "no configuration file"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_sweep(path)


def test_wrong_use(tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no sweep file"):
        load_sweep(tmp_path / "none.yaml")
    sweep = load_sweep(written(tmp_path, tiny_data))
    with pytest.raises(InputError, match=r"no variant 'qta'\. Did you mean 'qat'"):
        run_sweep(sweep, tmp_path / "out", ("qta",))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="is no sweep"):
        run_sweep(sweep, tmp_path / "full")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(InputError, match="starts its processes itself"):
        run_sweep(sweep, tmp_path / "out")


def test_code_of_the_user_is_imported_where_they_named_it(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of a sweep learn of it; the file of a sweep names nothing."""
    model, names = f"{tmp_path / 'net.py'}:Net", list[str]()
    file = written(tmp_path, tiny_data, "variants:\n  fp16: {model: fp16}\n")
    sets = (f"data.root={json.dumps(str(tiny_data))}", f"model.spec={json.dumps(model)}")

    def stop(config: Config, *_: object, **__: object) -> None:
        names.append(require_named(parse_spec(config.model.spec), "The run").text)
        raise InputError("far enough")

    monkeypatch.setattr(module, "train_models", stop)
    for named in ((model,), ()):
        _named.clear()
        sweep = load_sweep(file, sets, named=named)
        results = run_sweep(sweep, tmp_path / f"out{len(named)}", say=lambda _: None)
        error = results["variants"]["fp16"]["runs"]["0"]["error"]
        assert ("far enough" in error) == bool(named), error
        assert named or "a file never makes code run" in error
    assert names == [model]
    _named.clear()
