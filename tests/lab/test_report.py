"""The report page: its numbers are those of the files, and it is readable wherever it is read."""

import io
import json
import math
import re
from collections import Counter
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest
from albert_lab.commands.report import main
from albert_lab.report.chart import HEIGHT, LEFT, RIGHT, WIDTH, Chart, Line, Point, thin
from albert_lab.report.corpus import Data, read_corpus
from albert_lab.report.folder import name_runs
from PIL import Image

from albert_ds.base.errors import UserError
from albert_ds.data.shards import Shard, open_shards
from albert_ds.data.stream import heldout_batches
from albert_ds.data.stream_config import StreamConfig
from tests.browser import with_page
from tests.models import copy_old_run

MOST_BYTES = 1_500_000


class Read(HTMLParser):
    """The visible text, the tables, and the values behind each chart."""

    def __init__(self, html: str):
        super().__init__()
        self.text = []
        self.rows = []
        self.charts = {}
        self.links = []
        self._open: list[str] = []
        self._title = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "data", "xlink:href", "action")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self._open:
            if "figure" in self._open:
                self.charts.setdefault(self._title, []).append(json.loads(data))
            return
        if "style" in self._open:
            return
        self.text.append(data)
        if self._open[-2:-1] == ["figcaption"] and self._open[-1] == "b":
            self._title = data
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def make(folder, *runs) -> tuple[Read, str]:
    output = folder / "report.html"
    main([*map(str, runs), "--output", str(output)])
    html = output.read_text()
    return Read(html), html


def write_run(folder, records, **files):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two real runs, which name their data where it is here: beside them."""
    folder = copy_old_run(tmp_path_factory.mktemp("old") / "runs")
    for name in ("lamb", "adamw"):
        config = json.loads((folder / name / "config.json").read_text())
        config["data"] = [str(folder / "data")]
        (folder / name / "config.json").write_text(json.dumps(config))
    return [folder / "lamb", folder / "adamw"]


@pytest.fixture(scope="module")
def both(tmp_path_factory, runs):
    """The page of both runs, and its HTML."""
    return make(tmp_path_factory.mktemp("both"), *runs)


def test_the_numbers_are_those_of_metrics_jsonl(runs, both):
    page, _ = both
    titles = {"MLM loss": "mlm_loss", "MLM accuracy": "mlm_accuracy", "SOP loss": "sop_loss"}
    titles |= {"SOP accuracy": "sop_accuracy", "Loss": "loss", "Learning rate": "lr"}
    titles |= {"Gradient norm": "grad_norm", "Throughput": "tokens_per_second"}
    for number, run in enumerate(runs):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for title, key in titles.items():
            (chart,) = page.charts[title]
            drawn = {line["name"]: line for line in chart["lines"] if line["run"] == number}
            for prefix in ("", "heldout_"):
                expected = {r["step"]: r[prefix + key] for r in records if prefix + key in r}
                if not expected:
                    continue
                is_loss = key.endswith(("loss", "accuracy"))
                line = drawn["held out" if prefix else "training" if is_loss else ""]
                assert line["x"] == list(expected)
                for shown, value in zip(line["y"], expected.values(), strict=True):
                    assert shown == (value and pytest.approx(value, rel=1e-6))
        for record in records:
            if "heldout_loss" in record:
                cells = [str(v) for v in record.values()]
                assert cells in page.rows


def test_configurations_differ_where_they_do(runs, both):
    page, _ = both
    configs = [json.loads((run / "config.json").read_text()) for run in runs]
    kinds = [config["deepspeed"]["optimizer"]["type"] for config in configs]
    assert ["deepspeed.optimizer.type", *kinds] in page.rows and kinds[0] != kinds[1]
    assert ["steps", str(configs[0]["steps"])] in page.rows  # the same in both: one value
    assert ["torch", configs[0]["versions"]["torch"]] in page.rows


def test_guessing_is_computed_from_the_tokens_that_the_run_predicts(runs):
    """The lines to compare with, against a plain count with the trainer's own batches."""
    data = runs[0].with_name("data")
    stream = StreamConfig(objective="sop", sequence_length=32, seed=3)
    changing = {"sequence_length": "16@0,32@5", "masked_fraction": "0.3..0.15@100%"}
    first = replace(stream, sequence_length=16, masked_fraction=0.3)
    config = {"stream": asdict(first), "schedules": changing, "batch_size": 8, "steps": 10}
    corpus = read_corpus(Data(str(data)), config, eval_samples=12)
    assert corpus.unigram is not None and not corpus.notes
    drawn = {"limit": 12, "micro_batch_size": 4, "dp_rank": 0, "dp_size": 1}
    batches = heldout_batches(open_shards(data, "heldout"), stream, **drawn)
    labels = [int(label) for batch in batches for label in batch.tensors["masked_labels"]]
    (piece, count), *_ = Counter(labels).most_common(1)
    train = open_shards(data, "train")
    assert (corpus.unigram.piece, corpus.unigram.masked) == (train.vocab.pieces[piece], len(labels))
    assert corpus.unigram.share == pytest.approx(count / len(labels))
    shards = [Shard(train, number) for number in range(min(4, len(train.shards)))]
    seen = Counter(int(i) for shard in shards for n in range(len(shard)) for i in shard[n].ids)
    total = sum(seen.values()) + train.vocab.size
    loss = -np.mean([math.log((seen[label] + 1) / total) for label in labels])
    assert corpus.unigram.loss == pytest.approx(loss)
    assert [c.title for c in corpus.pictures] == [
        "Length of a sample",
        "Masked share of a sample",
        "Words of a masked stretch",
        "Frequency of pieces",
    ]


