"""The site builds as `make docs` builds it, and what README links to exists."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fp4deploy

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = sorted(ROOT.glob("*.md"))  # what the site does not contain


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a broken link or anchor, a page outside of the navigation or an unknown name is an error."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.nightly
def test_the_site_has_its_pages(site: Path) -> None:
    assert (site / "index.html").is_file()
    marks = [path for path in site.rglob("*.html") if "&lt;!--" in path.read_text(encoding="utf-8")]
    assert marks == [], "comments that a reader sees"


@pytest.mark.nightly
def test_the_api_reference_is_complete_and_can_be_read(site: Path) -> None:
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    shown = {path.rpartition(".")[2] for path in re.findall(r'<h3 id="(fp4deploy[\w.]+)"', text)}
    assert set(fp4deploy.__all__) <= shown
    signatures = re.findall(r'<div class="doc-signature.*?</div>', text, re.DOTALL)
    lines = [line for each in signatures for line in html.unescape(re.sub("<[^>]+>", "", each)).splitlines()]
    assert max(map(len, lines)) <= 90
    assert "<blockquote>" not in text, "an example that is no code"
    assert text.count("&gt;&gt;&gt; </span>") > 40


def shelves() -> dict[str, list[str]]:
    """Shelf -> its pages, of the navigation."""
    return {
        title: [page for entry in pages for page in entry.values()]
        for shelf in yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:\n")[1])
        for title, pages in shelf.items()
    }


def test_what_a_user_reads_is_short() -> None:
    """Eight pages of 12,000 words, tables and commands counted."""
    pages = shelves()["Use"]
    assert len(pages) == 8
    assert sum(len((ROOT / "docs" / page).read_text(encoding="utf-8").split()) for page in pages) <= 12_000


def test_the_first_page_links_every_other() -> None:
    """A code host shows no navigation."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page for each in shelves().values() for page in each}
    assert {f"{page.stem}.md" for page in (ROOT / "docs").glob("*.md")} == pages
    assert {page for page in pages if f"]({page})" not in text} == {"index.md"}


def test_one_word_for_one_thing() -> None:
    """The glossary has at most eight words; what is named after an option is written as code, or by its own word."""
    words = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## Words")[2].partition("\n## ")[0]
    assert 1 < len(re.findall(r"^\| \*\*", words, re.MULTILINE)) <= 8
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        prose = re.sub(r"```.*?```|<!--.*?-->|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"\bportable (file|graph|onnx|model)", prose, re.IGNORECASE), page


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.name)
def test_links_of_a_page_outside_of_the_site(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []
