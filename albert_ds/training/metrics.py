"""Metrics of a run: RUN/metrics.jsonl, and the same numbers for TensorBoard and Weights & Biases.

Sums stay on the device and are gathered once per logging interval, so no step waits for them.
"""

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tensorboard.compat.proto.event_pb2 import Event  # ty: ignore[import-not-found]
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor

from albert_ds.base.cli import log_line
from albert_ds.base.files import write_file
from albert_ds.base.json_files import read_lines
from albert_ds.model.albert import TERMS, name_outputs
from albert_ds.model.config import ModelConfig, count_flops
from albert_ds.parallel.consensus import Counts
from albert_ds.parallel.mesh import Mesh
from albert_ds.training.screen import Screen

# Dense bf16 (V100: fp16) peak in FLOP/s by part of the device's name, the first that fits; half of
# what NVIDIA's datasheets give for sparse matrices. Cards have less than the modules of their name.
PEAK_FLOPS = {
    "H200 NVL": 835.5e12,
    "H200": 989e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
}

METRICS = "metrics.jsonl"
TICK = 1e-9  # seconds: the least time that passes, where the clock stands still


def peak_flops(device: torch.device) -> float | None:
    """The device's dense 16-bit peak in FLOP/s; None if it is unknown (MFU is then null)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def summarise(outputs: Tensor, counts: Counts, objective: str) -> dict[str, float | None]:
    """Means of the model's summed outputs (in the order of `name_outputs`, over all ranks).

    The mean of no values is None. The keys of the sentence task begin with its objective.
    """
    sums = dict(zip(name_outputs(), outputs.tolist(), strict=True))
    values: dict[str, float | None] = {}
    for name, term in TERMS.items():
        shown = objective if term.of_sentence_task else name
        total = sums[f"{name}_loss_sum"]
        count = getattr(counts, term.per)
        # What has no accuracy may be switched off.
        if shown == "none" or not (term.has_accuracy or total):
            continue
        values[f"{shown}_loss"] = total / count if count else None
        if term.has_accuracy:
            values[f"{shown}_accuracy"] = sums[f"{name}_correct"] / count if count else None
    losses = [v for k, v in values.items() if k.endswith("_loss") and v is not None]
    return {"loss": sum(losses), **values}


class Window:
    """Sums since the last log line: model outputs, counts, time spent waiting for data."""

    def __init__(self, device: torch.device):
        self._device = device
        self._peak = peak_flops(device)
        self.reset()

    def reset(self) -> None:
        self.outputs = torch.zeros(len(name_outputs()), dtype=torch.float64, device=self._device)
        self.counts = Counts()
        self.flops = 0
        self.steps = 0
        self.skipped = 0
        self.data_seconds = 0.0  # whoever takes batches from the loader adds to it
        self.started = self._ended = time.perf_counter()
        self._durations: list[float] = []  # of the steps

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave the block (evaluation, saving) out of the window's time."""
        stopped = time.perf_counter()
        yield
        self.started += (seconds := time.perf_counter() - stopped)
        self._ended += seconds

    def add_outputs(self, outputs: dict[str, Tensor]) -> None:
        self.outputs += torch.stack([outputs[name].detach().double() for name in name_outputs()])

    def add_step(self, counts: Counts, model: ModelConfig, *, heads: int, applied: bool) -> None:
        """Count a step of `model`, whose depth may change from step to step.

        heads: the depths at which its MLM loss was computed.
        """
        self.counts = self.counts + counts
        self.flops += count_flops(
            model,
            tokens=counts.tokens,
            squared_lengths=counts.squared_lengths,
            masked=heads * counts.masked,
        )
        self.steps += 1
        self.skipped += not applied
        begun = self._ended
        self._ended = time.perf_counter()  # the host has waited for the norm
        self._durations.append(self._ended - begun)

    def close(self, mesh: Mesh, objective: str) -> dict[str, float | None]:
        """The window's metrics, the same on every rank. Collective; starts a new window."""
        dist.all_reduce(self.outputs, group=mesh.dp_group)
        values = summarise(self.outputs, self.counts, objective)  # waits for the device
        seconds = max(time.perf_counter() - self.started, TICK)
        counts = self.counts
        values |= {
            "step_seconds": seconds / self.steps,
            "step_seconds_p90": sorted(self._durations)[math.ceil(0.9 * self.steps) - 1],
            "samples_per_second": counts.samples / seconds,
            "tokens_per_second": counts.tokens / seconds,
            "mfu": self.flops / seconds / (self._peak * mesh.world_size) if self._peak else None,
            "data_wait_fraction": self.data_seconds / seconds,
            "flops": self.flops // self.steps,  # of all ranks, per step
            "unused_fraction": counts.unused_tokens / max(1, counts.available),
            "unpaired": counts.unpaired,
            "skipped_steps": self.skipped,
        }
        self.reset()
        return values


