"""What the demo's model has learned, what it has not and why, and what to do next.

python tools/demo/demo_verdict.py demo/probe.json
"""

import json
import sys


def describe(found: dict) -> list[str]:
    """Sentences for a terminal, from what probe.py measured."""
    mlm, frequent = found["heldout_mlm_accuracy"], found["most_frequent_share"]
    piece = found["most_frequent_piece"]
    verdict = "it reads the words around a mask" if mlm > 1.5 * frequent else "nothing was learned"
    lines = [
        f"Masked words: {mlm:.1%} right; always guessing {piece!r} gives {frequent:.1%}: {verdict}."
    ]
    pairs, sop = found["heldout_pairs"], found["heldout_sop_accuracy"]
    error = 2 * 0.5 / pairs**0.5  # two standard errors of a coin
    if abs(sop - 0.5) < error:
        lines.append(
            f"Sentence order: {sop:.1%} of {pairs:,} pairs, a coin's 50 % within {error:.1%}. That "
            "needs far more text: see docs/learning.md for when it begins."
        )
    else:
        lines.append(f"Sentence order: {sop:.1%} of {pairs:,} pairs; a coin gives 50 %.")
    lines.append(
        "Next: two hours on your own text (make learn TEXT='text/*.txt' HOURS=2), or the six steps "
        "of README.md for another language or a larger model."
    )
    return lines


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print("\n".join(describe(json.load(file))))
