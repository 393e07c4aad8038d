"""Train a SentencePiece vocabulary in ALBERT's layout.

Writes DIR/spiece.model, DIR/spiece.vocab (its pieces and scores, to read) and
DIR/tokenizer_config.json (how text is normalised). Hugging Face's AlbertTokenizer loads DIR.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from albert_ds.data.inputs import cut_units, read_documents
from albert_ds.data.progress import show_progress
from albert_ds.data.readers import add_input_flags, split_sentences
from albert_ds.data.storage import find_files
from albert_ds.data.vocab import Normalisation, train_vocab
from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_input_flags(parser)
    add("--output", required=True, type=Path, metavar="DIR", help="folder to write to; is made")
    add("--vocab-size", type=int, default=30_000, help="pieces, special ones included (30000)")
    add("--keep-case", action="store_true", help="do not lower-case the text (it is, by default)")
    add("--keep-accents", action="store_true", help="do not strip accents (they are, by default)")
    add(
        "--character-coverage",
        type=float,
        default=0.99995,
        help="share of all characters in the text that get a piece; the rest is <unk> (0.99995)",
    )
    add(
        "--sample-size",
        type=int,
        default=10_000_000,
        help="sentences to train on, drawn at random where there are more (10000000)",
    )
    add("--seed", type=int, default=0, help="of that drawing (0)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    paths = find_files(args.input)
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output {args.output}: is not a folder")
    slices = [piece for unit in cut_units(paths) for piece in unit]
    damaged: Counter[str] = Counter()

    def sentences() -> Iterator[str]:
        with show_progress(sum(piece.size for piece in slices), "reading") as advance:
            readings = read_documents(slices, args.text_field)
            for number, (document, _, bytes_read) in enumerate(readings, 1):
                advance(number, bytes_read)
                if document.damage:
                    damaged[document.damage] += 1
                else:
                    yield from split_sentences(document.lines, args.lines, args.language)

    vocab = train_vocab(
        sentences(),
        Normalisation(lower_case=not args.keep_case, keep_accents=args.keep_accents),
        vocab_size=args.vocab_size,
        character_coverage=args.character_coverage,
        sample_size=args.sample_size,
        seed=args.seed,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    vocab.write(args.output)
    vocab.write_pieces(args.output)
    dropped = "".join(f", {number:,} {kind} dropped" for kind, number in damaged.items())
    print(f"{args.output}: {vocab.size:,} pieces{dropped}")


if __name__ == "__main__":
    try:
        main()
    except ENDINGS as ending:
        print(f"build_vocab: {ending}", file=sys.stderr)
        sys.exit(ending.code)
