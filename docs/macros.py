"""Writes measured tables and figures into README.md and the pages of docs, from benchmarks/results/*.json.

    python docs/macros.py

A page has them where a code host shows it too, between marks that are comments:

    <!-- table kernels: written by python docs/macros.py -->            a name of TABLES or TEXTS, and arguments
    <!-- end of table -->
    of <!--= machine("claim_h200") -->NVIDIA H200, torch 2.11<!--/-->   a Jinja expression of FIGURES

Below a table stands as of when its numbers are. Other figures in sentences are written by hand. `tests/docs` compares.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for docs and tools
from docs.tables import (  # noqa: E402
    accuracy,
    engines,
    kernels,
    names,
    networks,
    packed,
    picture,
    pipelines,
    results,
    studies,
    timing,
    training,
)
from docs.tables.accuracy import ABLATION as ABLATION  # noqa: E402
from docs.tables.results import as_of, document, points, result  # noqa: E402


def commands(*names: str) -> str:
    """What measured some results, to be copied."""
    return "\n".join(["```", *(document(name)["command"] for name in names), "```"])


def table(name: str, *arguments: str) -> str:
    """What a mark names: a table and as of when its numbers are, or a text.

    Raises:
        KeyError: there is no such table.
    """
    results.read.clear()
    text = (TABLES | TEXTS)[name](*arguments)
    return f"{text}\n\n{as_of()}" if results.read else text


def machine(name: str) -> str:
    """GPU and versions of a result: "NVIDIA H200, torch 2.11.0+cu130"."""
    found = result(name)["machine"]
    return f"{found['gpu']}, torch {found['torch']}"


def command(name: str, *more: str) -> str:
    """What measured a result, as code; more: arguments that are not recorded with it."""
    return f"`{' '.join((result(name)['command'], *more))}`"


FIGURES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        result, command, points, machine, accuracy.instances_of_samples, accuracy.claim_growth, accuracy.image_loss,
        accuracy.first_input_share, engines.engine_control, engines.on_validation, engines.test_gap,
        engines.trained_for_auto, kernels.four_over_six_cost,
        kernels.activation_shares, kernels.wgmma_share, kernels.triton_share,
        packed.cpu_slowest, packed.input_encoding_cost, packed.packed_fp16_over_nvfp4,
        networks.nnunet_volume, networks.nnunet_volume_dice,
        packed.packed_networks_ratios, packed.packed_ratio, packed.packed_volumes_ratio,
        picture.digits_below,
        picture.digits_trained, picture.largest_loss, picture.qat_over_calibrated,
        picture.rule_gaps, studies.published_folds,
        timing.held_out_layers, timing.layer_shapes, timing.ours_over, timing.product_rate,
        training.captured_recipe, training.first_steps, training.fp4_over_best, training.fused_losses,
        training.recipe_over_best, training.steps_by_cudnn,
        training.loading_rates, training.over_bound, training.recipe_ratios, training.step_images_per_s,
        training.step_ratio,
    )
}  # fmt: skip
TEXTS: dict[str, Callable[..., str]] = {"commands": commands, "public_names": names.public_names}
TABLES: dict[str, Callable[..., str]] = {
    name: function
    for module in (accuracy, engines, kernels, names, networks, packed, picture, pipelines, studies, timing, training)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_") and name not in FIGURES | TEXTS
}
PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(
    r"(<!-- table (.+): written by python docs/macros\.py -->\n)(?:(?!<!-- table ).*\n)*?(<!-- end of table -->)"
)
FIGURE = re.compile(r"(<!--= (.+?) -->)[^\n]*?(<!--/-->)")


def written(text: str) -> str:
    """A page with its tables and figures made again, each between its marks.

    Raises:
        KeyError: there is no such table.
        jinja2.UndefinedError: a result has no such value.
        ValueError: a mark has no other, or a line begins with one, which a code host would show as raw HTML.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)

    def figure(found: re.Match[str]) -> str:
        return f"{found[1]}{environment.from_string(f'{{{{ {found[2]} }}}}').render(FIGURES)}{found[3]}"

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{table(*found[2].split())}\n{found[3]}"

    for mark, whole in (("<!-- table ", BLOCK), ("<!-- end of table", BLOCK), ("<!--= ", FIGURE), ("<!--/-->", FIGURE)):
        if text.count(mark) != len(whole.findall(text)):
            raise ValueError(f"'{mark}' is not always one of two marks")
    if alone := re.search(r"^[\s*+>-]*<!--=.*", text, re.MULTILINE):
        raise ValueError(f"a line begins with a mark: {alone[0]}")
    return FIGURE.sub(figure, BLOCK.sub(block, text))


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each.read_text(encoding="utf-8")), encoding="utf-8")
