"""Seconds of an optimizer step from a layout, a link and a machine's constants.

    step = compute + exposed communication + optimizer + what every step costs
    a collective = alpha x hops + wire bytes x max(beta, what the link takes for a byte)

and what ranks wait for the slowest of them, a share of what they compute.

A gradient is reduced behind backward only where it is complete before backward ends: a shared
block's is complete after its last use, in the first layer, so of an ALBERT nothing is hidden.
"""

from dataclasses import dataclass

from albert_ds.scaling.layout import Layout
from albert_ds.scaling.traffic import GRADIENTS, WEIGHTS, Collective, count_collectives

BACKWARD_SHARE = 2 / 3  # of a pass: the gradient of the input and that of the weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Constants of one rank that has one device (a core, a GPU) to itself; seconds."""

    name: str
    source: str  # where the numbers come from
    a_flop: float
    an_element: float = 0.0  # activation that a layer writes
    a_weight: float = 0.0  # parameter that a pass reads, a shared one once a layer
    a_gradient: float = 0.0  # parameter whose gradient a pass writes, a shared one once
    a_layer: float = 0.0  # least that a layer takes in a pass: launching its kernels
    an_update: float = 0.0  # parameter whose update this rank computes
    a_parameter: float = 0.0  # parameter of this rank, whoever updates it
    a_step: float = 0.0
    alpha: float = 0.0  # message that others wait for
    beta: float = 0.0  # wire byte inside a node, of a reduction
    beta_gather: float = 0.0  # ... of a gather
    link_cost: float = 1.0  # the link's nominal time for a reduced byte is multiplied by this
    link_cost_gather: float = 1.0  # ... for a gathered one
    straggle: float = 0.0  # ranks wait for the slowest this share of what they compute
    overlap: float = 0.0  # share of backward behind which a reduction can run


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, and the bytes that it sends."""

    compute: float
    communication: float  # exposed
    optimizer: float
    other: float
    hidden: float  # communication behind backward, not in `total`
    wire_bytes: float  # of one rank
    link_bytes: float  # through one node's link, in each direction
    kinds: dict[str, float]  # seconds of each kind of collective, hidden or not

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.optimizer + self.other


def predict_step(
    layout: Layout, machine: Machine, *, link: float | None = None, devices: float = 1.0
) -> StepTime:
    """One optimizer step.

    link: bits a second of a node's link, None where nothing limits it; devices: cores or GPUs that
    a rank has, below 1 where ranks share them.
    """
    model = layout.model
    a_pass = (
        (layout.flops + layout.recomputed_flops) / layout.accumulation * machine.a_flop
        + layout.layer_elements * machine.an_element
        + layout.used_parameters * machine.a_weight
        + layout.parameters * machine.a_gradient
    ) / devices
    a_pass = max(a_pass, model.num_layers * machine.a_layer)
    collectives = count_collectives(layout)
    seconds = {c.kind: time_collective(c, machine, link, devices) for c in collectives}
    passes_that_hide = layout.accumulation if layout.zero >= 2 else 1
    hidden = min(
        layout.hideable_share * seconds.get(GRADIENTS, 0.0),
        machine.overlap * BACKWARD_SHARE * a_pass * passes_that_hide,
    )
    updates = layout.held_parameters * machine.an_update + layout.parameters * machine.a_parameter
    compute, optimizer = a_pass * layout.accumulation, updates / devices
    waited = machine.straggle * (compute + optimizer) * (layout.ranks > 1)
    return StepTime(
        compute=compute,
        communication=sum(seconds.values()) - hidden + waited,
        optimizer=optimizer,
        other=machine.a_step / devices,
        hidden=hidden,
        wire_bytes=sum(c.wire_bytes for c in collectives),
        link_bytes=sum(c.wire_bytes * c.rings for c in collectives if c.crosses_nodes),
        kinds=seconds,
    )


def time_collective(
    collective: Collective, machine: Machine, link: float | None, devices: float
) -> float:
    """Seconds of all its calls, were nothing else going on."""
    is_gather = collective.kind == WEIGHTS
    a_byte = (machine.beta_gather if is_gather else machine.beta) / devices
    if collective.crosses_nodes and link is not None:
        cost = machine.link_cost_gather if is_gather else machine.link_cost
        a_byte = max(a_byte, 8 / link * cost * collective.rings)
    return collective.hops * machine.alpha / devices + collective.wire_bytes * a_byte
