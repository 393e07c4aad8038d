"""Which layout to use for a model on a cluster.

`find_plans` chooses the simplest layout that is as fast as the model can distinguish. It takes the
lowest ZeRO stage that fits: at ZeRO-3 without accumulation fewer bytes are sent, but the model
does not contain the host's time for ZeRO-3's gathers, module by module. Simpler means less tensor
parallelism, then less recomputation. Two layouts count as equally fast if they differ by less than
the model's own error. Of equally simple layouts it takes the smallest micro-batch that is not
slower: that leaves the most memory.
"""

import itertools
from dataclasses import dataclass, replace
from statistics import fmean

from albert_ds.base.errors import UserError
from albert_ds.base.schedules import cut
from albert_ds.data.stream_config import read_varying
from albert_ds.model.config import ModelConfig
from albert_ds.model.depth import read_depths
from albert_lab.scaling.layout import CHECKPOINTING, Layout
from albert_lab.scaling.memory import Memory, predict_memory
from albert_lab.scaling.step_time import Machine, StepTime, predict_step

AS_FAST = 1.10  # a step that is longer by at most this factor counts as equally fast
NO_LOSS = 1.02  # ... does not justify a larger micro-batch
RULE = (
    f"Rule: the lowest ZeRO stage that fits; of its layouts at most {AS_FAST - 1:.0%} slower than "
    "its fastest the least tensor parallelism, then the least checkpointing; of these the smallest "
    f"micro-batch at most {NO_LOSS - 1:.0%} slower than the fastest."
)
LARGEST_PASS = 1024  # sequences of a pass that are tried
ZERO_STAGES = (1, 2, 3)  # what ds_configs/ ships in bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A layout with its memory and its step."""

    layout: Layout
    memory: Memory
    step: StepTime

    @property
    def samples_per_second(self) -> float:
        return self.layout.batch_size / self.step.total

    @property
    def kind(self) -> tuple[int, int]:
        """Simpler is less."""
        again = CHECKPOINTING.index(self.layout.activation_checkpointing)
        return (self.layout.tensor_parallel, again)


def find_hours(
    plan: Plan,
    machine: Machine,
    *,
    link: float,
    steps: int,
    depth_schedule: str | None = None,
    schedules: dict[str, str] | None = None,
) -> float:
    """Hours of a run, part by part of its --depth-schedule and of batch and length in `schedules`.

    On a line the length in its middle stands for all, of drawn depths the mean.
    """
    layout = plan.layout
    seconds = 0.0
    depths = read_depths(layout.model, depth_schedule, steps)
    sizes, lengths = (
        read_varying(name, (schedules or {}).get(name, str(getattr(layout, name))), steps)
        for name in ("batch_size", "sequence_length")
    )
    for begin, number in cut((depths, sizes, lengths), steps):
        part = replace(
            layout,
            accumulation=sizes.at(begin) // (layout.micro_batch_size * layout.data_parallel),
            sequence_length=lengths.at(begin + number // 2),
        )
        models = [layout.model.at_depth(layers) for layers in depths.at(begin)]
        parts = [replace(part, model=model) for model in models]
        seconds += number * fmean(predict_step(x, machine, link=link).total for x in parts)
    return seconds / 3600


def list_patterns_of(plan: Plan, machine: Machine, *, link: float) -> dict[str, float]:
    """Share of a step that each pattern's exposed communication takes, in the plan's layout.

    cycle:M stands for all patterns of M whole blocks, of which each is used more than once.
    """
    layers = plan.layout.model.num_layers
    shares = {}
    words = ["all", *(f"cycle:{count}" for count in range(2, layers // 2 + 1))]
    for word in (*words, "attention", "ffn", "none"):
        model = replace(plan.layout.model, sharing=word)
        step = predict_step(replace(plan.layout, model=model), machine, link=link)
        shares[word] = step.communication / step.total
    return shares


def find_layouts(
    name: str,
    model: ModelConfig,
    *,
    ranks: int,
    ranks_a_node: int,
    batch_size: int,
    sequence_length: int,
    micro_batch_size: int | None = None,
    muon: bool = False,
    eight_bits: bool = False,
    teacher: ModelConfig | None = None,
) -> list[Layout]:
    """All layouts with exactly this global batch; tensor parallelism stays inside a node.

    micro_batch_size: instead of every one that is possible. Raises UserError where there is none.
    """
    nodes = count_nodes(ranks, ranks_a_node)
    shares = {  # tensor-parallel ranks -> sequences of a replica
        tp: batch_size * tp // ranks
        for tp in ((1,) if eight_bits else (1, 2, 4, 8))
        if not (min(ranks, ranks_a_node) % tp or model.num_heads % tp or model.ffn_size % tp)
        and not batch_size * tp % ranks
    }
    if not shares:
        below = batch_size // ranks * ranks
        nearest = ", ".join(str(size) for size in (below, below + ranks) if size)
        raise UserError(
            f"--batch-size {batch_size}: no multiple of --gpus {ranks}; the nearest are {nearest}"
        )
    layouts = [
        Layout(
            name=name,
            model=model,
            ranks=ranks,
            nodes=nodes,
            zero=zero,
            tensor_parallel=tp,
            micro_batch_size=micro,
            accumulation=share // micro,
            sequence_length=sequence_length,
            activation_checkpointing=again,
            muon=muon,
            eight_bits=eight_bits,
            teacher=teacher,
        )
        for tp, share in shares.items()
        for micro in ([micro_batch_size] if micro_batch_size else range(1, LARGEST_PASS + 1))
        if share % micro == 0
        for zero, again in itertools.product((1,) if muon else ZERO_STAGES, CHECKPOINTING)
    ]
    if not layouts:
        raise UserError(
            f"--micro-batch-size {micro_batch_size}: does not divide the {min(shares.values())} "
            "sequences of a replica"
        )
    return layouts


def count_nodes(ranks: int, ranks_a_node: int) -> int:
    """Raises UserError where the last node would not be full."""
    if ranks > ranks_a_node and ranks % ranks_a_node:
        raise UserError(
            f"--gpus {ranks}: not a multiple of the {ranks_a_node} GPUs of a node; allowed: "
            "multiples, or another --gpus-a-node"
        )
    return -(-ranks // ranks_a_node)


def find_plans(
    layouts: list[Layout], machine: Machine, *, link: float, memory_limit: float
) -> list[Plan]:
    """Every layout within `memory_limit` bytes per rank: the one to use, then the others by speed.

    Raises UserError where none fits; the message says how much the smallest needs.
    """
    every = [
        Plan(
            layout=layout,
            memory=predict_memory(layout),
            step=predict_step(layout, machine, link=link),
        )
        for layout in layouts
    ]
    fits = [plan for plan in every if plan.memory.peak <= memory_limit]
    if not fits:
        least = min(plan.memory.peak for plan in every)
        raise UserError(
            f"--gpu-memory: no layout fits in {memory_limit / 1e9:.1f} GB per GPU, the smallest "
            f"needs {least / 1e9:.1f}; allowed: more memory or more GPUs"
        )
    by_time = sorted(fits, key=lambda plan: plan.step.total)
    stage = min(plan.layout.zero for plan in fits)
    leanest = [plan for plan in by_time if plan.layout.zero == stage]
    kind = min(p.kind for p in leanest if p.step.total <= AS_FAST * leanest[0].step.total)
    same = [plan for plan in leanest if plan.kind == kind]
    enough = [plan for plan in same if plan.step.total <= NO_LOSS * same[0].step.total]
    best = min(enough, key=lambda plan: plan.layout.micro_batch_size)
    return [best, *(plan for plan in by_time if plan is not best)]