def test_other_data_at_the_place_of_a_run_s_are_no_baseline(tmp_path, runs):
    """They were built anew, or a run of another folder names its data alike."""
    config = json.loads((runs[0] / "config.json").read_text())
    records = [{"step": 1, "heldout_mlm_loss": 6.0, "heldout_mlm_accuracy": 0.1}]
    other = write_run(tmp_path / "other", records, config=config | {"data_sha256": ["0" * 64]})
    page, _ = make(tmp_path, other)
    assert "holds other data than the run has read" in page.words
    assert "frequencies alone" not in page.words
    page, _ = make(tmp_path, runs[0], other)
    assert "holds other data than the run has read" in page.words
    assert "frequencies alone:" in page.words and "(A)" not in page.words


def test_all_schedules_of_a_run_are_drawn(tmp_path):
    keys = {"lr": "Learning rate", "batch_size": "Batch", "sequence_length": "Longest sequence"}
    keys |= {"masked_fraction": "Masked", "num_layers": "Depth"}
    values = {key: [n, n, n + 1, n + 1] for n, key in enumerate(keys, start=1)}
    values["masked_fraction"] = [0.3, 0.25, 0.2, 0.15]
    records = [{"step": s, **{k: v[s - 1] for k, v in values.items()}} for s in range(1, 5)]
    page, _ = make(tmp_path, write_run(tmp_path / "run", records))
    for key, title in keys.items():
        (chart,) = page.charts[title]
        (line,) = chart["lines"]
        assert line["x"] == [1, 2, 3, 4] and line["y"] == pytest.approx(values[key])


def test_merged_points_keep_the_mean_and_the_range():
    values = [math.sin(n) for n in range(1000)] + [math.nan] * 24
    points = thin([Point(n, v, v, v) for n, v in enumerate(values)], 64)
    assert len(points) == 64 and math.isnan(points[-1].y)
    first = [math.sin(n) for n in range(16)]
    assert points[0] == pytest.approx((7.5, np.mean(first), min(first), max(first)))
    assert min(p.low for p in points[:-2]) == min(values[:990])


def test_many_records_are_merged_and_the_page_says_so(tmp_path):
    keys = ("mlm_loss", "mlm_accuracy", "sop_loss", "sop_accuracy", "lr", "grad_norm", "mfu")
    keys += ("tokens_per_second", "num_layers", "data_wait_fraction", "skipped_steps")
    runs = []
    for k, name in enumerate("abc"):
        waves = [{key: 1 + math.sin(s * (k + 1)) for key in keys} for s in range(5000)]
        records = [{"step": s, "loss": 7 + 3 / s, **wave} for s, wave in enumerate(waves, start=1)]
        runs.append(write_run(tmp_path / f"{name}/run", records))
    page, html = make(tmp_path, *runs)
    assert len(html.encode()) < MOST_BYTES
    assert "mean of about 21 records" in page.words
    (chart,) = page.charts["Loss"]
    assert [len(line["x"]) for line in chart["lines"]] == [240] * 3


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/run", "b/run"], ["a", "b"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["x/a/run", "y/a/run", "z/b"], ["x", "y", "b"]),
        (["a/x", "a/y", "b/x"], ["a/x", "y", "b"]),
        (["a", "a/b"], ["a", "b"]),
        (["one.jsonl", "two.jsonl"], ["one", "two"]),
        (["x/run"], ["run"]),
    ],
)
def test_a_name_is_the_shortest_that_tells_runs_apart(tmp_path, paths, names):
    labels = name_runs([tmp_path / path for path in paths])
    assert labels == names or (len(paths) == 1 and labels[0] in paths[0])
    assert len(set(labels)) == len(paths)


def test_a_run_without_metrics_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="no metrics.jsonl there; allowed"):
        make(tmp_path, tmp_path)
    other = tmp_path / "report.json"
    other.write_text('{"cells": []}\n')
    with pytest.raises(UserError, match="report.json: none of its lines is a record of a step"):
        make(tmp_path, other)
    run = write_run(tmp_path / "run", [])
    with pytest.raises(UserError, match="must be a new file"):
        main([str(run), "--output", str(run / "metrics.jsonl")])


def test_a_seed_s_run_ended_as_all_seeds_did_wherever_one_stands(tmp_path, monkeypatch):
    run = write_run(tmp_path / "seed-3", [{"step": 1, "loss": 7.0, "dev_f1": 0.5}], config={})
    (tmp_path / "exit.json").write_text('{"code": 0}')
    monkeypatch.chdir(run)
    for name in (run, "."):
        page, _ = make(tmp_path, name)
        assert "finished" in page.words


def test_what_is_missing_or_damaged_is_said_on_the_page(tmp_path, runs):
    empty = write_run(tmp_path / "empty", [])
    torn = write_run(tmp_path / "torn", [{"step": 1, "loss": 7.0}], exit={"code": [7]})
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    (torn / "config.json").write_text("{")
    (torn / "history.jsonl").write_text('{"time": 3}\n{"time": "now", "event": "start"}\n')
    wrong = write_run(
        tmp_path / "wrong",
        [{"step": 1, "loss": "low", "mlm_loss": True}],
        config={"data": ["absent"], "versions": 3, "stream": [], "model": None},
    )
    page, _ = make(tmp_path, empty, torn, wrong, runs[0], runs[0])
    for text in (
        "a RUN that was given twice is shown once",
        "empty: metrics.jsonl has no record yet",
        "torn: 1 damaged lines of metrics.jsonl are left out",
        "torn: config.json: not JSON",
        "torn: 1 damaged lines of history.jsonl are left out",
        "wrong: values that are no numbers are left out: loss, mlm_loss",
        "absent: no index.json here",
    ):
        assert text in page.words
    assert page.words.count("A empty") >= 1 and "E " not in page.rows[0]


def test_pretraining_and_fine_tuning_have_panels_of_their_own(tmp_path, runs):
    records = [{"step": 5, "loss": 0.6, "lr": 1e-5}, {"step": 10, "dev_matthews": 0.25}]
    tuned = write_run(tmp_path / "cola", records, config={"task": "glue/cola", "steps": 10})
    page, _ = make(tmp_path, runs[0], tuned)
    assert [chart["lines"][0]["run"] for chart in page.charts["Loss"]] == [0, 1]
    assert page.charts["Dev matthews"][0]["lines"][0]["y"] == [0.25]
    assert "fine-tuning on glue/cola" in page.words


def test_the_history_tells_a_start_that_never_ended(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 7.0}], exit={"code": 0, "reason": "r"})
    start = {"event": "start", "machine": "node7", "device": "a CPU", "ranks": 2}
    end = {"event": "end", "code": 75, "reason": "stopped after step 4 of 9: SIGTERM", "step": 4}
    times = [f"2026-01-02T03:04:0{n}+00:00" for n in range(4)]
    events = [{"time": t} | e for t, e in zip(times, (start, end, start, start), strict=True)]
    (run / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page, _ = make(tmp_path, run)
    what = [row[1] for row in page.rows if row[0].startswith("2026") or row[1:2] == ["no end"]]
    assert what == ["start", "stopped, can go on", "start", "no end", "start"]
    assert ["A run", "node7", "a CPU", "2"] in page.rows


def test_text_of_files_is_shown_as_text(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    run = write_run(
        tmp_path / "<b>run",
        [{"step": 1, "loss": 1.0, f"dev_{evil}": 0.5}],
        config={"task": evil, evil: evil},
        exit={"code": 5, "reason": evil},
    )
    page, html = make(tmp_path, run)
    assert evil not in html and "<b>run" not in html
    assert evil in page.words


def test_a_page_asks_for_nothing(both):
    page, html = both
    assert all(link.startswith("#") for link in page.links)
    assert "url(" not in html and "@import" not in html and "//" not in html.split("</style>")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_in_a_browser(tmp_path, runs, both, width, is_dark):
    """What a reader sees: no overflow, the colours asked for, every chart drawn, nothing loaded."""
    (tmp_path / "report.html").write_text(both[1])

    async def look(page):
        await page.open(tmp_path / "report.html", width=width, is_dark=is_dark)
        facts = json.loads(await page.ask(FACTS))
        picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
        await page.ask(POINT)
        shown = await page.ask("document.querySelector('.chart output').textContent")
        return facts, picture, shown, page.requests, page.errors

    facts, picture, shown, requests, errors = with_page(tmp_path / "profile", look)
    assert facts["scroll"] <= facts["width"] == width
    assert requests == [(tmp_path / "report.html").as_uri()] and errors == []
    background = np.array(facts["background"])
    assert (background.mean() < 60) == is_dark
    assert abs(background.mean() - np.mean(facts["text"])) > 120  # contrast
    pixels = np.asarray(picture)
    assert tuple(pixels[5, 5]) == tuple(background)
    assert len(facts["charts"]) >= 9 + 4
    for name, left, top, right, bottom in facts["charts"]:
        assert 0 <= left < right <= width and right - left > 280, name
        inside = pixels[round(top) : round(bottom), round(left) : round(right)].reshape(-1, 3)
        coloured = (np.ptp(inside.astype(int), axis=1) > 60).mean()
        assert coloured > 0.003, f"{name}: no line is seen"
    for name, low, high in facts["fonts"]:
        assert low >= 9 and high <= 16, f"{name}: text of {low} to {high} px"
    last = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    loss = [record["loss"] for record in last if "loss" in record][-1]
    assert f"{float(f'{loss:.5g}'):g}" in shown


# Run in the page. The sizes of texts are those on the screen, after scaling.
FACTS = """JSON.stringify((() => {
  const rgb = (text) => text.match(/\\d+/g).slice(0, 3).map(Number);
  const style = getComputedStyle(document.body);
  const charts = [...document.querySelectorAll(".chart")];
  const box = (c) => c.querySelector("svg").getBoundingClientRect();
  return {
    scroll: document.documentElement.scrollWidth, width: innerWidth,
    background: rgb(style.backgroundColor), text: rgb(style.color),
    charts: charts.map((c) => [c.querySelector("b").textContent, box(c).left,
      box(c).top + scrollY, box(c).right, box(c).bottom + scrollY]),
    fonts: charts.map((c) => {
      const scale = box(c).width / 360;
      const size = (text) => scale * parseFloat(getComputedStyle(text).fontSize);
      const sizes = [...c.querySelectorAll("text")].map(size);
      return [c.querySelector("b").textContent, Math.min(...sizes), Math.max(...sizes)];
    }),
  };
})())"""
POINT = """(() => {
  const svg = document.querySelector(".chart svg"), box = svg.getBoundingClientRect();
  const place = {clientX: box.right - 20 * box.width / 360, clientY: box.top + 50};
  svg.dispatchEvent(new PointerEvent("pointermove", place));
})()"""


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        ((10, 20), (6.9158, 6.9163)),
        ((124_900, 125_000), (0.30001, 0.30031)),
        ((1_000_000, 1_000_900), (1.5e-5, 1.5004e-5)),
        ((2, 9), (12_345.1, 12_345.9)),
    ],
)
def test_a_label_says_what_stands_at_its_tick(steps, values):
    """Of a narrow range too, of which all ticks are alike in four digits."""
    points = [Point(*where, *2 * where[1:]) for where in zip(steps, values, strict=True)]
    chart = Chart(title="t", unit="u", lines=[Line(run=0, name="", points=points)])
    for scale, ticks, axis in ((chart.x, chart.x_ticks, "x"), (chart.y, chart.y_ticks, "y")):
        for tick in ticks:
            number, letter = re.fullmatch(r"([-\d.,e]+?)([kMG]?)", tick.text).groups()
            said = float(number.replace(",", "")) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[letter]
            assert abs(scale(said) - getattr(tick, axis)) < 6, tick  # of 284 and 184 units
        assert len({tick.text for tick in ticks}) == len(ticks) > 2


def test_every_label_is_inside_its_chart_and_apart_from_the_others():
    lines = [
        Line(run=n, name="", points=[Point(0, 5 + n / 99, 0, 9), Point(9, 7, 0, 9)])
        for n in range(6)
    ]
    chart = Chart(title="t", unit="u", lines=lines)
    heights = sorted(label.y for label in chart.ends)
    assert min(b - a for a, b in zip(heights, heights[1:], strict=False)) >= 12
    assert heights[-1] <= HEIGHT and heights[0] >= 0
    for label in chart.x_ticks + chart.y_ticks:
        assert 0 <= label.x <= WIDTH and 0 <= label.y <= HEIGHT
    assert LEFT < chart.x(4) < RIGHT
    rate = Chart(
        title="t", unit="u", lines=[Line(run=0, name="", points=[Point(0, 1e-3, 0, 1e-3)])]
    )
    assert "0.00025" in [label.text for label in rate.y_ticks]
    for label in rate.y_ticks:
        assert label.x > 6.4 * len(label.text)  # of the font, 11 px high
