"""The layout to use: of all that fit in memory, the simplest that is as fast as the model can tell.

A higher ZeRO stage is for what does not fit at a lower one: at ZeRO-3 without accumulation fewer
bytes are sent, but what its gathers, module by module, cost the host is not in the model. Simple is
less tensor parallelism, then nothing computed again. What is nearer to the fastest than the model's
own error is as fast. Of the simplest kind, the smallest micro-batch that loses next to nothing: it
leaves the most memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from albert_ds.errors import UserError
from albert_ds.model.config import ModelConfig
from albert_ds.scaling.layout import CHECKPOINTING, Layout
from albert_ds.scaling.memory import Memory, predict_memory
from albert_ds.scaling.predict import Machine, StepTime, predict_step

AS_FAST = 1.10  # a step longer by this much is not told apart from the fastest
NO_LOSS = 1.02  # ... is no reason for a larger micro-batch
ZERO_STAGES = (1, 2, 3)  # what ds_configs/ ships in bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A layout with what it needs and what it takes."""

    layout: Layout
    memory: Memory
    step: StepTime

    @property
    def samples_a_second(self) -> float:
        return self.layout.batch_size / self.step.total

    def hours(self, steps: int) -> float:
        return steps * self.step.total / 3600

    @property
    def kind(self) -> tuple[int, int]:
        """Simpler is less."""
        again = CHECKPOINTING.index(self.layout.activation_checkpointing)
        return (self.layout.tensor_parallel, again)


def find_layouts(
    name: str,
    model: ModelConfig,
    *,
    ranks: int,
    ranks_a_node: int,
    batch_size: int,
    sequence_length: int,
    micro_batch_sizes: tuple[int, ...] | None = None,
) -> Iterator[Layout]:
    """All that make exactly this global batch; tensor parallelism stays inside a node."""
    nodes = -(-ranks // ranks_a_node)
    if nodes > 1 and ranks % ranks_a_node:
        raise UserError(f"--gpus {ranks}: not a multiple of the {ranks_a_node} GPUs of a node")
    for tp in (t for t in (1, 2, 4, 8) if t <= ranks_a_node and not min(ranks, ranks_a_node) % t):
        if model.num_heads % tp or model.ffn_size % tp or batch_size % (ranks // tp):
            continue
        local = batch_size // (ranks // tp)
        for micro in micro_batch_sizes or tuple(2**n for n in range(local.bit_length())):
            if local % micro:
                continue
            for zero in ZERO_STAGES:
                for again in CHECKPOINTING:
                    yield Layout(
                        name=name,
                        model=model,
                        ranks=ranks,
                        nodes=nodes,
                        zero=zero,
                        tensor_parallel=tp,
                        micro_batch_size=micro,
                        accumulation=local // micro,
                        sequence_length=sequence_length,
                        activation_checkpointing=again,
                    )


def find_plans(
    layouts: Iterator[Layout], machine: Machine, *, link: float, memory_limit: float
) -> list[Plan]:
    """Every layout within `memory_limit` bytes a rank: the one to use, then the others by speed.

    Raises UserError where there is none, saying how much the leanest needs.
    """
    every = [
        Plan(
            layout=layout,
            memory=predict_memory(layout),
            step=predict_step(layout, machine, link=link),
        )
        for layout in layouts
    ]
    if not every:
        raise UserError("--batch-size: no micro-batch and no number of replicas divide it")
    fits = [plan for plan in every if plan.memory.peak <= memory_limit]
    if not fits:
        least = min(plan.memory.peak for plan in every)
        raise UserError(
            f"--gpu-memory: no layout fits in {memory_limit / 1e9:.1f} GB a GPU, the leanest needs "
            f"{least / 1e9:.1f}; allowed: more memory or more GPUs"
        )
    by_time = sorted(fits, key=lambda plan: plan.step.total)
    stage = min(plan.layout.zero for plan in fits)
    leanest = [plan for plan in by_time if plan.layout.zero == stage]
    kind = min(p.kind for p in leanest if p.step.total <= AS_FAST * leanest[0].step.total)
    same = [plan for plan in leanest if plan.kind == kind]
    enough = [plan for plan in same if plan.step.total <= NO_LOSS * same[0].step.total]
    best = min(enough, key=lambda plan: plan.layout.micro_batch_size)
    return [best, *(plan for plan in by_time if plan is not best)]
