"""The default settings of each task: those that the release published.

GLUE: run_glue.sh of google-research/albert, which agrees with the paper's Table 14 in all eight
rows. The script has no WNLI and sets no dropout: both are Table 14's (the dropout of 0.1 before the
classifier is in the release's code as well).

Texts and tokens with labels of the user's own: ten epochs, because such sets are small, and a tenth
of warm-up (Mosbach et al., 2021, who take twenty), at the rate of most tasks of GLUE.

SQuAD and RACE: the commands in the release's README. Table 14 differs from it: SQuAD 2.0 at 3e-5
for 8,144 steps of up to 512 tokens (814 of them warm-up), RACE at 2e-5 with ALBERT's dropout at
0.1. The README has RACE at 1e-5 without dropout, because the paper's setting diverges with the
second version of its models. SQuAD 1.1 agrees: Table 14's 3,649 steps are two epochs of batches of
48 questions.
"""

from dataclasses import dataclass, replace

from albert_ds.base.cli import flag, positive
from albert_ds.base.plugin import Table

SHORTEST = 10  # tokens of a sequence: three marks, a question and at least one of a passage


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Limits in tokens; that of a sequence includes [CLS] and [SEP]."""

    sequence: int = flag(
        "longest sequence, with [CLS] and [SEP]; what is kept of a question, and the step from "
        "window to window, are at most two thirds of it",
        "TOKENS",
        positive,
        default=512,
        name="--sequence-length",
    )
    question: int = 64  # SQuAD: the question's first; RACE: the last of question and option
    stride: int = 128  # SQuAD: from the start of a window to the start of the next
    answer: int = 30  # SQuAD: the longest answer that is predicted

    def cut_to(self, sequence: int) -> "Lengths":
        """These limits for sequences of that length, at least SHORTEST.

        A question and a stride have at most two thirds of it: the rest is left for a passage.
        """
        most = 2 * sequence // 3
        return replace(
            self,
            sequence=sequence,
            question=min(self.question, most),
            stride=min(self.stride, most),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of one task. It has either `steps` or `epochs`."""

    learning_rate: float
    batch_size: int
    steps: int | None = None
    epochs: float | None = None
    warmup: float  # share of the steps
    dropout: float = 0.0  # of ALBERT itself
    classifier_dropout: float = 0.1
    lengths: Lengths = Lengths()

    def count_steps(self, *, examples: int, batch_size: int) -> int:
        """Optimizer steps of the recipe's epochs, at least 1.

        As the release counts them: SQuAD's epochs are over questions, although a step trains on
        `batch_size` windows, and what is left of a division is dropped.
        """
        assert self.epochs is not None
        return max(1, int(examples / batch_size * self.epochs))

    def count_warmup(self, steps: int) -> int:
        """Warm-up steps; rounded down, as the release does, if the steps follow from epochs."""
        share = self.warmup * steps
        return int(share) if self.steps is None else round(share)


def _glue(rate: float, batch_size: int, steps: int, warmup: int, dropout: float = 0.0) -> Recipe:
    return Recipe(
        learning_rate=rate,
        batch_size=batch_size,
        steps=steps,
        warmup=warmup / steps,
        dropout=dropout,
    )


_USER_TASK = Recipe(learning_rate=2e-5, batch_size=32, epochs=10, warmup=0.1)
_SQUAD = Lengths(sequence=384, question=64, stride=128)

RECIPES = Table(Recipe) | {
    "glue/cola": _glue(1e-5, 16, 5336, 320),
    "glue/sst2": _glue(1e-5, 32, 20935, 1256),
    "glue/mrpc": _glue(2e-5, 32, 800, 200),
    "glue/stsb": _glue(2e-5, 16, 3598, 214),
    "glue/qqp": _glue(5e-5, 128, 14000, 1000, 0.1),
    "glue/mnli": _glue(3e-5, 128, 10000, 1000),
    "glue/qnli": _glue(1e-5, 32, 33112, 1986),
    "glue/rte": _glue(3e-5, 32, 800, 200, 0.1),
    "glue/wnli": _glue(2e-5, 16, 2000, 250, 0.1),
    "squad1": Recipe(learning_rate=5e-5, batch_size=48, epochs=2, warmup=0.1, lengths=_SQUAD),
    "squad2": Recipe(learning_rate=5e-5, batch_size=48, epochs=2, warmup=0.1, lengths=_SQUAD),
    "race": Recipe(
        learning_rate=1e-5,
        batch_size=32,
        steps=12000,
        warmup=1000 / 12000,
        lengths=Lengths(question=128),
    ),
    "text": _USER_TASK,
    "tokens": _USER_TASK,
}
