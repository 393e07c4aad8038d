#!/usr/bin/env python
"""Can a reader tell the order of two segments? Asks, and scores the answers.

tools/lab/order_reader.py --data DATA --ask pairs.txt         writes held-out pairs, without masks
tools/lab/order_reader.py --data DATA --answers answers.jsonl scores what a reader said of them

A line of the answers: {"pair": 7, "order": "kept", "sure": true}; order is "kept" or "swapped", and
the pair's number is that in the text, which counts all held-out pairs.
What a reader tells and a model does not is the model's limit, not the text's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from albert_lab.order_pairs import build_row, draw_pairs, group_by_length, list_pairs, show
from albert_lab.tables import table

from albert_ds import cli
from albert_ds.cli import Number, Parser
from albert_ds.errors import UserError
from albert_ds.files import write_file
from albert_ds.json_files import check, parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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


def read_answers(path: Path, asked: Collection[int]) -> dict[int, dict]:
    """The answer to each of the pairs; UserError where one is missing or was not asked for."""
    schema = {"pair": Number(low=0, whole=True), "order": ORDERS, "sure": bool}
    found: dict[int, dict] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--answers {path}: cannot be read: {error.strerror}") from None
    for place, line in enumerate(lines, start=1):
        name = f"--answers {path}, line {place}"
        answer = parse_json(line, name)
        check(answer, schema, name)
        number = answer["pair"]
        if number not in asked:
            raise UserError(
                f"{name}: pair {number} must be one of those that --ask writes with the same "
                "--data, --samples and --pairs"
            )
        if number in found:
            raise UserError(f"{name}: pair {number} has been answered before")
        found[number] = {key: answer[key] for key in schema}
    missing = [number for number in asked if number not in found]
    if missing:
        raise UserError(
            f"--answers {path}: must answer all {len(asked)} pairs; no line has pair {missing[0]}"
        )
    return found


def score(asked: Sequence[tuple], answers: Sequence[dict]) -> str:
    """A table of how many are right: all, by how sure the reader was, and by length."""
    right = [answer["order"] == answer["right"] for answer in answers]
    rows = [("all", [sum(right), len(right)])]
    for name, is_sure in (("sure", True), ("not sure", False)):
        chosen = [r for r, answer in zip(right, answers, strict=True) if answer["sure"] is is_sure]
        rows.append((name, [sum(chosen), len(chosen)]))
    rows += [
        (f"shorter segment of {name}", found)
        for name, found in group_by_length(asked, right).items()
    ]
    head = ("a reader", "right", "95 % interval", "of")
    return table(head, [build_row(name, *counts) for name, counts in rows])


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.ask and args.output:
        raise UserError("--output: goes with --answers")
    from albert_ds.data.shards import open_shards

    heldout = open_shards(args.data, "heldout")
    found = list_pairs(map(show, draw_pairs(heldout, args.samples, heldout.sequence_length)))
    if len(found) < args.pairs:
        raise UserError(
            f"--pairs {args.pairs}: must be at most {len(found)}, the pairs of --samples "
            f"{args.samples} held-out sequences"
        )
    chosen = np.random.default_rng(0).choice(len(found), args.pairs, replace=False).tolist()
    asked = {number: found[number] for number in chosen}
    if args.ask:
        decode = heldout.vocab.decode
        texts = [
            f"## {number}\n1: {decode(first.tolist())}\n2: {decode(second.tolist())}\n"
            for number, (first, second, _) in asked.items()
        ]
        write_file(args.ask, "\n".join(texts))
        return
    answered = read_answers(args.answers, asked)
    answers = []
    for number, (first, second, label) in asked.items():
        known = {"right": ORDERS[label], "lengths": [len(first), len(second)]}
        answers.append(answered[number] | known)
    print(score(list(asked.values()), answers))
    if args.output:
        write_file(args.output, "".join(f"{json.dumps(answer)}\n" for answer in answers))


if __name__ == "__main__":
    cli.run(main)
