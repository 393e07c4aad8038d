"""Train a classifier on an export with the Trainer of transformers, on CSV files.

albert-ds export --checkpoint runs/base --output hf/base
python tools/examples/trainer_csv.py --model hf/base --train train.csv --dev dev.csv --output tuned

The CSVs have the columns text and label. The Trainer's own learning rate, 5e-5, is one for large
models: one of a few million parameters hardly leaves guessing with it in a few hundred steps.
"""

import argparse
import csv
from pathlib import Path

import transformers as hf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--train", "--dev", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    args = parser.parse_args()
    splits = []
    for path in (args.train, args.dev):
        with open(path, encoding="utf-8-sig", newline="") as file:
            splits.append([(row["text"], row["label"]) for row in csv.DictReader(file)])
    labels = {label: n for n, label in enumerate(sorted({label for _, label in splits[0]}))}
    tokenizer = hf.AutoTokenizer.from_pretrained(args.model)
    model = hf.AutoModelForSequenceClassification.from_pretrained(
        args.model, label2id=labels, id2label={n: label for label, n in labels.items()}
    )
    train, dev = (
        [{**tokenizer(text, truncation=True), "label": labels[label]} for text, label in rows]
        for rows in splits
    )
    Path(args.output).mkdir()
    trainer = hf.Trainer(
        model,
        hf.TrainingArguments(
            args.output,
            num_train_epochs=args.epochs,
            learning_rate=args.learning_rate,
            warmup_steps=0.1,  # of all steps
            per_device_train_batch_size=32,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=train,
        eval_dataset=dev,
        processing_class=tokenizer,  # pads each batch, and is saved with the model
        compute_metrics=lambda x: {"accuracy": (x.predictions.argmax(-1) == x.label_ids).mean()},
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
