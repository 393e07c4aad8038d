#!/usr/bin/env python
"""Look at a built set before training on it for a month: samples as text, statistics, a picture.

Samples are drawn just as training draws them. In the text, {fox=>[MASK]} is a token to be predicted
and what the model sees in its place; {fox} one that it sees as it is.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from albert_ds.data.samples import MicroBatch, StreamConfig
from albert_ds.data.segments import OBJECTIVES
from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser

LABELS = {
    "sop": {0: "in order", 1: "swapped"},
    "nsp": {0: "B follows A", 1: "B from another document"},
    "none": {},
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, metavar="DATA", help="folder made by build_shards.py")
    add("--split", choices=("train", "heldout"), default="train", help="which of the two (train)")
    add("--show", type=int, default=2, help="samples to print as text (2)")
    add("--count", type=int, default=2000, help="samples to count (2000)")
    add("--picture", type=Path, metavar="PNG", help="where to draw the distributions")
    add("--objective", choices=OBJECTIVES, default="sop", help="as in training (sop)")
    add("--sequence-length", type=int, help="as in training (the set's own)")
    add("--masked-fraction", type=float, default=0.15, help="as in training (0.15)")
    add("--max-predictions", type=int, help="as in training (no limit)")
    add("--max-ngram", type=int, default=3, help="as in training (3)")
    add("--seed", type=int, default=0, help="as in training (0)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import MicroBatchReader

    source = open_shards(args.data, args.split)
    config = StreamConfig(
        objective=args.objective,
        sequence_length=args.sequence_length or source.sequence_length,
        masked_fraction=args.masked_fraction,
        max_predictions=args.max_predictions,
        max_ngram=args.max_ngram,
        seed=args.seed,
    )
    reader = MicroBatchReader([source], None, config)
    count = min(args.count, int(source.sizes.sum()))
    if count < 1 or args.show < 0:
        raise UserError(f"--count {args.count} --show {args.show}: must be at least 1 and 0")
    seen = Seen(starts=reader.word_starts.tolist())
    for position in range(count):
        sample = read_sample(reader.read(range(position, position + 1)))
        if position < args.show:
            print(f"sample {position}: {len(sample.ids)} tokens, ", end="")
            print(LABELS[config.objective].get(sample.pair_label, "no pair"))
            print_text(sample, source.vocab.pieces)
        seen.add(sample)
    print_statistics(seen, count, config, source.vocab.pieces)
    if args.picture:
        draw_distributions(seen, config, args.picture)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One sample as plain numbers."""

    ids: list[int]  # as the model sees them
    first: int  # tokens of [CLS] A [SEP]
    labels: dict[int, int]  # masked position -> what stood there
    pair_label: int
    set_aside: int  # stored tokens that a short draw left out


def read_sample(batch: MicroBatch) -> Drawn:
    tensors: dict[str, Any] = batch.tensors
    positions, labels = (tensors[f"masked_{name}"].tolist() for name in ("positions", "labels"))
    return Drawn(
        ids=tensors["input_ids"].tolist(),
        first=tensors["token_type_ids"].tolist().count(0),
        labels=dict(zip(positions, labels, strict=True)),
        pair_label=int(tensors["pair_labels"][0]),
        set_aside=batch.set_aside,
    )


@dataclass(kw_only=True, slots=True)
class Seen:
    """What has been counted over all samples."""

    starts: list[bool]  # of each piece, whether it starts a word
    lengths: list[int] = field(default_factory=list)
    first_lengths: list[int] = field(default_factory=list)
    masked_shares: list[float] = field(default_factory=list)
    runs: Counter[int] = field(default_factory=Counter)  # of masked words, by their number
    replaced: Counter[str] = field(default_factory=Counter)
    pair_labels: Counter[int] = field(default_factory=Counter)
    ids: Counter[int] = field(default_factory=Counter)  # before masking
    set_aside: int = 0

    def add(self, sample: Drawn) -> None:
        from albert_ds.data.vocab import MASK

        whole = [sample.labels.get(i, token) for i, token in enumerate(sample.ids)]
        self.lengths.append(len(whole))
        self.first_lengths.append(sample.first)
        self.masked_shares.append(len(sample.labels) / len(whole))
        self.pair_labels[sample.pair_label] += 1
        self.ids.update(whole)
        self.set_aside += sample.set_aside
        for position, label in sample.labels.items():
            shown = sample.ids[position]
            kind = "[MASK]" if shown == MASK else "kept" if shown == label else "another piece"
            self.replaced[kind] += 1
        self.runs.update(count_runs(sample.labels, [self.starts[token] for token in whole]))


