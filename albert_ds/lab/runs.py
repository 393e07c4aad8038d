"""What a picture or a report needs of several runs: their records, and a short name for each."""

from collections.abc import Sequence
from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.json_files import read_lines


def metrics_path(run: Path) -> Path:
    """The metrics.jsonl of a run folder, or the file itself; UserError where there is none."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(
            f"{run}: no metrics.jsonl there; allowed: a RUN that has been started (of several "
            "seeds: one of its folders seed-S), or a metrics.jsonl"
        )
    return path


def read_metrics(run: Path) -> list[dict]:
    """The records of a run folder or of a metrics.jsonl."""
    return read_lines(metrics_path(run))


def name_runs(runs: Sequence[Path]) -> list[str]:
    """For each run the shortest end of its path that no other has: a/run and b/run are a and b."""
    paths = [run.absolute() for run in runs]
    parts = [(*path.parts[1:-1], path.name.removesuffix(".jsonl")) for path in paths]
    if len(set(parts)) > 1:
        while len({path[-1] for path in parts}) == 1 and min(map(len, parts)) > 1:
            parts = [path[:-1] for path in parts]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            return names
    raise AssertionError("paths that differ have ends that differ")
