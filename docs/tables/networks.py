"""Tables of networks, engines, emulated kernels and tests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from docs.tables.results import MINUS, NOT_MEASURED, RESULTS, markdown, result, shown, spread, wilson
from docs.tables.steps import span


def projected() -> str:
    """By the time model, with its error bar; nothing was measured on a Blackwell GPU."""
    rows = []
    for row in result("roofline_projected")["totals"]:
        times = [[row[f"{side}_{part}us"] / 1e3 for part in ("", "low_", "high_")] for side in ("fp16", "nvfp4")]
        cells = [f"{ms:.2f} ({low:.2f} to {high:.2f})" for ms, low, high in times]
        rows.append([row["gpu"], *cells, f"{row['speedup']:.2f}"])
    return markdown(["projected", "FP16, ms", "NVFP4, ms", "ratio"], rows)


def projected_training() -> str:
    """Products and norms of a training step, projected from published peaks."""
    rows = []
    for row in result("roofline_training_projected")["rows"]:
        times = [f"{row[name]:.2f}" for name in ("fp16_ms", "fp4_ms")]
        rows.append([f"{row['scale']}", row["gpu"], *times, f"{row['ratio']:.2f}"])
    return markdown(["scale", "projected", "FP16, ms", "FP4 products, ms", "ratio"], rows, 2)


def fuzzed() -> str:
    """Outcomes of `make fuzz`, and the machine of each row."""
    rows = result("fuzz_cpu")["rows"]
    counts = ("cases", "refused", "accepted", "defects")
    cells = [[str(row[key]) for key in ("loader", *counts)] + [f"{row['cores']} cores, {row['cpu']}"] for row in rows]
    total = [str(sum(row[key] for row in rows)) for key in counts]
    return markdown(["reader", *counts, "machine"], [*cells, ["all", *total, ""]])


def touched() -> str:
    """Commands by what they look up in a network and leave in the home and the temporary folder."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in result("touched_cpu")["rows"]:
        homes = dict.fromkeys("/".join(path.split("/")[:2]) for path in row["home"] if "/" in path)
        home = ", ".join(f"`~/{HOMES.get(path.split('/')[0], '')}{path.split('/')[1]}`" for path in homes)
        place = (", ".join(row["lookups"]) or "none", home or "nothing", ", ".join(row["temporary"]) or "nothing")
        groups.setdefault(place, []).append(f"`{row['command']}`")
    return markdown(
        ["command", "network", "home folder", "temporary folder"],
        [[", ".join(names), *place] for place, names in groups.items()],
        left=4,
    )


def mutants() -> str:
    """Shares of mistakes that tests notice, by room, of each sample; what is marked is left out."""
    runs = result("mutants_cpu")["runs"]
    counted = [[row for row in run["rows"] if "left_out" not in row] for run in runs]
    rows = []
    for room in [*sorted({row["room"] for each in counted for row in each}), "all"]:
        cells = [room]
        for each in counted:
            seen = [row["noticed"] for row in each if room in (row["room"], "all")]
            low, high = wilson(sum(seen), len(seen)) if room == "all" else (0.0, 0.0)
            share = f" ({sum(seen) / len(seen):.0%}, {low:.0%} to {high:.0%})" if room == "all" else ""
            cells.append(f"{sum(seen)} of {len(seen)}{share}" if seen else "")
        rows.append(cells)
    heads = [f"seed {run['command'].partition('--seed ')[2].split()[0]}" for run in runs]
    return markdown(["room", *heads], rows)


def qdq_placement() -> str:
    """Engines of other tools' INT8 files, before and after their pairs were moved."""
    heads = ["file", "changes", "before", "after", "plan before, MB", "after, MB", "dB"]
    rows = []
    for row in result("qdq_placement_sm120")["rows"]:
        states = [row["before"], row["after"]]
        said = [
            "refused"
            if "refused" in each
            else f"INT8 {100 * each['shares'].get('INT8', 0):.0f} %, {each['kernels']} kernels"
            for each in states
        ]
        sizes = ["–" if "refused" in each else f"{each['bytes'] / 1e6:.3f}" for each in states]
        rows.append(
            [
                row["file"],
                str(row["edits"]),
                *said,
                *sizes,
                "same" if row["decibels"] > 200 else f"{row['decibels']:.0f}",
            ]
        )
    return markdown(heads, rows)


HOMES = {"XDG_CACHE_HOME": ".cache/", "XDG_CONFIG_HOME": ".config/", "XDG_DATA_HOME": ".local/share/"}
FORMS = {"plugin": "TensorRT: SM100 to SM110", "fp16": "FP16 engine"}  # the others: TensorRT-RTX for SM120


