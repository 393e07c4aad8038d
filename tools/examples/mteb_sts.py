"""The figures of sts_score.py by mteb: pairs of your own as a task of its benchmark.

pip install mteb
python tools/examples/mteb_sts.py --models vectors-before vectors --pairs dev.csv

CSV and models are those of sts_score.py. mteb keeps no result (cache=None).
"""

import argparse
import csv

import mteb
from datasets import Dataset
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer

TEXTS = ("text_a", "text_b")


class Pairs(AbsTaskSTS):
    """mteb's own evaluation of pairs of texts, on rows that are given instead of downloaded."""

    column_names = TEXTS
    metadata = TaskMetadata(
        name="LocalPairs",
        description="Pairs of texts with scores.",
        dataset={"path": "local/pairs", "revision": "1"},
        type="STS",
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
    )

    def __init__(self, rows: list[dict]):
        super().__init__()
        table = Dataset.from_list([{**row, "score": float(row["score"])} for row in rows])
        self.dataset = {"test": table}
        self.data_loaded = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True, nargs="+", help="folders to compare")
    parser.add_argument("--pairs", required=True, help="CSV with text_a, text_b and score")
    args = parser.parse_args()
    with open(args.pairs, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for folder in args.models:
        (result,) = mteb.evaluate(SentenceTransformer(folder), Pairs(rows), cache=None)
        (scores,) = result.scores["test"]
        spearman, pearson = scores["cosine_spearman"], scores["cosine_pearson"]
        figures = f"Spearman of cosines {spearman:.4f}, Pearson {pearson:.4f}"
        print(f"{folder}: {figures}, {len(rows)} pairs")


if __name__ == "__main__":
    main()
