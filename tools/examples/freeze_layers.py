"""Train a classifier on an export of which some parameters stay as they are.

albert-ds export --checkpoint runs/base --output hf/base
python tools/examples/freeze_layers.py --model hf/base --train train.csv --output tuned \
    --freeze albert.embeddings

--freeze takes beginnings of parameter names, which it prints: albert.embeddings, albert.pooler,
albert.encoder; the block that all layers share is albert.encoder.albert_layer_groups.0.
The CSV has the columns text and label.
"""

import argparse
import csv
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--train", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--freeze", nargs="+", required=True, metavar="NAME")
    parser.add_argument("--steps", type=int, default=200, help="steps of 32 texts (200)")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args()
    with open(args.train, encoding="utf-8-sig", newline="") as file:
        rows = [(row["text"], row["label"]) for row in csv.DictReader(file)]
    labels = {label: n for n, label in enumerate(sorted({label for _, label in rows}))}
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, label2id=labels, id2label={n: label for label, n in labels.items()}
    )
    Path(args.output).mkdir()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(args.freeze))
        print(f"{'trained' if parameter.requires_grad else 'frozen':8}{name} {[*parameter.shape]}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    draw = Random(0)
    model.train()
    for step in range(1, args.steps + 1):
        texts, words = zip(*draw.choices(rows, k=32), strict=True)
        inputs = tokenizer(list(texts), truncation=True, padding=True, return_tensors="pt")
        loss = model(**inputs, labels=torch.tensor([labels[word] for word in words])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
