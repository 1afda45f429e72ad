"""Tables of what networks are used in: a diffusion model, and frames to masks."""

from __future__ import annotations

from fp4deploy.predict.pipeline import PARTS

from .results import NOT_MEASURED, RESULTS, markdown, result


def denoiser(name: str = "denoiser_h200") -> str:
    """Each form of a denoiser: how near its outputs and its samples are."""
    found = result(name)
    sigmas = list(found["rows"][0]["psnr"])
    rows = []
    for row in found["rows"]:
        near = [row["sqnr_db"][sigma] for sigma in sigmas]
        cells = [
            *("" if each is None else f"{each:.1f}" for each in near),
            *(f"{row['psnr'][sigma]:.2f}" for sigma in sigmas),
        ]
        rows.append([row["form"], *cells, f"{row['frechet']:.3f}"])
    rows.append(["crops that were trained on", *[""] * (2 * len(sigmas)), f"{found['real']:.3f}"])
    columns = (f"{kind}, sigma {float(sigma):g}" for kind in ("SQNR, dB", "PSNR, dB") for sigma in sigmas)
    return markdown(["form", *columns, "Frechet distance"], rows)


def denoiser_latency() -> str:
    """One step of the denoisers, packed, beside the fastest form of torch's FP16."""
    rows = []
    names = [f"denoiser_latency{name}_h200" for name in ("", "_unet2d")]
    for row in (row for name in names if (RESULTS / f"{name}.json").is_file() for row in result(name)["rows"]):
        times = {name: run.get("graph_ms") for name, run in row["runs"].items()}
        cells = [
            f"{times['packed ' + form]:.3f}" if times.get("packed " + form) else NOT_MEASURED
            for form in ("nvfp4", "nvfp4, compiled", "fp16", "fp16, compiled")
        ]
        best, ratio = row["best"].removeprefix("fp16, "), row["ratio_nvfp4"]
        shown = f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"
        rows.append([row["network"], str(row["batch"]), *cells, f"{times[row['best']]:.3f} ({best})", shown])
    head = ["network", "crops", "NVFP4", "NVFP4, compiled", "packed FP16", "packed FP16, compiled", "torch FP16, best"]
    return markdown([*head, "NVFP4 over it"], rows)


def pipeline() -> str:
    """Frames to masks, by part, and overlapped over the network alone."""
    rows = []
    found = [row for name in ("pipeline_h200", "pipeline_digits_h200") for row in result(name)["rows"]]
    for row in sorted(found, key=lambda row: -float(row["over_network"])):
        ms, over = row["ms"], row["over_network"]
        parts = [f"{ms[part]:.2f}" for part in (*PARTS, "overlapped")]
        shown = f"**{over:.2f}**" if over > 1.15 else f"{over:.2f}"
        rows.append([f"UNet {row['scale']}, {row['form']}", *parts, f"{row['images_per_s']:,.0f}", shown])
    return markdown(["network", *PARTS, "overlapped", "images/s", "over the network"], rows)
