"""The bench times the same work on both sides; the figures themselves are no test's business."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from albert_ds.data.vocab import Normalisation, train_vocab
from tests.conftest import ROOT
from tests.finetuning import write_checkpoint, write_rte
from tools.lab.finetune_bench import pad_examples

pytest.importorskip("accelerate")


def test_both_sides_take_every_round(text_file, tmp_path):
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    vocab = train_vocab(lines, Normalisation(), vocab_size=300)
    checkpoint = write_checkpoint(tmp_path / "run", vocab)
    argv = ["--task", "glue/rte", "--data", write_rte(tmp_path / "RTE"), "--checkpoint", checkpoint]
    argv += [
        "--batch-size",
        "4",
        "--steps",
        "2",
        "--rounds",
        "3",
        "--output",
        tmp_path / "out.json",
    ]
    command = [sys.executable, "-W", "ignore", "tools/lab/finetune_bench.py", *map(str, argv)]
    environ = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    ours, trainer = (found["step_seconds"][name] for name in ("ours", "trainer"))
    ratios = [b / a for a, b in zip(ours, trainer, strict=True)]
    assert found["trainer_over_ours"] == pytest.approx(ratios) and len(ratios) == 3
    low, middle, high = sorted(ratios)
    assert f"| Trainer / albert-ds | {low:.2f} | {middle:.2f} | {high:.2f} |" in done.stdout


def test_the_trainer_s_batch_is_padded_to_its_longest():
    made = [
        {
            "input_ids": np.arange(1, n + 1),
            "token_type_ids": np.zeros(n, np.int64),
            "attention_mask": np.ones(n, np.int64),
            "labels": n,
        }
        for n in (2, 3)
    ]
    batch = pad_examples(made)
    assert batch["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [2, 3]
