"""The sampler and the distance of the diffusion benchmark, where both are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_an_exact_denoiser_samples_what_it_denoises() -> None:
    """Of crops whose pixels are normal, the best denoiser is a quotient of variances."""
    from benchmarks.sample_quality import features, frechet, sampled

    def exact(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return x * 0.2**2 / (0.2**2 + sigma**2)

    found = sampled(exact, 64, 16, 48, torch.device("cpu"), 48)
    assert found.shape == (64, 3, 16, 16)
    assert float(found.std()) == pytest.approx(0.2, rel=0.02)
    torch.testing.assert_close(sampled(exact, 64, 16, 48, torch.device("cpu"), 48), found, rtol=0, atol=0)
    torch.manual_seed(0)
    alike, wider = 0.2 * torch.randn(64, 3, 16, 16), 0.4 * torch.randn(64, 3, 16, 16)
    assert frechet(found, found) == pytest.approx(0, abs=1e-5)
    assert frechet(found, alike) < 0.2 * frechet(found, wider)
    assert features(found).isfinite().all()


def test_packed_denoiser_is_near_torch_and_beside_it_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a network in high precision, packing changes nothing but last bits; a row has every form."""
    monkeypatch.syspath_prepend(FOLDER)
    from benchmarks import denoiser, denoiser_latency

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(4, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 1))
    x, sigma = torch.randn(2, 3, 8, 8), torch.full((2, 1, 1, 1), 0.5)
    made = denoiser.packed(network, denoiser.inputs_of(x, sigma))
    with torch.no_grad():
        wanted = denoiser.denoised(network, x, sigma)
    torch.testing.assert_close(denoiser.denoised(made, x, sigma), wanted, rtol=0, atol=1e-2)

    monkeypatch.setattr(denoiser_latency, "forward", lambda base, form, given: lambda: base(given))
    monkeypatch.setattr(denoiser_latency, "compile_program", lambda file, given: made)
    given = denoiser.inputs_of(x, sigma)
    cases = [("net", 2, group) for group in denoiser_latency.GROUPS]
    for number, group in enumerate(list(denoiser_latency.GROUPS)[:-1]):
        runs, found = denoiser_latency.compiled(
            group, lambda name: denoiser_latency.run_of(name, network, lambda: made, given), tmp_path
        )
        for name, run in runs.items():
            torch.testing.assert_close(run(), network(given), rtol=0, atol=1e-2, check_dtype=False)
            found[name]["graph_ms"] = 3.0 if name == "fp16, compiled" else 6.0
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
    rows: dict[tuple[str, int], dict[str, object]] = {}
    denoiser_latency.add_runs(rows, cases, tmp_path, late=[3])
    (row,) = rows.values()
    denoiser_latency.compare(row)
    assert (row["ratio_nvfp4"], row["ratio_fp16"], row["best"]) == (2.0, 2.0, "fp16, compiled")
    assert row["runs"]["fp16, max-autotune"] == {"error": "not compiled in time"}
