"""A task of your own with a head of its own: any number of labels a text.

albert-ds finetune --plugin plugin_task.py --task several --data DATA ...

DATA has train.txt and dev.txt of lines "label,label<tab>text".
"""

import json
from functools import partial

import numpy as np
from torch.nn.functional import binary_cross_entropy_with_logits

from albert_ds.model.task_heads import HEADS, Head, PooledHead
from albert_ds.tasks.features import FeatureBuilder
from albert_ds.tasks.recipes import RECIPES, Recipe
from albert_ds.tasks.registry import TASKS

loss = partial(binary_cross_entropy_with_logits, reduction="sum")  # of logits and labels [B, C]
HEADS["several"] = Head(
    build=partial(PooledHead, loss=loss), width=lambda labels: labels, reads_pooled=True
)


class SeveralLabels:
    head = "several"
    labels = ("class", "type", "string")
    metrics = ("right",)
    dev_splits = ("dev",)
    test_splits = ()
    has_test_labels = False
    published = {}

    def files(self, data, split):
        return [data / f"{split}.txt"]

    def read(self, data, split):
        return [line.split("\t") for line in self.files(data, split)[0].read_text().splitlines()]

    def count_examples(self, data):
        return len(self.read(data, "train"))

    def build(self, data, split, vocab, lengths):
        builder = FeatureBuilder()
        rows = self.read(data, split)
        for number, (_, text) in enumerate(rows):
            builder.add_example(number, vocab.encode([text]), lengths.sequence)
        builder.count("examples", len(rows))
        marks = [[label in words.split(",") for label in self.labels] for words, _ in rows]
        return builder.build(labels=np.array(marks, np.float32))

    def score(self, split, outputs):
        marks = split.features.arrays["labels"] > 0
        return {"right": float(((outputs["logits"] > 0) == marks).mean())}

    def write(self, split, outputs, folder, metrics):
        rows = (outputs["logits"] > 0).astype(int).tolist()
        (folder / f"predictions.{split.name}.json").write_text(json.dumps(rows))


TASKS["several"] = SeveralLabels()
RECIPES["several"] = Recipe(learning_rate=5e-3, batch_size=16, epochs=8, warmup=0.1)
