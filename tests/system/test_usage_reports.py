"""Nothing is sent to vendors of libraries, and nothing is stored for that.

Processes are looked at from outside, since ONNX Runtime's C++ code bypasses Python's hooks: the files that they leave,
and their system calls. `test_touched` does so with every command.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp4deploy.system.usage_reports import SWITCHES, switch_off
from tests.cli.command_line import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
HOME = Path("fp4deploy/system/onnx_runtime.py")
UPLOADED_AFTER = 14  # seconds; ONNX Runtime 1.31.1 looks up its vendor's name after about ten

SESSION = """
import sys, time
{imports}
from onnx import TensorProto, helper
value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", value[:1], value[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
time.sleep(float(sys.argv[1]))
"""
OURS = SESSION.format(imports="from fp4deploy.system.onnx_runtime import ort")
LATER = SESSION.format(imports="import fp4deploy\nimport onnxruntime as ort")  # by another library of the process
BARE = SESSION.format(imports="import onnxruntime as ort")


def private(folder: Path) -> dict[str, str]:
    """An environment whose home, cache and temporary folders are in `folder`, and that says nothing of reports."""
    kept = {name: value for name, value in ENVIRONMENT.items() if name not in SWITCHES and not name.startswith("XDG_")}
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "TMPDIR"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        kept[name] = str(folder / name)
    kept.pop("FP4DEPLOY_CACHE", None)
    kept["PYTHONPATH"] = os.pathsep.join(filter(os.path.isabs, [*sys.path, str(ROOT)]))
    return kept


def left(folder: Path) -> list[str]:
    """What is in the folders of `private`."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/**/*"))


def run(folder: Path, *arguments: object, wrapper: tuple[str, ...] = (), **environment: str) -> None:
    done = subprocess.run(
        [*wrapper, sys.executable, *map(str, arguments)], cwd=folder, env={**private(folder), **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def reporting(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where this ONNX Runtime reports nothing; otherwise the listing of files sees that it would."""
    folder = tmp_path_factory.mktemp("bare")
    run(folder, "-c", BARE, 0)
    if not left(folder):
        pytest.skip("this build of ONNX Runtime stores no reports")


@pytest.mark.usefixtures("reporting")
@pytest.mark.parametrize("code", [OURS, LATER], ids=["ours", "another library's import"])
@pytest.mark.parametrize("given", [{}, {"ORT_DISABLE_TELEMETRY": "0"}], ids=["default", "switched on"])
def test_a_session_stores_no_reports(tmp_path: Path, code: str, given: dict[str, str]) -> None:
    run(tmp_path, "-c", code, 0, **given)
    assert left(tmp_path) == []


def traced(folder: Path, code: str, seconds: float) -> list[str]:
    """The system calls by which a process reaches a network."""
    log = folder / "calls.txt"
    strace = ("strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmmsg", "-o", str(log))
    run(folder, "-c", code, seconds, wrapper=strace)
    return [line for line in log.read_text(encoding="utf-8").splitlines() if "AF_INET" in line]


def _can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    probe = ["strace", "-f", "-o", os.devnull, sys.executable, "-c", ""]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


@pytest.mark.nightly  # half a minute of waiting for ONNX Runtime; the switch itself is tested above
@pytest.mark.skipif(not _can_trace(), reason="strace is missing, or may not trace here (apt install strace)")
@pytest.mark.usefixtures("reporting")
def test_no_name_is_looked_up(tmp_path: Path) -> None:
    assert traced(tmp_path / "bare", BARE, UPLOADED_AFTER), "the trace would not see a report"
    assert traced(tmp_path / "ours", OURS, UPLOADED_AFTER) == []


def test_the_environment_of_children_says_so_too() -> None:
    assert switch_off({"ORT_DISABLE_TELEMETRY": "0", "PATH": "/bin"}) == {"PATH": "/bin", **SWITCHES}
    probe = "import fp4deploy, subprocess, sys; sys.exit(subprocess.call([sys.executable, '-Ic', sys.argv[1]]))"
    code = "import os, sys; sys.exit(os.environ.get('ORT_DISABLE_TELEMETRY') != '1')"
    environment = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    environment["PYTHONPATH"] = os.pathsep.join(filter(os.path.isabs, [*sys.path, str(ROOT)]))
    assert subprocess.run([sys.executable, "-c", probe, code], env=environment, check=False).returncode == 0


def _imported(path: Path) -> set[str]:
    found, text = set[str](), path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "onnxruntime" in text else ():
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_onnx_runtime_is_imported_in_one_place() -> None:
    """Examples and benchmarks too, which the lint rule leaves out."""
    folders = ("fp4deploy", "cli", "benchmarks", "examples", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts]
    assert [path.relative_to(ROOT) for path in files if "onnxruntime" in _imported(path)] == [HOME]
