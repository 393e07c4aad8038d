"""How samples are drawn from stored sequences: the fields, their flags and ranges.

Apart from the code that draws, because a command line reads it and must not wait for numpy.
"""

from dataclasses import dataclass, field
from functools import partial

from albert_ds.cli import Number, check_ranges, flag, positive, whole
from albert_ds.errors import UserError
from albert_ds.json_files import build, check

WORD_RULES = ("scripts", "released")
MIN_SEQUENCE_LENGTH = 5  # [CLS] A [SEP] B [SEP] with one token in A and in B
TASK = "the task"
task = partial(flag, group=TASK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A sentence task; `DRAWS` of data/segments.py makes its pairs.

    What is drawn for (seed, source, epoch, sample) is a format, and a resumed run must draw in the
    one it began with. Whoever changes a draw raises the number of each objective it changes.
    """

    title: str  # in tables and plots
    labels: tuple[str, ...]  # what the labels 0 and 1 mean
    format: int


OBJECTIVES = {
    "sop": Objective(title="SOP", labels=("in order", "swapped"), format=1),
    "nsp": Objective(title="NSP", labels=("B follows A", "B from another document"), format=2),
    "none": Objective(title="", labels=(), format=1),
}


def list_pair_tasks() -> dict[str, str]:
    """Objective -> title, of those that have pairs."""
    return {name: objective.title for name, objective in OBJECTIVES.items() if objective.labels}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How samples are drawn from stored sequences.

    Raises UserError, naming the flag, for a value out of its range.
    """

    objective: str = task(
        "sentence loss beside MLM: sentence order (sop), next sentence (nsp) or none",
        default="sop",
        choices=OBJECTIVES,
    )
    sequence_length: int = task(
        "longest sequence, with [CLS] and [SEP]",
        "TOKENS",
        whole(MIN_SEQUENCE_LENGTH, 1 << 20),
        default=512,
        shown_default="that of the shards, at most --max-position-embeddings",
    )
    short_fraction: float = 0.1  # share of the sequences that are cut to a random length
    masked_fraction: float = task(
        "share of a sequence's tokens to predict", "SHARE", Number(above=0, below=1), default=0.15
    )
    max_predictions: int | None = task(
        "largest number of tokens of a sequence to predict; the release takes 20, which is 4 % of "
        "512",
        "TOKENS",
        whole(1, 1 << 20),
        default=None,
        shown_default="no limit, as in the paper",
    )
    max_ngram: int = task(
        "largest number of whole words that are masked together", "WORDS", whole(1, 100), default=3
    )
    word_boundaries: str = task(
        "what a whole word is: by each script's own use of spaces (scripts), or only a-z continue "
        "a word (released)",
        default="scripts",
        choices=WORD_RULES,
    )
    seed: int = task(
        "seed of the weights, the data order, the masks and dropout",
        "N",
        whole(0, (1 << 63) - 1),
        default=0,
    )

    format: int = field(init=False)  # of the draws, in OBJECTIVES

    def __post_init__(self):
        check_ranges(self)
        share = Number(low=0, high=1)
        if self.short_fraction not in share:
            raise UserError(f"--short-fraction {self.short_fraction}: must be {share}")
        object.__setattr__(self, "format", OBJECTIVES[self.objective].format)

    @classmethod
    def read(cls, recorded: dict, run: str) -> "StreamConfig":
        """How `run` draws, from "stream" of its config.json.

        Raises UserError if that is wrong, or if this version draws in another format.
        """
        name = f"{run}: config.json: stream"
        check(recorded, {"format": positive}, name)
        given = {key: value for key, value in recorded.items() if key != "format"}
        stream = build(cls, given, name)
        if recorded["format"] != stream.format:
            raise UserError(
                f"{run} draws --objective {stream.objective} in format {recorded['format']}, "
                f"and this version in format {stream.format}: read it with the commit that its "
                "config.json names"
            )
        return stream
