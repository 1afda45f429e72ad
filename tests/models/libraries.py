"""Libraries of networks that tests use where they are installed."""

from __future__ import annotations

import pytest

from fp4deploy.models.spec import parse_spec
from fp4deploy.requirements import ZOO


def need_library_of(text: str) -> None:
    """Skip a test whose model spec names a library that is not installed."""
    source = parse_spec(text).source
    reason = ZOO[{"smp": "segmentation_models_pytorch", "hf": "transformers"}.get(source, source)].why_missing()
    if reason is not None:
        pytest.skip(f"{reason}")
