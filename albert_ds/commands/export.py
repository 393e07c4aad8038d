"""Checkpoints to Hugging Face folders, and back.

    albert-ds export --checkpoint RUN --output DIR
    albert-ds import --input DIR --output CKPT

Of a run the newest whole checkpoint is exported; a line says so if it is not the newest. DIR
loads offline with AutoModel, AutoModelForPreTraining, AutoModelForMaskedLM and AutoTokenizer. A
fine-tuned model, of which the best weights are exported, loads with the class of its task: sequence
or token classification, multiple choice or question answering (SQuAD 1.1). CKPT works wherever a
checkpoint is asked for. DIR/README.md is the model card: read it, and fill in what it marks.
"""

import argparse
import re
from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.plugin import PLUGIN, load_plugin
from albert_ds.vocab.vocab import MODEL_NAME


def licence(text: str) -> str:
    """The identifier of a licence, as Hugging Face writes it."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        raise argparse.ArgumentTypeError(
            f"{text}: must be an identifier as Hugging Face lists them, such as apache-2.0, "
            "cc-by-sa-4.0 or other"
        )
    return text


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="a run or checkpoint -> a Hugging Face folder")
    add = export.add
    add("--checkpoint", "run (its newest checkpoint)", "RUN", Path, required=True)
    add("--output", "Hugging Face folder to write", "DIR", Path, required=True)
    add("--average", "export the averaged weights of the run", action="store_true")
    text = "export the mean of the weights of the K newest checkpoints"
    add("--average-last", text, "K", cli.positive, default=1)
    text = "write every checkpoint of the run, each as the folder DIR/step-N, or DIR/chck_1M "
    text += "and so on where train --save-at-words kept it"
    add("--revision-per-checkpoint", text, action="store_true")
    text = (
        "positions to write (default: all; the tokenizer cuts texts to the longest sequence "
        "of training in any case)"
    )
    add("--max-length", text, "TOKENS", cli.integer(3))
    text = (
        "of the weights in the file; transformers computes in fp32 with either, and the logits are "
        "compared before and after they are rounded"
    )
    add("--precision", text, choices=("fp32", "bf16"), default="fp32")
    text = (
        "licence of the weights for the model card, such as apache-2.0 (default: none, and "
        "the card marks its place)"
    )
    add("--license", text, "ID", licence)
    text = (
        "reports of `albert-ds probe --output` about what is exported, for the model card "
        "(default: none)"
    )
    add("--probe", text, "FILE", Path, nargs="+", default=[])
    cli.add_flag(export, "plugin", PLUGIN)
    add = commands.add_parser("import", help="a Hugging Face folder -> a checkpoint").add
    add("--input", "Hugging Face folder to read", "DIR", Path, required=True)
    add("--output", "checkpoint folder to write", "CKPT", Path, required=True)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.interop import export

    if args.command == "import":
        export.import_hf(ModelFolder(args.input), args.output)
        print(f"wrote {args.output}\nwrote {args.output / MODEL_NAME}")
        return
    load_plugin(args.plugin)
    if args.average_last > 1 and (args.average or args.revision_per_checkpoint):
        raise UserError("--average-last: not with --average, nor with --revision-per-checkpoint")
    if args.revision_per_checkpoint:
        exported = export.open_revisions(args.checkpoint, args.output, average=args.average)
    else:
        folder = ModelFolder(args.checkpoint, average=args.average, last=args.average_last)
        exported = {args.output: folder}
    probes = export.read_probes(args.probe, list(exported.values()))
    for output, folder in exported.items():
        export.export_hf(
            folder,
            output,
            max_length=args.max_length,
            licence=args.license,
            probes=probes,
            precision=args.precision,
        )
        print(f"wrote {output}")
