#!/usr/bin/env python
"""Compare our scores of sentences with those of minicons, of one pair of each of the first files.

Both of its pseudo-likelihoods: `original`, which `albert-ds probe --minimal-pairs` takes, and
`within_word_l2r`, its --within-word. Needs `pip install minicons`, which is no part of the project.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from albert_lab.tables import table

from albert_ds.base import cli
from albert_ds.base.cli import Parser, positive
from albert_ds.base.errors import UserError

METRICS = {"original": False, "within_word_l2r": True}
TOLERANCE = 1e-3  # nats of a sentence, in fp32 on both sides


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/minicons_check.py", description=__doc__.splitlines()[0])
    add = parser.add
    add("--checkpoint", "folder of Hugging Face", "HF", Path, required=True)
    add("--minimal-pairs", "folder of *.jsonl, as BLiMP's data/", "FOLDER", Path, required=True)
    add("--files", "pairs, each of another file", "FILES", positive, default=50)
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if find_spec("minicons") is None:
        raise UserError("minicons is not installed: pip install minicons")
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.evals.minimal_pairs import read_pairs, score_sentences

    first = {pair.paradigm: pair for pair in reversed(read_pairs(args.minimal_pairs))}
    pairs = list(first.values())[: args.files]
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    scorer = import_module("minicons.scorer").MaskedLMScorer(str(args.checkpoint), "cpu")
    # minicons 0.3 calls what transformers 5 has dropped.
    type(scorer.tokenizer).batch_encode_plus = lambda self, *words, **named: self(*words, **named)
    folder = ModelFolder(args.checkpoint)
    model = folder.build_model()
    rows = []
    worst = 0.0
    for metric, within_word in METRICS.items():
        scores = scorer.sequence_score(
            sentences, reduction=lambda terms: terms.sum(0).item(), PLL_metric=metric
        )
        our_scores = score_sentences(
            model, folder.vocab, sentences, torch.device("cpu"), within_word=within_word
        )
        off = max(abs(one - other) for one, other in zip(our_scores, scores, strict=True))
        rows.append(
            (metric, str(len(our_scores)), f"{sum(our_scores) / len(our_scores):.3f}", f"{off:.1e}")
        )
        worst = max(worst, off)
    print(table(("pseudo-likelihood", "sentences", "mean, nats", "largest difference"), rows))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    cli.run(main)
