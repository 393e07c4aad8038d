"""Train every mode with the product and with a float64 reference, and compare."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.teacher import Teacher
from albert_ds.settings.pretrain import RunConfig
from tests.batches import random_samples
from tests.distributed import run_ranks
from tests.exactness.modes import Mode
from tests.models import shake
from tests.optim import muon
from tests.reference import Reference, build_reference, reference_training
from tests.runs import SMALL, open_small_run, resume, small_config

NUM_STEPS = 5
RESUMED_AFTER = 3  # steps
BATCH_SIZE = 6
LEAST = 0.01  # share of itself: of a shorter way, fp32's rounding of a weight is too large a part
MODEL = replace(SMALL, num_layers=4, vocab_size=61)
# Of another width and depth; with blocks of its own, and a sentence head that nobody asks.
TEACHER = replace(MODEL, hidden_size=48, ffn_size=96, sharing="cycle:2")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of five steps of the product; the tensors are logical ones."""

    initial: Tensors
    weights: Tensors
    gradients: Tensors  # of the last step, clipped
    losses: list[float]
    norms: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference between two runs; relative except for the key bias."""

    loss: float  # worst step's
    norm: float  # worst step's
    gradient: float  # ||dg|| / ||g||, the worst tensor's
    parameter: float  # ||dp|| / max(||p - p_init||, LEAST ||p_init||), the worst tensor's
    overall: float  # the same over all tensors together
    key_bias: float  # largest |dp|


def batches_of(mode: Mode) -> list[list[dict]]:
    """The global batches, in the order in which `mode.dealt_to` ranks take their samples.

    `nsp` has other pair labels than `sop`.
    """
    first = 0 if mode.objective != "nsp" else 100
    ranks = mode.dealt_to
    batches = [
        random_samples(BATCH_SIZE, vocab_size=MODEL.vocab_size, max_length=24, seed=first + step)
        for step in range(NUM_STEPS)
    ]
    return [[s for rank in range(ranks) for s in batch[rank::ranks]] for batch in batches]


def config_of(mode: Mode, output: str = "unused") -> RunConfig:
    config = small_config(
        world_size=mode.world_size,
        tensor_parallel=mode.tensor_parallel,
        batch_size=BATCH_SIZE,
        micro_batch_size=BATCH_SIZE // (mode.data_parallel * mode.accumulation),
        ds_file=f"zero1_{mode.precision.replace('fp8', 'bf16')}.json",
        ds_changes={
            # A loss scale that overflows would skip the first steps, which the reference takes.
            **({"fp16": {"initial_scale_power": 8}} if mode.precision == "fp16" else {}),
            **({"fp8": {"enabled": True}} if mode.precision == "fp8" else {}),
            "zero_optimization": {"stage": mode.stage},
            "gradient_clipping": mode.clipping or 0.0,
            **(muon.DS_CHANGES if mode.optimizer == "Muon" else {}),
        },
        model=replace(
            MODEL,
            sharing=mode.sharing,
            per_layer=mode.per_layer,
            pair_head=mode.objective != "none",
        ),
        activation_checkpointing=mode.checkpointing,
        output=output,
    )
    stream = replace(config.stream, objective=mode.objective)
    config = replace(config, z_loss=mode.z_loss)
    if mode.depths:
        parts = [*enumerate(mode.depths), (NUM_STEPS, config.model.num_layers)]
        schedule = ",".join(f"{depth}@{step}" for step, depth in parts)
        config = replace(config, depth_schedule=f"{mode.drawn}@0" if mode.drawn else schedule)
    if mode.exits:
        words = ",".join(f"{layer}:{weight}" for layer, weight in mode.exits)
        config = replace(config, exit_losses=words)
    return replace(config, stream=stream)


def give_teacher(run, mode: Mode):
    """The run with the teacher of its mode, if there is one, in the type of its passes."""
    if mode.teacher:
        module = run.engine.deepspeed.module
        dtype = module.mlm_head.bias.dtype
        module.teacher = Teacher(shake(AlbertForPretraining(TEACHER)).to(dtype), mode.teacher)
    return run


def train_modes(rank: int, modes: list[Mode], folder: Path) -> list[Outcome]:
    """Train each mode, one after the other in the same processes; checkpoints go to `folder`.

    What a GPU does in fp8 is done on the host.
    """
    outcomes = []
    for number, mode in enumerate(modes):
        with ExitStack() as room:
            if mode.precision == "fp8":
                from tests.eight_bits import emulated  # imports Triton

                room.enter_context(emulated())
            outcomes.append(train_mode(mode, folder / str(number)))
    return outcomes if rank == 0 else []


def train_mode(mode: Mode, folder: Path) -> Outcome:
    from albert_ds.checkpoint.gather import gather
    from albert_ds.training.pretrain import next_batch, train_step

    config = config_of(mode, str(folder))
    batches = batches_of(mode)
    run = give_teacher(open_small_run(config, batches), mode)
    initial = gather(run.engine, "weights.safetensors")
    before = {}
    losses = []
    norms = []
    for step in range(NUM_STEPS):
        if mode.resumed and step == RESUMED_AFTER:
            run = give_teacher(resume(run, batches), mode)
        if step == NUM_STEPS - 1:
            before = gather(run.engine, "exp_avg.safetensors")
        norms.append(train_step(run, next_batch(run)))
        values = run.window.close(run.mesh, config.stream.objective)
        losses.append(values["loss"])
    after = gather(run.engine, "exp_avg.safetensors")
    return Outcome(
        initial=initial,
        weights=gather(run.engine, "weights.safetensors"),
        # m' = 0.9 m + 0.1 g, solved for g
        gradients={n: (m.double() - 0.9 * before[n].double()) / 0.1 for n, m in after.items()},
        losses=losses,
        norms=norms,
    )


def train_all(modes: list[Mode]) -> dict[Mode, Outcome]:
    """Train every mode; the processes are started once for each grid."""
    outcomes = {}
    for grid in sorted({mode.grid for mode in modes}):
        group = [mode for mode in modes if mode.grid == grid]
        with tempfile.TemporaryDirectory() as folder:
            trained = run_ranks(train_modes, group[0].world_size, group, Path(folder))[0]
        outcomes |= zip(group, trained, strict=True)
    return {mode: outcomes[mode] for mode in modes}


class References:
    """Float64 training in one process, run once for each task, clipping and starting weights."""

    def __init__(self):
        self._known: dict[tuple, Reference] = {}

    @cached_property
    def _teacher(self):
        weights = shake(AlbertForPretraining(TEACHER)).state_dict()
        return build_reference(TEACHER, weights)[0].eval()

    def of(self, mode: Mode, outcome: Outcome, *, rounded: bool = False) -> Reference:
        """Training from the outcome's initial weights, or from these `rounded` to bf16."""
        task = (mode.sharing, mode.per_layer, mode.objective, mode.depths, mode.exits)
        key = (*task, mode.z_loss, mode.teacher, mode.clipping, mode.optimizer, rounded)
        if key not in self._known:
            config = config_of(mode)
            start = outcome.initial
            if rounded:
                start = {name: w.bfloat16().float() for name, w in start.items()}
            self._known[key] = reference_training(
                config.model,
                start,
                batches_of(mode),
                rates=[config.rate_at(step) for step in range(NUM_STEPS)],
                clip=mode.clipping,
                muon=mode.optimizer == "Muon",
                depths=[*mode.depths],
                exits=dict(mode.exits),
                z_loss=mode.z_loss,
                teacher=self._teacher if mode.teacher else None,
                teacher_weight=mode.teacher,
            )
        return self._known[key]

    def spread(self, mode: Mode, outcome: Outcome) -> Difference:
        """How much float64 training changes when its initial weights are rounded to bf16."""
        reference = self.of(mode, outcome, rounded=True)
        weights = {  # the update counts, not the rounding of its start
            name: w - outcome.initial[name].bfloat16().double() + outcome.initial[name].double()
            for name, w in reference.weights.items()
        }
        moved = Outcome(
            initial=outcome.initial,
            weights=weights,
            gradients=reference.gradients,
            losses=reference.losses,
            norms=reference.norms,
        )
        return compare(moved, self.of(mode, outcome))


