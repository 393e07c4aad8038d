"""Checkpoints to Hugging Face folders, and back.

    python tools/convert_hf.py export --checkpoint RUN --output DIR
    python tools/convert_hf.py import --input DIR --output CKPT

DIR loads offline with AutoModel, AutoModelForPreTraining, AutoModelForMaskedLM and AutoTokenizer.
A fine-tuned model loads with the class of its task: sequence classification, multiple choice or
question answering (SQuAD 1.1). CKPT works wherever a checkpoint is asked for.
"""

from pathlib import Path

from albert_ds import cli


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="a run or checkpoint -> a Hugging Face folder")
    add = export.add_argument
    add("--checkpoint", required=True, type=Path, metavar="RUN", help="run (its newest checkpoint)")
    add("--output", required=True, type=Path, metavar="DIR", help="Hugging Face folder to write")
    add = commands.add_parser("import", help="a Hugging Face folder -> a checkpoint").add_argument
    add("--input", required=True, type=Path, metavar="DIR", help="Hugging Face folder to read")
    add("--output", required=True, type=Path, metavar="CKPT", help="checkpoint folder to write")
    return parser


def main(argv: list[str]) -> None:
    from albert_ds.convert import export_hf, import_hf

    args = build_parser().parse_args(argv)
    if args.command == "export":
        export_hf(args.checkpoint, args.output)
    else:
        import_hf(args.input, args.output)
    print(f"wrote {args.output}")
