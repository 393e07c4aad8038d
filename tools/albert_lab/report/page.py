"""The page: what it says of each run, the tables, and the HTML, which page.html holds."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from albert_ds.base.errors import UserError
from albert_lab.report import chart
from albert_lab.report.chart import as_percent
from albert_lab.report.corpus import Corpus, Data, read_corpus
from albert_lab.report.folder import RunFolder, is_number
from albert_lab.report.panels import PAIRS, draw_losses, draw_others, evaluated_data, interval
from albert_lab.report.seeds import draw_bands, find_settings, list_differences, list_means
from albert_lab.report.table import ABSENT, Table

HIDDEN = ("versions", "output")  # not part of the configuration that runs are compared by
STATES = {  # exit code -> sign and word
    "0": ("\u2713", "finished"),
    "2": ("\u2715", "wrong input"),
    "3": ("\u2715", "damaged data"),
    "4": ("\u2715", "diverged"),
    "5": ("\u2715", "machine failed"),
    "75": ("\u275a\u275a", "stopped, can go on"),
}


def build_page(runs: Sequence[RunFolder], notes: Sequence[str]) -> tuple[str, dict[str, Table]]:
    """The whole page, and its tables by name. `notes` are about the runs as a whole."""
    corpora = read_corpora(runs)
    groups = split_groups(runs)
    settings, doubled = find_settings(runs)
    evaluations = {run.name: table for run in runs if (table := list_evaluations(run)).rows}
    configurations = {title: compare_configs(group) for title, group in groups.items()}
    seeds = {"seeds": list_means(settings), "differences": list_differences(settings)}
    tables = {"evaluations": join_tables(evaluations), **seeds}
    for title, (differing, common) in configurations.items():
        header = ["key", *(run.name for run in groups[title])]
        rows = [*differing.rows, *([key, *[x] * len(groups[title])] for key, x in common.rows)]
        tables[f"configuration-{title.lower()}"] = Table(header=header, rows=rows)
    panels = {
        title: draw_losses(group, corpora) + draw_others(group) for title, group in groups.items()
    }
    html = render(
        "page.html",
        runs=runs,
        chart=chart,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        notes=[*notes, *doubled, *(f"{run.name}: {note}" for run in runs for note in run.notes)],
        state=tell_state,
        results=[list_results(run, corpora) for run in runs],
        panels=panels,
        seeds=seeds,
        bands=draw_bands(settings),
        evaluations=[*evaluations.values()],
        configurations=configurations,
        versions=compare([read_versions(run) for run in runs], runs),
        machines=list_machines(runs),
        corpora=[(corpus, list_facts(corpus)) for corpus in corpora.values()],
        histories=[list_history(run) for run in runs],
    )
    return html, {name: table for name, table in tables.items() if table.rows}


def draw_curves(runs: Sequence[RunFolder]) -> list[chart.Chart]:
    """The losses and scores alone. Raises UserError where no run has a value to draw."""
    charts = [c for group in split_groups(runs).values() for c in draw_losses(group, {})]
    if not charts:
        names = ", ".join(str(run.path) for run in runs)
        raise UserError(f"{names}: no loss and no accuracy is recorded yet")
    return charts


def render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("albert_lab.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def split_groups(runs: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """The runs of pretraining and those of fine-tuning, which have charts of their own."""
    groups = {
        title: [run for run in runs if run.is_finetuning == tuned]
        for title, tuned in (("Pretraining", False), ("Fine-tuning", True))
    }
    return {title: group for title, group in groups.items() if group}


def read_corpora(runs: Sequence[RunFolder]) -> dict[Data, Corpus]:
    """The data sets that runs are evaluated on, each read once."""
    corpora: dict[Data, Corpus] = {}
    for run in runs:
        data = evaluated_data(run)
        if data.folder and data not in corpora and not run.is_finetuning:
            samples = run.config.get("eval_samples")
            limit = int(samples) if is_number(samples) else 4096
            corpora[data] = read_corpus(data, run.config, limit)
    return corpora


def tell_state(run: RunFolder) -> tuple[str, str]:
    """A sign and a word: how the last start of a run ended."""
    if run.ending is None:
        return "\u2026", "running, or ended without exit.json"
    code = run.ending.get("code")
    return STATES.get(show(code), ("\u2715", f"ended with code {show(code)}"))


def list_results(run: RunFolder, corpora: dict[Data, Corpus]) -> list[tuple[str, str, str]]:
    """(what, value, what to compare it with) of the last records of a run."""
    rows = [("steps", f"{run.steps:,}", f"of {count(run.config.get('steps'))}")]
    if (samples := run.last("samples")) is not None:
        rows.append(("samples", f"{samples:,.0f}", ""))
    if (speed := median(value for _, value in run.values("tokens_per_second"))) is not None:
        seconds = time_trained(run)
        rows.append(("tokens a second", f"{speed:,.0f}", f"median; {seconds} of training"))
    if run.is_finetuning:
        scores = sorted({k for record in run.records for k in record if k.startswith("dev_")})
        best = {key: run.last(key) for key in scores}
        rows += [(f"dev {k[4:]}", f"{v:.4f}", "last") for k, v in best.items() if v is not None]
        return rows
    if (loss := run.last("heldout_mlm_loss")) is not None:
        corpus = corpora.get(evaluated_data(run))
        unigram = corpus.unigram if corpus else None
        beside = f"frequencies alone {unigram.loss:.3f}" if unigram else ""
        rows.append(("held-out MLM loss", f"{loss:.3f}", beside))
        beside = f"always {unigram.piece!r} {as_percent(unigram.share)}" if unigram else ""
        rows.append(list_share(run, "mlm", "masked", "held-out MLM accuracy", beside))
    for task, title in PAIRS.items():
        if run.last(f"heldout_{task}_accuracy") is not None:
            name = f"held-out {title} accuracy"
            rows.append(list_share(run, task, "pairs", name, "a coin 50\u00a0%"))
    return rows


def list_share(
    run: RunFolder, task: str, trials: str, name: str, beside: str
) -> tuple[str, str, str]:
    """A held-out accuracy with its interval; `beside` says what to compare it with."""
    share = run.last(f"heldout_{task}_accuracy")
    number = run.last(f"heldout_{trials}")
    if share is None:
        return name, ABSENT, ""
    low, high = interval(share, number or 0)
    around = (
        f"95\u00a0%: {as_percent(low)} .. {as_percent(high)} of {number:,.0f}" if number else ""
    )
    return name, as_percent(share), "; ".join(filter(None, (around, beside)))


def time_trained(run: RunFolder) -> str:
    """Time of all logged steps; evaluation and saving are left out."""
    total = 0.0
    before = 0
    for step, seconds in run.values("step_seconds"):
        total += (step - before) * (0.0 if math.isnan(seconds) else seconds)
        before = step
    hours, minutes = divmod(round(total / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{total / 60:.1f} min"


def list_evaluations(run: RunFolder) -> Table:
    """Every held-out or dev record, as it stands in metrics.jsonl."""
    marks = ("heldout_", "dev_")
    keys = list(dict.fromkeys(k for r in run.records for k in r if k.startswith(marks)))
    rows = [
        [str(record["step"]), *(show(record.get(key, ABSENT)) for key in keys)]
        for record in run.records
        if any(key in record for key in keys)
    ]
    header = [
        f"{run.letter} step",
        *(k.removeprefix("heldout_").removeprefix("dev_") for k in keys),
    ]
    return Table(header=header, rows=rows)


def join_tables(evaluations: dict[str, Table]) -> Table:
    """Those of `list_evaluations` in one, by the names of their runs."""
    keys = [*dict.fromkeys(key for table in evaluations.values() for key in table.header[1:])]
    rows = []
    for name, table in evaluations.items():
        for step, *values in table.rows:
            cells = dict(zip(table.header[1:], values, strict=True))
            rows.append([name, step, *(cells.get(key, ABSENT) for key in keys)])
    return Table(header=["run", "step", *keys], rows=rows)


def flatten(config: dict, hidden: Sequence[str] = (), above: str = "") -> dict[str, str]:
    """Dotted key -> value as text, of nested objects."""
    texts: dict[str, str] = {}
    for key, value in config.items():
        if key in hidden:
            continue
        if isinstance(value, dict) and value:
            texts |= flatten(value, (), f"{above}{key}.")
        else:
            texts[above + key] = show(value)
    return texts


def read_versions(run: RunFolder) -> dict[str, str]:
    versions = run.config.get("versions")
    return flatten(versions) if isinstance(versions, dict) else {}


def compare_configs(runs: Sequence[RunFolder]) -> tuple[Table, Table]:
    return compare([flatten(run.config, HIDDEN) for run in runs], runs)


def compare(configs: Sequence[dict[str, str]], runs: Sequence[RunFolder]) -> tuple[Table, Table]:
    """The keys whose values differ between the runs, and those whose values do not."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key, ABSENT) for config in configs] for key in keys}
    differing = [[key, *values] for key, values in rows.items() if len(set(values)) > 1]
    common = [[key, values[0]] for key, values in rows.items() if len(set(values)) == 1]
    return (
        Table(header=["key", *(f"{run.letter} {run.name}" for run in runs)], rows=differing),
        Table(header=["key", "value"], rows=common),
    )


