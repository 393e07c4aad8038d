"""Seeds on the report page and in its tables, against scipy's own intervals."""

import csv
import json
import re

import pytest
from albert_lab.commands.report import main
from albert_lab.report.chart import Chart
from albert_lab.report.folder import read_runs
from albert_lab.report.seeds import draw_bands, find_settings
from scipy.stats import ttest_1samp, ttest_rel

from albert_ds.base.errors import UserError
from tests.lab.test_report import Read, write_run

LOSSES = {"base": {1: 5.0, 2: 5.3, 3: 4.9}, "wide": {2: 5.2, 3: 4.7, 4: 4.4}}


def train(folder, name: str, seed: int, loss: float):
    """A run with three evaluations, of which the last gives `loss`; seed 3 has one in between."""
    steps = [(10, loss + 1), (20, loss + 0.5), (30, loss)]
    records = [{"step": step, "heldout_mlm_loss": value} for step, value in steps]
    config = {"seed": seed, "stream": {"seed": seed, "objective": "none"}, "command": f"{seed}"}
    config |= {"steps": 30, "model": {"hidden_size": {"base": 32, "wide": 64}[name]}}
    more = [{"step": 25, "heldout_mlm_loss": 9.0}] * (seed == 3)
    run = folder / name / f"seed-{seed}"
    return write_run(run, [*records[:2], *more, records[2]], config=config)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return [train(folder, name, *each) for name, of in LOSSES.items() for each in of.items()]


def read_csv(path) -> list[list[str]]:
    return [*csv.reader(path.read_text(encoding="utf-8").splitlines())]


def test_means_and_differences_are_those_of_scipy(sweep, tmp_path):
    main([*map(str, sweep), "--output", str(tmp_path / "a.html"), "--csv", str(tmp_path / "t")])
    page = Read((tmp_path / "a.html").read_text())
    means, differences = (read_csv(tmp_path / "t" / f"{x}.csv") for x in ("seeds", "differences"))
    assert [row for row in means + differences if row not in page.rows] == []
    for (name, letters), row in zip((("base", "ABC"), ("wide", "DEF")), means[1:], strict=True):
        values = [*LOSSES[name].values()]
        low, high = ttest_1samp(values, 0).confidence_interval(0.95)
        assert row[:3] == [f"{name} ({letters})", "heldout_mlm_loss", "3"]
        expected = (sum(values) / 3, (high - low) / 2, min(values), max(values))
        assert [*map(float, row[3:])] == pytest.approx(expected, rel=1e-5)
    ((name, minus, key, count, *numbers),) = differences[1:]
    assert (name, minus, key, count) == ("wide (DEF)", "base (ABC)", "heldout_mlm_loss", "2")
    pairs = [[LOSSES[x][seed] for seed in (2, 3)] for x in ("wide", "base")]  # what both have
    low, high = ttest_rel(*pairs).confidence_interval(0.95)
    assert [*map(float, numbers)] == pytest.approx([-0.15, (high - low) / 2, -0.2, -0.1], rel=1e-5)


def test_a_band_goes_from_the_lowest_to_the_highest_seed(sweep):
    settings, _ = find_settings(read_runs(sweep))
    (chart,) = draw_bands(settings)
    assert isinstance(chart, Chart) and chart.title == "MLM loss over seeds"
    for line, values in zip(chart.lines, map(dict.values, LOSSES.values()), strict=True):
        assert [point.x for point in line.points] == [10, 20, 30]  # 25 has one seed alone
        for point, more in zip(line.points, (1, 0.5, 0), strict=True):
            losses = [value + more for value in values]
            assert point[1:] == pytest.approx((sum(losses) / 3, min(losses), max(losses)))
        strokes = re.findall(r"V", chart.whiskers(line))
        assert len(strokes) == 3


def test_every_table_is_a_csv(sweep, tmp_path):
    main([str(sweep[0]), str(sweep[-1]), "--output", str(tmp_path / "a.html"), "--csv",
          str(tmp_path / "t")])  # fmt: skip
    names = {path.name for path in (tmp_path / "t").iterdir()}
    assert names == {"evaluations.csv", "configuration-pretraining.csv"}  # no seeds to compare
    header, *rows = read_csv(tmp_path / "t" / "evaluations.csv")
    assert header == ["run", "step", "mlm_loss"]
    expected = [
        [run.name, str(record["step"]), str(record["heldout_mlm_loss"])]
        for run in (sweep[0], sweep[-1])
        for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    ]
    assert rows == expected
    configuration = read_csv(tmp_path / "t" / "configuration-pretraining.csv")
    keys = {key: values for key, *values in configuration}
    assert keys["model.hidden_size"] == ["32", "64"] and keys["steps"] == ["30", "30"]


def test_a_seed_counts_once_and_a_folder_with_tables_is_refused(sweep, tmp_path):
    again = train(tmp_path, "base", 1, 7.0)
    runs = [sweep[0], again, sweep[1]]
    main([*map(str, runs), "--output", str(tmp_path / "a.html"), "--csv", str(tmp_path / "t")])
    page = Read((tmp_path / "a.html").read_text())
    assert "of one configuration and seed with" in page.words
    assert read_csv(tmp_path / "t" / "seeds.csv")[1][2] == "2"
    with pytest.raises(UserError, match="--output .*: holds .*csv; name another folder"):
        main([str(sweep[0]), "--output", str(tmp_path / "b.html"), "--csv", str(tmp_path / "t")])
    assert not (tmp_path / "b.html").exists()
