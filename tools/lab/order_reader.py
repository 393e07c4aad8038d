#!/usr/bin/env python
"""Can a reader tell the order of two segments? Asks, and scores the answers.

tools/lab/order_reader.py --data DATA --ask pairs.txt         writes held-out pairs, without masks
tools/lab/order_reader.py --data DATA --answers answers.jsonl scores what a reader said of them

A line of the answers: {"pair": 0, "order": "kept", "sure": true}; order is "kept" or "swapped".
What a reader tells and a model does not is the model's limit, not the text's.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from albert_ds import cli
from albert_ds.cli import Number, Parser
from albert_ds.data.segments import NO_LABEL
from albert_ds.errors import UserError
from albert_ds.files import write_file
from albert_ds.json_files import check, parse_json
from albert_ds.lab.order_pairs import (
    LENGTHS,
    build_row,
    draw_pairs,
    name_lengths,
    show,
    split_segments,
)
from albert_ds.lab.tables import table

ORDERS = ("kept", "swapped")  # labels 0 and 1


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/order_reader.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DATA", help="folder with held-out shards")
    count: dict[str, Any] = {"type": cli.positive}
    text = "held-out sequences that the pairs are drawn from"
    add("--samples", default=4096, metavar="SAMPLES", help=text, **count)
    add("--pairs", default=480, metavar="PAIRS", help="pairs to ask for", **count)
    what = parser.add_mutually_exclusive_group(required=True)
    text = "text file to write, for a reader"
    what.add_argument("--ask", type=cli.new_file, metavar="FILE", help=text)
    text = "the reader's answers, one JSON object a line"
    what.add_argument("--answers", type=Path, metavar="FILE", help=text)
    text = "with --answers: the same lines, with the right order and both lengths"
    add("--output", type=cli.new_file, metavar="FILE", help=text)
    return parser


def read_answers(path: Path, pairs: int) -> list[dict]:
    """The answers to pairs 0 to `pairs` - 1, in this order; UserError where one is missing."""
    number = Number(low=0, high=pairs - 1, whole=True)
    schema = {"pair": number, "order": ORDERS, "sure": bool}
    found: dict[int, dict] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--answers {path}: cannot be read: {error.strerror}") from None
    for place, line in enumerate(lines, start=1):
        name = f"--answers {path}, line {place}"
        answer = parse_json(line, name)
        check(answer, schema, name)
        if answer["pair"] in found:
            raise UserError(f"{name}: pair {answer['pair']} has been answered before")
        found[answer["pair"]] = {key: answer[key] for key in schema}
    missing = sorted(set(range(pairs)) - set(found))
    if missing:
        raise UserError(
            f"--answers {path}: must answer all {pairs} pairs; no line has pair {missing[0]}"
        )
    return [found[number] for number in range(pairs)]


def score(answers: list[dict]) -> str:
    """A table of how many are right: all, by how sure the reader was, and by length."""

    def row(name: str, chosen: list[dict]) -> tuple:
        return build_row(name, sum(a["order"] == a["right"] for a in chosen), len(chosen))

    rows = [row("all", answers)]
    for name, is_sure in (("sure", True), ("not sure", False)):
        rows.append(row(name, [a for a in answers if a["sure"] is is_sure]))
    for low, high in LENGTHS:
        chosen = [a for a in answers if low <= min(a["lengths"]) < high]
        rows.append(row(f"shorter segment {name_lengths(low, high)}", chosen))
    return table(("a reader", "right", "95 % interval", "of"), rows)


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.ask and args.output:
        raise UserError("--output: goes with --answers")
    from albert_ds.data.shards import open_shards

    heldout = open_shards(args.data, "heldout")
    batches = map(show, draw_pairs(heldout, args.samples, heldout.sequence_length))
    found = [p for p in chain.from_iterable(map(split_segments, batches)) if p[2] != NO_LABEL]
    if len(found) < args.pairs:
        raise UserError(
            f"--pairs {args.pairs}: must be at most {len(found)}, the pairs of --samples "
            f"{args.samples} held-out sequences"
        )
    chosen = np.random.default_rng(0).choice(len(found), args.pairs, replace=False)
    asked = [found[number] for number in chosen]
    if args.ask:
        decode = heldout.vocab.decode
        texts = [
            f"## {number}\n1: {decode(first.tolist())}\n2: {decode(second.tolist())}\n"
            for number, (first, second, _) in enumerate(asked)
        ]
        write_file(args.ask, "\n".join(texts))
        return
    answers = read_answers(args.answers, args.pairs)
    for answer, (first, second, label) in zip(answers, asked, strict=True):
        answer |= {"right": ORDERS[label], "lengths": [len(first), len(second)]}
    print(score(answers))
    if args.output:
        write_file(args.output, "".join(f"{json.dumps(answer)}\n" for answer in answers))


if __name__ == "__main__":
    cli.run(main)
