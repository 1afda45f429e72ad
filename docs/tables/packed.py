"""Tables of packed networks."""

from __future__ import annotations

from typing import Any

from docs.tables.results import markdown, result


def _time_and_memory(row: dict[str, float]) -> list[str]:
    return [f"{row['ms']:.2f}", f"{row['peak_bytes'] / 2**20:.0f}"]


def packed_network() -> str:
    """The packed UNet against torch."""
    one, many = result("packed_unet_h200")["batches"]
    names = {
        "FP16, torch eager, channels_last": "fp16 eager",
        "FP16, torch.compile, no CUDA graph": "fp16 compiled",
        "NVFP4 as it is trained, fake-quantised": "nvfp4 emulated",
        "**packed**, CUDA graph": "packed",
    }
    rows = [[label, *_time_and_memory(one[name]), *_time_and_memory(many[name])] for label, name in names.items()]
    return markdown(["", "batch 1, ms", "MiB", "batch 16, ms", "MiB"], rows)


LATENCY_FORMS = {
    "FP16 eager NCHW": "fp16, eager, NCHW",
    "FP16 eager channels_last": "fp16, eager, channels_last",
    "torch.compile": "fp16, compiled",
    "max-autotune": "fp16, max-autotune",
    "packed FP16": "packed fp16",
    "**packed NVFP4**": "packed nvfp4",
}


def packed_latency() -> str:
    """Packed networks beside FP16 of torch in every form, each as one CUDA graph."""
    return _latencies("packed_latency_h200", LATENCY_FORMS)


def packed_ratio(case: str) -> str:
    """Time of a packed UNet over the fastest form of torch's FP16."""
    return next(f"{row['ratio_nvfp4']:.2f}" for row in result("packed_latency_h200")["cases"] if row["case"] == case)


def packed_fp16_over_nvfp4() -> str:
    """Time of our packed UNets with FP16 weights over NVFP4's, from and to."""
    runs = [case["runs"] for case in result("packed_latency_h200")["cases"]]
    found = sorted(run["packed fp16"]["graph_ms"] / run["packed nvfp4"]["graph_ms"] for run in runs)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def packed_own_networks() -> str:
    """The same of networks of other libraries."""
    return _latencies("packed_own_networks_h200", LATENCY_FORMS | {"NVFP4, node by node": "packed nvfp4, node by node"})


def packed_volumes_layers() -> str:
    """Convolutions over volumes: kernels of packed activations and cuDNN, those that lose first."""
    rows = []
    for name, times in result("packed_volumes_h200")["layers"].items():
        best = min(times["float16_us"], times["bfloat16_us"])
        size, _, channels = name.partition(": ")
        shown = [f"{times[each]:.0f}" for each in ("packed_us", "float16_us", "bfloat16_us")]
        rows.append((best / times["packed_us"], [f"{size} x {size} x {size}, {channels}", *shown]))
    head = ["voxels, channels", "packed, us", "cuDNN FP16, us", "cuDNN BF16, us", "speed against cuDNN"]
    return markdown(head, [[*row, f"{ratio:.2f}"] for ratio, row in sorted(rows)], 1)


VOLUME_FORMS = {
    "packed": "**steps of kernels**",
    "packed, compiled": "packed, compiled with cuDNN",
    "fp16, compiled": "FP16, torch.compile",
    "bf16, compiled": "BF16, torch.compile",
    "fp16, eager": "FP16, eager",
}


def packed_volumes_networks() -> str:
    """A network over volumes, packed and by torch, in CUDA graphs."""
    rows = []
    for each in result("packed_volumes_h200")["networks"]:
        best = min(run["graph_ms"] for name, run in each["runs"].items() if not name.startswith("packed"))
        for name, label in VOLUME_FORMS.items():
            if name in each["runs"]:
                run = each["runs"][name]
                figures = [
                    f"{run['graph_ms']:.2f}",
                    f"{run['graph_ms'] / best:.2f}",
                    f"{run['peak_bytes'] / 2**20:.0f}",
                ]
                rows.append([str(each["batch"]), label, *figures])
    return markdown(["batch", "form", "ms", "over the best of torch", "peak MiB of a pass"], rows, 2)


