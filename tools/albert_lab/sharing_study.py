"""What a pretraining run has reached, against what it has spent: FLOPs, time and bytes.

Read from RUN/config.json and RUN/metrics.jsonl; a run may have been stopped and resumed.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from albert_ds.cli import Number
from albert_ds.errors import UserError
from albert_ds.json_files import build, check, read_json, read_lines
from albert_ds.model.config import ModelConfig, count_flops
from albert_ds.model.shapes import count_params

GRADIENT_BYTES = 4  # gradients are reduced in fp32 in the shipped configurations


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A run's held-out MLM losses, and what was spent up to each evaluation."""

    model: ModelConfig
    sequence_length: int
    steps: list[int]
    losses: list[float]
    flops: list[float]
    seconds: list[float]
    tokens_a_second: float  # of the whole run, evaluation and checkpoints left out
    layers_a_step: float  # on average; below the model's with --depth-schedule
    bits: float | None  # per byte of masked words, by probe.py; for any masks and vocabulary
    mlm: float | None  # held-out accuracy by probe.py, whose masks are the same for every run
    sop: float | None  # by probe.py, which trains a head where the run has none; else the run's
    nsp: float | None  # by probe.py
    blimp: float | None

    @property
    def loss(self) -> float:
        """The held-out MLM loss at the end."""
        return self.losses[-1]

    @property
    def spent(self) -> tuple[float, float]:
        """FLOPs and seconds of the whole run."""
        return self.flops[-1], self.seconds[-1]

    def loss_at(self, budget: float, spent: list[float]) -> float:
        """The held-out loss where `spent` (self.flops or self.seconds) reaches `budget`."""
        return float(np.interp(budget, spent, self.losses))

    @property
    def parameters(self) -> int:
        return sum(count_params(self.model).values())

    @property
    def gradient_bytes(self) -> list[float]:
        """Bytes of gradients that a replica has handed over, up to each evaluation."""
        return [float(GRADIENT_BYTES * self.parameters * step) for step in self.steps]


def read_curve(run: Path) -> Curve:
    """Raises UserError, naming the file, where a run has no held-out loss or no timed steps."""
    config = read_json(run / "config.json")
    check(config, {"model": dict, "stream": dict}, str(run / "config.json"))
    path = run / "metrics.jsonl"
    records = read_lines(path) if path.is_file() else []
    logged = [record for record in records if "flops" in record]
    held = [record for record in records if record.get("heldout_mlm_loss") is not None]
    if not logged or not held:
        raise UserError(f"{path}: has no logged steps or no held-out loss; the run is not trained")
    schema = {"step": Number(low=1), "flops": Number(above=0), "step_seconds": Number(above=0)}
    for record in logged:
        check({key: record[key] for key in schema}, schema, str(path))
    ends = [0, *(record["step"] for record in logged)]
    steps = np.diff(ends)
    spent = {
        key: np.concatenate([[0], np.cumsum(steps * [record[key] for record in logged])])
        for key in ("flops", "step_seconds")
    }
    tokens = sum(
        record["tokens_per_second"] * record["step_seconds"] * number
        for record, number in zip(logged, steps.tolist(), strict=True)
    )
    depth = config["model"].get("num_layers", 0)
    layers = sum(
        record.get("num_layers", depth) * number
        for record, number in zip(logged, steps.tolist(), strict=True)
    )
    at = [record["step"] for record in held]
    blimp, probed = (
        read_json(path) if path.is_file() else {}
        for path in (run / "blimp.json", run / "probe.json")
    )
    return Curve(
        model=build(ModelConfig, config["model"], f"{run / 'config.json'}: model"),
        sequence_length=config["stream"]["sequence_length"],
        steps=at,
        losses=[record["heldout_mlm_loss"] for record in held],
        flops=np.interp(at, ends, spent["flops"]).tolist(),
        seconds=np.interp(at, ends, spent["step_seconds"]).tolist(),
        tokens_a_second=float(tokens / spent["step_seconds"][-1]),
        layers_a_step=layers / ends[-1],
        bits=probed.get("heldout_bits_per_byte"),
        mlm=probed.get("heldout_mlm_accuracy"),
        sop=probed.get("heldout_sop_accuracy", held[-1].get("heldout_sop_accuracy")),
        nsp=probed.get("heldout_nsp_accuracy"),
        blimp=blimp.get("accuracy"),
    )


def list_costs(curve: Curve) -> dict[str, float]:
    """Parameters, FLOPs a token at full depth and length, and bytes of gradients a step."""
    length = curve.sequence_length
    flops = count_flops(
        curve.model, tokens=length, squared_lengths=length**2, masked=round(0.15 * length)
    )
    return {
        "parameters": curve.parameters,
        "flops_a_token": flops / length,
        "gradient_bytes": GRADIENT_BYTES * curve.parameters,
    }
