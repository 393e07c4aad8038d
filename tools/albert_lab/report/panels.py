"""Which charts the runs' metrics make, and the held-out numbers with their intervals."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy.stats import binomtest

from albert_ds.data.stream_config import list_pair_tasks
from albert_lab.report.chart import Chart, Level, Line, Point, as_percent, thin
from albert_lab.report.corpus import Corpus, Data
from albert_lab.report.folder import RunFolder

MOST_POINTS = 240  # of a line; more are merged
PAIRS = list_pair_tasks()
COIN = {"accuracy": Level(0.5, "a coin: 50\u00a0%"), "loss": Level(math.log(2), "a coin: 0.693")}


class Panel(NamedTuple):
    """A metric, its title, its unit, and fields of its `Chart`."""

    key: str
    title: str
    unit: str
    fields: dict[str, Any]


SHARE, FROM_ZERO, MAY_BE_LOG = {"is_share": True}, {"from_zero": True}, {"may_be_log": True}
PRETRAINING = [
    Panel("loss", "Loss", "nats: MLM and the sentence task", MAY_BE_LOG),
    Panel("mlm_loss", "MLM loss", "nats a masked token", {}),
    Panel("mlm_accuracy", "MLM accuracy", "of the masked tokens", SHARE | FROM_ZERO),
    *(
        Panel(f"{task}_accuracy", f"{name} accuracy", "of the pairs", SHARE)
        for task, name in PAIRS.items()
    ),
    *(Panel(f"{task}_loss", f"{name} loss", "nats a pair", {}) for task, name in PAIRS.items()),
    Panel("exit_loss", "Losses at exits", "nats a masked token, weighted", {}),
    Panel("z_loss", "z-loss", "mean of log(Z)^2, weighted", {}),
    Panel("teacher_loss", "Divergence from the teacher", "nats a masked token, weighted", {}),
]
BOTH = [
    Panel("lr", "Learning rate", "of the last step", FROM_ZERO),
    Panel("batch_size", "Batch", "samples of a step", FROM_ZERO),
    Panel("sequence_length", "Longest sequence", "tokens", FROM_ZERO),
    Panel("masked_fraction", "Masked", "of a sequence's tokens", SHARE | FROM_ZERO),
    Panel("num_layers", "Depth", "layers that ran", FROM_ZERO),
    Panel("grad_norm", "Gradient norm", "before clipping", MAY_BE_LOG),
    Panel("tokens_per_second", "Throughput", "tokens a second", FROM_ZERO),
    Panel("mfu", "MFU", "of the GPUs' peak", SHARE | FROM_ZERO),
    Panel("data_wait_fraction", "Waiting for data", "of the time", SHARE | FROM_ZERO),
    Panel("skipped_steps", "Skipped steps", "since the last record", FROM_ZERO),
]


def draw_losses(runs: Sequence[RunFolder], corpora: dict[Data, Corpus]) -> list[Chart]:
    """A chart of every loss and score that one of `runs` has; all pretrain or all fine-tune.

    The first folder of a run is the one that is evaluated.
    """
    levels: dict[str, list[Level]] = {}
    if not runs[0].is_finetuning:
        levels = list_levels(runs, corpora)
        levels |= {f"{task}_{what}": [coin] for task in PAIRS for what, coin in COIN.items()}
    return _draw_all(runs, list_losses(runs), levels)


def draw_others(runs: Sequence[RunFolder]) -> list[Chart]:
    """A chart of everything else that one of `runs` has."""
    return _draw_all(runs, BOTH, {})


def list_losses(runs: Sequence[RunFolder]) -> list[Panel]:
    if not runs[0].is_finetuning:
        return PRETRAINING
    scores = sorted({k for run in runs for r in run.records for k in r if k.startswith("dev_")})
    panels = [Panel("loss", "Loss", "mean of an example", MAY_BE_LOG)]
    return panels + [Panel(key, f"Dev {key[4:]}", "of the task", {}) for key in scores]


def _draw_all(
    runs: Sequence[RunFolder], panels: Sequence[Panel], levels: dict[str, list[Level]]
) -> list[Chart]:
    charts = [_draw(runs, panel, levels.get(panel.key, ())) for panel in panels]
    return [chart for chart in charts if chart is not None]


def largest_differences(first: RunFolder, other: RunFolder) -> dict[str, tuple[float, int]]:
    """The largest absolute difference of each quantity, and how many steps both logged."""
    largest = {}
    for key, *_ in list_losses([first, other]):
        one, two = dict(first.values(key)), dict(other.values(key))
        if one and two:
            gaps = [abs(one[step] - two[step]) for step in one.keys() & two.keys()]
            known = [gap for gap in gaps if not math.isnan(gap)]
            largest[key] = max(known, default=math.nan), len(known)
    return largest


def list_levels(runs: Sequence[RunFolder], corpora: dict[Data, Corpus]) -> dict[str, list[Level]]:
    """What guessing by the frequencies of pieces reaches, a line for each data set."""
    levels: dict[str, list[Level]] = {"mlm_loss": [], "mlm_accuracy": []}
    readers: dict[Data, str] = {}
    for run in runs:
        data = evaluated_data(run)
        if data in corpora and corpora[data].unigram:
            readers[data] = readers.get(data, "") + run.letter
    for data, letters in readers.items():
        unigram = corpora[data].unigram
        assert unigram is not None
        name = "" if len(readers) == 1 else f" ({letters})"
        share = as_percent(unigram.share)
        levels["mlm_loss"].append(
            Level(unigram.loss, f"frequencies alone{name}: {unigram.loss:.2f}")
        )
        levels["mlm_accuracy"].append(Level(unigram.share, f"most frequent piece{name}: {share}"))
    return levels


def evaluated_data(run: RunFolder) -> Data:
    """The DATA whose held-out part the run evaluates; "" where it is not recorded."""
    recorded = (run.config.get(key) for key in ("data", "data_sha256"))
    folder, content = (x[0] if isinstance(x, list) and x else "" for x in recorded)
    return Data(*(x if isinstance(x, str) else "" for x in (folder, content)))


def _draw(runs: Sequence[RunFolder], panel: Panel, levels: Sequence[Level]) -> Chart | None:
    """The chart of one metric: thin lines for training, thick ones with markers for held out.

    None where no run has a value of it, or no step was skipped.
    """
    lines = []
    merged = 0
    in_training = "training" if panel in PRETRAINING else ""  # not what a held-out point is
    for run in runs:
        held = list_heldout(run, panel.key)
        trained = [Point(step, value, value, value) for step, value in run.values(panel.key)]
        named = {in_training: trained, "held out": held}
        for name, points in named.items():
            if all(math.isnan(point.y) for point in points):
                continue
            shown = thin(points, MOST_POINTS)
            if len(shown) < len(points):
                merged = max(merged, round(len(points) / len(shown)))
            is_main = name != "training"
            lines.append(Line(run=run.number, name=name, points=shown, is_main=is_main))
    drawn = [point.y for line in lines for point in line.points]
    if not drawn or (panel.key == "skipped_steps" and not any(drawn)):
        return None
    note = f"A point is the mean of about {merged} records, the band their range." if merged else ""
    return Chart(
        title=panel.title, unit=panel.unit, lines=lines, levels=levels, note=note, **panel.fields
    )


def list_heldout(run: RunFolder, key: str) -> list[Point]:
    """The held-out values of a metric; a share with its 95 % interval."""
    trials = "heldout_masked" if key.startswith("mlm_") else "heldout_pairs"
    counts = dict(run.values(trials)) if key.endswith("_accuracy") else {}
    points = []
    for step, value in run.values(f"heldout_{key}"):
        count = counts.get(step, math.nan)
        low, high = (value, value) if math.isnan(value) else interval(value, count)
        points.append(Point(step, value, low, high))
    return points


def interval(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share of `count` trials; the share where it has none.

    The tokens of one sentence are not independent: the true interval is a little wider.
    """
    if not (0 <= share <= 1 and count >= 1):
        return share, share
    bounds = binomtest(round(share * count), int(count)).proportion_ci(0.95, method="wilson")
    return float(bounds.low), float(bounds.high)
