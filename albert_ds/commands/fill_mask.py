"""Fill each [MASK] of a sentence with the pieces that a pretrained model finds most likely.

albert-ds fill-mask --checkpoint RUN_OR_HF "A list is a [MASK] of items."
"""

from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.plugin import PLUGIN, load_plugin


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add
    text = "pretraining run, checkpoint or Hugging Face folder"
    add("--checkpoint", text, "RUN_OR_HF", Path, required=True)
    add("--average", "read the averaged weights of the run", action="store_true")
    add("--top", "pieces to show for a mask", "PIECES", cli.positive, default=3)
    add("sentences", "text with one [MASK] or more", "SENTENCE", cli.utf8, nargs="+")
    cli.add_flag(parser, "plugin", PLUGIN)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    load_plugin(args.plugin)
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.evals.fill_mask import fill_masks

    folder = ModelFolder(args.checkpoint, average=args.average)
    filled = fill_masks(folder, args.sentences, args.top)
    for sentence, masks in zip(args.sentences, filled, strict=True):
        print(sentence)
        for best in masks:
            words = (f"{piece.replace(chr(0x2581), ' ').strip()} {p:.0%}" for piece, p in best)
            print("   " + ", ".join(words))
