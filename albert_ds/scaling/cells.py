"""What tools/throughput_bench.py measured, one object a cell: a layout, a link and its seconds."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.model.arithmetic import count_params
from albert_ds.model.config import SIZES
from albert_ds.scaling.layout import Layout

# What may be held back from a fit, each by its key in the file.
KEYS = (
    *("model", "link", "ranks", "nodes", "zero", "tensor_parallel", "micro_batch_size"),
    "sequence_length",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One layout on one link; medians over the rounds, in seconds of a step."""

    layout: Layout
    link: float | None  # bits a second of a node's link, None where nothing limits it
    devices: float  # cores or GPUs that a rank has
    keys: dict[str, str]  # KEYS, as they are typed
    total: float
    compute: float  # forward and backward
    communication: float  # exposed
    optimizer: float  # with everything that is none of the others
    kinds: dict[str, float]  # of the communication, by kind

    @property
    def label(self) -> str:
        k = self.keys
        return (
            f"{k['model']}, {k['ranks']} ranks on {k['nodes']} nodes, link {k['link']}, "
            f"{k['micro_batch_size']} x {k['sequence_length']} tokens x {self.layout.accumulation}"
        )


def read_cells(path: Path) -> list[Cell]:
    """Raises UserError, naming file and cell, for what is no report or no cell of Table 1."""
    try:
        report = json.loads(path.read_text())
        cells = report["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--input {path}: {error!r}; it must be what throughput_bench.py --output writes"
        ) from None
    found = []
    for number, cell in enumerate(cells):
        try:
            found.append(_read_cell(cell, report.get("cores")))
        except KeyError as error:
            raise UserError(f"--input {path}, cell {number}: no {error}") from None
        except UserError as error:
            raise UserError(f"--input {path}, cell {number}: {error}") from None
    return found


def _read_cell(cell: dict, cores: int | None) -> Cell:
    if cell["model"] not in SIZES:
        raise UserError(f"model {cell['model']}; allowed: {', '.join(SIZES)}")
    model = SIZES[cell["model"]]
    expected = sum(count_params(model).values())
    if cell["parameters"] != expected:
        raise UserError(
            f"{cell['model']} with {cell['parameters']:,} parameters, not the {expected:,} of the "
            "size; only sizes as they are can be predicted"
        )
    layout = Layout(
        name=cell["model"],
        model=model,
        ranks=cell["ranks"],
        nodes=cell["nodes"],
        zero=cell["zero"],
        tensor_parallel=cell["tensor_parallel"],
        micro_batch_size=cell["micro_batch_size"],
        accumulation=cell["accumulation"],
        sequence_length=cell["sequence_length"],
        precision=cell["precision"],
        activation_checkpointing=cell["activation_checkpointing"],
    )
    rounds = cell["rounds"]

    def median(*names: str) -> float:
        return statistics.median(sum(turn[f"{n}_seconds"] for n in names) for turn in rounds)

    def median_of_kind(kind: str) -> float:
        return statistics.median(turn["kinds"][kind]["exposed_seconds"] for turn in rounds)

    total = statistics.median(turn["seconds_a_step"] for turn in rounds)
    compute, communication = median("forward", "backward"), median("communication")
    return Cell(
        layout=layout,
        link=cell["link_bits_per_second"],
        devices=cores / layout.ranks if cores else 1.0,
        keys={key: str(cell[key]) if cell[key] is not None else "none" for key in KEYS},
        total=total,
        compute=compute,
        communication=communication,
        optimizer=median("optimizer", "data_wait", "other"),
        kinds={kind: median_of_kind(kind) for kind in rounds[0]["kinds"]},
    )
