"""The table of networks of transformers and diffusers in its small form."""

from __future__ import annotations

import pytest

from benchmarks.transformers_networks import ASKED, NETWORKS
from benchmarks.transformers_table import HEADINGS, cells, measure

AMPLIFIED = {"vae", "unet2d", "segformer"}  # where FP4 may amplify last bits: then compared with reference inputs
ANGLES = {"qwen3-moe"}  # whose tables of angles the ONNX file has in FP16
OF_THEIR_OWN = ("t5", "bart", "swin", "deepseek-v3")  # masks, guards, views and choices that no other network has
LEAST_SHARE = {"flux-block": 0.4}


def test_rows_say_what_was_refused_and_what_was_not_measured() -> None:
    row = {"model": "x", "prepare": {"fp4_layers": 1, "layers": 2, "fp4_share": 0.5}, "export": {"error": "why"}}
    assert cells(row) == ["x", "1 of 2, 50%", "", "refused", "", "", "not measured"]
    assert len(cells(row)) == len(HEADINGS)
    assert len(ASKED) == 13
    assert {*ASKED, *OF_THEIR_OWN} <= NETWORKS.keys()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*ASKED, *OF_THEIR_OWN])
def test_a_row_of_each_network(name: str) -> None:
    library = NETWORKS[name].library
    pytest.importorskip(library, reason=f"{library} is not installed: pip install -e '.[{library}]'")
    row = measure(name)
    assert not [stage for stage, found in row.items() if isinstance(found, dict) and "error" in found]
    assert row["prepare"]["fp4_share"] > LEAST_SHARE.get(name, 0.8)
    assert row["train"]["finite"]
    assert row["train"]["with_gradient"] > 0.9
    assert row["export"]["passed"]
    for stage, verified in (
        ("runtime", "export"),
        ("packed", "packed"),
    ):  # end to end, or layer by layer by verification
        amplified = "FP4 amplifies last bits" in row[verified]["compared"] or (stage == "runtime" and name in ANGLES)
        assert not amplified or name in AMPLIFIED | ANGLES
        assert row[stage]["distance"] < (1.0 if amplified else 1e-3)
