"""Numbers of a run: RUN/metrics.jsonl first, TensorBoard and Weights & Biases from the same dict.

Sums stay on the device and are gathered once a logging interval; a step itself waits for none.
"""

import json
import math
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from albert_ds.model.arithmetic import count_flops
from albert_ds.model.config import ModelConfig
from albert_ds.parallel.mesh import Mesh
from albert_ds.runtime.agreement import Counts
from albert_ds.runtime.traffic import Traffic

OUTPUTS = ("mlm_loss_sum", "mlm_correct", "pair_loss_sum", "pair_correct")

# Dense bf16 peak in FLOP/s by what the device calls itself; from NVIDIA's datasheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "V100": 125e12}


def peak_flops(device: torch.device) -> float | None:
    """The device's dense 16-bit peak, None where it is not known (MFU is then null)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def summarise(outputs: Tensor, counts: Counts, objective: str) -> dict[str, float | None]:
    """Means of summed model outputs (in the order of OUTPUTS, all data-parallel ranks).

    A mean over nothing is None. The sentence task is named by its objective (`sop_`, `nsp_`).
    """
    mlm_loss, mlm_correct, pair_loss, pair_correct = outputs.tolist()

    def mean(total: float, count: int) -> float | None:
        return total / count if count else None

    values = {
        "mlm_loss": mean(mlm_loss, counts.masked),
        "mlm_accuracy": mean(mlm_correct, counts.masked),
    }
    if objective != "none":
        values[f"{objective}_loss"] = mean(pair_loss, counts.pairs)
        values[f"{objective}_accuracy"] = mean(pair_correct, counts.pairs)
    losses = [v for k, v in values.items() if k.endswith("_loss") and v is not None]
    return {"loss": sum(losses), **values}


class Window:
    """Everything since the last log line: model outputs, counts, waiting time."""

    def __init__(self, device: torch.device, traffic: Traffic):
        self._device, self._traffic, self._peak = device, traffic, peak_flops(device)
        self.reset()

    def reset(self) -> None:
        self.outputs = torch.zeros(len(OUTPUTS), dtype=torch.float64, device=self._device)
        self.counts = Counts()
        self.steps = 0
        self.skipped = 0
        self.data_seconds = 0.0
        self.moved = self._traffic.copy()
        self.started = time.perf_counter()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave evaluation and saving out of the window's time and traffic."""
        stopped, before = time.perf_counter(), self._traffic.copy()
        yield
        self.started += time.perf_counter() - stopped
        self.moved += self._traffic - before

    def add_outputs(self, outputs: dict[str, Tensor]) -> None:
        self.outputs += torch.stack([outputs[name].detach().double() for name in OUTPUTS])

    def add_step(self, counts: Counts, *, data_seconds: float, applied: bool) -> None:
        self.counts = self.counts + counts
        self.data_seconds += data_seconds
        self.steps += 1
        self.skipped += not applied

    def close(self, mesh: Mesh, model: ModelConfig, objective: str) -> dict[str, float | None]:
        """The window's numbers, the same on every rank. Collective; starts a new window."""
        comm_bytes = (self._traffic - self.moved).total_bytes // self.steps
        dist.all_reduce(self.outputs, group=mesh.dp_group)
        values = summarise(self.outputs, self.counts, objective)  # waits for the device
        seconds = time.perf_counter() - self.started
        counts = self.counts
        flops = count_flops(
            model,
            tokens=counts.tokens,
            squared_lengths=counts.squared_lengths,
            masked=counts.masked,
        )
        values |= {
            "step_seconds": seconds / self.steps,
            "samples_per_second": counts.samples / seconds,
            "tokens_per_second": counts.tokens / seconds,
            "mfu": flops / seconds / (self._peak * mesh.world_size) if self._peak else None,
            "data_wait_fraction": self.data_seconds / seconds,
            "comm_bytes": comm_bytes,  # of this rank, a step
            "set_aside_fraction": counts.set_aside / counts.available if counts.available else 0.0,
            "unpaired": counts.unpaired,
            "skipped_steps": self.skipped,
        }
        self.reset()
        return values


class Metrics:
    """Rank 0's sinks: the file is the source of truth, the others show the same numbers."""

    def __init__(self, output: Path, mesh: Mesh, step: int, *, num_steps: int, wandb: bool):
        self._writes = mesh.rank == 0
        if not self._writes:
            return
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        path = output / "metrics.jsonl"
        cut_back(path, step)
        self._file = open(path, "a")  # noqa: SIM115 (closed by `close`)
        self._board = SummaryWriter(output / "tensorboard", purge_step=step + 1)
        self._bar = tqdm(
            total=num_steps, initial=step, unit="step", disable=not sys.stderr.isatty()
        )
        self._wandb = None
        if wandb:
            import wandb as library  # ty: ignore[import-not-found] (optional)

            self._wandb = library.init(dir=output, id=output.name, resume="allow")

    def write(self, step: int, values: dict) -> None:
        """Write one record; None becomes null in the file and is left out elsewhere."""
        if not self._writes or not values:
            return
        # JSON has no NaN: a loss or norm that is not finite is null, and `skipped_steps` counts it.
        values = {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in values.items() if value is not None}
        for key, value in numbers.items():
            self._board.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        line = f"step {step}  " + "  ".join(f"{k} {_short(v)}" for k, v in numbers.items())
        self._bar.update(step - self._bar.n)
        self._bar.write(line) if not self._bar.disable else print(line, flush=True)

    def close(self) -> None:
        if not self._writes:
            return
        self._bar.close()
        self._board.close()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after `step` (a resume does those steps again), and a line half written."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a process that was killed while it wrote
        if record["step"] <= step:
            kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
