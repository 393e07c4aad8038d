#!/usr/bin/env python
"""How well do models of different vocabularies know the same words?

Bits a byte of masked words depend on the vocabulary: the pieces of one word are scored each alone,
and a larger vocabulary has fewer such words. Here all models fill the same words of the same
held-out text, those that are one piece in every vocabulary: of each text 6 words, masked at once. A
word has white space around it and nothing but letters in it, so languages without spaces have none.
A text has 30 words or more, of which the first 60 are taken; how many are left out is printed.
Printed are nats a word (the true word's negative log-probability), and the difference from the
first model, whose 95 % interval is over texts.
"""

import random
from pathlib import Path

import torch
from albert_lab.report.seeds import mean_interval
from albert_lab.tables import table

from albert_ds.base import cli
from albert_ds.base.cli import Parser, positive
from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.data.shards import Shard, ShardSet, open_shards
from albert_ds.vocab.vocab import CLS, MASK, SEP

MASKED = 6  # words of a text
FEWEST, MOST = 30, 60  # words of a text: what is shorter is left out, what is longer is cut
TEXTS_A_PASS = 32


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/same_words.py", description=__doc__)
    add = parser.add
    text = "runs or folders of Hugging Face; none may have been trained on the held-out text"
    add("--checkpoints", text, "RUN_OR_HF", Path, nargs="+", required=True)
    add("--data", "shards, of any vocabulary, with held-out text", "FOLDER", Path, required=True)
    add("--texts", "held-out texts, drawn at random", "TEXTS", positive, default=3000)
    return parser


def read_texts(source: ShardSet) -> list[list[str]]:
    """The words of every sequence, at most MOST of each, in random order."""
    shards = [Shard(source, number) for number in range(len(source.shards))]
    decoded = (source.vocab.decode(each.ids.tolist()) for shard in shards for each in shard)
    texts = [text.split()[:MOST] for text in decoded]
    random.Random(0).shuffle(texts)
    return texts


def fits(folder: ModelFolder, text: list[str]) -> bool:
    """Whether the model was trained on as many tokens as the text has, with [CLS] and [SEP]."""
    return len(folder.vocab.encode([" ".join(text)])[0]) + 2 <= folder.trained_length


@torch.inference_mode()
def fill(folder: ModelFolder, drawn: list[tuple[list[str], list[int]]]) -> list[list[float]]:
    """Nats of the chosen words of each text, MASKED of them, all masked at once."""
    model = folder.build_model().eval()
    words = {word for text, _ in drawn for word in text}
    known = {word: folder.vocab.encode([word])[0] for word in words}
    nats = []
    for at in range(0, len(drawn), TEXTS_A_PASS):
        ids, positions, begins, columns, labels = [], [], [0], [], []
        for text, chosen in drawn[at : at + TEXTS_A_PASS]:
            columns.append(len(ids))  # every sequence begins with an output position
            ids.append(CLS)
            for number, word in enumerate(text):
                if number in chosen:
                    columns.append(len(ids))
                    labels.append(known[word][0])
                ids += [MASK] if number in chosen else known[word]
            ids.append(SEP)
            positions += range(len(ids) - begins[-1])
            begins.append(len(ids))
        states = model.albert(
            torch.tensor(ids),
            torch.zeros(len(ids), dtype=torch.int64),
            torch.tensor(positions),
            torch.tensor(begins, dtype=torch.int32),
            max(positions) + 1,
            torch.tensor(columns),
        )["last_hidden_state"]
        is_word = torch.tensor([ids[column] == MASK for column in columns])
        word = model.albert.embeddings.word.weight
        logits = model.mlm_head.logits(states[is_word].float(), word.float())
        scores = -logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None]).squeeze(1)
        nats += scores.view(-1, MASKED).tolist()
    return nats


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    folders = [ModelFolder(path) for path in args.checkpoints]
    source = open_shards(args.data, "heldout")
    if source.segmented:
        raise UserError(f"--data {args.data}: its language has no words between spaces")
    for path, folder in zip(args.checkpoints, folders, strict=True):
        if folder.vocab.normalisation != source.vocab.normalisation:
            raise UserError(
                f"--checkpoints {path}: normalises text as {folder.vocab.normalisation.name}, "
                f"--data {args.data} as {source.vocab.normalisation.name}; they must be the same"
            )
    everything = read_texts(source)
    long = [text for text in everything if len(text) >= FEWEST]
    texts = [text for text in long if all(fits(folder, text) for folder in folders)]
    words = {word for text in texts for word in text if word.isalpha()}
    whole = {w for w in words if all(len(f.vocab.encode([w])[0]) == 1 for f in folders)}
    able = [[n for n, word in enumerate(text) if word in whole] for text in texts]
    share = sum(map(len, able)) / max(1, sum(map(len, texts)))
    rng = random.Random(0)
    drawn = [
        (text, sorted(rng.sample(numbers, MASKED)))
        for text, numbers in zip(texts, able, strict=True)
        if len(numbers) >= MASKED
    ]
    left_out = {
        f"have under {FEWEST} words": len(everything) - len(long),
        "are longer than what a model was trained on": len(long) - len(texts),
        f"have under {MASKED} such words": len(texts) - len(drawn),
        "were not drawn": max(0, len(drawn) - args.texts),
    }
    counted = f"of {len(everything):,} texts: " + ", ".join(
        f"{number:,} {why}" for why, number in left_out.items()
    )
    drawn = drawn[: args.texts]
    if len(drawn) < 2:
        raise UserError(f"--data {args.data}: must have two texts to compare; left out, {counted}")
    rows: list[tuple[str, ...]] = []
    first: list[float] = []
    for path, folder in zip(args.checkpoints, folders, strict=True):
        means = [sum(nats) / MASKED for nats in fill(folder, drawn)]
        first = first or means
        mean, half = mean_interval([own - other for own, other in zip(means, first, strict=True)])
        difference = "" if means is first else f"{mean:+.3f} +- {half:.3f}"
        pieces = f"{folder.vocab.size:,}"
        rows.append((str(path), pieces, f"{sum(means) / len(means):.3f}", difference))
    print(table(("", "pieces", "nats a word", "minus the first"), rows))
    print(
        f"\n{MASKED * len(drawn):,} words of {len(drawn):,} texts; {share:.1%} of all words are "
        f"letters alone and one piece in every vocabulary. Left out, {counted}"
    )


if __name__ == "__main__":
    cli.run(main)
