"""Build pretraining shards: text is split into sentences, encoded and packed, each sequence once.

Writes WebDataset tars DATA/train-000000.tar ... and DATA/heldout-000000.tar ... (held out by
document, at least one), a copy of the vocabulary, and DATA/index.json, which counts everything.
Pairs, lengths and masks are drawn in training. The same input gives the same bytes, by one process
or by many: mpirun -n N python tools/build_shards.py ... . Killed, the same command goes on.
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from albert_ds.data.build import BuildConfig, Built, build_shards
from albert_ds.data.ranks import Ranks, joined_ranks
from albert_ds.data.readers import add_input_flags
from albert_ds.data.storage import find_files
from albert_ds.data.vocab import Vocab, read_vocab
from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_input_flags(parser)
    add("--vocab", required=True, metavar="FILE", help="spiece.model of build_vocab.py")
    add("--output", required=True, type=Path, metavar="DATA", help="folder to write to; is made")
    add(
        "--sequence-length",
        type=int,
        default=512,
        help="tokens of a sequence at most, [CLS] and two [SEP] included (512)",
    )
    add("--holdout", type=float, default=0.01, help="share of documents held out, 0 to 1 (0.01)")
    add(
        "--samples-per-shard",
        type=int,
        default=2048,
        help="sequences in a shard, on average (2048)",
    )
    add("--seed", type=int, default=0, help="of the order and of what is held out (0)")
    add(
        "--dedup",
        action="store_true",
        help="of documents with the very same text keep one (all are kept, copies are counted)",
    )
    add(
        "--max-damaged",
        type=float,
        default=0.01,
        help="share of the documents that may be damaged: not UTF-8, not JSON, ... (0.01); they "
        "are dropped and counted, and over this share nothing is built",
    )
    return parser


def main(ranks: Ranks) -> None:
    args, config, locations, vocab = ranks.from_first(prepare)
    built = build_shards(locations, vocab, args.output, config, ranks)
    if ranks.rank == 0:
        print_summary(args.output, built)


def prepare() -> tuple[argparse.Namespace, BuildConfig, list[str], Vocab]:
    """All that can be wrong with the command line, seen by the first process alone."""
    args = build_parser().parse_args()
    config = BuildConfig(**{f.name: getattr(args, f.name) for f in fields(BuildConfig)})
    return args, config, find_files(args.input), read_vocab(args.vocab)


def print_summary(output: Path, built: Built) -> None:
    index = built.index
    for split, entry in index["splits"].items():
        print(
            f"{output}: {split}: {len(entry['shards'])} shards, {entry['samples']:,} sequences, "
            f"{entry['tokens']:,} tokens, {entry['documents']:,} documents"
        )
    counts = ", ".join(f"{name} {count:,}" for name, count in index["counts"].items() if count)
    print(f"{output}: fill {index['fill']:.1%}; {counts}")
    for kind, place in built.damage.items():
        print(f"{output}: {kind}: {index['counts'][f'damaged_{kind}']:,} dropped, first: {place}")
    if built.kept or built.redone:
        print(
            f"{output}: of a killed build, {built.kept} pieces of work were kept and "
            f"{built.redone} damaged ones done anew"
        )


if __name__ == "__main__":
    try:
        with joined_ranks("build_shards") as ranks:
            main(ranks)
    except ENDINGS as ending:
        print(f"build_shards: {ending}", file=sys.stderr)
        sys.exit(ending.code)
