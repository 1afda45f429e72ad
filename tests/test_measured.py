"""What the documentation says was measured is what the JSON files of the runs say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def rows(name: str) -> list[list[str]]:
    """The cells of every line of a table in a page."""
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_products() -> None:
    found, page = result("products_h200.json"), rows("products.md")
    for layer in found["convolutions"]:
        channels = f"{' + '.join(map(str, layer['channels']))} -> {layer['outputs']}"
        times = [f"{layer[name] * 1e3:.0f}" for name in ("fp16_ms", "packed_ms")]
        size = f"{layer['height']} x {layer['width']}"
        assert [layer["layer"], channels, size, *times, f"{layer['ratio']:.2f}"] in page
    matrices = [row[1:4] for row in page if row[0].startswith(("W4A4, 4096", "W4A16, "))]
    assert matrices == [
        [f"{row['fp16_ms'] * 1e3:.1f}", f"{row['packed_ms'] * 1e3:.1f}", f"{row['ratio']:.2f}"]
        for row in found["matrices"]
    ]


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