class Metrics:
    """Writes and shows the metrics, on rank 0, behind what `cut_back` has left in the file."""

    def __init__(
        self,
        run: Path,
        mesh: Mesh,
        step: int,
        *,
        num_steps: int,
        work_of: Callable[[int], float] = int,
        wandb: bool = False,
    ):
        self._writes = mesh.rank == 0
        if not self._writes:
            return
        self._path = run / METRICS
        self._file = open(self._path, "ab", buffering=0)
        self._screen = Screen(step=step, num_steps=num_steps, work_of=work_of)
        self._copies: dict[str, Screen | TensorBoard | WeightsAndBiases] = {"stdout": self._screen}
        with self._optional("TensorBoard"):
            self._copies["TensorBoard"] = TensorBoard(run / "tensorboard", step)
        if wandb:
            with self._optional("Weights & Biases"):
                self._copies["Weights & Biases"] = WeightsAndBiases(run)

    def advance(self, step: int) -> None:
        """Show that `step` steps are finished, on a terminal."""
        if self._writes:
            self._screen.advance(step)

    def write(self, step: int, values: dict) -> None:
        """Write one record; None is null in the file. Raises OSError if that fails."""
        if not self._writes or not values:
            return
        # JSON has no NaN: a non-finite loss or norm is null, and `skipped_steps` counts the step.
        values = {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}
        record = (json.dumps({"step": step, **values}) + "\n").encode()
        try:
            while record:
                record = record[self._file.write(record) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        for name, copy in list(self._copies.items()):
            with self._optional(name):
                copy.write(step, values)

    def close(self) -> None:
        if not self._writes:
            return
        self._file.close()
        for name, copy in list(self._copies.items()):
            with self._optional(name):
                copy.close()

    @contextmanager
    def _optional(self, name: str) -> Generator[None]:
        """Whatever a copy of metrics.jsonl raises, the run goes on without it."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            log_line(f"{name} failed ({reason[:160]}): it gets no more numbers of this run")
            self._copies.pop(name, None)


class TensorBoard:
    """One file of scalars for TensorBoard.

    torch's SummaryWriter opens its file by name for every write, in a thread: an error there is a
    traceback, and if RUN has been replaced it writes to the other run.
    """

    def __init__(self, folder: Path, step: int):
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{os.uname().nodename}.{os.getpid()}"
        self._records = RecordWriter(open(folder / name, "ab", buffering=0))
        self._write(file_version="brain.Event:2")
        # Later steps of the run that this one resumes are not shown.
        self._write(step=step + 1, session_log={"status": "START"})

    def write(self, step: int, values: dict) -> None:
        numbers = [{"tag": k, "simple_value": v} for k, v in values.items() if v is not None]
        self._write(step=step, summary={"value": numbers})

    def _write(self, **fields) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


class WeightsAndBiases:
    """A run of the package wandb, which is optional."""

    def __init__(self, output: Path):
        import wandb

        # Not the folder's name, which other runs may have: this one would continue theirs.
        kept = output / "wandb" / "id"
        kept.parent.mkdir(exist_ok=True)
        if not kept.is_file():
            write_file(kept, secrets.token_hex(4))
        self._run = wandb.init(dir=output, id=kept.read_text(), name=str(output), resume="allow")

    def write(self, step: int, values: dict) -> None:
        self._run.log({k: v for k, v in values.items() if v is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def last_counts(records: list[dict], names: Collection[str]) -> tuple[int, dict[str, int]]:
    """(step, what was counted up to it) of the last record that has all; 0 and zeros without."""
    for record in reversed(records):
        counts = {name: n for name in names if isinstance(n := record.get(name), int)}
        if len(counts) == len(names):
            return record["step"], counts
    return 0, dict.fromkeys(names, 0)


def cut_back(run: Path, step: int) -> list[dict]:
    """The records of RUN/metrics.jsonl up to `step`.

    The lines after it, which a resumed run writes again, and what is no record are deleted.
    """
    path = run / METRICS
    if not path.is_file():
        return []
    kept = [record for record in read_lines(path) if record["step"] <= step]
    write_file(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept
