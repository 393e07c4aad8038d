"""The pages name only what exists, their tables are those of the code; the site is whole."""

import ast
import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

import pytest

import albert_ds
from albert_ds.model.config import SIZES, count_flops
from albert_ds.model.shapes import count_params
from albert_ds.model.sharing import ADDITIONS, list_patterns
from albert_ds.settings.pretrain import build_parser
from tests.browser import with_page
from tests.command import ROOT, run_python
from tests.rooms import draw, find_imports
from tools.lab.docs_hook import list_actions

DOCS = ROOT / "docs"
FOLDERS = ("albert_ds", "docs", "ds_configs", "slurm", "tests", "tools")
PAGES = [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
PAGES = [page for page in PAGES if page.parent.name != "raw"]
PAGES = [ROOT / "README.md", *sorted(PAGES)]
# Pages about today's code. Log and notebook tell of experiments, with the code of their day.
CURRENT = [page for page in PAGES if not {"notebook", "fixtures"} & set(page.parts)]
# A file of the project as the pages name it: from the root, with its extension, no wildcard.
FILE = re.compile(
    r"(?<![\w/.*-])((?:albert_ds|tools|slurm|ds_configs|tests|docs)/[\w./-]*\.(?:py|sh|json|md|env\.example))"
)
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def read(name: str) -> str:
    return (DOCS / name).read_text()


def read_raw(name: str) -> dict:
    return json.loads(read(f"raw/{name}.json"))


def test_every_named_file_exists():
    named = {(page, name) for page in CURRENT for name in FILE.findall(page.read_text())}
    assert [(str(page), name) for page, name in named if not (ROOT / name).is_file()] == []


def test_every_relative_link_resolves():
    broken = []
    for page in PAGES:
        for target in LINK.findall(page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in anchors_of(file.read_text())):
                broken.append(f"{page}: {target}")
    assert broken == []


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\s-]", "", h.lower()).replace(" ", "-") for h in headings}


def test_a_reader_gets_through():
    """Measurements in full belong to docs/notebook, proofs to docs/raw."""
    lengths = {page.name: len(page.read_text().splitlines()) for page in DOCS.glob("*.md")}
    assert sum(lengths.values()) <= 3300
    assert {name: length for name, length in lengths.items() if length > 210} == {}
    assert lengths["exactness.md"] <= 100


def test_no_line_but_a_row_of_a_table_is_longer_than_200():
    long = {
        f"{page}:{number}"
        for page in (*PAGES, ROOT / "CHANGELOG.md")
        if page.parent.name != "model"  # a card that the product wrote
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        if len(line) > 200 and not line.startswith("|")
    }
    assert long == set()


def test_pages_that_are_history_say_so_first():
    """All of the notebook but its list and what committed scripts write, which are kept up."""
    pages = {*(DOCS / "notebook").glob("*.md")}
    pages -= {DOCS / "notebook" / name for name in ("README.md", "ablations.md", "lamb.md")}
    assert {page.name for page in pages if "\n\n*History: " not in page.read_text()[:200]} == set()


def test_a_release_has_one_number_and_one_date():
    changes, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    number, date = re.search(r"^## (\S+)(?: - (\S+))?$", changes, re.M).groups()
    if number == "Unreleased":  # what comes after it is
        number, date = re.search(r"^## (\d\S+) - (\S+)$", changes, re.M).groups()
    assert number == albert_ds.__version__
    assert f"\nversion: {number}\ndate-released: {date}\n" in citation


def test_commands_fit_80_columns():
    block = re.compile(r"^ *```(?:bash|python)\n(.*?)^ *```", re.M | re.S)
    pages = [page for page in PAGES if page.parent in (ROOT, DOCS, DOCS / "notebook")]
    commands = [block.findall(page.read_text()) for page in pages if page.name != "transfer.md"]
    lines = [line for blocks in commands for text in blocks for line in text.splitlines()]
    assert len(lines) > 300 and [line for line in lines if len(line) > 80] == []


