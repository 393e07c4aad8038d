"""Which samples each step of a run reads, and how they are drawn: fields, flags, ranges, schedules.

Apart from the code that draws, because a command line checks it.
"""

from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

from albert_ds.base.cli import Range, as_flag, check_ranges, flag, flags_of, integer, positive
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import build, check
from albert_ds.base.plugin import Table
from albert_ds.base.schedules import Schedule, Varying, cut, read_schedule

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


OBJECTIVES = Table(Objective) | {
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
        integer(MIN_SEQUENCE_LENGTH, 1 << 20),
        default=512,
        shown_default="that of the shards, at most --max-position-embeddings",
    )
    short_fraction: float = 0.1  # share of the sequences that are cut to a random length
    masked_fraction: float = task(
        "share of a sequence's tokens to predict", "SHARE", Range(gt=0, lt=1), default=0.15
    )
    max_predictions: int | None = task(
        "largest number of tokens of a sequence to predict; the release takes 20, which is 4 % of "
        "512",
        "TOKENS",
        integer(1, 1 << 20),
        default=None,
        shown_default="no limit, as in the paper",
    )
    max_ngram: int = task(
        "largest number of whole words that are masked together",
        "WORDS",
        integer(1, 100),
        default=3,
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
        integer(0, (1 << 63) - 1),
        default=0,
    )

    format: int = field(init=False)  # of the draws, in OBJECTIVES

    def __post_init__(self):
        check_ranges(self)
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


BATCH_SIZE = integer(1, 1 << 24)
_STREAM: dict[str, Any] = {name: declared.type for name, declared in flags_of(StreamConfig).items()}
# The fields that may change while training, with their ranges.
VARYING: dict[str, Varying] = {
    "batch_size": Varying(**asdict(BATCH_SIZE)),
    **{name: Varying(**asdict(_STREAM[name])) for name in ("sequence_length", "masked_fraction")},
}


def gradient_accumulation_steps(batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """Micro-batches of a step on one of the data-parallel ranks; UserError if none is whole."""
    accumulation, left = divmod(batch_size, micro_batch_size * ranks)
    if left:
        raise UserError(
            f"--batch-size {batch_size} is no multiple of --micro-batch-size {micro_batch_size} x "
            f"{ranks} data-parallel ranks; allowed: multiples of {micro_batch_size * ranks}"
        )
    return accumulation


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """The batches of a run of `steps` steps.

    `batch_size` and `stream` are those of the first step; `schedules` has the text of each field of
    VARYING that changes. Raises UserError where one is no schedule.
    """

    batch_size: int
    stream: StreamConfig
    schedules: dict[str, str] = field(default_factory=dict)
    steps: int = 1

    @classmethod
    def read(cls, recorded: dict, run: str) -> "DataPlan":
        """That of `run`, of whose config.json this is the content. Raises UserError."""
        name = f"{run}: config.json"
        check(recorded, {"batch_size": positive, "stream": dict, "steps": positive}, name)
        return cls(
            batch_size=recorded["batch_size"],
            stream=StreamConfig.read(recorded["stream"], run),
            schedules=read_schedules(recorded, name),
            steps=recorded["steps"],
        )

    def schedule(self, name: str) -> Schedule:
        """The schedule of a field of VARYING; of one value if it never changes."""
        held = self if name == "batch_size" else self.stream
        return read_varying(name, self.schedules.get(name) or str(getattr(held, name)), self.steps)

    def samples_at(self, step: int) -> int:
        """The position in the data after `step` steps: the sum of their batches."""
        sizes = self.schedule("batch_size")
        return sum(sizes.at(begin) * steps for begin, steps in cut([sizes], step))

    def stream_at(self, step: int) -> StreamConfig:
        """How the step after `step` finished ones draws."""
        return replace(
            self.stream,
            sequence_length=self.schedule("sequence_length").at(step),
            masked_fraction=self.schedule("masked_fraction").at(step),
        )

    def batch_at(self, step: int) -> tuple[range, StreamConfig]:
        """The positions of the samples of the step after `step` finished ones, and their draws."""
        return range(self.samples_at(step), self.samples_at(step + 1)), self.stream_at(step)


@cache
def read_varying(name: str, text: str, steps: int) -> Schedule:
    """The schedule of a field of VARYING. Raises UserError for what is none."""
    may_be_between = name != "batch_size"  # a batch is a number of whole micro-batches
    return read_schedule(as_flag(name), text, steps, VARYING[name], lines=may_be_between)


def read_schedules(recorded: dict, name: str) -> dict[str, str]:
    """The schedules of VARYING in the config.json `name`, of which `recorded` is the content."""
    schedules = recorded.get("schedules", {})
    check(schedules, dict.fromkeys(VARYING, str), f"{name}: schedules", is_closed=True)
    return schedules
