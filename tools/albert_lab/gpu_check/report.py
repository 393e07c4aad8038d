"""REPORT/report.md and its pictures, from the pieces that are finished."""

from __future__ import annotations

import statistics
from pathlib import Path

from albert_ds.files import write_file
from albert_ds.json_files import read_json
from albert_lab.gpu_check.check import Check
from albert_lab.plots.style import line_style, new_figure
from albert_lab.tables import table

WORDS = {True: "PASS", False: "**FAIL**", None: "-"}


def read_pieces(folder: Path, names: list[str]) -> list[dict]:
    paths = [folder / "pieces" / f"{name}.json" for name in names]
    return [read_json(path, str(path)) for path in paths if path.exists()]


def write_report(check: Check, names: list[str]) -> bool:
    """Write report.md about all pieces `names`; returns whether nothing has failed."""
    about = read_json(check.folder / "about.json", "about.json")
    pieces = read_pieces(check.folder, names)
    rows = [row for piece in pieces for row in piece["findings"]]
    failed = sum(row["passed"] is False for row in rows)
    missing = [name for name in names if name not in {piece["piece"] for piece in pieces}]
    verdict = f"FAIL: {failed} of {len(rows)} rows" if failed else "PASS"
    title = f"# {verdict}: {about['device']}, {about['gpus']} GPU(s), commit {about['commit']}"
    lines = [title, "", *warn(about)]
    if missing:
        lines += [f"Not run yet: {', '.join(missing)}.", ""]
    for piece in pieces:
        found = [(row["what"], WORDS[row["passed"]], row["says"]) for row in piece["findings"]]
        lines += [f"## {piece['piece']} ({piece['seconds']:.0f} s)", ""]
        lines += [table(("what", "", "found"), found), ""]
    for picture, draw in (("speed.png", draw_speed), ("steps.png", draw_steps)):
        if draw(check, check.folder / picture):
            lines += [f"![{picture}]({picture})", ""]
    write_file(check.folder / "report.md", "\n".join(lines))
    return not failed


def warn(about: dict) -> list[str]:
    """Whether the figures mean anything."""
    reasons = ["device: fake"] if "fake" in about["device"] else []
    reasons += ["--quick"] if about["quick"] else []
    text = f"**{', '.join(reasons)}: no figure below means anything**, only whether commands work."
    return [text, ""] if reasons else []


def read_speeds(check: Check) -> dict[str, list[dict]]:
    """Size -> cells of full rows, by micro-batch; only what has run."""
    found: dict[str, list[dict]] = {}
    for path in sorted(check.folder.glob("cells/speed-*/rows-[0-9]*.json")):
        report = None if ".result" in path.name else read_json(path, str(path))["result"]
        if report:
            found.setdefault(path.parent.name.removeprefix("speed-"), []).extend(report["cells"])
    for cells in found.values():
        cells.sort(key=lambda cell: cell["micro_batch_size"])
    return found


def draw_speed(check: Check, picture: Path) -> bool:
    """tokens/s against the micro-batch, a line for each size."""
    speeds = read_speeds(check)
    if not speeds:
        return False
    figure, (axes,) = new_figure()
    for number, (model, cells) in enumerate(speeds.items()):
        sizes = [cell["micro_batch_size"] for cell in cells]
        rates = [statistics.median(r["tokens_a_second"] for r in cell["rounds"]) for cell in cells]
        axes.plot(sizes, rates, label=model, **line_style(number))
    axes.set(xscale="log", yscale="log", xlabel="sequences of a micro-batch", ylabel="tokens/s")
    axes.set_title("no figure means anything" if check.quick else "full rows, plain, bf16")
    axes.legend(fontsize=7)
    figure.savefig(picture, dpi=100, bbox_inches="tight")
    return True


def draw_steps(check: Check, picture: Path) -> bool:
    """The parts of a step at each size's fastest micro-batch."""
    from albert_lab.step_breakdown import PARTS, SECONDS

    speeds = read_speeds(check)
    if not speeds:
        return False
    figure, (axes,) = new_figure()
    left = dict.fromkeys(speeds, 0.0)
    for part, title in PARTS.items():
        shares = []
        for cells in speeds.values():
            turn = max((t for c in cells for t in c["rounds"]), key=lambda t: t["tokens_a_second"])
            shares.append(turn[SECONDS[part]] / turn["seconds_a_step"])
        axes.barh(list(speeds), shares, left=list(left.values()), label=title)
        left = {model: a + b for (model, a), b in zip(left.items(), shares, strict=True)}
    axes.set(xlabel="share of a step")
    axes.legend(fontsize=7)
    figure.savefig(picture, dpi=100, bbox_inches="tight")
    return True
