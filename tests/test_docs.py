"""The documentation names only what exists: files, links, imports, metric keys."""

import json
import re

import pytest

from albert_ds.model.additions import ADDITIONS
from albert_ds.model.sharing import list_patterns
from tests.conftest import ROOT
from tests.test_layers import IMPORTS

FOLDERS = ("albert_ds", "docs", "ds_configs", "slurm", "tests", "tools")
PAGES = [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
PAGES = [ROOT / "README.md", *sorted(page for page in PAGES if page.parent.name != "raw")]
# A file of the project as the pages name it: from the root, with its extension, no wildcard.
FILE = re.compile(
    r"(?<![\w/.*-])((?:albert_ds|tools|slurm|ds_configs|tests|docs)/[\w./-]*\.(?:py|sh|json|md|env\.example))"
)
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
BASE = {"cli", "files", "errors", "json_files"}  # every box may import these
HISTORY = ROOT / "docs/log.md"  # tells of ended experiments, whose files are gone


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_named_file_exists(page):
    named = {ROOT / name for name in FILE.findall(page.read_text())} if page != HISTORY else set()
    assert {path for path in named if not path.is_file()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_resolves(page):
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors_of(found.read_text()), target


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\s-]", "", h.lower()).replace(" ", "-") for h in headings}


def box_of(module: str) -> str:
    apart = {"interop.export": "export", "process.trainer": "trainer"}
    top = module.split(".")[0]
    return apart.get(module, "base" if top in BASE else top)


def test_the_diagram_of_the_packages_is_that_of_the_imports():
    text = (ROOT / "docs/architecture.md").read_text()
    drawn = set(re.findall(r"^ +(\w+)(?:\[.*?\])? --> (\w+)", text, re.M))
    pairs = {(box_of(a), box_of(b)) for a, imported in IMPORTS.items() for b in imported}
    actual = {(a, b) for a, b in pairs if a != b}
    assert drawn <= actual, f"drawn, but no file imports it: {drawn - actual}"
    reachable = set(drawn)
    while more := {(a, d) for a, b in reachable for c, d in drawn if b == c} - reachable:
        reachable |= more
    hidden = {(a, b) for a, b in actual - reachable if b != "base"}
    assert not hidden, f"imported, but not drawn in docs/architecture.md: {hidden}"


def test_every_key_of_the_metrics_is_explained():
    text = (ROOT / "docs/metrics.md").read_text()
    lines = (ROOT / "docs/raw/first_run_dp2.jsonl").read_text().splitlines()
    keys = {key for line in lines for key in json.loads(line)}
    assert {key for key in keys if f"`{key}`" not in text} == set()


def test_the_page_about_exactness_can_be_read():
    assert len((ROOT / "docs/exactness.md").read_text().splitlines()) <= 100


def test_the_page_about_sharing_has_the_tables_of_the_code():
    text = (ROOT / "docs/sharing.md").read_text()
    rows = [f"| `{form}` | `{blocks}` | {meaning} |" for form, blocks, meaning in list_patterns()]
    rows += [f"| `{addition.form}` | {addition.meaning} |" for addition in ADDITIONS.values()]
    assert [row for row in rows if row not in text.splitlines()] == []