def engine_forms(*networks: str) -> str:
    """What each form of an engine multiplies, and how large its plan is, for each network."""
    found = [row for row in result("engine_forms_sm120")["rows"] if row["network"] in networks]
    rows = []
    for form in dict.fromkeys(row["form"] for row in found if row["form"] != "fp8"):  # as auto, wherever auto has FP8
        own = {row["network"]: row for row in found if row["form"] == form}
        half = {row["network"]: row["plan_bytes"] for row in found if row["form"] == "fp16"}
        cells = [FORMS["fp16"] if form == "fp16" else f"`--conv {form}`"]
        cells.append(FORMS["plugin"] if form == "plugin" else "TensorRT-RTX: SM120")
        for name in networks:
            share = own[name]["shares"]
            cells.append(" / ".join(f"{100 * share.get(each, 0):.1f}" for each in ("FP4", "FP8", "FP16")))
            size = own[name].get("plan_bytes")
            cells.append(f"{size / 1e6:.1f} ({size / half[name]:.2f})" if size else "not built")
        rows.append(cells)
    titles = [text for name in networks for text in (f"`{name}`, %", "plan MB (of FP16's)")]
    return markdown(["form", "library", *titles], rows, 2)


def _families(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Cases of the emulator by the values of some keys."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[key]) for key in keys), []).append(row)
    return groups


def emulated(name: str, *architectures: str) -> str:
    """Kernels in the PTX emulator, against the reference; a line for each family."""
    rows, cases = [], [case for case in result(name)["cases"] if case["for"] in architectures]
    for (arch, family), group in sorted(_families(cases, "for", "family").items()):
        cells = [str(len({row["kernel"] for row in group})), str(sum(row["launches"] for row in group))]
        cells += [span(row["instructions"] for row in group), f"{sum(row['compared'] for row in group):,}"]
        cells += [*_verdict(group), span((row["seconds"] for row in group), ".1f")]
        rows.append([arch.replace("sm_", "SM"), family, *cells])
    head = ["for", "family", "cases", "launches", "instructions a case", "values compared", "bit-equal", "hazards"]
    return markdown([*head, "CPU s a case"], rows, 2)


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Whether all are bit-equal, and how many hazards there were."""
    different, hazards = sum(row["different"] for row in rows), sum(bool(row["hazard"]) for row in rows)
    return [f"{different} differ" if different else "no" if hazards else "yes", str(hazards or "none")]


def emulated_architectures(name: str) -> str:
    """A line for each architecture."""
    rows = []
    cases = [case for case in result(name)["cases"] if case["for"] not in ("sm_100", "sm_120")]  # these: `emulated`
    for (arch,), group in _families(cases, "for").items():
        unknown = [row for row in group if "not implemented" in row["hazard"]]
        ran = [row for row in group if not row["unavailable"] and row not in unknown]
        missing = sorted({row["family"] for row in group if row["unavailable"]})
        cells = [f"{len({row['family'] for row in ran})}", str(len(ran)), f"{sum(row['compared'] for row in ran):,}"]
        cells += [*_verdict(ran), ", ".join(row["family"] for row in unknown), ", ".join(missing)]
        rows.append([arch.replace("sm_", "SM"), *cells])
    head = ["for", "families", "cases", "values compared", "bit-equal", "hazards", "not implemented"]
    return markdown([*head, "not compiled here"], rows)


def emulated_on_gpu(name: str) -> str:
    """The emulator's bytes against a GPU's."""
    found = result(name)["cases"]
    exact = _families((row for row in found if "model" not in row), "family")
    models = _families((row for row in found if "model" in row), "family", "model")
    rows = []
    for (family,), group in exact.items():
        cells = [str(len(group)), str(sum(row["launches"] for row in group))]
        cells += [f"{sum(row['device_bytes'] for row in group):,}", str(sum(row["device_different"] for row in group))]
        for model in ("hardware", "exact"):
            others = models.get((family, model))
            cells.append(f"{sum(row['device_different'] for row in others):,}" if others else "")
        rows.append([family, *cells])
    head = ["family", "cases", "launches", "bytes compared", "different", "cancelling: different"]
    return markdown([*head, "the same, sums taken as exact"], rows)


def self_test() -> str:
    """What the self-test showed on a GPU."""
    checks = result("selftest_h200")["checks"]
    rows = [[check["group"], check["claim"], check["status"], check["detail"]] for check in checks]
    return markdown(["", "claim", "status", "evidence or reason"], rows, 4)


def first_hour() -> str:
    """The commands of docs/first-hour.md by name: seconds by the clock and of the processor."""
    rows = []
    for row in result("first_hour_cpu")["rows"]:
        words = row["command"].split()
        name = " ".join(words[: 3 if words[1] == "data" else 2])
        rows.append([f"`{name}`", f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}"])
    return markdown(["command", "seconds", "of a processor"], rows, 1)


def nnunet_commands() -> str:
    """The commands of docs/nnunet.md: seconds of a processor and the largest resident set on the CPU."""
    rows = []
    for row in result("nnunet_walk_cpu")["rows"]:
        words = row["command"].split()
        target = next((after for word, after in pairwise(words) if word in ("--out", "-o")), "")
        name = " ".join(words[: 2 if words[0] == "fp4deploy" else 1])
        rows.append([f"`{name}`", target, f"{row['cpu_seconds']:.0f}", f"{row['peak_mb']:,}", "not measured"])
    return markdown(["command", "writes", "seconds of a processor", "host memory, MB", "GPU memory"], rows, 2)


def nnunet_forms() -> str:
    """Accuracy and size of what docs/nnunet.md compares."""
    found = result("nnunet_walk_cpu")
    names = {"fp16": "FP16, packed", "nvfp4": "NVFP4, packed", "torch": "NVFP4, nnU-Net's own predictor"}
    rows = []
    for form, name in names.items():
        scores, size = found["scores"][form], found["network_bytes"].get(form)
        cells = [
            " / ".join(f"{100 * each:.1f}" for each in scores["dice"]),
            " / ".join(f"{each:.1f}" for each in scores["hd95_mm"]),
        ]
        unlike = "" if form == "fp16" else f"{100 * scores['unlike_fp16'][0]:.2f} %"
        rows.append([name, *cells, unlike, f"{size / 1e3:,.0f}" if size else ""])
    return markdown(["", "Dice, %", "95 % Hausdorff, mm", "voxels unlike FP16", "network, kB"], rows, 1)


def nnunet_hippocampus(name: str = "nnunet_hippocampus_h200") -> str:
    """Dice of what nnU-Net's shortened trainings gave, and differences from the control with both intervals."""
    forms = {
        "base": "FP16, which the others start from",
        "control": "FP16, trained on: control",
        "ptq": "NVFP4, `fp4deploy quantize`",
        "nvfp4": "NVFP4, trained on",
        "ptq, packed": "`fp4deploy quantize`, packed",
        "nvfp4, packed": "NVFP4, trained on, packed",
    }
    found = result(name)["forms"] if (RESULTS / f"{name}.json").is_file() else {}
    rows = []
    for form, label in forms.items():
        cells = [NOT_MEASURED] * 4
        if form in found:
            row = found[form]
            drop = row.get("drop_from_control")
            apart = [_gained(drop), _gained(drop["over_images"])] if drop else ["", ""]
            distance = row["hd95_mm"]
            cells = [spread(row), NOT_MEASURED if distance is None else f"{distance:.2f}", *apart]
        rows.append([label, *cells])
    head = ["", "Dice, %", "95 % Hausdorff, mm", f"{MINUS} control, points; other seeds", "the same; other volumes"]
    return markdown(head, rows, 1)


def _gained(drop: dict[str, Any]) -> str:
    """A drop in points as a signed difference with its interval."""
    mean = drop["mean"] if "mean" in drop else drop["drop"]
    if drop["low"] is None:
        return NOT_MEASURED
    return shown({"mean": -mean, "low": -drop["high"], "high": -drop["low"]})


def fuzzed_networks(name: str = "fuzz_networks_cpu") -> str:
    """Outcomes of random networks."""
    found = result(name)
    counts = [(name, count) for name, count in found["outcomes"].items() if not name.startswith("refused")]
    rows = [[name, f"{count:,}"] for name, count in counts]
    rows += [[reason, f"{count:,}"] for reason, count in found["reasons"].items()]
    return markdown(["outcome", "networks"], [*rows, ["all", f"{found['networks']:,}"]])


def transformers_table(name: str = "transformers_cpu") -> str:
    """What became of networks of transformers and diffusers, from `prepare` to a packed network and an engine."""
    head = ["network", "layers in FP4", "of the parameters", "export", "ONNX Runtime", "packed", "FP4 GEMMs, fallbacks"]
    rows = []
    for row in result(name)["rows"]:
        planned, exported, packed = row.get("prepare", {}), row.get("export", {}), row.get("packed", {})
        runtime, engine = row.get("runtime", {}), row.get("engine", {"error": "not measured"})
        built = f"{engine['fp4_gemms']}, {engine['fallbacks']}" if "fallbacks" in engine else _refusal(engine)
        layers = f"{planned['fp4_layers']} of {planned['layers']}" if "layers" in planned else _refusal(planned)
        rows.append([
            f"`{row['class']}`",
            layers,
            f"{100 * planned.get('fp4_share', 0):.0f} %",
            "agrees" if exported.get("passed") else _refusal(exported),
            *(f"{each['distance']:.0e}" if "distance" in each else _refusal(each) for each in (runtime, packed)),
            built,
        ])  # fmt: skip
    return markdown(head, rows)


def architectures(name: str = "architectures_cpu") -> str:
    """What became of many architectures, from `prepare` to a packed network."""
    found = result(name)
    rows = []
    for row in found["rows"]:
        given = f" {row['arguments']}" if row.get("arguments") else ""
        untuned = " \\*" if row["model"] in found["untuned"] else ""
        planned, trained = row.get("prepare", {}), row.get("train", {})
        engine, packed = row.get("engine", {}), row.get("packed", {})
        canonical = row.get("canonical", {})
        gate = "yes" if canonical.get("passed") else _refusal(canonical)
        share = (
            f"{100 * engine['fp4_mac_share']:.1f} %, {engine['fallbacks']}"
            if "fallbacks" in engine
            else _refusal(engine)
        )
        stages = (canonical, row.get("portable", {}), engine, packed)
        sizes = [2 * planned.get("parameters", 0), *(stage.get("bytes") for stage in stages)]
        rows.append([
            f"`{row['model']}`{given.replace('|', ' ')}{untuned}",
            f"{planned['fp4_layers']} of {planned['layers']}" if "layers" in planned else _refusal(planned),
            "{:.2f}, {:.2f}".format(*trained["losses"]) if "losses" in trained else _refusal(trained),
            f"{gate}, {_percent(canonical)}",
            _distance_of_logits(row.get("portable", {})),
            share,
            _percent(packed),
            ", ".join("-" if size is None else f"{size / 1e6:.1f}" for size in sizes),
        ])  # fmt: skip
    head = [
        "model", "layers in FP4", "QAT loss, first and last step", "canonical ONNX: gate, argmax",
        "decomposed ONNX: distance of logits, classes", "SM120 engine: FP4 MACs, fallbacks", "packed",
        "MB: FP16, canonical, decomposed, plan, packed",
    ]  # fmt: skip
    return markdown(head, rows)


def _percent(stage: dict[str, Any]) -> str:
    """Pixels with torch's class, or that the stage was refused."""
    return f"{100 * stage['argmax']:.2f} %" if "argmax" in stage else _refusal(stage)


def _distance_of_logits(stage: dict[str, Any]) -> str:
    """Relative distance of the logits from torch's and the classes that occur, or that the stage was refused."""
    return f"{stage['distance']:.0e}, {stage['classes']}" if "classes" in stage else _refusal(stage)


def _refusal(stage: dict[str, Any]) -> str:
    """The first sentence of a stage's error."""
    return " ".join(stage.get("error", "not run").split()).partition(". ")[0].replace("|", " ")[:120]


def nnunet_volume(form: str) -> str:
    """Seconds of a volume from file to file, and of them those of the network: of a form, or of nnU-Net's fastest."""
    found = result("nnunet_volume_h200")["forms"]
    forms = [row for name, row in found.items() if name.startswith(form)]
    best = min(forms, key=lambda row: float(row["total_s"]))
    return f"{best['total_s']:.1f} s (network {best['seconds']['network']:.1f} s)"


def nnunet_volume_dice(form: str) -> str:
    """Dice of both classes of the generated volume, %."""
    return " and ".join(f"{100 * each:.1f}" for each in result("nnunet_volume_h200")["dice"][form])


def native_networks() -> str:
    """The C library on networks of all kinds: bytes that differ from the plan in Python, and milliseconds."""
    rows = []
    results = (result(f"native_networks_{each}") for each in ("h200", "eight_bits_h200"))
    for row in (row for each in results for row in each["rows"]):
        shape, differing = "x".join(map(str, row["shape"])), sum(row["different"].values())
        times = [f"{row[key]:.3f}" for key in ("library_ms", "python_ms")]
        cells = [str(differing), f"{row['relative']:.2g}", f"{100 * row['same_classes']:.1f} %", *times]
        rows.append([row["network"], shape, *cells])
    head = ["network", "input", "bytes that differ from the plan", "relative difference from `PackedNetwork`"]
    return markdown([*head, "same classes", "library, ms", "`PackedNetwork`, ms"], rows)
