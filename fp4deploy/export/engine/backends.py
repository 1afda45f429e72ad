"""The engine libraries that `build` knows, by their `--backend` name."""

from __future__ import annotations

from fp4deploy.export.engine import rtx, tensorrt
from fp4deploy.export.engine.backend import Backend

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (rtx.BACKEND, tensorrt.BACKEND)}
