"""Sentence vectors: an export as a folder of sentence-transformers, fitted to pairs of a CSV.

albert-ds export --checkpoint runs/base --output hf/base
python tools/examples/sentence_vectors.py --model hf/base --pairs pairs.csv --output vectors

The CSV has the columns text_a and text_b: two texts that belong together, such as a question and
its answer. The other texts of a batch count as wrong answers.
"""

import argparse
import csv
from pathlib import Path
from random import Random

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import batch_to_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder that albert-ds export wrote")
    parser.add_argument("--pairs", required=True, help="CSV with the columns text_a and text_b")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=100, help="steps of 32 pairs (100)")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args()
    words = Transformer(args.model)  # cuts texts to the longest sequence of pretraining
    mean = Pooling(words.get_embedding_dimension(), pooling_mode="mean")
    model = SentenceTransformer(modules=[words, mean])
    with open(args.pairs, encoding="utf-8-sig", newline="") as file:
        pairs = [(row["text_a"], row["text_b"]) for row in csv.DictReader(file)]
    Path(args.output).mkdir()
    loss_of = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    draw = Random(0)
    model.train()
    for step in range(1, args.steps + 1):
        batch = draw.sample(pairs, min(32, len(pairs)))
        sides = [model.preprocess(list(texts)) for texts in zip(*batch, strict=True)]
        loss = loss_of([batch_to_device(side, model.device) for side in sides], None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained(args.output)
    print(f"wrote {args.output}: vectors of {model.get_embedding_dimension()} numbers")


if __name__ == "__main__":
    main()