def list_machines(runs: Sequence[RunFolder]) -> Table:
    """The different machines on which the runs were started."""
    rows = []
    for run in runs:
        keys = ("machine", "device", "ranks")
        starts = [event for event in run.history if event["event"] == "start"]
        machines = dict.fromkeys(tuple(show(s.get(key, ABSENT)) for key in keys) for s in starts)
        rows += [[f"{run.letter} {run.name}", *values] for values in machines]
    return Table(header=["run", "machine", "device", "ranks"], rows=rows)


def list_history(run: RunFolder) -> Table:
    """Starts and ends; for a run of an earlier version only the last end."""
    rows = []
    for number, event in enumerate(run.history):
        time = event["time"].replace("T", " ").replace("+00:00", " UTC")
        if event["event"] == "start":
            where = f"on {event.get('machine', ABSENT)}, {event.get('ranks', ABSENT)} ranks"
            rows.append([time, "start", "", "", where])
            follows = run.history[number + 1 : number + 2]
            if follows and follows[0]["event"] == "start":
                rows.append(["", "no end", "", "", "killed or crashed: it could record nothing"])
        else:
            rows.append([time, *tell_end(event)])
    if not run.history and run.ending is not None:
        rows.append(["not recorded", *tell_end(run.ending)])
    return Table(header=[f"{run.letter} {run.name}", "what", "code", "step", "reason"], rows=rows)


