"""The sampler and the distance of the diffusion benchmark, where both are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_an_exact_denoiser_samples_what_it_denoises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of crops whose pixels are normal, the best denoiser is a quotient of variances."""
    monkeypatch.syspath_prepend(FOLDER)
    from benchmarks.denoiser import features, frechet, sampled

    def exact(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return x * 0.2**2 / (0.2**2 + sigma**2)

    found = sampled(exact, 64, 16, 24, torch.device("cpu"), 48)
    assert found.shape == (64, 3, 16, 16)
    assert float(found.std()) == pytest.approx(0.2, rel=0.02)
    torch.testing.assert_close(sampled(exact, 64, 16, 24, torch.device("cpu"), 48), found, rtol=0, atol=0)
    torch.manual_seed(0)
    alike, wider = 0.2 * torch.randn(64, 3, 16, 16), 0.4 * torch.randn(64, 3, 16, 16)
    assert frechet(found, found) == pytest.approx(0, abs=1e-5)
    assert frechet(found, alike) < 0.2 * frechet(found, wider)
    assert features(found).isfinite().all()
