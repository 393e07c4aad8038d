"""What a loop is worth: phi, by which r runs of a block count as r ** phi blocks of their own.

Trains each pattern with each seed on the same samples, and fits their held-out MLM losses to

    loss = a - b log(n),   n = P + D + C R ** phi   of   loop:P,CxR,D

with an a for each seed: a line between the sizes that are tried, where arXiv 2604.21106 has a power
of n. phi 1: a run more is as good as a block more; 0: it is worth nothing. Patterns of R 1 give b,
so two are needed. The interval is Student's t over the seeds' own fits.

    python tools/lab/phi.py --data DATA --output DIR -- --model albert-tiny --steps 2000 ...

What follows -- are flags of `albert-ds train`. The same command goes on after a stop, and one of
other seeds may run beside it.
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from albert_lab.tables import table
from scipy.optimize import minimize_scalar
from scipy.stats import t as student

from albert_ds.base import cli
from albert_ds.base.cli import Parser
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import read_json, read_lines

PATTERNS = [f"loop:1,{core}x{runs},1" for core, runs in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4))]


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/phi.py", description=__doc__)
    add = parser.add
    add("--data", "shards", "DATA", cli.path, required=True, nargs="+")
    add("--output", "folder of the runs", "DIR", Path, required=True)
    add("--patterns", "loop:P,CxR,D, each a run", "LOOP", nargs="+", default=PATTERNS)
    add("--seeds", "seeds", "N", cli.non_negative, nargs="+", default=[1, 2, 3])
    add("flags", "flags of the trainer, of all runs", "-- FLAG", nargs="*")
    return parser


def read_pattern(word: str) -> tuple[int, int, int]:
    """Layers of their own, blocks of the core and its runs; UserError for anything but a loop."""
    typed = re.fullmatch(r"loop:(\d+),(\d+)x(\d+),(\d+)", word, re.ASCII)
    if typed is None:
        raise UserError(f"--patterns {word}: must be loop:P,CxR,D")
    before, core, runs, after = map(int, typed.groups())
    return before + after, core, runs


def train(run: Path, argv: list[str]) -> float:
    """The held-out MLM loss of a run at its last step. One that is finished trains no more."""
    done = subprocess.run([sys.executable, "-m", "albert_ds", "train", *argv])
    if done.returncode:
        sys.exit(done.returncode)
    steps = read_json(run / "config.json")["steps"]
    held = {r["step"]: r.get("heldout_mlm_loss") for r in read_lines(run / "metrics.jsonl")}
    if (loss := held.get(steps)) is None:
        raise UserError(f"{run}: no held-out loss at its last step; were samples held out?")
    return loss


def fit(losses: dict[str, float]) -> tuple[float, float, float]:
    """phi, b and the root mean square of what is left, of one seed's losses by pattern."""
    own, core, runs = np.array([read_pattern(word) for word in losses]).T
    values = np.array([*losses.values()])

    def solve(phi: float) -> tuple[np.ndarray, float]:
        lines = np.stack([np.ones(len(own)), -np.log(own + core * runs**phi)], axis=1)
        coefficients = np.linalg.lstsq(lines, values, rcond=None)[0]
        return coefficients, float(((lines @ coefficients - values) ** 2).mean() ** 0.5)

    phi = float(minimize_scalar(lambda x: solve(x)[1], bounds=(-1, 2), method="bounded").x)
    return phi, float(solve(phi)[0][1]), solve(phi)[1]


def summarise(losses: dict[int, dict[str, float]]) -> dict:
    """phi of each seed, their mean and half of its 95 % interval; None of one seed."""
    phis, slopes, left = zip(*(fit(seed_losses) for seed_losses in losses.values()), strict=True)
    half = None
    if (count := len(phis)) > 1:
        half = float(student.ppf(0.975, count - 1) * np.std(phis, ddof=1) / count**0.5)
    return {"phi": float(np.mean(phis)), "half": half, "phis": phis, "b": slopes, "left": left}


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    shapes = {read_pattern(word) for word in args.patterns}
    if len({own + core for own, core, runs in shapes if runs == 1}) < 2 or len(shapes) < 3:
        raise UserError("--patterns: must be two sizes with R 1, and at least one with more runs")
    losses: dict[int, dict[str, float]] = {}
    for seed in args.seeds:
        for word in args.patterns:
            run = args.output / word.replace(":", "-") / f"seed-{seed}"
            flags = ["--data", *args.data, "--output", str(run), "--sharing", word, *args.flags]
            losses.setdefault(seed, {})[word] = train(run, [*flags, "--seed", str(seed)])
    rows = [[word, *(f"{losses[n][word]:.4f}" for n in args.seeds)] for word in args.patterns]
    print(table(["held-out MLM loss", *(f"seed {n}" for n in args.seeds)], rows))
    summary = summarise(losses)
    interval = "no interval of one seed" if summary["half"] is None else f"+- {summary['half']:.3f}"
    seeds = ", ".join(f"{phi:.3f}" for phi in summary["phis"])
    print(f"\nphi {summary['phi']:.3f} {interval}; of each seed: {seeds}")
    print(f"b {np.mean(summary['b']):.4f} nats; not explained: {max(summary['left']):.4f} nats")


if __name__ == "__main__":
    cli.run(main)
