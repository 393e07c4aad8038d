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
    """A short name for each run: the last folder of its path that is in no other run's path.

    a/run and b/run are a and b. Where that is not enough, it is the shortest end of the paths that
    tells them apart.
    """
    paths = [run.absolute() for run in runs]
    parts = [(*path.parts[1:-1], path.name.removesuffix(".jsonl")) for path in paths]
    own = [_own_part(number, parts) for number in range(len(parts))]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(path[-length:]) for path in parts]
        if len(set(ends)) == len(set(parts)):
            return [name or end for name, end in zip(own, ends, strict=True)]
    raise AssertionError("paths that differ have ends that differ")


def _own_part(number: int, paths: Sequence[tuple[str, ...]]) -> str | None:
    """The last part of a path that no other path has."""
    others = {part for n, path in enumerate(paths) if n != number for part in path}
    return next((part for part in reversed(paths[number]) if part not in others), None)
