"""Seconds of an optimizer step from a layout, a link and a machine's constants.

    step = compute + communication + optimizer + a constant
    a collective = alpha x hops + wire bytes x max(beta, the link's time per byte)

Communication also has the time that ranks wait for the slowest rank: a share of compute and update.
Nothing of it is hidden behind backward: as shipped, gradients are reduced after the last pass.

docs/raw/scaling_constants.json has the constants of a measured machine, hardware.py those of GPUs.
"""

from dataclasses import dataclass

from albert_lab.scaling.collectives import WEIGHTS, Collective, count_collectives
from albert_lab.scaling.layout import Layout

FP32 = 16  # times as long as bf16, of a GPU's matrix products: 15 to 16 on the datasheets


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Constants of one rank with one device (a core, a GPU), in seconds per ..."""

    name: str
    source: str  # where the numbers come from
    a_flop: float  # FLOP
    an_element: float = 0.0  # activation element that a layer writes
    a_weight: float = 0.0  # parameter that a pass reads, a shared one once per layer
    a_gradient: float = 0.0  # unique parameter whose gradient a pass writes
    a_layer: float = 0.0  # layer and pass, at least: launching its kernels
    an_update: float = 0.0  # parameter whose update this rank computes
    a_parameter: float = 0.0  # parameter of this rank, even if another rank updates it
    a_step: float = 0.0  # step
    alpha: float = 0.0  # hop
    beta: float = 0.0  # wire byte of a reduction inside a node
    beta_gather: float = 0.0  # wire byte of a gather inside a node
    link_cost: float = 1.0  # factor on the link's nominal time for a reduction
    link_cost_gather: float = 1.0  # ... for a gather
    straggle: float = 0.0  # wait for the slowest rank, as a share of compute and update


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, and its bytes."""

    compute: float
    communication: float
    optimizer: float
    other: float
    wire_bytes: float  # of one rank
    link_bytes: float  # over one node's link, in each direction

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.optimizer + self.other


def predict_step(
    layout: Layout, machine: Machine, *, link: float | None = None, devices: float = 1.0
) -> StepTime:
    """One optimizer step.

    link: bits/s of a node's link, None for no limit. devices: cores or GPUs per rank, below 1 where
    ranks share them.
    """
    model = layout.model
    a_pass = (
        (layout.flops + layout.recomputed_flops + layout.teacher_flops)
        / layout.accumulation
        * machine.a_flop
        + layout.layer_elements * machine.an_element
        + layout.used_parameters * machine.a_weight
        + layout.parameters * machine.a_gradient
    ) / devices
    of_teacher = layout.teacher.num_layers / 3 if layout.teacher else 0  # forward alone
    a_pass = max(a_pass, (model.num_layers + of_teacher) * machine.a_layer)
    collectives = count_collectives(layout)
    seconds = sum(time_collective(c, machine, link, devices) for c in collectives)
    slower = FP32 if layout.weight_bytes == 2 else 1
    matrices = layout.newton_schulz_flops * machine.a_flop * slower
    updates = layout.held_parameters * machine.an_update + layout.parameters * machine.a_parameter
    compute = a_pass * layout.accumulation
    optimizer = (updates + matrices) / devices
    straggle = machine.straggle * (compute + optimizer) * (layout.ranks > 1)
    return StepTime(
        compute=compute,
        communication=seconds + straggle,
        optimizer=optimizer,
        other=machine.a_step / devices,
        wire_bytes=sum(c.wire_bytes for c in collectives),
        link_bytes=sum(c.wire_bytes * c.rings for c in collectives if c.crosses_nodes),
    )


def time_collective(
    collective: Collective, machine: Machine, link: float | None, devices: float
) -> float:
    """Seconds of all its calls, if they run alone."""
    is_gather = collective.kind == WEIGHTS
    a_byte = (machine.beta_gather if is_gather else machine.beta) / devices
    if collective.crosses_nodes and link is not None:
        cost = machine.link_cost_gather if is_gather else machine.link_cost
        a_byte = max(a_byte, 8 / link * cost * collective.rings)
    return collective.hops * machine.alpha / devices + collective.wire_bytes * a_byte
