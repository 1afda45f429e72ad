"""Cases of the CUDA kernels."""

from __future__ import annotations

from typing import Any

CUDA: tuple[Any, ...] = ()
