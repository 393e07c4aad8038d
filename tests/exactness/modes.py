"""Which modes are run: full cross products where that is cheap, pairwise coverage elsewhere."""

import itertools
import random
from dataclasses import asdict, dataclass

FACTORS = {
    "grid": ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)),  # tensor parallel x data parallel
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16"),
    "accumulation": (1, 3),
    "clipping": (0.5, None),
    "checkpointing": ("none", "attention", "block"),
    "sharing": ("all", "attention", "ffn", "none", "groups:2"),
    "objective": ("sop", "nsp", "none"),
}
TASK = ("sharing", "objective")  # what is rotated through the cross product of the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One row of the table."""

    grid: tuple[int, int] = (1, 1)
    stage: int = 1
    precision: str = "fp32"
    accumulation: int = 1
    clipping: float | None = 0.5
    checkpointing: str = "none"
    sharing: str = "all"
    objective: str = "sop"

    @property
    def tensor_parallel(self) -> int:
        return self.grid[0]

    @property
    def data_parallel(self) -> int:
        return self.grid[1]

    @property
    def world_size(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def is_refused(self) -> bool:
        """Refused before anything runs: DeepSpeed's 16-bit wrapper at stage 0 is wrong."""
        return self.stage == 0 and self.precision == "bf16"


def _pairs(mode: Mode) -> set:
    return set(itertools.combinations(asdict(mode).items(), 2))


def all_pairs() -> set:
    """Every pair of values of two factors that some mode which is not refused has."""
    return {
        pair
        for one, two in itertools.combinations(FACTORS, 2)
        for pair in itertools.product(
            ((one, value) for value in FACTORS[one]), ((two, value) for value in FACTORS[two])
        )
        if set(pair) != {("stage", 0), ("precision", "bf16")}
    }


def pairwise_modes(seed: int = 8, tries: int = 300) -> list[Mode]:
    """Modes that hold every pair, chosen greedily: of `tries` random ones the most new pairs."""
    rng = random.Random(seed)
    missing, chosen = all_pairs(), []
    while missing:
        wanted = min(missing, key=repr)
        best = max(
            (_draw(rng, wanted) for _ in range(tries)), key=lambda mode: len(_pairs(mode) & missing)
        )
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _draw(rng: random.Random, wanted) -> Mode:
    while True:
        values = {name: rng.choice(choices) for name, choices in FACTORS.items()}
        mode = Mode(**{**values, **dict(wanted)})
        if not mode.is_refused:
            return mode


def crossed_modes() -> list[Mode]:
    """The full cross product of the layout, with sharing and objective rotated through it.

    Each of the 15 pairs of sharing and objective meets every value of every other factor;
    checkpointing is on (`block`) or off here, `attention` is left to the pairwise modes.
    """
    factors = {**FACTORS, "checkpointing": ("none", "block")}
    layout = [name for name in factors if name not in TASK]
    tasks = list(itertools.product(*(factors[name] for name in TASK)))
    met, used, chosen = set(), dict.fromkeys(tasks, 0), []
    for values in itertools.product(*(factors[name] for name in layout)):
        cell = dict(zip(layout, values, strict=True))
        if Mode(**cell).is_refused:
            continue
        task = max(tasks, key=lambda t: (sum((t, i) not in met for i in cell.items()), -used[t]))
        met |= {(task, item) for item in cell.items()}
        used[task] += 1
        chosen.append(Mode(**cell, **dict(zip(TASK, task, strict=True))))
    assert len(met) == len(tasks) * sum(len(factors[name]) for name in layout)
    return chosen


def half_precision_modes() -> list[Mode]:
    """bf16 in every grid, stage and cut of the batch, all else alike."""
    return [
        Mode(grid=grid, stage=stage, precision="bf16", accumulation=accumulation)
        for grid in FACTORS["grid"]
        for stage in (1, 2, 3)
        for accumulation in FACTORS["accumulation"]
    ]


def yardstick(mode: Mode) -> Mode:
    """The same steps by one process in one micro-batch: what the arithmetic itself gives."""
    return Mode(
        precision=mode.precision,
        sharing=mode.sharing,
        objective=mode.objective,
        clipping=mode.clipping,
    )
