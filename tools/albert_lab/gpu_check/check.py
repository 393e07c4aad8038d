"""One check of a machine: commands in processes of their own, and what their results say.

REPORT/cells/PIECE/NAME.json is a command's end and result, NAME.log what it printed. They are
written as soon as they are known, and the report is made of them alone. So a check that is started
again continues: it runs only the commands that failed or were left out.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.base.files import check_folder, write_file
from albert_ds.base.json_files import read_json
from albert_lab.tables import table

ROOT = Path(__file__).parents[3]
MARK = "GPU_CHECK_CELL"  # a variable of every process that a command starts
LEAST_SECONDS = 8  # a command is not started for less
LEFT_OUT = "left out: no time"
CUT = "left out: it was still running when the minutes were over"
WORDS = {True: "PASS", False: "**FAIL**", None: "-"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one row of the report says."""

    what: str
    passed: bool | None  # None: a figure, or something that this machine cannot do
    says: str


@dataclass(kw_only=True)
class Check:
    """A report folder and the machine that it is about."""

    folder: Path
    gpus: int
    quick: bool  # everything small: it shows that the commands work, and no figure means anything
    data: str = ""  # shards of real text
    ends: float = math.inf  # of the monotonic clock: then all that runs is killed
    stretch: int = 1  # of every limit
    reads_only: bool = False  # what has run

    def limit(self, seconds: float) -> float:
        """How long a command may take that usually has so many seconds."""
        return min(seconds * self.stretch, self.ends - time.monotonic())

    def run(
        self,
        cell: str,
        *command: object,
        seconds: float,
        module: bool = False,
        output: bool = True,
        codes: tuple[int, ...] = (0,),
    ) -> dict:
        """Run `python COMMAND --output FILE` once; returns how it ended, and FILE as `result`.

        cell: PIECE/NAME. seconds: after these, if not stretched, the command and all that it
        started are killed, and the code is None; so it is if there is no time for it. output: False
        if the command takes no --output. codes: those of a good end, which becomes 0.
        """
        path = self.folder / "cells" / f"{cell}.json"
        known = read_json(path, str(path)) if path.exists() else None
        if known and (known["code"] == 0 or self.reads_only):
            return known
        limit = self.limit(seconds)
        if self.reads_only or self.ends - time.monotonic() < LEAST_SECONDS:
            return {"code": None, "last_words": LEFT_OUT, "result": None}
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".result.json")
        written.unlink(missing_ok=True)
        argv = [sys.executable, *(["-m"] if module else []), *map(str, command)]
        argv += ["--output", str(written)] if output else []
        log_line(f"gpu_check: {cell} (at most {limit:.0f} s): {' '.join(argv[1:])}")
        started = time.monotonic()
        log = path.with_suffix(".log")
        code = run_to_end(argv, log, limit)
        code = 0 if code in codes else code
        is_cut = code is None and limit < seconds * self.stretch
        ended = {
            "command": argv[1:],
            "code": code,
            "seconds": round(time.monotonic() - started, 1),
            "last_words": CUT if is_cut else last_words(log, code, limit),
            "result": json.loads(written.read_text()) if written.is_file() else None,
        }
        write_file(path, json.dumps(ended, indent=1) + "\n")
        log_line(f"gpu_check: {cell}: {ended['seconds']} s {ended['last_words']}")
        return ended

    def write_report(self, pieces: dict[str, Callable[[Check], list[Finding]]]) -> bool:
        """Write report.md and results.jsonl about all that has run; True if nothing has failed."""
        about = read_json(self.folder / "about.json", "about.json")
        reader = replace(self, reads_only=True)
        findings = {name: look(reader) for name, look in pieces.items()}
        missing = [n for n, rows in findings.items() if all(row.says == LEFT_OUT for row in rows)]
        findings = {name: rows for name, rows in findings.items() if name not in missing}
        rows = [row for piece in findings.values() for row in piece]
        failed = sum(row.passed is False for row in rows)
        verdict = f"FAIL: {failed} of {len(rows)} rows" if failed else "PASS"
        title = f"# {verdict}: {about['device']}, {about['gpus']} GPU(s), commit {about['commit']}"
        lines = [title, ""]
        reasons = ["device: fake"] * ("fake" in about["device"]) + ["--quick"] * about["quick"]
        if reasons:
            lines += [f"**{', '.join(reasons)}: no figure below means anything**.", ""]
        if missing:
            lines += [f"Not run yet: {', '.join(missing)}.", ""]
        for name, piece in findings.items():
            said = [(row.what, WORDS[row.passed], row.says) for row in piece]
            lines += [f"## {name}", "", table(("what", "", "found"), said), ""]
        write_file(self.folder / "report.md", "\n".join(lines))
        records = [about] + [
            {"piece": name, **asdict(row)} for name, piece in findings.items() for row in piece
        ]
        for path in sorted((self.folder / "cells").glob("*/*.json")):
            if not path.name.endswith(".result.json"):
                cell = read_json(path)
                name = str(path.relative_to(self.folder / "cells").with_suffix(""))
                records.append({"cell": name, "code": cell["code"], "seconds": cell["seconds"]})
                measured = (cell["result"] or {}).get("records", [])
                records += [{"cell": name, **record} for record in measured]
        write_file(self.folder / "results.jsonl", "".join(f"{json.dumps(r)}\n" for r in records))
        return not failed


def run_to_end(argv: list[str], log: Path, seconds: float) -> int | None:
    """Run a command, at most `seconds` long, and kill whatever it started and left."""
    environ = {**os.environ, MARK: str(log)}
    with log.open("wb") as printed:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=environ, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_marked(str(log))
            process.wait()


def kill_marked(mark: str) -> None:
    """Kill all processes of a command: some are in groups of their own, and each holds the GPU."""
    for _ in range(3):  # one may have started another meanwhile
        processes = [process for process in psutil.process_iter() if is_marked(process, mark)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=2)


def is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):  # it has ended, or is somebody else's
        return False


def last_words(log: Path, code: int | None, seconds: float) -> str:
    """What a command that failed said at last, in one line."""
    if code == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("albert-ds:")]
    text = (errors or lines or ["it printed nothing"])[-1].strip()[:300]
    return f"still running after {seconds:.0f} s" if code is None else f"code {code}: {text}"


def ended(what: str, cell: dict, says: str = "") -> Finding:
    """PASS if the command ended with code 0."""
    if cell["code"] == 0:
        return Finding(what=what, passed=True, says=says)
    passed = None if cell["last_words"] in (LEFT_OUT, CUT) else False
    return Finding(what=what, passed=passed, says=cell["last_words"])


def open_folder(folder: Path, about: dict) -> None:
    """Create REPORT, or refuse one that is about another machine, commit or size."""
    path = folder / "about.json"
    if path.exists():
        known = read_json(path, str(path))
        for key, value in about.items():
            if known.get(key) != value:
                raise UserError(
                    f"--output {folder}: holds a check with {key} {known.get(key)}, this one has "
                    f"{value}; allowed: another folder"
                )
        return
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(about, indent=1) + "\n")
