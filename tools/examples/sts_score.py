"""How well sentence vectors tell similar texts: correlations, by sentence-transformers.

python tools/examples/sts_score.py --models vectors-before vectors --pairs dev.csv

The CSV has the columns text_a, text_b and score (any scale, larger is more alike), as STS-B has.
The models are folders that tools/examples/sentence_vectors.py wrote (--steps 0: before training).
"""

import argparse
import csv

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True, nargs="+", help="folders to compare")
    parser.add_argument("--pairs", required=True, help="CSV with text_a, text_b and score")
    args = parser.parse_args()
    with open(args.pairs, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    first, second = ([row[name] for row in rows] for name in ("text_a", "text_b"))
    judge = EmbeddingSimilarityEvaluator(first, second, [float(row["score"]) for row in rows])
    for folder in args.models:
        result = judge(SentenceTransformer(folder))
        spearman, pearson = result["spearman_cosine"], result["pearson_cosine"]
        figures = f"Spearman of cosines {spearman:.4f}, Pearson {pearson:.4f}"
        print(f"{folder}: {figures}, {len(rows)} pairs")


if __name__ == "__main__":
    main()