def test_the_architecture_page_shows_the_rooms_as_they_are():
    text = read("architecture.md")
    assert draw() in text, "print it anew: python -m tests.rooms"
    rooms = {path.parent.name for path in (ROOT / "albert_ds").glob("*/*.py")}
    assert missing([f"\n  {room}/ " for room in rooms], text) == []


def test_the_architecture_page_says_who_imports_nothing_of_whom():
    table = read("architecture.md").partition("imports nothing of")[2].partition("\n\n")[0]
    imports = find_imports()
    said = 0
    for row in table.splitlines()[2:]:
        rooms, avoided = (re.findall(r"`(\w+)`", row.split("|")[column]) for column in (1, 3))
        said += len(avoided)
        for room in rooms:
            assert imports.keys() >= {*avoided} and not imports.get(room, set()) & {*avoided}, row
    assert said > 20


def test_every_key_of_the_metrics_is_explained():
    keys = {
        key for line in read("raw/first_run_dp2.jsonl").splitlines() for key in json.loads(line)
    }
    text = read("metrics.md")
    assert {key for key in keys if f"`{key}`" not in text} == set()


def test_the_page_about_sharing_has_the_tables_of_the_code():
    rows = [f"| `{form}` | `{blocks}` | {meaning} |" for form, blocks, meaning in list_patterns()]
    rows += [f"| `{addition.form}` | {addition.meaning} |" for addition in ADDITIONS.values()]
    assert missing(rows, read("sharing.md").splitlines()) == []


def missing(wanted: Iterable[str], page: str | list[str]) -> list[str]:
    return [text for text in wanted if text not in page]


def test_the_sizes_are_those_of_the_code():
    flops = {
        name: count_flops(config, tokens=512, squared_lengths=512**2, masked=77)
        for name, config in SIZES.items()
    }
    rows = [
        f"| `{name}` | {sum(count_params(config).values()) / 1e6:.1f} M | {config.num_layers} "
        f"| {config.hidden_size:,} | {flops[name] / flops['albert-base']:.2f} |"
        for name, config in SIZES.items()
    ]
    assert missing(rows, read("pretraining.md")) == []


def test_the_messages_in_troubleshooting_are_ours():
    """Each stretch of three words or more of a quoted message stands in the sources."""
    texts = "\n".join(strings_of(ROOT / "albert_ds"))
    quoted = re.findall(r"^(?:\| )?`([^`]+)`(?:,| \||\s*\(code)", read("troubleshooting.md"), re.M)
    between = re.compile(r"\b(?:[A-Z]+|\d+|[XYNM])\b|\.\.\.|[():,;/]")
    parts = [part.strip() for message in quoted for part in between.split(message)]
    parts = [part for part in parts if len(part.split()) >= 3]
    assert len(parts) > 12 and missing(parts, texts) == []


