"""Which samples each step of a run reads, and how they are drawn: a function of the step.

Apart from the code that reads, because a command line checks it and must not wait for numpy.
"""

from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from albert_ds.cli import as_flag, flags_of, positive, whole
from albert_ds.data.stream_config import StreamConfig
from albert_ds.json_files import check
from albert_ds.schedules import Schedule, Varying, cut, read_schedule

BATCH_SIZE = whole(1, 1 << 24)
_STREAM: dict[str, Any] = {name: how.type for name, how in flags_of(StreamConfig).items()}
# The fields that may change while training, with their ranges.
VARYING: dict[str, Varying] = {
    "batch_size": Varying(**asdict(BATCH_SIZE)),
    **{name: Varying(**asdict(_STREAM[name])) for name in ("sequence_length", "masked_fraction")},
}


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
        name, count = f"{run}: config.json", positive
        check(recorded, {"batch_size": count, "stream": dict, "steps": count}, name)
        schedules = recorded.get("schedules", {})
        check(schedules, dict.fromkeys(VARYING, str), f"{name}: schedules", is_closed=True)
        return cls(
            batch_size=recorded["batch_size"],
            stream=StreamConfig.read(recorded["stream"], run),
            schedules=schedules,
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
