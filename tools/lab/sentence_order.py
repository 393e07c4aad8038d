#!/usr/bin/env python
"""What a checkpoint knows of the order of two segments, and what would let it know more.

Two tables on held-out sequences. The first: how often the model tells the order, with the masks of
`albert-ds probe` and with none, beside a linear classifier that sees nothing but the pieces of each
segment and the pairs of neighbouring ones; and by the length of the shorter segment, whether more
text tells it more. The second: how often the model fills a masked piece that is rare, where the
same piece stands in view elsewhere in the sequence and where it does not. A model that compares the
segments does better than the words alone, and copies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from albert_lab.order_pairs import build_row, draw_pairs, group_by_length, list_pairs, show
from albert_lab.tables import table

from albert_ds import cli
from albert_ds.cli import Parser
from albert_ds.data.segments import NO_LABEL
from albert_ds.errors import UserError
from albert_ds.files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from albert_ds.data.samples import MicroBatch

FREQUENT = 2000  # SentencePiece numbers pieces by frequency; those from this number on are rare


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/sentence_order.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = "pretraining run, checkpoint or Hugging Face folder"
    add("--checkpoint", type=Path, required=True, metavar="RUN_OR_HF", help=text)
    add("--data", type=Path, required=True, metavar="DATA", help="folder with held-out shards")
    count: dict[str, Any] = {"type": cli.positive, "metavar": "SAMPLES"}
    add("--samples", default=4096, help="largest number of held-out sequences", **count)
    add("--word-samples", default=100_000, help="sequences the classifier learns from", **count)
    add("--output", type=cli.new_file, metavar="FILE", help="JSON file for the same numbers")
    return parser


def find_rare(batch: MicroBatch, frequent: int = FREQUENT) -> tuple[np.ndarray, np.ndarray]:
    """Of the masked pieces [P]: which are rare, and which stand in view elsewhere; bool [P]."""
    ids, ends = (np.asarray(batch.tensors[name]) for name in ("input_ids", "cu_seqlens"))
    places, labels = (
        np.asarray(batch.tensors[name]) for name in ("masked_positions", "masked_labels")
    )
    seen = np.zeros(len(places), bool)
    visible = ids.copy()
    visible[places] = -1  # a mask, another piece, or the piece itself
    for low, high in zip(ends[:-1], ends[1:], strict=True):
        inside = (places >= low) & (places < high)
        seen[inside] = np.isin(labels[inside], visible[low:high])
    return labels >= frequent, seen


def measure_copying(model, batches: Iterable[MicroBatch]) -> dict[str, list[int]]:
    """Rare masked pieces `elsewhere` in view and those `nowhere`: how many are filled, of how many.

    The most likely piece counts.
    """
    import torch

    found = {"elsewhere": [0, 0], "nowhere": [0, 0]}
    for batch in batches:
        tensors: dict[str, Any] = dict(batch.tensors)
        places, labels = tensors.pop("masked_positions"), tensors.pop("masked_labels")
        del tensors["pair_labels"]
        with torch.no_grad():
            states = model.albert(**tensors)["last_hidden_state"].index_select(0, places)
            scores = model.mlm_head.logits(states, model.albert.embeddings.word.weight)
        right = (scores.argmax(-1) == labels).numpy()
        rare, seen = find_rare(batch)
        for name, chosen in (("elsewhere", rare & seen), ("nowhere", rare & ~seen)):
            found[name][0] += int(right[chosen].sum())
            found[name][1] += int(chosen.sum())
    return found


def judge_order(model, batches: Iterable[MicroBatch]) -> np.ndarray:
    """Whether the model tells the order of each labelled pair: bool [pairs]."""
    import torch

    right = []
    for batch in batches:
        tensors: dict[str, Any] = dict(batch.tensors)
        labels = tensors.pop("pair_labels")
        del tensors["masked_positions"], tensors["masked_labels"]
        firsts = tensors["cu_seqlens"][:-1].long()  # of the last layer only each [CLS] is needed
        with torch.no_grad():
            pooled = model.albert(**tensors, output_positions=firsts)["pooled"]
            predicted = model.pair_head(pooled).argmax(-1)
        right.append((predicted == labels)[labels != NO_LABEL].numpy())
    return np.concatenate(right)


def count_right(right: np.ndarray) -> list[int]:
    return [int(right.sum()), len(right)]


def list_terms(ids: np.ndarray) -> list[str]:
    """The pieces of a segment and their pairs; its first piece stands after a mark."""
    words = ["^", *map(str, ids)]
    return [*words[1:], *(f"{a} {b}" for a, b in zip(words, words[1:], strict=False))]


def count_words(batches: Iterable[MicroBatch]):
    """Terms of the first segment minus those of the second [pairs, terms], and labels [pairs].

    A swap changes the sign, so a classifier without a bias treats both segments alike.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    first, second, labels = zip(*list_pairs(batches), strict=True)
    vectors: Any = HashingVectorizer(
        analyzer=list_terms, binary=True, alternate_sign=False, n_features=1 << 20
    )
    return vectors.transform(first) - vectors.transform(second), np.array(labels)


def classify_words(train: Iterable[MicroBatch], heldout: Iterable[MicroBatch]) -> list[int]:
    """Held-out pairs that a linear classifier tells, all of them, and those it learnt from."""
    from sklearn.linear_model import LogisticRegression

    known, labels = count_words(train)
    terms, answers = count_words(heldout)
    model = LogisticRegression(fit_intercept=False, solver="liblinear").fit(known, labels)
    return [*count_right(model.predict(terms) == answers), len(labels)]


def describe(values: dict) -> str:
    right, count, known = values["words"]
    order = [
        build_row("the model, masks as in `albert-ds probe`", *values["masked"]),
        build_row("the model, no masks", *values["shown"]),
        *(
            build_row(f"- shorter segment of {name}", *found)
            for name, found in values["lengths"].items()
        ),
        build_row(f"words alone, learnt from {known:,} pairs", right, count),
    ]
    copied = [
        build_row("in view elsewhere in the sequence", *values["elsewhere"]),
        build_row("nowhere else", *values["nowhere"]),
    ]
    head = ("right", "95 % interval", "of")
    rare = f"masked pieces from number {FREQUENT:,} on"
    return "\n\n".join(
        [table(("order of two segments", *head), order), table((rare, *head), copied)]
    )


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    import torch

    from albert_ds.commands.probe import open_model
    from albert_ds.data.shards import open_shards

    heldout, train = (open_shards(args.data, split) for split in ("heldout", "train"))
    device = torch.device("cpu")
    model = open_model(args.checkpoint, heldout.vocab, args.data, device, None).eval()
    if model.pair_head is None:
        raise UserError(f"--checkpoint {args.checkpoint}: must have a head for the order")
    longest = min(heldout.sequence_length, model.config.max_position_embeddings)
    masked = list(draw_pairs(heldout, args.samples, longest))
    shown = [show(batch) for batch in masked]
    learnt = draw_pairs(train, args.word_samples, longest)
    right = judge_order(model, shown)
    values = {
        "masked": count_right(judge_order(model, masked)),
        "shown": count_right(right),
        "lengths": group_by_length(list_pairs(shown), right),
        "words": classify_words(map(show, learnt), shown),
        **measure_copying(model, masked),
    }
    print(describe(values))
    if args.output:
        write_file(args.output, json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main)