def compare(outcome: Outcome, goal: Reference | Outcome) -> Difference:
    """The difference of `outcome` from `goal`, which started from the same weights."""
    gradient = key_bias = 0.0
    missed = []
    moved = []
    ways = {}
    for name, target in goal.weights.items():
        target = target.double()
        off = outcome.weights[name].double() - target
        if name.endswith("key.bias"):  # its true gradient is 0, so only noise moves it
            key_bias = max(key_bias, float(off.abs().max()))
            continue
        initial = outcome.initial[name].double()
        wanted = goal.gradients[name]
        gradient = max(gradient, float((outcome.gradients[name] - wanted).norm() / wanted.norm()))
        missed.append(off.norm())
        moved.append((target - initial).norm())
        tensor = "scale" if name.endswith(".scale") else name  # single numbers: all as one
        sizes = torch.stack([missed[-1], moved[-1], LEAST * initial.norm()])
        ways[tensor] = torch.hypot(ways.get(tensor, torch.zeros(3)).double(), sizes)
    parameter = max(float(off / max(way, least)) for off, way, least in ways.values())
    return Difference(
        loss=_worst(outcome.losses, goal.losses),
        norm=_worst(outcome.norms, goal.norms),
        gradient=gradient,
        parameter=parameter,
        overall=float(torch.stack(missed).norm() / torch.stack(moved).norm()),
        key_bias=key_bias,
    )


def tensor_errors(outcome: Outcome, goal: Reference | Outcome) -> dict[str, float]:
    """||dp|| / ||p - p_init|| of each tensor but the key bias."""
    return {
        name: float(
            (outcome.weights[name].double() - target.double()).norm()
            / (target.double() - outcome.initial[name].double()).norm()
        )
        for name, target in goal.weights.items()
        if not name.endswith("key.bias")
    }


def _worst(values: list[float], goal: list[float]) -> float:
    return max(abs(f - g) / abs(g) for f, g in zip(values, goal, strict=True))