def count_runs(masked: dict[int, int], starts: list[bool]) -> Iterator[int]:
    """Words of every stretch of masked tokens; two n-grams side by side are one stretch."""
    words = 0
    for i in range(len(starts) + 1):
        if i < len(starts) and i in masked:
            words += starts[i] or not words
        elif words:
            yield words
            words = 0


def print_text(sample: Drawn, pieces: list[str]) -> None:
    for name, begin, end in (("A", 0, sample.first), ("B", sample.first, len(sample.ids))):
        text = ""
        for i in range(begin, end):
            piece = pieces[sample.labels.get(i, sample.ids[i])]
            # The word mark becomes a space, but where it is a piece by itself.
            space, bare = (" ", piece[1:] or piece) if piece[0] == "\u2581" else ("", piece)
            if i in sample.labels:
                shown = pieces[sample.ids[i]]
                bare = f"{{{bare}}}" if shown == piece else f"{{{bare}=>{shown}}}"
            text += space + bare
        if text:
            print(f"  {name}: {text.strip()}")
    print()


def print_statistics(seen: Seen, count: int, config: StreamConfig, pieces: list[str]) -> None:
    from albert_ds.data.vocab import SPECIAL_PIECES

    tokens, masked = sum(seen.lengths), seen.replaced.total()
    room = config.sequence_length * count
    print(f"{count:,} samples, {tokens:,} tokens")
    print(f"fill: {tokens / room:.1%} of {config.sequence_length} (no row is ever padded)")
    print(
        f"set aside by short draws: {seen.set_aside / (tokens + seen.set_aside):.1%} of the tokens"
    )
    for name, values in (("length", seen.lengths), ("[CLS] A [SEP]", seen.first_lengths)):
        spread = f"{min(values)} / {statistics.median(values):.0f} / {max(values)}"
        print(f"{name}: min / median / max {spread}")
    print(f"masked: {masked / tokens:.2%} of the tokens; of these " + shares(seen.replaced))
    harmonic = sum(1 / n for n in range(1, config.max_ngram + 1))
    drawn = ", ".join(f"{n}: {1 / n / harmonic:.1%}" for n in range(1, config.max_ngram + 1))
    print(f"words of a masked stretch: {shares(seen.runs)} (n-grams are drawn as {drawn})")
    labelled = count - seen.pair_labels[-100]
    if labelled:
        share = seen.pair_labels[1] / labelled
        error = 1.96 * (share * (1 - share) / labelled) ** 0.5
        print(f"pairs with label 1: {share:.1%} +- {error:.1%}; samples without a pair: ", end="")
        print(f"{seen.pair_labels[-100]:,}")
    print(
        "special pieces: " + ", ".join(f"{p} {seen.ids[i]:,}" for i, p in enumerate(SPECIAL_PIECES))
    )
    common = ", ".join(f"{pieces[i]} {n / tokens:.1%}" for i, n in seen.ids.most_common(12))
    print(f"most frequent: {common}")
    print(f"pieces that occur: {len(seen.ids):,} of {len(pieces):,}")


def shares(counts: Counter) -> str:
    total = counts.total()
    ranked = sorted(counts.items(), key=lambda item: (str(type(item[0])), item[0]))
    return ", ".join(f"{name} {number / total:.1%}" for name, number in ranked)


def draw_distributions(seen: Seen, config: StreamConfig, path: Path) -> None:
    """Lengths, masked share, words of a masked stretch, and how frequent the pieces are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(18, 4))
    axes[0].hist(seen.lengths, bins=range(0, config.sequence_length + 17, 16), color="0.4")
    axes[0].set(xlabel="tokens of a sample", ylabel="samples", yscale="log")
    axes[1].hist([100 * share for share in seen.masked_shares], bins=40, color="0.4")
    axes[1].set(xlabel="masked tokens of a sample (%)", ylabel="samples")
    axes[2].bar(list(seen.runs), list(seen.runs.values()), color="0.4")
    axes[2].set(xlabel="words of a masked stretch", ylabel="stretches", yscale="log")
    frequencies = sorted(seen.ids.values(), reverse=True)
    axes[3].loglog(range(1, len(frequencies) + 1), frequencies, color="0.2")
    axes[3].set(xlabel="rank of the piece", ylabel="occurrences")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    try:
        main()
    except ENDINGS as ending:
        print(f"inspect_shards: {ending}", file=sys.stderr)
        sys.exit(ending.code)
