#!/usr/bin/env python
"""Measure reading: masked samples a second on one core, of every objective and beside Hugging
Face's whole-word collator on the same sequences; where the time goes; what resuming costs.

Prints Markdown tables. What is compared takes turns, so that a drift of the machine cancels.
"""

import argparse
import cProfile
import itertools
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser

KINDS: dict[str, dict[str, Any]] = {
    "sop, 15 % masked": {},
    "sop, at most 20 masked": {"max_predictions": 20},
    "nsp, 15 % masked": {"objective": "nsp"},
    "none, 15 % masked": {"objective": "none"},
}
BATCH = 32


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, metavar="DATA", help="folder made by build_shards.py")
    add("--samples", type=int, default=4096, help="samples of each reading (4096)")
    add("--repeats", type=int, default=5, help="turns (5)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    import torch

    torch.set_num_threads(1)
    compare_rates(args.data, args.samples, args.repeats)
    print_profile(args.data, args.samples)
    measure_resume(args.data, args.repeats)


def compare_rates(data: str, samples: int, repeats: int) -> None:
    readers: dict[str, Callable[[], int]] = {}
    for name, settings in KINDS.items():
        batches = open_stream(data, **settings)
        readers[name] = lambda batches=batches: next(batches).samples
    readers["Hugging Face's collator"] = collator_of_hugging_face(data)
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(repeats + 1):
        for name, read in readers.items():
            began, done = time.perf_counter(), 0
            while done < samples:
                done += read()
            if turn:  # the first one warms up
                rates[name].append(done / (time.perf_counter() - began))
    print_row("samples/s", "min", "median", "max", "median against the first")
    print_row("---", *["---:"] * 4)
    first = statistics.median(next(iter(rates.values())))
    for name, values in rates.items():
        middle = statistics.median(values)
        figures = (f"{value:,.0f}" for value in (min(values), middle, max(values)))
        print_row(name, *figures, f"{middle / first:.2f}")
    print()


def open_stream(data: str, start: int = 0, **settings: Any) -> Iterator:
    from albert_ds.data.samples import StreamConfig
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import training_batches

    return training_batches(
        [open_shards(data, "train")],
        None,
        StreamConfig(**settings),
        start=start,
        batch_size=BATCH,
        micro_batch_size=BATCH,
        dp_rank=0,
        dp_size=1,
    )


def collator_of_hugging_face(data: str) -> Callable[[], int]:
    """A function that masks the next batch of the same sequences, held in memory as lists."""
    from transformers import AlbertTokenizer, DataCollatorForLanguageModeling

    from albert_ds.data.shards import open_shards
    from albert_ds.data.vocab import CLS, PAD, SEP
    from albert_ds.data.words import build_word_starts

    source = open_shards(data, "train")
    tokenizer = AlbertTokenizer.from_pretrained(data, local_files_only=True)
    # Replacement by a random token, which it cannot do with whole words, is left out.
    collate = DataCollatorForLanguageModeling(
        tokenizer, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    starts = build_word_starts(source.vocab.pieces, "unicode")
    examples: list[dict[str, Any]] = []
    for batch in open_stream(data, objective="none", masked_fraction=0):
        for begin, end in itertools.pairwise(batch.tensors["cu_seqlens"].tolist()):
            ids = batch.tensors["input_ids"][begin:end].tolist()
            special = [int(token in (CLS, SEP)) for token in ids]
            # It tells words by the gaps between the characters of their tokens.
            at, offsets = 0, []
            for token, is_special in zip(ids, special, strict=True):
                at += bool(starts[token] or is_special)
                offsets.append((at, at + 1))
                at += 1
            examples.append(
                {"input_ids": ids, "special_tokens_mask": special, "offset_mapping": offsets}
            )
        if len(examples) >= 1024:
            break
    batches = [examples[i : i + BATCH] for i in range(0, len(examples), BATCH)]
    for batch in batches:  # it pads ids, but not offsets: done before the clock runs
        longest = max(len(example["input_ids"]) for example in batch)
        fills = {"input_ids": PAD, "special_tokens_mask": 1, "offset_mapping": (0, 0)}
        for example in batch:
            for name, fill in fills.items():
                example[name] += [fill] * (longest - len(example[name]))
    turns = itertools.cycle(batches)

    def read() -> int:
        batch = next(turns)
        collate([dict(example) for example in batch])
        return len(batch)

    return read


def print_profile(data: str, samples: int) -> None:
    """Own time of each function, of all the time of reading so many samples."""
    batches = open_stream(data)
    next(batches)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(samples // BATCH):
        next(batches)
    profile.disable()
    stats = pstats.Stats(profile).stats  # ty: ignore[missing-attribute]
    total = sum(own for _, _, own, _, _ in stats.values())
    ranked = sorted(stats.items(), key=lambda item: -item[1][2])
    print_row("function", "own share of the time", "calls a sample")
    print_row("---", "---:", "---:")
    for (file, _, name), (_, calls, own, _, _) in ranked[:12]:
        place = f"{Path(file).name}: {name}" if file != "~" else name.strip("<>")
        print_row(place.replace("|", "/"), f"{own / total:.0%}", f"{calls / samples:.1f}")
    print()


def measure_resume(data: str, repeats: int) -> None:
    """From a new start of the stream to its first samples, in the middle of the set and far on."""
    from albert_ds.data.shards import open_shards

    source = open_shards(data, "train")
    middle = int(source.sizes.sum()) // 2 // BATCH * BATCH
    print_row(f"first {BATCH} samples of {len(source.shards)} shards", "ms: min", "median", "max")
    print_row("---", *["---:"] * 3)
    for name, start in (
        ("from 0", 0),
        ("from the middle", middle),
        ("from 10^9", 10**9 // 32 * 32),
    ):
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            next(open_stream(data, start))
            taken.append(1e3 * (time.perf_counter() - began))
        print_row(name, *(f"{t:.0f}" for t in (min(taken), statistics.median(taken), max(taken))))


def print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main()
    except ENDINGS as ending:
        print(f"load_bench: {ending}", file=sys.stderr)
        sys.exit(ending.code)
