"""Build pretraining shards: text is split into sentences, encoded and packed, each sequence once.

Writes WebDataset tars DATA/train-000000.tar ... and DATA/heldout-000000.tar ... (held out by
document, at least one of several), a copy of the vocabulary, and DATA/index.json, which counts
everything. Pairs, lengths and masks are drawn in training. The same input gives the same bytes, by
one process or by many: `--processes N`, or on several machines `mpirun -n N albert-ds shards ...`,
where one of the N hands out the work. Killed, the same command goes on.

Without MPI, several machines take parts of one build, at the same time or not: N times
`--piece I/N`, then, for large text, M times `--join I/M`, then `--join`.
"""

from collections import Counter
from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.storage import find_files, refuse_within
from albert_ds.text.documents import add_input_flag
from albert_ds.text.encode import BuildConfig
from albert_ds.text.pipeline import build_shards, encode_part, write_part
from albert_ds.text.pool import open_pool
from albert_ds.text.sources import describe_tally
from albert_ds.text.work_folder import Part
from albert_ds.vocab.vocab import read_vocab

ALL = Part(1, 1)  # --join without a number


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    add = parser.add
    add_input_flag(parser)
    add("--vocab", "spiece.model of `albert-ds vocab`", "FILE", cli.path, required=True)
    add("--output", "folder to write to; is made", "DATA", Path, required=True)
    text = "processes of this machine that build together; for several machines, mpirun"
    add("--processes", text, "N", cli.integer(1, 1024), default=1)
    parts = parser.add_mutually_exclusive_group()
    text = "only encode the I-th of N parts of the text, for --join"
    parts.add_argument("--piece", type=Part.read, metavar="I/N", help=text)
    text = (
        "write the shards of text that is encoded: with I/M the I-th of M parts of them, without a "
        "number all that are missing, and the index"
    )
    parts.add_argument("--join", type=Part.read, metavar="I/M", nargs="?", const=ALL, help=text)
    cli.add_flags(parser, BuildConfig)
    return parser


def main(argv: list[str]) -> None:
    with open_pool() as pool:
        if pool is None:  # one of MPI's processes, which has worked for the first one
            return
        args = vars(build_parser().parse_args(argv))
        patterns, vocab, output = (args.pop(name) for name in ("input", "vocab", "output"))
        piece, join = args.pop("piece"), args.pop("join")
        pool.start(args.pop("processes"))
        config = BuildConfig(**args)
        left_out = Counter()
        refuse_within(output, patterns)
        files = find_files(patterns, left_out=left_out)
        given = files, read_vocab(vocab), output, config, pool
        if piece or join not in (None, ALL):
            print(
                output, encode_part(*given, piece) if piece else write_part(*given, join), sep=": "
            )
            return
        index, report = build_shards(*given, is_encoded=join == ALL)
    for split, entry in index["splits"].items():
        print(
            f"{output}: {split}: {len(entry['shards'])} shards, {entry['samples']:,} sequences, "
            f"{entry['tokens']:,} tokens, {entry['documents']:,} documents"
        )
    counts = ", ".join(f"{name} {count:,}" for name, count in index["counts"].items() if count)
    for line in (*report, *describe_tally(left_out), f"fill {index['fill']:.1%}; {counts}"):
        print(f"{output}: {line}")
