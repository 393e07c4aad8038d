"""One run as its folder tells it: configuration, records, history, and the data it read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from albert_ds.base.cli import Range
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check, parse_json, read_json, read_lines
from albert_lab.report.chart import LETTERS

NUMBER = Range(ge=-1e99, le=1e99)  # what an axis can show
EVENT = {"time": str, "event": ("start", "end")}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """What is known of a run. Files other than metrics.jsonl may be missing; `notes` says so."""

    number: int  # decides letter, colour, dashes and marker
    name: str
    path: Path
    records: list[dict]
    config: dict
    ending: dict | None  # exit.json
    history: list[dict]  # starts and ends, oldest first
    notes: list[str] = field(default_factory=list)

    @property
    def is_finetuning(self) -> bool:
        return "task" in self.config or any(k.startswith("dev_") for r in self.records for k in r)

    @property
    def letter(self) -> str:
        return LETTERS[self.number]

    @property
    def steps(self) -> int:
        """The last step with a record."""
        return max((record["step"] for record in self.records), default=0)

    def values(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every record that has `key`; NaN where the value is null or no number.

        A second record of a step replaces the first: metrics.jsonl has one only after a crash.
        """
        values = {r["step"]: r[key] for r in self.records if key in r}
        return [(s, float(v) if is_number(v) else math.nan) for s, v in sorted(values.items())]

    def last(self, key: str) -> float | None:
        known = [value for _, value in self.values(key) if not math.isnan(value)]
        return known[-1] if known else None


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value in NUMBER


def read_runs(paths: Sequence[Path], names: Sequence[str] | None = None) -> list[RunFolder]:
    """The runs in RUN folders or metrics.jsonl files. Raises UserError where one has no records."""
    if len(paths) > len(LETTERS):
        raise UserError(f"RUN: {len(paths)} runs; allowed: at most {len(LETTERS)} in one picture")
    named = zip(paths, names or name_runs(paths), strict=True)
    return [read_folder(path, number, name) for number, (path, name) in enumerate(named)]


def read_folder(path: Path, number: int, name: str) -> RunFolder:
    """Read a RUN folder or a metrics.jsonl; UserError where there is no metrics.jsonl."""
    metrics = metrics_path(path)
    notes = []
    folder = metrics.parent
    # Runs of several seeds end together. `.` has no name.
    ended = folder.absolute().parent if folder.absolute().name.startswith("seed-") else folder
    records = read_lines(metrics)
    damaged = len(metrics.read_bytes().splitlines()) - len(records)
    if damaged and not records:
        raise UserError(f"{metrics}: none of its lines is a record of a step, as in metrics.jsonl")
    if damaged:
        notes.append(f"{damaged} damaged lines of metrics.jsonl are left out")
    if not records:
        notes.append("metrics.jsonl has no record yet")
    wrong = sorted({k for r in records for k, v in r.items() if v is not None and not is_number(v)})
    if wrong:
        notes.append(f"values that are no numbers are left out: {', '.join(wrong)}")
    return RunFolder(
        number=number,
        name=name,
        path=folder if metrics.name == "metrics.jsonl" else metrics,
        records=records,
        config=_read(folder / "config.json", notes) or {},
        ending=_read(ended / "exit.json", notes, is_optional=True),
        history=_read_history(ended / "history.jsonl", notes),
        notes=notes,
    )


def _read(path: Path, notes: list[str], *, is_optional: bool = False) -> dict | None:
    """A JSON object; None, and a note, where there is none that can be read."""
    if is_optional and not path.exists():
        return None
    try:
        return read_json(path, path.name)
    except UserError as error:
        notes.append(str(error))
        return None


def _read_history(path: Path, notes: list[str]) -> list[dict]:
    """The starts and ends in history.jsonl. Runs of earlier versions have none."""
    if not path.is_file():
        return []
    events = []
    damaged = 0
    for line in path.read_bytes().splitlines():
        try:
            event = parse_json(line, path.name)
            check(event, EVENT, path.name)
            events.append(event)
        except UserError:
            damaged += 1
    if damaged:
        notes.append(f"{damaged} damaged lines of {path.name} are left out")
    return events


def metrics_path(run: Path) -> Path:
    """The metrics.jsonl of a run folder, or the file itself; UserError where there is none."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(
            f"{run}: no metrics.jsonl there; allowed: a RUN that has been started (of several "
            "seeds: one of its folders seed-S), or a metrics.jsonl"
        )
    return path


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
