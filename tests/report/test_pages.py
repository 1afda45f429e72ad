"""Every HTML page has a Content-Security-Policy in front of its first script; text in it is text."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import fp4deploy
from fp4deploy.report.figures.heatmap import Heatmap
from fp4deploy.report.figures.heatmap_page import page
from fp4deploy.report.html import environment
from fp4deploy.report.telemetry_page import render_page

PACKAGE = Path(fp4deploy.__file__).parent
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')
SCRIPT = re.compile(r"<script\b([^>]*)>(.*?)</script>", re.DOTALL)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_a_heatmap_runs_its_own_scripts_alone(tmp_path: Path) -> None:
    heatmap = Heatmap(HOSTILE, HOSTILE, [HOSTILE], ["1"], HOSTILE, HOSTILE, [[1.0]], HOSTILE)
    text = page(heatmap, tmp_path / "deep", tmp_path / "plotly.min.js")
    (policy,) = POLICY.findall(text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    digests = set(re.findall(r"'sha256-([^']+)'", rules["script-src"]))
    scripts = SCRIPT.findall(text)
    inline = {b64encode(sha256(code.encode()).digest()).decode() for _, code in scripts if code}
    assert inline == digests
    assert [attributes for attributes, code in scripts if not code] == [' charset="utf-8" src="../plotly.min.js"']
    assert len(scripts) == 3
    assert text.index("Content-Security-Policy") < text.index("<script")
    assert "<img" not in text


def test_every_template_has_the_frame_with_the_policy() -> None:
    templates = environment()
    assert templates.autoescape is True
    pages = sorted(path for path in PACKAGE.rglob("*.html.j2") if path.name not in ("page.html.j2", "parts.html.j2"))
    assert {path.name for path in pages} >= {"run.html.j2", "comparison.html.j2", "selftest.html.j2"}
    for path in pages:
        assert path.read_text(encoding="utf-8").startswith('{% extends "page.html.j2" %}'), path
        assert not re.search(r"\|\s*safe\b|autoescape", path.read_text(encoding="utf-8")), path
    source, *_ = templates.loader.get_source(templates, "page.html.j2")  # type: ignore[union-attr]
    (policy,) = POLICY.findall(source)
    assert "script-src {% block digests %}{{ digest('page.js') }}{% endblock %};" in policy
    assert policy.startswith("default-src 'none'")


def own_scripts(text: str) -> list[str]:
    """The scripts of a page, each allowed by its digest, which nothing else is; data blocks left out."""
    (policy,) = POLICY.findall(text)
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    scripts = [code for attributes, code in SCRIPT.findall(text) if "application/json" not in attributes]
    assert [f"'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'" for code in scripts] == rules[
        "script-src"
    ].split()
    assert text.count("<script") == len(SCRIPT.findall(text))
    return scripts


def test_the_page_of_all_heatmaps(tmp_path: Path) -> None:
    heatmap = Heatmap(
        HOSTILE, HOSTILE, [HOSTILE, "b"], ["1", "2"], "layer", "step", [[1.0, None], [0.00012347, 3.0]], "%"
    )
    text = render_page(HOSTILE, [("nvfp4", Path("weights/quantized/flips"), heatmap)])
    assert len(own_scripts(text)) == 2
    (data,) = [code for attributes, code in SCRIPT.findall(text) if "application/json" in attributes]
    (entry,) = json.loads(data)["maps"]
    assert (entry["model"], entry["group"], entry["name"]) == ("nvfp4", "weights/quantized", "flips")
    assert entry["values"] == [[1, None], [0.0001235, 3]]
    assert (entry["title"], entry["rows"]) == (HOSTILE, [HOSTILE, "b"])
    assert "<img src=x" not in text
    assert set(json.loads(data)["colours"]) == {"viridis"}
    assert not re.search(r'(src|href)="(?!data:|#)', text)


def test_nothing_else_writes_pages() -> None:
    """A new writer of HTML has to come here, and bring a policy."""
    writers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"<html|<body|to_html\(|Environment\(", path.read_text(encoding="utf-8"))
    }
    assert writers == {"report/figures/heatmap_page.py", "report/html.py"}


def test_a_share_in_a_tile_stays_on_one_line() -> None:
    tile = environment().get_template("parts.html.j2").module.tile  # type: ignore[attr-defined]
    assert "<b>FP8\u00a093.1\u00a0%, FP4\u00a06.0\u00a0%</b>" in tile("shares", "FP8 93.1 %, FP4 6.0 %", "note")
    assert "&lt;script&gt;" in tile("name", HOSTILE, "note")