def packed_volumes_ratio(batch: int) -> str:
    """Time of the packed network over volumes over that of the fastest form of torch."""
    rows = result("packed_volumes_h200")["networks"]
    return next(f"{row['ratio']:.2f}" for row in rows if row["batch"] == batch)


COMPILED_FORMS = {
    "FP16, torch.compile": "fp16, compiled",
    "steps of kernels": "packed nvfp4",
    "compiled": "packed nvfp4, compiled",
}


PACKED_FORM = COMPILED_FORMS["compiled"]


def packed_networks() -> str:
    """Packed networks of other libraries, by steps and compiled, those that lose first."""
    rows = []
    for case in _by_ratio():
        model, _, images = case["case"].rpartition(":")
        if "ratio_nvfp4" not in case:
            rows.append([model, images.replace("x", " x "), *["–"] * len(COMPILED_FORMS), case["error"]])
            continue
        times = [f"{case['runs'][form]['graph_ms']:.2f}" for form in COMPILED_FORMS.values()]
        ratio = f"{case['ratio_nvfp4']:.2f}"
        if case["ratio_nvfp4"] > 1:
            ratio = f"**{ratio}**"
        rows.append([model, images.replace("x", " x "), *times, ratio])
    return markdown(["network", "images", *COMPILED_FORMS, "faster packed form / FP16"], rows)