def tell_end(event: dict) -> list[str]:
    _, word = STATES.get(show(event.get("code")), ("", "ended"))
    return [word, *(show(event.get(key, ABSENT)) for key in ("code", "step", "reason"))]


def list_facts(corpus: Corpus) -> list[tuple[str, str]]:
    """What index.json says of a data set."""
    if not corpus.index:
        return []
    counts = corpus.index.get("counts", {})
    splits = corpus.index["splits"]
    train, held = splits["train"], splits["heldout"]
    facts = {
        "documents": f"{train['documents']:,} to train on, {held['documents']:,} held out",
        "sequences": f"{train['samples']:,} and {held['samples']:,}",
        "tokens": f"{train['tokens']:,} and {held['tokens']:,}",
        "longest sequence": f"{corpus.index['sequence_length']:,} tokens",
        "vocabulary": f"{count(corpus.index.get('vocab_size'))} pieces",
        "language": show(corpus.index.get("language", ABSENT)),
    }
    if is_number(fill := corpus.index.get("fill")):
        facts["fill"] = as_percent(fill)
    if is_number(unknown := counts.get("unknown_tokens")) and is_number(counts.get("tokens")):
        facts["unknown tokens"] = f"{unknown:,} ({unknown / max(1, counts['tokens']):.4%})"
    if is_number(twice := counts.get("duplicate_documents")):
        facts["documents that occur twice"] = f"{twice:,}"
    if corpus.unigram:
        facts["most frequent masked piece"] = (
            f"{corpus.unigram.piece!r}, {as_percent(corpus.unigram.share)} of "
            f"{corpus.unigram.masked:,} held-out masked tokens"
        )
    return list(facts.items())


def show(value: Any) -> str:
    """A value of a JSON file as text."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def count(value: Any) -> str:
    return f"{value:,}" if is_number(value) else ABSENT


def median(values: Iterable[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else None
