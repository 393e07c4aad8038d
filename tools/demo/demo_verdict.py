"""What the demo's model has learned, what it has not and why, and what to do next.

python tools/demo/demo_verdict.py demo/probe.json
"""

from pathlib import Path

from albert_ds.base.cli import Parser, Range, positive, run
from albert_ds.base.json_files import check, read_json

_SHARE = Range(ge=0, le=1)
_COUNT = positive
REPORT = {
    "heldout_mlm_accuracy": _SHARE,
    "heldout_sop_accuracy": _SHARE,
    "heldout_pairs": _COUNT,
    "most_frequent_piece": str,
    "most_frequent_share": _SHARE,
}


def build_parser() -> Parser:
    parser = Parser(prog="tools/demo/demo_verdict.py", description=__doc__.splitlines()[0])
    parser.add(
        "report", "what albert-ds probe --output wrote of a model trained with SOP", "JSON", Path
    )
    return parser


def describe(report: dict) -> list[str]:
    """Sentences for a terminal, from what probe.py measured."""
    mlm, frequent = report["heldout_mlm_accuracy"], report["most_frequent_share"]
    piece = report["most_frequent_piece"]
    verdict = "it reads the words around a mask" if mlm > 1.5 * frequent else "nothing was learned"
    lines = [
        f"Masked words: {mlm:.1%} right; always guessing {piece!r} gives {frequent:.1%}: {verdict}."
    ]
    pairs, sop = report["heldout_pairs"], report["heldout_sop_accuracy"]
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


def main(argv: list[str]) -> None:
    path = build_parser().parse_args(argv).report
    report = read_json(path)
    check(report, REPORT, str(path))
    print("\n".join(describe(report)))


if __name__ == "__main__":
    run(main)
