"""What eight bits cost a training, on a CPU and at any width.

python -m tests.eight_bit_training train FLAGS      `albert-ds train`; its JSON may ask for fp8
python -m tests.eight_bit_training compare A B ...  pairs of runs, or of their metrics.jsonl: the
                                                    loss of B less that of A, all and by tenths
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest


def train(argv: list[str]) -> int:
    from albert_ds import train as trainer
    from albert_ds.settings import shared
    from tests.eight_bits import emulated

    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "check_eight_bits", lambda *_, **__: None)
        return trainer.main(argv)


def read_losses(run: str) -> dict[int, float]:
    """The MLM loss by step, each a mean since the line before."""
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    lines = map(json.loads, path.read_text().splitlines())
    return {line["step"]: line["mlm_loss"] for line in lines if "mlm_loss" in line}


def compare(runs: list[str]) -> int:
    for pair in zip(runs[::2], runs[1::2], strict=True):
        first, second = map(read_losses, pair)
        steps = sorted(first.keys() & second.keys())
        # Of the longer run: one that was stopped is compared over the same steps.
        tenth = max(*first, *second) // 10
        parts = {"all": steps, "the last tenth": [n for n in steps if n > 0.9 * steps[-1]]}
        for number in range(10):
            begin, end = number * tenth, (number + 1) * tenth
            parts[f"after {begin} to {end}"] = [n for n in steps if begin < n <= end]
        for name, part in filter(lambda item: item[1], parts.items()):
            gap = fmean(second[n] - first[n] for n in part)
            means = (fmean(losses[n] for n in part) for losses in (first, second))
            print(f"{' '.join(pair)}: {name} of {steps[-1]} steps:", end=" ")
            print("{:.4f}, {:.4f} nats; {:+.4f}".format(*means, gap))
    return 0


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    sys.exit({"train": train, "compare": compare}[command](rest))
