"""The site builds without a warning and without the network, with every flag of the trainer."""

import re
import subprocess
import sys

import pytest

from albert_ds.settings.pretrain import build_parser
from tests.conftest import ROOT
from tools.lab.docs_hook import list_actions

pytestmark = pytest.mark.nightly


def test_the_site_is_whole_and_loads_nothing_from_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    assert len(pages) > 25
    loaded = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
    foreign = {url for text in pages.values() for url in re.findall(loaded, text)}
    assert {url for url in foreign if "canonical" not in url} == set()
    # The theme would fetch a program to draw a diagram.
    assert [page for page, text in pages.items() if 'class="mermaid"' in text] == []
    assert "<svg viewBox" in pages[tmp_path / "architecture.html"]
    assert (tmp_path / "search/search_index.json").stat().st_size > 100_000
    flags = {action.option_strings[-1] for action in list_actions(build_parser())}
    shown = set(re.findall("<code>(--.*?)</code>", pages[tmp_path / "flags.html"]))
    assert flags <= shown
    assert "&lt;doc&gt;" in pages[tmp_path / "flags.html"]  # a word of a help text, not a tag