def strings_of(folder: Path) -> Iterable[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_page_of_results_states_its_commit():
    names = ["measuring.md", "learning.md", "performance.md", "scaling.md"]
    pages = {DOCS / name for name in names} | set((DOCS / "notebook").glob("*.md"))
    pages -= {DOCS / "notebook" / "log.md"}  # each entry's heading has its day and commit
    for page in pages:
        text = page.read_text()
        if "Recorded on" in text or re.search(r"^\|.*\d\.\d", text, re.M):
            assert re.search(r"\d+ November \d{4}", text), page
            assert re.search(r"commits? [0-9a-f]{7}", text), page


def test_the_figures_of_the_readme_stand_in_the_pages_it_names():
    readme = (ROOT / "README.md").read_text()
    learning = read("learning.md")
    worst = read("exactness.md").partition("<!-- worst -->")[2]
    modes, of_fp32 = re.search(r"^\| fp32 \| (\d+) (?:\| \S+ ){2}\| (\S+) \|", worst, re.M).groups()
    of_bf16 = re.search(r"^\| bf16 \| \d+ (?:\| \S+ ){2}\| (\S+) \|", worst, re.M)[1]
    large, bert, xxlarge = (
        sum(count_params(SIZES[name]).values())
        for name in ("albert-large", "bert-large", "albert-xxlarge")
    )
    figures = [f"| {of_fp32} |", f"over {modes} layouts", f"error is {float(of_bf16):.2f},"]
    figures += [f"| {bert / large:.1f} times |", f"ALBERT-xxlarge: {bert / xxlarge:.1f})"]
    probed, judged = read_raw("minutes_probe"), read_raw("minutes_minimal_pairs")
    words, order = (probed[f"heldout_{task}_accuracy"] for task in ("mlm", "sop"))
    shares = [words, order, judged["accuracy"]]
    assert missing(figures + [f"{100 * share:.1f} %" for share in shares], readme) == []
    assert missing([f"{100 * share:.1f} %" for share in shares], learning) == []
    card = (ROOT / "tools/demo/model/README.md").read_text()  # the model is that run's
    assert missing([f'"value": {share}' for share in shares], card) == []
    assert "100 of 100 kills" in read("reliability.md")


def test_the_table_of_fine_tuned_tasks_is_that_of_the_raw_files():
    rows = re.findall(
        r"^\| ((?:glue/|squad|race)\w*).*?\| (.*?) \| (.*?) \|", read("finetuning.md"), re.M
    )
    shown = {task: cells for task, *cells in rows}
    for task, starts in (read_raw("transfer") | read_raw("transfer_twice")).items():
        scores = [
            [float(score) for score in starts[start]["dev"]] for start in ("pretrained", "random")
        ]
        scale = 1 if task == "squad1" else 100
        cells = [f"{scale * mean(seeds):.1f} +- {scale * stdev(seeds):.1f}" for seeds in scores]
        assert shown.pop(task) == cells
    assert not shown


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = run_python("-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.nightly
def test_the_site_is_whole_and_loads_nothing_from_the_network(site):
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    assert len(pages) > 25
    loaded = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
    foreign = {url for text in pages.values() for url in re.findall(loaded, text)}
    assert {url for url in foreign if "canonical" not in url} == set()
    # The theme would fetch a program to draw a diagram.
    assert [page for page, text in pages.items() if 'class="mermaid"' in text] == []
    assert "<svg viewBox" in pages[site / "architecture.html"]
    assert (site / "search/search_index.json").stat().st_size > 100_000
    flags = {action.option_strings[-1] for action in list_actions(build_parser())}
    shown = set(re.findall("<code>(--.*?)</code>", pages[site / "flags.html"]))
    assert flags <= shown
    assert "&lt;doc&gt;" in pages[site / "flags.html"]  # a word of a help text, not a tag


# What a reader must push aside to see the whole: the page, or a block of code or a table in it.
WIDE = """(() => {
    const page = document.documentElement, boxes = [page];
    if (innerWidth > 1000)
        boxes.push(...document.querySelectorAll("article pre > code, .md-typeset__scrollwrap"));
    const wide = boxes.filter(box => box.scrollWidth > box.clientWidth + 1);
    return wide.map(box => box.tagName + " " + box.scrollWidth + " " + box.innerText.slice(0, 60));
})()"""
SEARCH = """(() => {
    const field = document.querySelector("[data-md-component=search-query]");
    field.focus();
    field.value = "tensor parallelism";
    field.dispatchEvent(new Event("input", {bubbles: true}));
})()"""


@pytest.mark.nightly
def test_the_site_is_read_from_the_disk_at_every_width(site, tmp_path):
    """No page is wider than its window, nor on a screen any block; the search finds."""

    async def read(page):
        wide = []
        for width, path in [
            (width, path) for width in (1280, 390) for path in site.rglob("*.html")
        ]:
            if path.parent.name != "raw":
                await page.open(path, width=width)
                wide += [(width, path.name, what) for what in await page.ask(WIDE)]
        assert wide == []
        await page.open(site / "index.html", width=1280)
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.ask(SEARCH)
        while not await page.ask("document.querySelectorAll('.md-search-result__item').length"):
            await asyncio.sleep(0.1)  # the test's time limit ends it
        assert page.errors == []
        assert {url.partition(":")[0] for url in page.requests} <= {"file", "data"}

    with_page(tmp_path / "profile", read)
