"""Audit of one file: an ONNX model against targets, or a runtime's own account against the ONNX model it came from."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from fp4deploy.audit.engine_info import engine_rows, is_engine_info
from fp4deploy.audit.operands import Multiplication, multiplications, other_readers
from fp4deploy.audit.ort_profile import is_profile, profile_rows, with_nodes
from fp4deploy.audit.targets import TARGETS, Target
from fp4deploy.errors import InputError
from fp4deploy.export.onnx.canonical import LAYERS_KEY, foreign_graph, parse_onnx
from fp4deploy.export.onnx.meaning import check_meaning
from fp4deploy.precisions import OF_ENGINES
from fp4deploy.system.schema import read_json

LARGEST_JSON = 2**28  # bytes


@dataclass(frozen=True)
class AuditRow:
    """One layer.

    requested: precision that the ONNX file asks for; "" where no ONNX file is known.
    runs: what it runs in. fell_back: less precise hardware was asked for and is not used, without an error.
    """

    layer: str
    operator: str
    requested: str
    weight: str
    activation: str
    runs: str
    reason: str
    fell_back: bool


@dataclass(frozen=True)
class Audit:
    """Rows of one file for one target; `evidence` says how the column `runs` is known.

    canonical: an ONNX file that `fp4deploy build` changes before it compiles it.
    """

    file: str
    target: str
    evidence: str
    rows: tuple[AuditRow, ...]
    canonical: bool = False

    def summary(self) -> str:
        """ "4 of 23 layers run in FP4, 2 in FP8; 17 fall back." """
        fp4, *others = (sum(row.runs == name for row in self.rows) for name in OF_ENGINES)
        lost = [row for row in self.rows if row.fell_back]
        refused = sum(row.runs == "refused" for row in self.rows)
        text = f"{fp4} of {len(self.rows)} layers run in FP4"
        text += "".join(f", {count} in {name}" for count, name in zip(others, OF_ENGINES[1:], strict=True) if count)
        text += f"; {len(lost) - refused} fall back" if len(lost) > refused else ""
        return text + (f"; {refused} refused." if refused else ".")


def audit_file(path: Path, target: str = "tensorrt-rtx", model: Path | None = None) -> Audit:
    """Audit an ONNX model, layer information of an engine, or a profile of ONNX Runtime.

    Args:
        target: for an ONNX model, the runtime whose behaviour is asked for: a name of `targets.TARGETS`.
        model: for the other files, the ONNX model that the engine or session was made of; without it nothing is known
            about what was asked for.

    Raises:
        InputError: the file is of another kind or broken, or the target is unknown.
    """
    path = Path(path)
    if path.suffix.lower() == ".onnx":
        chosen = _target(target)
        with foreign_graph(path):
            return _audit_onnx(path, chosen)
    document = _read_json(path)
    with foreign_graph(model):
        graph = _checked(model) if model is not None else onnx.ModelProto()
        requested = {layer.name: layer for layer in multiplications(graph)} if model is not None else {}
    if is_engine_info(document):
        rows = engine_rows(document, path)
        return _audit_account(path, "TensorRT engine", "layer information of the engine itself", rows, requested)
    if is_profile(document):
        rows = with_nodes(profile_rows(document, path), set(requested), graph)
        return _audit_account(path, "ONNX Runtime session", "profile of the session itself", rows, requested)
    raise InputError(
        f"{path} is neither layer information of TensorRT (an object with 'Layers') nor a profile of ONNX Runtime. "
        "audit reads .onnx files and these two kinds of JSON."
    )


def _target(name: str) -> Target:
    if name not in TARGETS:
        raise InputError(f"--target is '{name}'; valid are {', '.join(TARGETS)}.")
    return TARGETS[name]


def _read_json(path: Path) -> Any:
    return read_json(path, "audit reads .onnx files, layer information and profiles of ONNX Runtime.", LARGEST_JSON)


def _checked(path: Path) -> onnx.ModelProto:
    model = parse_onnx(path)
    check_meaning(model)
    return model


def _audit_onnx(path: Path, target: Target) -> Audit:
    rows = []
    model = _checked(path)
    for layer in multiplications(model):
        verdict = target.rule(layer)
        fix = f"; fp4deploy audit {shlex.quote(str(path))} --fix OUT.onnx writes it without" if verdict.fixable else ""
        rows.append(
            AuditRow(
                layer=layer.name,
                operator=layer.operator,
                requested=layer.requested,
                weight=str(layer.weight),
                activation=str(layer.activation),
                runs=verdict.runs,
                reason=verdict.reason + fix,
                fell_back=verdict.fell_back(layer.requested),
            )
        )
    if not rows:
        raise InputError(f"{path} has no convolution or matrix multiplication to audit.")
    for reader in other_readers(model):
        if reason := target.refuses(reader.activation):
            operand = str(reader.activation)
            row = AuditRow(reader.name, reader.operator, "FP4", "", operand, "refused", reason, True)
            rows.append(row)
    canonical = any(entry.key == LAYERS_KEY for entry in model.metadata_props)
    return Audit(str(path), target.title, target.evidence, tuple(rows), canonical)


def _audit_account(
    path: Path, target: str, evidence: str, found: list[dict[str, Any]], requested: dict[str, Multiplication]
) -> Audit:
    """Rows of what ran, each with what its ONNX node asks for; nodes that nothing ran for are rows as well."""
    rows: list[AuditRow] = []
    seen: set[str] = set()
    for each in found:
        asked = [requested[name] for name in each["onnx_nodes"] if name in requested]
        seen.update(layer.name for layer in asked)
        wanted = asked[0].requested if asked else ""
        fell_back = wanted in OF_ENGINES and each["runs"] != wanted
        rows.append(
            AuditRow(
                layer=", ".join(layer.name for layer in asked) or each["layer"],
                operator=each["operator"],
                requested=wanted,
                weight=str(asked[0].weight) if asked else "",
                activation=str(asked[0].activation) if asked else each.get("operands", ""),
                runs=each["runs"],
                reason=f"kernel {each['kernel']}" if each["kernel"] else "",
                fell_back=fell_back,
            )
        )
    for name, layer in requested.items():
        if name not in seen:
            rows.append(
                AuditRow(
                    layer=name,
                    operator=layer.operator,
                    requested=layer.requested,
                    weight=str(layer.weight),
                    activation=str(layer.activation),
                    runs="unknown",
                    reason="no kernel names this node",
                    fell_back=layer.requested in OF_ENGINES,
                )
            )
    if not rows:
        raise InputError(f"{path} lists no convolution or matrix multiplication.")
    return Audit(str(path), target, evidence, tuple(rows))
