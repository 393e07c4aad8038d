"""Toy tasks in the published formats, a small checkpoint, and a way to fine-tune on them."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import ModelConfig
from albert_ds.vocab.vocab import Vocab
from tests.models import write_run

MODEL = ModelConfig(
    **dict(vocab_size=300, embedding_size=16, hidden_size=32, ffn_size=64),
    **dict(num_layers=2, num_heads=2, max_position_embeddings=64, dropout=0.1),
)
WORDS = "the object name class type list string module function statement".split()


def write_checkpoint(
    folder: Path, vocab: Vocab, *, seed: int = 0, stream: dict | None = None, **changes
) -> Path:
    """A pretraining run as it is left behind, with random weights."""
    record = {} if stream is None else {"stream": stream}
    model = AlbertForPretraining(replace(MODEL, **changes), seed=seed)
    return write_run(folder, model, vocab, **record)


def draw_sentences(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 6)) for _ in range(count)]


def write_cola(folder: Path, *, train: int = 96, dev: int = 40) -> Path:
    """Acceptable is what has the word "class"."""
    folder.mkdir(parents=True)
    for split, count, seed in (("train", train, 1), ("dev", dev, 2)):
        rows = [f"x\t{int('class' in s)}\t\t{s}" for s in draw_sentences(count, seed)]
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    rows = [f"{i}\t{s}" for i, s in enumerate(draw_sentences(10, 3))]
    (folder / "test.tsv").write_text("index\tsentence\n" + "\n".join(rows) + "\n")
    return folder


def write_pairs(folder: Path, header: str, row, splits=("train", "dev"), count: int = 12) -> Path:
    """A task of pairs; `row` makes the fields of (number, first, second)."""
    folder.mkdir(parents=True)
    for number, split in enumerate(splits):
        texts = draw_sentences(2 * count, number)
        rows = [row(i, texts[2 * i], texts[2 * i + 1]) for i in range(count)]
        lines = [header, *("\t".join(fields) for fields in rows)]
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_rte(folder: Path) -> Path:
    labels = ("entailment", "not_entailment")
    header = "index\tsentence1\tsentence2\tlabel"
    return write_pairs(folder, header, lambda i, a, b: [str(i), a, b, labels[i % 2]])


def write_stsb(folder: Path) -> Path:
    header = "index\tsentence1\tsentence2\tscore"
    return write_pairs(folder, header, lambda i, a, b: [str(i), a, b, f"{i % 5}.250"])


def write_mnli(folder: Path) -> Path:
    labels = ("neutral", "entailment", "contradiction")
    return write_pairs(
        folder,
        "index\tsentence1\tsentence2\tgold_label",
        lambda i, a, b: [str(i), a, b, labels[i % 3]],
        splits=("train", "dev_matched", "dev_mismatched"),
    )


def write_topics(folder: Path, *, train: int = 96, dev: int = 40, wrong: int = 1000) -> Path:
    """Labels of one's own: three classes, by which of two words there are; quoted CSV.

    Every `wrong`-th label of dev and test is wrong.
    """
    folder.mkdir(parents=True)
    for split, count, seed in (("train", train, 1), ("dev", dev, 2), ("test", 10, 3)):
        rows = [["id", "label", "text"]]
        for number, text in enumerate(draw_sentences(count, seed)):
            label = "type, class" if "class" in text else "string" if "string" in text else "other"
            if split != "train" and number % wrong == wrong - 1:
                label = "other" if label == "string" else "string"
            rows.append([str(number), label, f'{text}, "so"'])
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return folder


def write_entities(folder: Path, *, train: int = 96, dev: int = 40) -> Path:
    """Tags of one's own: `class` and what follows are a THING, `string` alone is a KIND; CoNLL."""
    folder.mkdir(parents=True)
    for split, count, seed in (("train", train, 1), ("dev", dev, 2), ("test", 10, 3)):
        lines = ["-DOCSTART- O", ""]
        for text in draw_sentences(count, seed):
            inside = False
            for word in text.split():
                tag = "B-THING" if word == "class" else "I-THING" if inside else "O"
                tag = "B-KIND" if tag == "O" and word == "string" else tag
                inside = word == "class"
                lines.append(f"{word} {tag}")
            lines.append("")
        (folder / f"{split}.conll").write_text("\n".join(lines))
    return folder


def write_race(folder: Path) -> Path:
    for split in ("train", "dev", "test"):
        for level, seed in (("middle", 1), ("high", 2)):
            path = folder / split / level / "1.txt"
            path.parent.mkdir(parents=True)
            content = {
                "article": " . ".join(draw_sentences(4, seed)),
                "questions": ["It is a _ ?", "Which one is it?"],
                "options": [WORDS[:4], WORDS[4:8]],
                "answers": ["A", "C"],
            }
            path.write_text(json.dumps(content))
    return folder


def write_squad(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    for split, seed in (("train", 1), ("dev", 2)):
        paragraphs = []
        for number, context in enumerate(draw_sentences(6, seed)):
            context = f"{context} Knuth {draw_sentences(1, seed + number)[0]}"
            answer = {"text": "Knuth", "answer_start": context.index("Knuth")}
            asked = [{"id": f"{split}{number}", "question": "Who is it?", "answers": [answer]}]
            if version == "v2.0":
                none = {"id": f"{split}{number}n", "question": "Why not?", "answers": []}
                asked.append(none | {"is_impossible": True})
            paragraphs.append({"context": context, "qas": asked})
        content = {"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]}
        (folder / f"{split}-{version}.json").write_text(json.dumps(content))
    return folder


def read_csv(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def flags(task: str, data: Path, checkpoint: Path, output: Path, **given) -> list[str]:
    """The command line of finetune.py; keyword arguments are flags, True means without a value."""
    shortest = dict(steps=4, batch_size=8, learning_rate=0.002, dropout=0.0, log_every=1)
    given = {**shortest, **given}
    argv = ["--task", task, "--data", data, "--checkpoint", checkpoint, "--output", output]
    for name, value in given.items():
        flag = "--" + (name if name == "deepspeed_config" else name.replace("_", "-"))
        argv += [flag] if value is True else [flag, value]
    return [str(word) for word in argv]


def tune_ranks(rank: int, argv: list[str]) -> int:
    """finetune.py on this rank; its exit code."""
    import torch

    from albert_ds.finetune import main

    torch.set_num_threads(1)
    return main(argv)


def open_run(argv: list[str], device, mesh):
    """A fine-tuning run, as finetune.py opens it in this process."""
    from albert_ds.settings.finetune import read_config
    from albert_ds.training.finetune import prepare, start

    config, opened = read_config(argv, world_size=1)
    splits = prepare(config, opened, mesh)
    return start(config, opened, splits, mesh, device)
