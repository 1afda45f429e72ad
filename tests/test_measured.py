"""What the documentation says was measured is what the JSON files of the runs say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def rows(name: str) -> list[list[str]]:
    """The cells of every line of a table in a page."""
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_products() -> None:
    found, page = result("products_h200.json"), rows("products.md")
    for layer in found["convolutions"] + found["few_channels"]:
        channels = f"{' + '.join(map(str, layer['channels']))} -> {layer['outputs']}"
        times = [f"{layer[name] * 1e3:.0f}" for name in ("fp16_ms", "packed_ms")]
        size = f"{layer['height']} x {layer['width']}"
        assert [layer["layer"], channels, size, *times, f"{layer['ratio']:.2f}"] in page
    matrices = [row[1:] for row in page if row[0].startswith(("W4A4, 4096", "W4A16, "))]
    for cells, row in zip(matrices, found["matrices"], strict=True):
        assert cells[:3] == [f"{row['fp16_ms'] * 1e3:.1f}", f"{row['packed_ms'] * 1e3:.1f}", f"{row['ratio']:.2f}"]
        few = (
            [f"{100 * row['share_of_copy']:.0f} %", f"{row['ordered_ms'] * 1e3:.1f}"] if "copy_ms" in row else ["", ""]
        )
        assert cells[3:] == few


def test_packed_network() -> None:
    found, page = result("packed_unet_h200.json"), rows("packed.md")
    one, many = found["batches"]
    names = {
        "FP16, torch eager, channels_last": "fp16 eager",
        "FP16, torch.compile": "fp16 compiled",
        "NVFP4 as it is trained, fake-quantised": "nvfp4 emulated",
        "**packed**": "packed",
    }
    for label, name in names.items():
        cells = [text for row in (one[name], many[name]) for text in _time_and_memory(row)]
        assert [label, *cells] in page
    text = (ROOT / "docs" / "packed.md").read_text(encoding="utf-8")
    assert f"{found['bytes']['ratio']:.3f} of the bytes" in text
    assert f"{100 * found['agreement']['share']:.2f} % of the pixels" in text


def test_every_layer_packed() -> None:
    page = rows("packed.md")
    one, many = result("packed_digits_h200.json")["batches"]
    for name in ("21 of 23", "all", "all, digits"):
        assert [name, *_time_and_memory(one[name]), *_time_and_memory(many[name])] in page
    text = (ROOT / "docs" / "packed.md").read_text(encoding="utf-8")
    costs = [batch["all, digits"]["ms"] - batch["all"]["ms"] for batch in (one, many)]
    assert "made in {:.2f} ms for one image and {:.2f} for 16".format(*costs) in text


def test_kernels() -> None:
    found = {row["case"]: row for row in result("kernels_h200.json")["torch.bfloat16"]}
    page = {row[0]: row[1:] for row in rows("kernels.md")}
    for label, cases in {
        "fake quantise": ("fake quantise, amax given",),
        "packed codes and scales": ("packed, amax given",),
        "packed 4/6, MAE, fast / strict": ("4/6 mae fast packed", "4/6 mae strict packed"),
        "packed 4/6, MSE, fast / strict": ("4/6 mse fast packed", "4/6 mse strict packed"),
        "fake quantise, amax found in the call (two passes; 67 % is the limit)": ("fake quantise, amax found",),
    }.items():
        times = " / ".join(f"{found[case]['ms'] * 1e3:.1f}" for case in cases)
        shares = " / ".join(f"{100 * found[case]['share_of_copy']:.1f} %" for case in cases)
        assert page[label] == [times, shares]
    plain = found["packed, amax given"]["ms"]
    text = " ".join((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").split())
    fast, strict = (
        [f"{found[f'4/6 {m} {k} packed']['ms'] / plain:.2f}" for m in ("mae", "mse")] for k in ("fast", "strict")
    )
    said = re.search(
        r"costs (\S+) \(MAE\) and (\S+) \(MSE\) times .* in fast mode, (\S+) and (\S+) in strict mode", text
    )
    assert said is not None
    assert list(said.groups()) == [*fast, *strict]
    for amax in ("5.8125", "5.0625", "5.25"):
        names = [f"4/6 {m} {k} packed, amax {amax}" for m in ("mae", "mse") for k in ("fast", "strict")]
        assert page[amax] == [f"{found[name]['ms'] / plain:.2f}" for name in names]


def test_camvid() -> None:
    found, page = result("camvid_sweep_h200.json")["variants"], rows("training.md")
    layers = {"fp16": "0", "control": "0", "ptq": "21 of 23", "qat": "21 of 23", "ptq_all": "all", "qat_all": "all"}
    layers |= {"ptq_all_digits": "all, digits", "qat_all_digits": "all, digits"}
    small = result("camvid_quarter_sweep_h200.json")["variants"]
    assert small.keys() == layers.keys()
    for sweep in (found, small):
        for name in layers:
            row = sweep[name]
            cells = [*map(_spread, (row["best"], row["last"])), *map(_gap, _gaps(row))]
            assert [name, layers[name], *cells, _spread(row["test"]), _gap(row["gap_test"])] in page
            assert len(row["runs"]) == 3
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for label, name in (
        ("**NVFP4, QAT** | 21 of 23", "qat"),
        ("NVFP4, QAT | all", "qat_all"),
        ("**NVFP4, QAT, image as digits** | all", "qat_all_digits"),
    ):
        row = found[name]
        cells = [text for key in ("best", "test") for text in (_spread(row[key]), _gap(row[f"gap_{key}"]))]
        assert f"| {label} | {' | '.join(cells).replace('-', '−')} |" in readme
    fp16 = [f"{100 * small['fp16'][key]['mean']:.2f}" for key in ("best", "test")]
    names = ("qat", "qat_all", "qat_all_digits")
    gaps = [_gap(small[name][f"gap_{key}"]).replace("-", "−") for name in names for key in ("best", "test")]
    said = "FP16 has {} and {}, and QAT {} and {} to its control; with every layer in FP4 {} and {}, with the image as "
    assert (said + "digits {} and {}.").format(*fp16, *gaps) in " ".join(readme.split())


def test_ablation() -> None:
    """Every variant that ran stands in the table, and every other one of the sweep below it."""
    found, page = result("camvid_sweep_h200.json")["variants"], rows("training.md")
    cells = [[row[0], *row[2:]] for row in page]
    for name in found.keys() - {"fp16", "control", "fp16-model.digits_true"}:
        row = found[name]
        assert [name, str(len(row["runs"])), row["against"], *map(_gap, _gaps(row)), _gap(row["gap_test"])] in cells
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    missing = re.search(r"Not measured: ([^.]*)\.\n", text)
    planned = yaml.safe_load((ROOT / "configs" / "sweep_camvid.yaml").read_text(encoding="utf-8"))["variants"]
    assert sorted(re.findall(r"`(\w+)`", missing[1] if missing else "")) == sorted(planned.keys() - found.keys())


def test_several_gpus() -> None:
    page = rows("training.md")
    for row in result("scaling_h200.json")["rows"]:
        distance = ", ".join(f"{100 * part:.2f} %" for part in row.get("relative_distance", ()))
        speed = [f"{row['images_per_s']:.0f}", f"{100 * row['efficiency']:.0f} %"]
        assert [row["model"], f"{row['gpus']} x {row['batch']}", *speed, distance] in page


def test_resume_estimate_and_loading() -> None:
    for row in result("kill_resume_h200.json")["rows"]:
        assert (row["device"], row["batches_compared"], row["different"]) == ("cuda", 100, 0)
    page = rows("training.md")
    for name in ("coco2017", "coco2017_instance"):
        facts = result(f"estimate_{name}_h200.json")
        for measured, whole in zip(facts["measured"], facts["estimated"], strict=True):
            speed = [f"{measured[key]:.0f}" for key in ("training", "loader")]
            assert [name, measured["model"], *speed, str(whole["epochs"]), f"{whole['hours']:.2f}"] in page
    loading = result("data_loading_h200.json")
    text = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    rates, workers = ([f"{row[key]:.0f}" for row in loading["rows"]] for key in ("images_per_s", "workers"))
    assert f"gave {', '.join(rates)} images/s with {', '.join(workers)} workers on {loading['cpu_cores']} cores" in text


def test_kurtosis() -> None:
    damage = result("kurtosis_camvid_h200.json")["damage"]
    groups = {
        "first layer": [row for row in damage if row["layer"] == "encoder.0.conv1"],
        "output layer": [row for row in damage if row["layer"] == "head"],
        "a normalisation's parameters": [row for row in damage if row["what"] == "parameters"],
        "a normalisation's input": [row for row in damage if row["what"] == "input"],
    }
    rest = [row for row in damage if all(row not in group for group in groups.values())]
    page = {row[0]: row[1:4] for row in rows("telemetry.md")}
    for label, group in (*groups.items(), ("a product that runs in FP4", rest)):
        means = [100 * sum(row[key] for row in group) / len(group) for key in ("logit_error", "changed")]
        assert page[label] == [str(len(group)), *(f"{mean:.2f} %" for mean in means)]


def test_dsb2018() -> None:
    found, page = result("dsb2018_h200.json")["models"], rows("instances.md")
    labels = {"fp16": "FP16", "fp16_control": "FP16 control", "nvfp4_ptq": "NVFP4, calibrated", "nvfp4": "NVFP4 QAT"}
    for name, label in labels.items():
        cells = [*(_spread(found[name][key]) for key in ("ap", "ap50", "ap75")), _gap(found[name].get("gap_best"))]
        assert any(row[0] == label and row[2:] == cells for row in page), (label, cells)
        assert len(found[name]["seeds"]) == 3
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = "AP {} for the FP16 control, {} for NVFP4 QAT, {} paired by seed"
    gap = _gap(found["nvfp4"]["gap_best"]).replace("-", "−")
    assert said.format(_spread(found["fp16_control"]["ap"]), _spread(found["nvfp4"]["ap"]), gap) in readme


def test_telemetry() -> None:
    page = rows("telemetry.md")
    for row in result("telemetry_cost_h200.json")["rows"]:
        times = [f"{row[name]:.1f}" for name in ("step_ms", "looked_at_ms")]
        cells = [row["model"], f"{row['scale']:g}", *times, f"{100 * row['share']['1'] / 200:.2f} %"]
        assert cells in page
        assert row["share"]["1"] / 200 <= 0.03


def test_tiles() -> None:
    found = result("tiles_compiled.json")["kernels"]
    table = [row for row in rows("ahead_of_time.md") if row[0].startswith("sm_") and len(row) == 7]
    assert {row[0] for row in table} == {kernel["arch"] for kernel in found}
    compiled = [
        [
            kernel["arch"],
            kernel["kind"],
            " x ".join(map(str, kernel["tile"])),
            f"`{', '.join(kernel['instructions'])}`",
            *(str(kernel[name]) for name in ("registers", "spills", "shared")),
        ]
        for kernel in found
    ]
    assert [row for row in table if row not in compiled] == []
    packed = [row for row in table if row[0] >= "sm_1" and len(row[0]) == 6 and row[1] != "W4A16"]
    assert packed
    assert all("kind::mxf4nvf4" in row[3] for row in packed)


def _time_and_memory(row: dict[str, float]) -> list[str]:
    return [f"{row['ms']:.2f}", f"{row['peak_bytes'] / 2**20:.0f}"]


def _spread(value: dict[str, float]) -> str:
    return f"{100 * value['mean']:.2f} ± {100 * value['sd']:.2f}"


def _gaps(row: dict[str, Any]) -> list[dict[str, float] | None]:
    return [row["gap_best"], row["gap_last"]]


def _gap(value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{value['mean']:+.2f}" + ("" if value["low"] is None else " [{low:+.2f}, {high:+.2f}]".format(**value))
