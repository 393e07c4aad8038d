"""Accuracy of a checkpoint on held-out shards: masked tokens, sentence order, next sentence.

A model that was pretrained without one of the sentence tasks has no head for it; the tool then
trains that head alone, on pairs of the training shards (Table 5 of the paper). For comparison it
prints two baselines that need no model: the token that is masked most often, and a coin. Every
share has its 95 % confidence interval (Wilson). The loss of masked words is also given in bits per
UTF-8 byte of them, which compares models of different vocabularies. --similarity measures the L2
distance and the angle between the input and the output of every layer instead (Figure 1).

A range of --num-layers gives the loss and accuracy of masked words at every depth, with distance
and angle between its output and that of the depth before.

albert-ds probe --checkpoint RUN_OR_HF --data DATA
albert-ds probe --checkpoint RUN --data DATA --num-layers 1-12 --output FILE
albert-ds plots depths --input FILE --output FILE.png
albert-ds probe --checkpoint ALBERT --against BERT --data DATA --similarity --output FILE
albert-ds plots layers --input FILE --output FILE.png
"""

from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.files import write_report
from albert_ds.base.plugin import PLUGIN, load_plugin
from albert_ds.model.depth import read_span
from albert_ds.process.quiet import quiet_libraries


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add
    text = "pretraining run, checkpoint or Hugging Face folder"
    add("--checkpoint", text, "RUN_OR_HF", Path, required=True)
    add("--average", "read the averaged weights of the run", action="store_true")
    add("--data", "folder with held-out shards (required without --minimal-pairs)", "DATA", Path)
    text = (
        "folder of *.jsonl with sentence_good and sentence_bad, to measure instead (default: none)"
    )
    add("--minimal-pairs", text, "FOLDER", Path)
    text = "of the encoder with --minimal-pairs; bf16 is faster on processors with units for it"
    add("--precision", text, choices=("fp32", "bf16"), default="fp32")
    text = "with --minimal-pairs mask the rest of a token's word too, as minicons' within_word_l2r"
    add("--within-word", text, action="store_true")
    add("--samples", "largest number of held-out samples", "SAMPLES", cli.positive, default=4096)
    text = "training samples for a missing head"
    add("--head-samples", text, "SAMPLES", cli.positive, default=8192)
    add("--micro-batch-size", "samples of one forward pass", "SAMPLES", cli.positive, default=8)
    text = "longest sequence (default: that of the shards or of the model, the smaller)"
    add("--sequence-length", text, "TOKENS", cli.positive)
    text = (
        "layers to run, of the same blocks (default: the model's); 1-12: masked words alone, after "
        "each of these numbers of layers"
    )
    add("--num-layers", text, "LAYERS", read_span)
    add("--seed", "seed of masks and swaps", "N", cli.non_negative, default=0)
    add("--output", "JSON file for the same numbers", "FILE", cli.new_file)
    add("--similarity", "measure every layer instead (Figure 1)", action="store_true")
    text = "further checkpoints to measure with --similarity (default: none)"
    add("--against", text, "RUN_OR_HF", Path, nargs="+", default=[])
    text = "names of the models for --similarity (default: those of their folders)"
    add("--labels", text, "NAME", nargs="+")
    cli.add_flag(parser, "plugin", PLUGIN)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if (args.against or args.labels) and not args.similarity:
        raise UserError("--against and --labels: allowed only with --similarity")
    if args.average and args.similarity:
        raise UserError("--average: not with --similarity")
    if args.num_layers and args.minimal_pairs:
        raise UserError("--num-layers: allowed only with --data")
    if args.similarity and args.num_layers and len({*args.num_layers}) > 1:
        raise UserError("--num-layers: one depth with --similarity; a range says it of its depths")
    if args.precision != "fp32" and not args.minimal_pairs:
        raise UserError("--precision: allowed only with --minimal-pairs")
    if args.within_word and not args.minimal_pairs:
        raise UserError("--within-word: allowed only with --minimal-pairs")
    if (args.data is None) == (args.minimal_pairs is None):
        raise UserError("--data and --minimal-pairs: one of them is needed, and not both")
    load_plugin(args.plugin)
    quiet_libraries()  # before they are imported
    from albert_ds.evals.probe import run_probe

    values, table = run_probe(args)
    print(table)
    if args.output:
        write_report(args.output, values)
