"""Build pretraining shards: text is split into sentences, encoded and packed, each sequence once.

Writes WebDataset tars DATA/train-000000.tar ... and DATA/heldout-000000.tar ... (held out by
document, at least one of several), a copy of the vocabulary, and DATA/index.json, which counts
everything. Pairs, lengths and masks are drawn in training. The same input gives the same bytes, by
one process or by many: `--processes N`, or on several machines `mpirun -n N albert-ds shards ...`,
where one of the N hands out the work. Killed, the same command goes on.
"""

from collections import Counter
from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.storage import find_files, refuse_within
from albert_ds.text.documents import add_input_flag
from albert_ds.text.pipeline import BuildConfig, build_shards
from albert_ds.text.pool import open_pool
from albert_ds.text.sources import describe_tally
from albert_ds.vocab.vocab import read_vocab


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    add = parser.add
    add_input_flag(parser)
    add("--vocab", "spiece.model of `albert-ds vocab`", "FILE", cli.path, required=True)
    add("--output", "folder to write to; is made", "DATA", Path, required=True)
    text = "processes of this machine that build together; for several machines, mpirun"
    add("--processes", text, "N", cli.integer(1, 1024), default=1)
    cli.add_flags(parser, BuildConfig)
    return parser


def main(argv: list[str]) -> None:
    with open_pool() as pool:
        if pool is None:  # one of MPI's processes, which has worked for the first one
            return
        args = vars(build_parser().parse_args(argv))
        patterns, vocab, output = (args.pop(name) for name in ("input", "vocab", "output"))
        pool.start(args.pop("processes"))
        config, left_out = BuildConfig(**args), Counter()
        refuse_within(output, patterns)
        files = find_files(patterns, left_out=left_out)
        index, report = build_shards(files, read_vocab(vocab), output, config, pool)
    for split, entry in index["splits"].items():
        print(
            f"{output}: {split}: {len(entry['shards'])} shards, {entry['samples']:,} sequences, "
            f"{entry['tokens']:,} tokens, {entry['documents']:,} documents"
        )
    counts = ", ".join(f"{name} {count:,}" for name, count in index["counts"].items() if count)
    for line in (*report, *describe_tally(left_out), f"fill {index['fill']:.1%}; {counts}"):
        print(f"{output}: {line}")
