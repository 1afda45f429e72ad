"""Engines of every form: which are built of which model, and which library builds them. No engine is built here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine import forms
from fp4deploy.export.engine.forms import backend_for, build_forms


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(model, form) of each engine that was asked for; the stand-in refuses fp8."""
    asked: list[tuple[str, str]] = []

    def build_engine(model: Path, target: Path, backend: str, arch: str, conv: str) -> Any:
        asked.append((model.stem, conv))
        if conv == "fp8":
            raise InputError("the compiler refuses it")
        layer = SimpleNamespace(requested="FP16" if model.stem == "unet.fp16" else "FP4")
        return SimpleNamespace(plan=target, ledger=SimpleNamespace(layers=[layer], summary=lambda: "one layer"))

    monkeypatch.setattr(forms, "build_engine", build_engine)
    return asked


def test_a_quantised_model_is_built_in_every_form(built: list[tuple[str, str]], tmp_path: Path) -> None:
    said: list[str] = []
    models = [tmp_path / "unet.fp16.onnx", tmp_path / "unet.nvfp4.onnx"]
    plans, refused = build_forms(models, tmp_path, "tensorrt-rtx", "sm120", said.append)
    assert [path.name for path in plans] == [
        "unet.fp16-auto.plan",
        "unet.nvfp4-auto.plan",
        "unet.nvfp4-gemm.plan",
        "unet.nvfp4-qdq.plan",
    ]
    assert built == [("unet.fp16", "auto"), *(("unet.nvfp4", form) for form in ("auto", "gemm", "fp8", "qdq"))]
    assert "unet.nvfp4-fp8.plan was not built: the compiler refuses it" in said
    assert refused == {"unet.nvfp4-fp8.plan": "the compiler refuses it"}


def test_the_library_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(why_missing=lambda: None)
    absent = SimpleNamespace(why_missing=lambda: "it is missing: pip install it")
    monkeypatch.setattr(forms, "LIBRARIES", {"tensorrt_rtx": library, "tensorrt": absent})
    assert backend_for("sm120") == "tensorrt-rtx"
    with pytest.raises(UnavailableError, match="pip install it"):
        backend_for("sm100")
    with pytest.raises(UnavailableError, match="for sm90: that needs SM100"):
        backend_for("sm90")
