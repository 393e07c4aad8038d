"""Train a SentencePiece vocabulary in ALBERT's layout.

Writes DIR/spiece.model, DIR/spiece.vocab (its pieces and scores, to read),
DIR/tokenizer_config.json and DIR/tokenizer.json (how text is normalised). Hugging Face's
AutoTokenizer loads DIR. Prints what normalisation did to the text.
"""

from collections import Counter
from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.storage import find_files, refuse_within
from albert_ds.text.documents import add_input_flag
from albert_ds.text.sources import describe_tally
from albert_ds.text.vocabulary import VocabConfig, build_vocab


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    add_input_flag(parser)
    parser.add("--output", "folder to write to; is made", "DIR", Path, required=True)
    cli.add_flags(parser, VocabConfig)
    return parser


def main(argv: list[str]) -> None:
    args = vars(build_parser().parse_args(argv))
    patterns, output = args.pop("input"), args.pop("output")
    left_out: Counter[str] = Counter()
    refuse_within(output, patterns)
    files = find_files(patterns, left_out=left_out)
    for line in (*build_vocab(files, output, VocabConfig(**args)), *describe_tally(left_out)):
        print(f"{output}: {line}")
