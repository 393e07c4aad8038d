"""Which charts the runs' metrics make, and the held-out numbers with their intervals."""

import math
from collections.abc import Sequence

from albert_ds.data.stream_config import list_pair_tasks
from albert_ds.lab.report.chart import Chart, Level, Line, Point, as_percent, thin
from albert_ds.lab.report.corpus import Corpus
from albert_ds.lab.report.folder import RunFolder

MOST_POINTS = 240  # of a line; more are merged
COIN_LOSS = math.log(2)
PAIRS = list_pair_tasks()


def draw_panels(runs: Sequence[RunFolder], corpora: dict[str, Corpus]) -> list[Chart]:
    """A chart for every quantity that one of `runs` has; all are pretraining or all fine-tuning.

    `corpora` are by the folder's name; the first folder of a run is the one that is evaluated.
    """
    if runs[0].is_finetuning:
        scores = sorted({k for run in runs for r in run.records for k in r if k.startswith("dev_")})
        charts = [_draw(runs, "loss", "Loss", "mean of an example", may_be_log=True)]
        charts += [_draw(runs, key, f"Dev {key[4:]}", "of the task") for key in scores]
    else:
        levels = list_levels(runs, corpora)
        charts = [_draw(runs, "loss", "Loss", "nats: MLM and the sentence task", may_be_log=True)]
        charts += [
            _draw(runs, "mlm_loss", "MLM loss", "nats a masked token", levels["mlm_loss"]),
            _draw(runs, "mlm_accuracy", "MLM accuracy", "of the masked tokens",
                  levels["mlm_accuracy"], is_share=True, from_zero=True),
        ]  # fmt: skip
        for task, title in PAIRS.items():
            coin = [Level(0.5, "a coin: 50\u00a0%")]
            charts += [
                _draw(runs, f"{task}_accuracy", f"{title} accuracy", "of the pairs", coin,
                      is_share=True),
                _draw(runs, f"{task}_loss", f"{title} loss", "nats a pair",
                      [Level(COIN_LOSS, "a coin: 0.693")]),
            ]  # fmt: skip
    charts += [
        _draw(runs, "lr", "Learning rate", "of the last step", from_zero=True),
        _draw(runs, "grad_norm", "Gradient norm", "before clipping", may_be_log=True),
        _draw(runs, "tokens_per_second", "Throughput", "tokens a second", from_zero=True),
        _draw(runs, "mfu", "MFU", "of the GPUs' peak", is_share=True, from_zero=True),
        _draw(runs, "num_layers", "Depth", "layers that ran", from_zero=True),
        _draw(runs, "data_wait_fraction", "Waiting for data", "of the time", is_share=True,
              from_zero=True),
        _draw(runs, "skipped_steps", "Skipped steps", "since the last record", from_zero=True),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def list_levels(runs: Sequence[RunFolder], corpora: dict[str, Corpus]) -> dict[str, list[Level]]:
    """What guessing by the frequencies of pieces reaches, a line for each data set."""
    found: dict[str, list[Level]] = {"mlm_loss": [], "mlm_accuracy": []}
    readers: dict[str, str] = {}
    for run in runs:
        folder = evaluated_data(run)
        if folder in corpora and corpora[folder].unigram:
            readers[folder] = readers.get(folder, "") + run.letter
    for folder, letters in readers.items():
        unigram = corpora[folder].unigram
        assert unigram is not None
        name = "" if len(readers) == 1 else f" ({letters})"
        share = as_percent(unigram.share)
        found["mlm_loss"].append(Level(unigram.loss, f"frequencies alone{name}: {unigram.loss:.2f}"))
        found["mlm_accuracy"].append(Level(unigram.share, f"most frequent piece{name}: {share}"))
    return found


def evaluated_data(run: RunFolder) -> str:
    """The DATA folder whose held-out part the run evaluates, "" where it is not recorded."""
    data = run.config.get("data")
    return data[0] if isinstance(data, list) and data and isinstance(data[0], str) else ""


def _draw(
    runs: Sequence[RunFolder],
    key: str,
    title: str,
    unit: str,
    levels: Sequence[Level] = (),
    **how: bool,
) -> Chart | None:
    """The chart of one metric: thin lines for training, thick ones with markers for held out.

    None where no run has a value of it.
    """
    lines, merged = [], 0
    for run in runs:
        held = list_heldout(run, key)
        for name, found, is_main in (
            ("", [Point(s, v, v, v) for s, v in run.values(key)], not held),
            ("held out", held, True),
        ):
            if any(not math.isnan(point.y) for point in found):
                shown = thin(found, MOST_POINTS)
                merged = max(merged, round(len(found) / len(shown)) if shown is not found else 0)
                is_both = bool(held) and not name
                lines.append(
                    Line(
                        run=run.number,
                        name=name or ("training" if is_both else ""),
                        points=shown,
                        is_main=is_main,
                    )
                )
    if not lines or (key == "skipped_steps" and not any(p.y for li in lines for p in li.points)):
        return None
    note = f"A point is the mean of about {merged} records, the band their range." if merged else ""
    return Chart(title=title, unit=unit, lines=lines, levels=levels, note=note, **how)


def list_heldout(run: RunFolder, key: str) -> list[Point]:
    """The held-out values of a metric; a share with its 95 % interval."""
    trials = "heldout_masked" if key.startswith("mlm_") else "heldout_pairs"
    counts = dict(run.values(trials)) if key.endswith("_accuracy") else {}
    found = []
    for step, value in run.values(f"heldout_{key}"):
        count = counts.get(step, math.nan)
        low, high = (value, value) if math.isnan(value) else interval(value, count)
        found.append(Point(step, value, low, high))
    return found


def interval(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share of `count` trials; the share where it has none.

    The tokens of one sentence are not independent: the true interval is a little wider.
    """
    if not (0 <= share <= 1 and count >= 1):
        return share, share
    from scipy.stats import binomtest

    found = binomtest(round(share * count), int(count)).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)
