"""The file and the page: statuses, what is left out of them, and what an interruption leaves."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4deploy.errors import GateError, UnavailableError
from fp4deploy.plugins import KernelError
from fp4deploy.selftest import run
from fp4deploy.selftest.proof import Proof
from fp4deploy.selftest.records import SelfTestRecord
from fp4deploy.selftest.run import Check, anonymous, self_test

CPU = torch.device("cpu")


def proves(_: Any) -> Proof:
    return Proof("all <equal>", {"cases": 3, "error": 1e-4})


def check(outcome: Exception | None = None) -> Check:
    def function(context: Any) -> Proof:
        if outcome is not None:
            raise outcome
        return proves(context)

    return Check("group", "a claim", function)


@pytest.mark.parametrize(
    ("outcome", "status", "detail"),
    [
        (None, "proven", "all <equal>"),
        (GateError("3 differ"), "failed", "GateError: 3 differ"),
        (KernelError("does not compile"), "failed", "does not compile"),
        (UnavailableError("no GPU"), "not possible here", "no GPU"),
        (ValueError("a defect"), "failed", "ValueError: a defect"),
    ],
)
def test_status(outcome: Exception | None, status: str, detail: str, tmp_path: Path) -> None:
    found = self_test(tmp_path / "a.json", CPU, checks=[check(outcome)])
    assert [(each.status, each.detail) for each in found.checks] == [(status, detail)]
    assert found.checks[0].figures == ({"cases": 3, "error": 1e-4} if outcome is None else {})
    assert SelfTestRecord.model_validate_json((tmp_path / "a.json").read_text()) == found
    assert (found.complete, found.device, found.format) == (True, "cpu", 1)
    assert found.environment.packages["torch"] == torch.__version__


def test_the_page(tmp_path: Path) -> None:
    self_test(tmp_path / "a.json", CPU, checks=[check(), check(GateError("<b>3"))])
    page = (tmp_path / "a.html").read_text()
    assert "On cpu: 1 proven, 1 failed, 0 not possible here." in page
    assert "all &lt;equal&gt;" in page
    assert "&lt;b&gt;3" in page
    assert page.count("<script") == page.count("script-src 'sha256-") == 1
    assert "default-src 'none'" in page


def test_an_interruption_leaves_what_was_done(tmp_path: Path) -> None:
    def interrupted(_: Any) -> Proof:
        raise KeyboardInterrupt

    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        self_test(
            tmp_path / "a.json",
            CPU,
            lambda done: seen.append(done.status),
            [check(), Check("group", "interrupted", interrupted), check()],
        )
    left = json.loads((tmp_path / "a.json").read_text())
    assert (left["complete"], len(left["checks"]), seen) == (False, 1, ["proven"])
    assert "interrupted" in (tmp_path / "a.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot open /home/alice/runs/unet.plan: no", "cannot open …/unet.plan: no"),
        ("in '/home/alice/a.py', line 3", "in '…/a.py', line 3"),
        (r"C:\Users\alice\x.json is", "…/x.json is"),
        ("~/models/unet.fp4", "…/unet.fp4"),
        ("error 1/3 of a ratio and/or 2.5 GB/s", "error 1/3 of a ratio and/or 2.5 GB/s"),
        ("encoder.0/conv1 and __editable__/x", "encoder.0/conv1 and __editable__/x"),
        ("alice@box42: box42 says alice", "…@…: … says …"),
        ("palice and box421", "palice and box421"),
    ],
)
def test_nobody_is_named(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "box42")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    assert anonymous(text) == expected


def test_the_whole_file_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "box42")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    home = tmp_path / "home" / "alice"
    self_test(home / "a.json", CPU, checks=[check(ValueError(f"{home}/secret on box42")), check()])
    for file in (home / "a.json", home / "a.html"):
        text = file.read_text()
        assert not [name for name in ("alice", "box42", str(tmp_path), str(Path.home()) + "/") if name in text]


def test_every_check_has_a_claim_of_its_own() -> None:
    claims = [each.claim for each in run.CHECKS]
    assert len(set(claims)) == len(claims) == 13
    assert {each.group for each in run.CHECKS} == {"reference", "networks", "kernels", "engines", "latency"}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_everything_on_the_gpu(tmp_path: Path) -> None:
    found = self_test(tmp_path / "a.json", torch.device("cuda", 0))
    assert [each for each in found.checks if each.status == "failed"] == []
    assert found.device.startswith("sm")


def test_each_check_is_named_before_it_runs(tmp_path: Path) -> None:
    said: list[str] = []
    checks = [Check("group", name, lambda _: proves(said.append("ran"))) for name in ("first", "second")]
    self_test(tmp_path / "a.json", CPU, lambda line: said.append(line.status), checks, said.append)
    assert said == ["first", "ran", "proven", "second", "ran", "proven"]
