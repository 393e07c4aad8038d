#!/usr/bin/env python
"""Compare sentence splitters: boundaries checked by hand, and speed. Prints a Markdown table.

sentence_boundaries.json holds offsets into paragraphs of a Wikipedia sample, never their text: one
half of the paragraphs was drawn at random, the other from those on which the libraries differ. A
boundary is where a sentence ends within a paragraph, in a quotation too; a semicolon is none.
Needs pip install '.[bench]'.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from albert_ds.data.readers import split_sentences
from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser

BOUNDARIES = Path(__file__).with_name("sentence_boundaries.json")
Splitter = Callable[[str], list[str]]


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", required=True, type=Path, metavar="DIR", help="folder with wiki_sample/ in it")
    add("--repeats", type=int, default=3, help="turns of the timing (3)")
    add("--show", action="store_true", help="print what is wrong, with the text around it")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    entries = json.loads(BOUNDARIES.read_text())
    paragraphs = read_paragraphs(args.text, entries)
    splitters = open_splitters()
    wiki = sorted((args.text / "wiki_sample").glob("*/*"))
    lines = [line for path in wiki for line in path.read_text().splitlines() if line.strip()]
    megabytes = sum(len(line.encode()) for line in lines) / 1e6
    speeds: dict[str, list[float]] = {name: [] for name in splitters}
    for _ in range(args.repeats):
        for name, split in splitters.items():
            began = time.perf_counter()
            for line in lines:
                split(line)
            speeds[name].append(megabytes / (time.perf_counter() - began))
    kinds = list(dict.fromkeys(entry["chosen"] for entry in entries))
    counts = {k: sum(len(e["ends"]) for e in entries if e["chosen"] == k) for k in kinds}
    heads = [f"{kind}: precision / recall of {count}" for kind, count in counts.items()]
    print_row("library", *heads, "MB/s: min / median / max")
    print_row("---", *["---:"] * (len(kinds) + 1))
    for name, split in splitters.items():
        scores = [score(split, name, entries, paragraphs, kind, args.show) for kind in kinds]
        spread = (min(speeds[name]), statistics.median(speeds[name]), max(speeds[name]))
        print_row(name, *scores, " / ".join(f"{speed:.2f}" for speed in spread))


def open_splitters() -> dict[str, Splitter]:
    try:
        pysbd = importlib.import_module("pysbd")
        segmenter = importlib.import_module("syntok.segmenter")
    except ImportError as error:
        raise UserError(f"{error}; install what is compared: pip install '.[bench]'") from None
    warnings.simplefilter("ignore")  # of pysbd's regular expressions
    rules = pysbd.Segmenter(language="en", clean=False)

    def split_syntok(text: str) -> list[str]:
        return [
            text[sentence[0].offset : sentence[-1].offset + len(sentence[-1].value)]
            for paragraph in segmenter.analyze(text)
            for sentence in paragraph
        ]

    return {
        "sentencex": lambda text: split_sentences([text], "paragraph"),
        "pysbd": rules.segment,
        "syntok": split_syntok,
    }


def read_paragraphs(folder: Path, entries: list[dict]) -> list[str]:
    files = {entry["file"] for entry in entries}
    try:
        lines = {name: (folder / name).read_text().split("\n") for name in files}
    except OSError as error:
        raise UserError(f"--text {folder}: {error.filename}: {error.strerror}") from None
    paragraphs = [lines[entry["file"]][entry["line"] - 1].strip() for entry in entries]
    for entry, text in zip(entries, paragraphs, strict=True):
        if len(text) != entry["length"]:
            raise UserError(f"--text {folder}: {entry['file']} is not the sample of {BOUNDARIES}")
    return paragraphs


def score(
    split: Splitter, name: str, entries: list[dict], paragraphs: list[str], kind: str, show: bool
) -> str:
    right = found = wanted = 0
    for entry, text in zip(entries, paragraphs, strict=True):
        if entry["chosen"] != kind:
            continue
        ends, goal = find_ends(split(text), text), set(entry["ends"])
        right, found, wanted = right + len(ends & goal), found + len(ends), wanted + len(goal)
        for end in sorted(ends ^ goal) if show else ():
            what = "missed" if end in goal else "wrong"
            print(f"{name}: {what}: ...{text[max(0, end - 50) : end]}|{text[end : end + 30]}...")
    return f"{right / found:.1%} / {right / wanted:.1%}"


def find_ends(sentences: list[str], text: str) -> set[int]:
    """Where the sentences end in the text, its own end left out; blanks do not matter."""
    places = [place for place, letter in enumerate(text) if not letter.isspace()]
    lengths = [sum(not letter.isspace() for letter in sentence) for sentence in sentences]
    counts = set(accumulate(lengths)) - {0}
    assert max(counts) == len(places), "a splitter lost text"
    return {places[count - 1] + 1 for count in counts} - {len(text)}


def print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    try:
        main()
    except ENDINGS as ending:
        print(f"sentence_bench: {ending}", file=sys.stderr)
        sys.exit(ending.code)
