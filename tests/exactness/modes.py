"""The modes that are run: full cross products where they are cheap, pairwise coverage elsewhere."""

import itertools
import random
from dataclasses import dataclass, replace

FACTORS = {
    "grid": ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)),  # tensor parallel x data parallel
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16"),
    "accumulation": (1, 3),
    "clipping": (0.5, None),
    "checkpointing": ("none", "attention", "block"),
    "sharing": (
        *("all", "attention", "ffn", "none", "groups:2", "cycle:3", "cycle-rev:2"),
        "pattern:0,0,1,0/0,1,1,2",
    ),
    "per_layer": ("none", "norm,scale", "position,lora:2"),
    "objective": ("sop", "nsp", "none"),
    "resumed": (False, True),
}
LOOP = "loop:1,1x2,1"
ALONE = ("none", "norm", "scale", "position", "lora:2", "inject")  # additions, one at a time
# Rotated through the cross product of the other factors.
TASK = ("sharing", "per_layer", "objective", "resumed")


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
    per_layer: str = "none"
    objective: str = "sop"
    optimizer: str = "Lamb"
    resumed: bool = False  # stopped after some steps, and continued from the checkpoint
    depths: tuple[int, ...] = ()  # layers of each step; all of them if empty
    drawn: str = ""  # the depths that `depths` are drawn from, with seed 0
    exits: tuple[tuple[int, float], ...] = ()  # layers with a loss of their own, and its weight
    z_loss: float = 0.0
    teacher: float = 0.0  # weight of the divergence from another model's scores
    dealt_to: int = 1  # samples are ordered as that many data-parallel ranks would take them

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
        """Whether the configuration check refuses it: DeepSpeed's 16-bit ZeRO-0 is wrong."""
        return self.stage == 0 and self.precision != "fp32"


def pairs_of(mode: Mode) -> set:
    """The pairs of values of two factors that a mode holds."""
    return set(itertools.combinations([(name, getattr(mode, name)) for name in FACTORS], 2))


def all_pairs() -> set:
    """Every pair of values of two factors that a mode may have."""
    return {
        pair
        for one, two in itertools.combinations(FACTORS, 2)
        for pair in itertools.product(
            ((one, value) for value in FACTORS[one]), ((two, value) for value in FACTORS[two])
        )
        if set(pair) != {("stage", 0), ("precision", "bf16")}
    }


def pairwise_modes(seed: int = 8, tries: int = 300) -> list[Mode]:
    """Modes that contain every pair. Greedy: the best of `tries` random modes, again and again."""
    rng = random.Random(seed)
    missing = all_pairs()
    chosen = []
    while missing:
        wanted = min(missing, key=repr)
        best = max(
            (_draw(rng, wanted) for _ in range(tries)),
            key=lambda mode: len(pairs_of(mode) & missing),
        )
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


def _draw(rng: random.Random, wanted) -> Mode:
    while True:
        values = {name: rng.choice(choices) for name, choices in FACTORS.items()}
        mode = Mode(**{**values, **dict(wanted)})
        if not mode.is_refused:
            return mode


def crossed_modes() -> list[Mode]:
    """The full cross product of the layout in fp32, with all else rotated through it.

    Each value of a factor of the model meets every value of every other factor. Checkpointing is
    `block` or `none` here; the pairwise modes have `attention` too.
    """
    factors = {**FACTORS, "checkpointing": ("none", "block"), "precision": ("fp32",)}
    layout = [name for name in factors if name not in TASK]
    tasks = list(itertools.product(*(factors[name] for name in TASK)))
    met = set()
    used = dict.fromkeys(tasks, 0)
    chosen = []
    for values in itertools.product(*(factors[name] for name in layout)):
        cell = dict(zip(layout, values, strict=True))

        def meets(task: tuple, cell: dict = cell) -> set:
            return set(itertools.product(zip(TASK, task, strict=True), cell.items()))

        task = max(tasks, key=lambda t: (len(meets(t) - met), -used[t]))
        met |= meets(task)
        used[task] += 1
        chosen.append(Mode(**cell, **dict(zip(TASK, task, strict=True))))
    values = [sum(len(factors[name]) for name in names) for names in (TASK, layout)]
    assert len(met) == values[0] * values[1]
    return chosen