def packed_norms() -> str:
    """What leaving norms of small maps, biases and empty paddings to the compiler changed."""
    before = {case["case"]: case for case in result("packed_networks_h200")["cases"]}
    rows = []
    for case in result("packed_norms_h200")["cases"]:
        model, _, images = case["case"].rpartition(":")
        own = [each["runs"][PACKED_FORM]["graph_ms"] for each in (before[case["case"]], case)]
        peer = case["runs"]["fp16, compiled"]["graph_ms"]
        ratio = case["ratio_nvfp4"]
        cells = [model, images.replace("x", " x "), *(f"{ms:.2f}" for ms in own), f"{peer:.2f}"]
        rows.append((ratio, [*cells, f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"]))
    head = ["network", "images", "compiled, before", "compiled", "FP16, torch.compile", "faster packed form / FP16"]
    return markdown(head, (cells for _, cells in sorted(rows, key=lambda row: -row[0])))


def packed_networks_ratios() -> str:
    """The largest and the smallest time of a packed network over compiled FP16, and how many are above 1."""
    ratios = [case["ratio_nvfp4"] for case in _by_ratio() if "ratio_nvfp4" in case]
    slower = sum(ratio > 1 for ratio in ratios)
    return f"{ratios[-1]:.2f} to {ratios[0]:.2f} times ({slower} of {len(ratios)} cases are slower)"


def _by_ratio() -> list[dict[str, Any]]:
    """Cases, the slowest first; before them those that were not measured."""
    cases: list[dict[str, Any]] = result("packed_networks_h200")["cases"]
    return sorted(cases, key=lambda case: -case.get("ratio_nvfp4", float("inf")))


def _latencies(name: str, forms: dict[str, str]) -> str:
    rows = []
    for case in result(name)["cases"]:
        runs = [case["runs"].get(form, {}) for form in forms.values()]
        times = [f"{run['graph_ms']:.2f}" if "graph_ms" in run else "–" for run in runs]
        ratio = f"{case['ratio_nvfp4']:.2f}" if "ratio_nvfp4" in case else "–"
        model, _, images = case["case"].rpartition(":")
        title = f"scale {model}" if model[0].isdecimal() else model
        rows.append([f"{title}, {images.replace('x', ' x ')}", *times, ratio])
    return markdown(["one CUDA graph, ms", *forms, "NVFP4 / best of torch"], rows)


CPU_FORMS = ("torch eager, channels_last", "torch.compile", "onnx fp16", "portable onnx", "packed fp16", "packed nvfp4")


def cpu_latency() -> str:
    """Artefacts on a CPU over torch eager in FP32."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in result("cpu_latency_cpu")["rows"]:
        found.setdefault((row["case"], row["batch"], row["threads"]), {})[row["form"]] = row
    rows = []
    for (case, batch, threads), forms in found.items():
        label, size = _network_and_size(case)
        ratios = [f"{forms[form]['ratio']:.2f}" if _settled(forms.get(form)) else "–" for form in CPU_FORMS]
        eager = f"{forms['torch eager']['ms']:.1f}"
        rows.append([label, f"{batch} x {size}", str(threads), eager, *ratios])
    titles = (form.replace("portable", "decomposed") for form in CPU_FORMS)
    return markdown(["network", "images", "threads", "torch eager FP32, ms", *titles], rows, 2)


def _network_and_size(case: str) -> tuple[str, str]:
    """ "0.25:96x96" as ("UNet, scale 0.25", "96 x 96")."""
    name, _, size = case.rpartition(":")
    label = f"UNet, scale {name}" if ":" not in name else name.partition(":")[2].replace("/", ", ")
    return label, size.replace("x", " x ")


def cpu_slowest() -> str:
    """The artefact with the largest ratio to torch eager, and its ratio to torch eager in channels_last."""
    rows = [row for row in result("cpu_latency_cpu")["rows"] if row["form"] in CPU_FORMS[2:] and _settled(row)]
    slowest = max(rows, key=lambda row: float(row["ratio"]))
    place = {key: slowest[key] for key in ("case", "batch", "threads")}
    (peer,) = (
        row for row in result("cpu_latency_cpu")["rows"] if row["form"] == CPU_FORMS[0] and place.items() <= row.items()
    )
    label, size = _network_and_size(slowest["case"])
    form = slowest["form"].replace("portable", "decomposed")
    return (
        f"the largest ratio of an artefact is the {slowest['ratio']:.2f} of {form} ({label}, "
        f"{slowest['batch']} x {size}, {slowest['threads']} thread{'s' * (slowest['threads'] > 1)}), which is "
        f"{slowest['ms'] / peer['ms']:.2f} times torch eager in channels_last"
    )


def _settled(row: dict[str, Any] | None) -> bool:
    """Whether the quartiles of a ratio lie within half of it."""
    return row is not None and float(row["high"]) < 1.5 * float(row["low"])


def packed_input_encoding() -> str:
    """The packed UNet with the first and last layer in FP4, without and with the multi-term input encoding."""
    one, many = result("packed_digits_h200")["batches"]
    names = {"21 of 23": "21 of 23", "all": "all", "all, multi-term input": "all, digits"}
    rows = [[label, *_time_and_memory(one[name]), *_time_and_memory(many[name])] for label, name in names.items()]
    return markdown(["layers in FP4", "batch 1, ms", "MiB", "batch 16, ms", "MiB"], rows)


def native_library() -> str:
    """The C library beside the Python runtime: elements that differ, and milliseconds."""
    rows = []
    for row in result("native_library_h200")["rows"]:
        every = row["kind"] == "digits"
        layers = "every layer in FP4" if every else "first and last layer in FP16"
        times = [f"{row[name]['graph_ms']:.2f}" for name in ("library", "python, own", "python, torch")]
        times[1] = "-" if every else times[1]
        differing = f"{sum(row['different'].values())} of {row['values']:,}"
        launched = [f"{row[name]['launched_ms']:.2f}" for name in ("library", "python, torch")]
        rows.append([f"{layers}, scale {row['scale']}", str(row["batch"]), differing, *times, *launched])
    head = ["UNet, 352 x 480", "batch", "logits that differ", "library", 'Python, `plain="kernel"`', "Python"]
    return markdown([*head, "library, launched", "Python, launched"], rows)


def large_images() -> str:
    """`predict --tile` by the size of the image: CPU time and peak memory of the command."""
    rows = [
        [
            f"{row['side']} x {row['side']}",
            str(row["tiles"]),
            f"{row['cpu_seconds']:.0f}",
            f"{row['peak_mib'] / 1024:.2f}",
            f"{row['all_logits_mib'] / 1024:.2f}",
        ]
        for row in result("large_images_cpu")["rows"]
    ]
    return markdown(["image", "tiles", "CPU, s", "peak memory, GiB", "logits of all pixels, GiB"], rows, 1)


def input_encoding_cost(batch: int) -> float:
    """Milliseconds that the multi-term input encoding adds: batch 1 (0), batch 16 (1)."""
    row = result("packed_digits_h200")["batches"][batch]
    return float(row["all, digits"]["ms"] - row["all"]["ms"])
