"""One check of a machine: commands in processes of their own, and what their results say.

REPORT/cells/PIECE/NAME.json is a command's end and result, NAME.log what it printed. They are
written as soon as they are known, and the report is made of them alone. So a check that is started
again continues: it repeats only the commands that failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from albert_ds.cli import log_line
from albert_ds.errors import UserError
from albert_ds.files import check_folder, write_file
from albert_ds.json_files import read_json
from albert_lab.tables import table

ROOT = Path(__file__).parents[3]
WORDS = {True: "PASS", False: "**FAIL**", None: "-"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one row of the report says."""

    what: str
    passed: bool | None  # None: a figure, or something that this machine cannot do
    says: str


class NotRun(Exception):
    """A command of a piece has not run yet."""


@dataclass(kw_only=True)
class Check:
    """A report folder and the machine that it is about."""

    folder: Path
    gpus: int
    quick: bool  # everything small: it shows that the commands work, and no figure means anything
    data: str = ""  # shards of real text
    reads_only: bool = False  # what has run; raises NotRun for the rest

    def run(
        self,
        cell: str,
        *command: object,
        seconds: float = 300,
        module: bool = False,
        output: bool = True,
    ) -> dict:
        """Run `python COMMAND --output FILE` once; returns how it ended, and FILE as `result`.

        cell: PIECE/NAME. seconds: after these the command and all that it started are killed, and
        the code is None. output: False where the command takes
        no --output.
        """
        path = self.folder / "cells" / f"{cell}.json"
        known = read_json(path, str(path)) if path.exists() else None
        if known and (known["code"] == 0 or self.reads_only):
            return known
        if self.reads_only:
            raise NotRun(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".result.json")
        written.unlink(missing_ok=True)
        argv = [sys.executable, *(["-m"] if module else []), *map(str, command)]
        argv += ["--output", str(written)] if output else []
        log_line(f"gpu_check: {cell}: {' '.join(argv[1:])}")
        started = time.monotonic()
        log = path.with_suffix(".log")
        code = run_in_group(argv, log, seconds)
        ended = {
            "command": argv[1:],
            "code": code,
            "seconds": round(time.monotonic() - started, 1),
            "last_words": last_words(log, code, seconds),
            "result": json.loads(written.read_text()) if written.is_file() else None,
        }
        write_file(path, json.dumps(ended, indent=1) + "\n")
        return ended

    def write_report(self, pieces: dict[str, Callable[[Check], list[Finding]]]) -> bool:
        """Write report.md about all that has run; returns whether nothing has failed."""
        about = read_json(self.folder / "about.json", "about.json")
        reader, found, missing = replace(self, reads_only=True), {}, []
        for name, look in pieces.items():
            try:
                found[name] = look(reader)
            except NotRun:
                missing.append(name)
        rows = [row for piece in found.values() for row in piece]
        failed = sum(row.passed is False for row in rows)
        verdict = f"FAIL: {failed} of {len(rows)} rows" if failed else "PASS"
        title = f"# {verdict}: {about['device']}, {about['gpus']} GPU(s), commit {about['commit']}"
        lines = [title, ""]
        reasons = ["device: fake"] * ("fake" in about["device"]) + ["--quick"] * about["quick"]
        if reasons:
            lines += [f"**{', '.join(reasons)}: no figure below means anything**.", ""]
        if missing:
            lines += [f"Not run yet: {', '.join(missing)}.", ""]
        for name, piece in found.items():
            said = [(row.what, WORDS[row.passed], row.says) for row in piece]
            lines += [f"## {name}", "", table(("what", "", "found"), said), ""]
        write_file(self.folder / "report.md", "\n".join(lines))
        return not failed


def run_in_group(argv: list[str], log: Path, seconds: float) -> int | None:
    """Run a command to its end, at most `seconds` long; its exit code."""
    with log.open("wb") as printed:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            try:  # whatever it started and left
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def last_words(log: Path, code: int | None, seconds: float) -> str:
    """What a command that failed said at last, in one line."""
    if code == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("albert-ds:")]
    text = (errors or lines or ["it printed nothing"])[-1].strip()[:300]
    return f"still running after {seconds:.0f} s" if code is None else f"code {code}: {text}"


def ended(what: str, cell: dict, says: str = "") -> Finding:
    """PASS where the command ended with code 0."""
    is_done = cell["code"] == 0
    return Finding(what=what, passed=is_done, says=says if is_done else cell["last_words"])


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
