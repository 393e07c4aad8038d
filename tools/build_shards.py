"""Build pretraining shards: text is split into sentences, encoded and packed, each sequence once.

Writes WebDataset tars DATA/train-000000.tar ... and DATA/heldout-000000.tar ... (held out by
document, at least one), a copy of the vocabulary, and DATA/index.json, which counts everything.
Pairs, lengths and masks are drawn in training. The same input gives the same bytes.
"""

import argparse
import sys
from pathlib import Path

from albert_ds.data.build import BuildConfig, build_shards
from albert_ds.data.progress import show_progress
from albert_ds.data.readers import add_input_flags, find_inputs, read_documents
from albert_ds.data.vocab import read_vocab
from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser

PACKED_RATIO = 4  # of text to its packed size, roughly


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_input_flags(parser)
    add("--vocab", required=True, type=Path, metavar="FILE", help="spiece.model of build_vocab.py")
    add("--output", required=True, type=Path, metavar="DATA", help="folder to write to; is made")
    add(
        "--sequence-length",
        type=int,
        default=512,
        help="tokens of a sequence at most, [CLS] and two [SEP] included (512)",
    )
    add("--holdout", type=float, default=0.01, help="share of documents held out, 0 to 1 (0.01)")
    add("--samples-per-shard", type=int, default=2048, help="sequences in a shard (2048)")
    add("--seed", type=int, default=0, help="of the order and of what is held out (0)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    config = BuildConfig(
        sequence_length=args.sequence_length,
        holdout=args.holdout,
        samples_per_shard=args.samples_per_shard,
        seed=args.seed,
        lines=args.lines,
        language=args.language,
    )
    paths = find_inputs(args.input)
    vocab = read_vocab(args.vocab)
    stored = {path: path.stat().st_size for path in paths}
    index = build_shards(
        show_progress(read_documents(paths, args.text_field), sum(stored.values()), "encoding"),
        vocab,
        args.output,
        config,
        input_bytes=sum(
            size * (PACKED_RATIO if path.suffix in (".gz", ".zst") else 1)
            for path, size in stored.items()
        ),
    )
    print_summary(args.output, index)


def print_summary(output: Path, index: dict) -> None:
    for split, entry in index["splits"].items():
        print(
            f"{output}: {split}: {len(entry['shards'])} shards, {entry['samples']:,} sequences, "
            f"{entry['tokens']:,} tokens, {entry['documents']:,} documents"
        )
    counts = ", ".join(f"{name} {count:,}" for name, count in index["counts"].items())
    print(f"{output}: fill {index['fill']:.1%}; {counts}")


if __name__ == "__main__":
    try:
        main()
    except ENDINGS as ending:
        print(f"build_shards: {ending}", file=sys.stderr)
        sys.exit(ending.code)
