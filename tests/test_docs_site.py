"""The site builds without a warning and without the network; its tables and messages are ours."""

import ast
import json
import re
import subprocess
import sys

import pytest
import yaml

from albert_ds.cli import list_actions
from albert_ds.model.config import SIZES, count_flops, count_params
from albert_ds.settings.pretrain import build_parser
from tests.conftest import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_page_loads_anything_from_the_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    loaded = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
    for page in pages:
        found = [url for url in re.findall(loaded, page.read_text()) if "canonical" not in url]
        assert not found, page
        assert 'class="mermaid"' not in page.read_text()  # the theme would fetch a program
    assert "<svg viewBox" in (site / "architecture.html").read_text()
    assert (site / "search/search_index.json").stat().st_size > 100_000


def test_the_reference_has_every_flag_of_the_trainer(site):
    text = (site / "flags.html").read_text()
    for action in list_actions(build_parser()):
        assert f"<code>{action.option_strings[-1]}</code>" in text


def test_the_sizes_are_those_of_the_code():
    def flops(config) -> int:
        return count_flops(config, tokens=512, squared_lengths=512**2, masked=77)

    text = (DOCS / "pretraining.md").read_text()
    base = flops(SIZES["albert-base"])
    for name, config in SIZES.items():
        millions = sum(count_params(config).values()) / 1e6
        row = f"| `{name}` | {millions:.1f} M | {config.num_layers} | {config.hidden_size:,} "
        assert f"{row}| {flops(config) / base:.2f} |" in text


def test_the_messages_in_troubleshooting_are_ours():
    """Each stretch of three words or more of a quoted message stands in the sources."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "albert_ds").rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^(?:\| )?`([^`]+)`(?:,| \||\s*\(code)", page, re.M)
    checked = 0
    for message in quoted:
        for part in re.split(r"\b(?:[A-Z]+|\d+|[XYNM])\b|\.\.\.|[():,;/]", message):
            if len(part.split()) >= 3:
                checked += 1
                assert any(part.strip() in text for text in texts), part
    assert checked > 12


def test_every_page_of_results_states_its_commit():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = next(entry["Measure"] for entry in nav if "Measure" in entry)
    for page in (name for entry in pages for name in entry.values()):
        text = (DOCS / page).read_text()
        if "Recorded on" in text or re.search(r"^\|.*\d\.\d", text, re.M):
            assert re.search(r"(Recorded|fitted) on \d+ November \d{4}", text), page
            assert re.search(r"commit [0-9a-f]{7}|Each report.*?names\s+its commit", text), page


def test_the_figures_of_the_readme_stand_in_the_pages_it_names():
    readme = (ROOT / "README.md").read_text()
    worst = (DOCS / "exactness.md").read_text().partition("<!-- worst -->")[2]
    modes, of_fp32 = re.search(r"^\| fp32 \| (\d+) (?:\| \S+ ){2}\| (\S+) \|", worst, re.M).groups()
    of_bf16 = re.search(r"^\| bf16 \| \d+ (?:\| \S+ ){2}\| (\S+) \|", worst, re.M)[1]
    assert f"| {of_fp32} |" in readme
    assert f"over {modes} layouts" in readme and f"bf16 rounds to {of_bf16} |" in readme
    large, bert, xxlarge = (
        sum(count_params(SIZES[name]).values())
        for name in ("albert-large", "bert-large", "albert-xxlarge")
    )
    assert (
        f"| {bert / large:.1f} times |" in readme
        and f"ALBERT-xxlarge: {bert / xxlarge:.1f})" in readme
    )
    learning = (DOCS / "learning.md").read_text()
    probed, judged = (
        json.loads((DOCS / "raw" / f"learn_{name}.json").read_text())
        for name in ("probe", "minimal_pairs")
    )
    words, order = (probed[f"heldout_{task}_accuracy"] for task in ("mlm", "sop"))
    for share in (words, order, judged["accuracy"]):
        assert all(f"{100 * share:.1f} %" in text for text in (readme, learning))
    card = (ROOT / "tools" / "demo" / "model" / "README.md").read_text()
    for share in (words, order, judged["accuracy"]):  # the model is that run's
        assert f'"value": {share}' in card
    assert probed["weights"] in card
    assert "100 kills of 2 ranks" in (DOCS / "reliability.md").read_text()


def test_the_phenomena_beside_other_models_are_those_of_the_raw_file():
    from albert_ds.evals.minimal_pairs import PHENOMENA

    raw = json.loads((DOCS / "raw" / "learn_minimal_pairs.json").read_text())
    right: dict[str, list[float]] = {}
    for term, (share, pairs) in raw["phenomena"].items():
        found = right.setdefault(PHENOMENA.get(term, term), [0.0, 0.0])
        found[0] += share * pairs
        found[1] += pairs
    accuracies = [100 * good / pairs for good, pairs in right.values()]
    _, _, section = (DOCS / "learning.md").read_text().partition("### Beside models")
    rows = re.findall(r"^\| (?!\*)[a-z ]+ \| ([\d.]+) \|", section, re.M)[:12]
    assert sorted(map(float, rows)) == pytest.approx(sorted(accuracies), abs=0.051)
    assert f"| **mean of the twelve** | **{sum(accuracies) / 12:.1f}** |" in section