def half_precision_modes() -> list[Mode]:
    """bf16 in every grid and stage, with and without accumulation; all else is the default."""
    return [
        Mode(grid=grid, stage=stage, precision="bf16", accumulation=accumulation)
        for grid in FACTORS["grid"]
        for stage in (1, 2, 3)
        for accumulation in FACTORS["accumulation"]
    ]


def eight_bit_modes() -> list[Mode]:
    """fp8 at every stage, and each way of sharing and checkpointing; every second is resumed."""
    plain = Mode(precision="fp8")
    sharing = [name for name in FACTORS["sharing"] if name != "all"]
    modes = [replace(plain, stage=stage) for stage in (1, 2, 3)]
    modes += [replace(plain, sharing=name, accumulation=3) for name in sharing]
    modes += [replace(plain, checkpointing=kind) for kind in ("attention", "block")]
    modes += [replace(plain, exits=((2, 0.5),), depths=(3, 4, 3, 4, 4))]
    modes = [replace(mode, resumed=number % 2 == 1) for number, mode in enumerate(modes)]
    return modes + [replace(plain, grid=(1, 2), stage=stage) for stage in (1, 2, 3)]


def muon_modes() -> list[Mode]:
    """Muon with one block, and with a loop and additions, in every layout."""
    loop = {"sharing": LOOP, "per_layer": "norm,inject,lora:2"}
    return in_every_layout({"optimizer": "Muon"}, {"optimizer": "Muon", **loop})


def teacher_modes() -> list[Mode]:
    """Goals of another model beside the plain losses, and beside all others, in every layout."""
    others = {"z_loss": 0.1, "exits": ((2, 0.5),), "sharing": "cycle:3", "accumulation": 3}
    return in_every_layout({"teacher": 0.5}, {"teacher": 2.0, **others})


def in_every_layout(*kinds: dict) -> list[Mode]:
    """Each kind in every grid, stage and precision; every second mode is stopped and resumed."""
    modes = [
        Mode(grid=grid, stage=stage, precision=precision, **kind)
        for kind in kinds
        for precision in FACTORS["precision"]
        for stage in FACTORS["stage"]
        for grid in FACTORS["grid"]
    ]
    allowed = [mode for mode in modes if not mode.is_refused]
    return [replace(mode, resumed=number % 2 == 1) for number, mode in enumerate(allowed)]


def sharing_modes() -> list[Mode]:
    """Every pattern, and every addition alone, in every stage and precision on two ranks.

    The additions rotate through the patterns, checkpointing and resuming through both.
    """
    layouts = itertools.product(((1, 2), (2, 1)), FACTORS["stage"], FACTORS["precision"])
    plain = [Mode(grid=grid, stage=stage, precision=kind) for grid, stage, kind in layouts]
    plain = [mode for mode in plain if not mode.is_refused]
    return [
        replace(
            mode,
            sharing=sharing,
            per_layer=ALONE[(column + row) % len(ALONE)],
            checkpointing=FACTORS["checkpointing"][(column + row // 2) % 3],
            resumed=(column + row) // 2 % 2 == 0,
        )
        for row, sharing in enumerate((*FACTORS["sharing"], LOOP))
        for column, mode in enumerate(plain)
    ]


def depth_modes() -> list[Mode]:
    """Depths that change, depths that are drawn and losses at exits, in every stage, in fp32."""
    kinds = (
        {"sharing": LOOP, "per_layer": "norm,inject,lora:2", "depths": (3, 4, 3, 3, 4)},
        {"drawn": "2-4", "depths": (2, 3, 2, 3, 3)},
        {"exits": ((1, 0.5), (3, 1.0)), "depths": (2, 3, 4, 4, 4)},
    )
    return [
        Mode(grid=grid, stage=stage, resumed=stage % 2 == 1, **kind)
        for kind in kinds
        for grid in ((1, 2), (2, 1))
        for stage in FACTORS["stage"]
    ]


def same_order(mode: Mode) -> Mode:
    """One process that takes the micro-batches of all of this mode's ranks, one after the other.

    It rounds the same sums in the same order as `mode`, but for those that tensor parallelism cuts.
    It is never stopped.
    """
    ranks = mode.data_parallel
    passes = mode.accumulation * mode.data_parallel
    return replace(mode, grid=(1, 1), accumulation=passes, dealt_to=ranks, resumed=False)
