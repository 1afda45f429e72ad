"""Engines of every form: which are built of which model, and which library builds them. No engine is built here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.export.engine import forms
from fp4deploy.export.engine.forms import backend_for, build_forms, smaller_in_fp16
from fp4deploy.export.ledger.build_log import EngineLayer, Tensor
from fp4deploy.export.ledger.ledger import Ledger, LedgerRow, ledger_path
from fp4deploy.precisions import OF_ENGINES


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


CARD = {"architecture": "unet", "height": 64, "width": 64}
W = Tensor("w", (500, 1000), "FP4")  # 250 kB of constants


def ledger(weights: str, size: int, **changes: Any) -> Ledger:
    """Of one layer whose plan has `size` bytes."""
    row = LedgerRow("a", "Conv2d", weights, weights, weights, weights, "gemm", "", 1, False, (), ())
    engine = (EngineLayer("k", "gemm", (), (W,), (), ()),)
    return dataclasses.replace(
        Ledger("tensorrt-rtx", "1.7.1", "sm120", "auto", "build log", "a.onnx", "0" * 64, f"{weights}.plan", "1" * 64,
               size, 0.1, (1, 1, 8), CARD, (row,), engine), **changes)  # fmt: skip


def advice(own: Ledger, beside: list[Ledger], folder: Path) -> str:
    for path in folder.glob("*.json"):
        path.unlink()
    for number, each in enumerate(beside):
        ledger_path(folder / f"{number}.plan").write_text(each.to_json())
    return smaller_in_fp16(folder / "own.plan", own)


@pytest.mark.parametrize("weights", [*OF_ENGINES, "FP16"])
def test_a_plan_is_compared_with_that_of_fp16(weights: str, tmp_path: Path) -> None:
    """With one of the same network for the same GPU, whatever else lies there, and however it is sorted."""
    own = ledger(weights, 400_000)
    others = [
        ledger("FP16", 1, arch="sm121"), ledger("FP16", 1, batch=(1, 1, 1)), ledger("FP4", 1), ledger("INT8", 1),
        ledger("FP16", 1, backend="tensorrt"), ledger("FP16", 1, card={**CARD, "width": 32}),
    ]  # fmt: skip
    for size in (399_999, 400_000, 400_001):
        for place in range(len(others) + 1):
            found = advice(own, [*others[:place], ledger("FP16", size), *others[place:]], tmp_path)
            larger = weights != "FP16" and size < 400_000
            assert found.startswith("own.plan is larger than the FP16 plan FP16.plan, 0.40 MB against 0.40") == larger
            assert bool(found) == larger


@pytest.mark.parametrize(("size", "is_code"), [(499_999, False), (500_000, True), (800_000, True)])
def test_without_a_plan_of_fp16_what_is_mostly_code_is_said(size: int, is_code: bool, tmp_path: Path) -> None:
    found = advice(ledger("FP4", size), [ledger("FP4", 1)], tmp_path)
    parts = f"0.25 MB are constants and {(size - 250_000) / 1e6:.2f} MB 1 compiled kernels"
    assert found.startswith(f"Of own.plan {parts}") == bool(found) == is_code
