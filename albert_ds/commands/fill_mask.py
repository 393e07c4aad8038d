"""Fill each [MASK] of a sentence with the pieces that a pretrained model finds most likely.

albert-ds fill-mask --checkpoint RUN_OR_HF "A list is a [MASK] of items."
"""

from pathlib import Path

from albert_ds import cli


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="RUN_OR_HF",
        help="pretraining run, checkpoint or Hugging Face folder",
    )
    add("--average", action="store_true", help="read the averaged weights of the run")
    add("--top", type=cli.positive, default=3, metavar="PIECES", help="pieces to show for a mask")
    add(
        "sentences",
        type=cli.utf8,
        nargs="+",
        metavar="SENTENCE",
        help="text with one [MASK] or more",
    )
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    from albert_ds.evals.fill_mask import fill_masks
    from albert_ds.interop.folder import ModelFolder

    filled = fill_masks(
        ModelFolder(args.checkpoint, average=args.average), args.sentences, args.top
    )
    for sentence, masks in zip(args.sentences, filled, strict=True):
        print(sentence)
        for best in masks:
            words = (f"{piece.replace(chr(0x2581), ' ').strip()} {p:.0%}" for piece, p in best)
            print("   " + ", ".join(words))
