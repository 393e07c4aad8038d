#!/usr/bin/env python
"""Score minimal pairs by the BabyLM challenge's own program and by ours, and compare each paradigm.

--harness is the folder `strict` of a clone of github.com/babylm-org/babylm-eval. Its
sentence_zero_shot runs as it is, with this Python, which must have what it imports: datasets,
aiohttp, scipy, tqdm.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from albert_lab.tables import table

from albert_ds.base import cli
from albert_ds.base.cli import Parser
from albert_ds.base.errors import UserError

PROGRAM = "evaluation_pipeline.sentence_zero_shot.run"


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/babylm_check.py", description=__doc__.splitlines()[0])
    add = parser.add
    add("--harness", "folder `strict` of a clone of babylm-eval", "FOLDER", Path, required=True)
    add("--checkpoint", "folder of Hugging Face", "HF", Path, required=True)
    add("--minimal-pairs", "folder of *.jsonl, as BLiMP's data/", "FOLDER", Path, required=True)
    return parser


def run_harness(folder: Path, checkpoint: Path, pairs: Path) -> dict[str, float]:
    """The percentage of right pairs of each paradigm, as the program prints it."""
    with TemporaryDirectory() as output:
        flags = ["--task", "blimp", "--backend", "mlm", "--output_dir", output]
        files = ["--data_path", pairs.resolve(), "--model_path_or_name", checkpoint.resolve()]
        command = [sys.executable, "-m", PROGRAM, *flags, *files]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"--harness {folder}: {PROGRAM} ended with {done.returncode}")
    part = done.stdout.partition("### UID ACCURACY\n")[2].partition("\n\n")[0]
    shares = {name: float(share) for name, share in re.findall(r"^(\S+): (\S+)$", part, re.M)}
    if not shares:
        raise UserError(f"--harness {folder}: {PROGRAM} printed no UID ACCURACY")
    return shares


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.evals.minimal_pairs import read_pairs, score_pairs

    harness_scores = run_harness(args.harness, args.checkpoint, args.minimal_pairs)
    pairs = read_pairs(args.minimal_pairs)
    folder = ModelFolder(args.checkpoint)
    right = score_pairs(folder.build_model(), folder.vocab, pairs, torch.device("cpu"))
    of_paradigm = defaultdict(list)
    for pair, is_right in zip(pairs, right, strict=True):
        of_paradigm[pair.paradigm].append(is_right)
    scores = {name: round(100 * sum(of) / len(of), 2) for name, of in of_paradigm.items()}
    rows = [
        (name, *(f"{each[name]:.2f}" if name in each else "-" for each in (scores, harness_scores)))
        for name in sorted(scores.keys() | harness_scores.keys())
    ]
    differing = [row for row in rows if row[1] != row[2]]
    if differing:
        print(table(("paradigm", "ours, %", "theirs, %"), differing))
    means = [sum(each.values()) / len(each) for each in (scores, harness_scores)]
    print(f"{len(pairs):,} pairs, {len(rows)} paradigms, {len(differing)} differ")
    print(f"ours {means[0]:.2f} %, theirs {means[1]:.2f} %")
    return int(bool(differing))


if __name__ == "__main__":
    cli.run(main)
