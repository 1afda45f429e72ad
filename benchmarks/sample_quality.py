"""Samples of a denoiser of images, and how far they are from other images.

`sampled` solves the probability flow ODE by Heun's method, as Karras et al., "Elucidating the Design Space of
Diffusion-Based Generative Models", 2022, from noise that depends on a sample's number alone. `frechet` is the distance
of Gaussians fitted to simple features: means of patches and of magnitudes of gradients at three sizes. It ranks forms
of one model; it is no FID, which needs a network of other weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

LOW, HIGH = 0.02, 200.0  # sigma; at HIGH even the mean of a crop of 64 x 64 pixels is lost in the noise
SEED = 0
Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def sampled(
    denoise: Denoise, count: int, size: int, steps: int, device: torch.device, batch: int, high: float = HIGH
) -> torch.Tensor:
    """Samples by Heun's method, from noise of sigma `high` that depends on their number alone."""
    ramp = torch.linspace(0, 1, steps, device=device)
    schedule = [*((high ** (1 / 7) + ramp * (LOW ** (1 / 7) - high ** (1 / 7))) ** 7).tolist(), 0.0]
    generator, found = torch.Generator(device).manual_seed(SEED), []
    for first in range(0, count, batch):
        number = min(batch, count - first)
        x = high * torch.randn(number, 3, size, size, generator=generator, device=device)
        for now, then in itertools.pairwise(schedule):
            slope = (x - denoise(x, torch.full((number, 1, 1, 1), now, device=device))) / now
            euler = x + (then - now) * slope
            if then > 0:
                other = (euler - denoise(euler, torch.full((number, 1, 1, 1), then, device=device))) / then
                euler = x + (then - now) * (slope + other) / 2
            x = euler
        found.append(x.clamp(-1, 1))
    return torch.cat(found)


def features(x: torch.Tensor) -> torch.Tensor:
    """[N, features]: means of patches and of magnitudes of gradients, at three sizes."""
    grey = x.mean(1, keepdim=True)
    edges = (grey.diff(dim=2)[..., :-1] ** 2 + grey.diff(dim=3)[:, :, :-1] ** 2).sqrt()
    parts = [F.adaptive_avg_pool2d(x, 2), *(F.adaptive_avg_pool2d(each, 4) for each in (grey, edges))]
    parts += [F.adaptive_avg_pool2d(F.avg_pool2d(grey, k).diff(dim=3).abs(), 2) for k in (2, 4, 8)]
    return torch.cat([each.flatten(1) for each in parts], 1).double().cpu()


def frechet(one: torch.Tensor, other: torch.Tensor) -> float:
    """Frechet distance of Gaussians fitted to the features of two sets of crops."""
    (a, b), means, covariances = (features(one), features(other)), [], []
    for each in (a, b):
        means.append(each.mean(0))
        covariances.append(each.T.cov())
    eigenvalues = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0)
    trace = covariances[0].trace() + covariances[1].trace() - 2 * eigenvalues.sqrt().sum()
    return float(((means[0] - means[1]) ** 2).sum() + trace.clamp(min=0))
