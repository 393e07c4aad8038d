"""Measure one grid of ranks in one precision; code 1 where a bound is not kept.

On a machine with fewer GPUs than ranks these share a GPU, and NCCL is gloo over copies on the host.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.exactness.modes import Mode, same_order  # noqa: E402
from tests.exactness.run import Difference, Outcome, References, compare, train_all  # noqa: E402

# The error of all tensors together that a precision may have: twice what a CPU gives in bf16.
HALF_BOUNDS = {"bf16": 0.07, "fp16": 0.02, "fp8": 0.07}


def modes_of(grid: tuple[int, int], precision: str) -> list[Mode]:
    """Every stage with and without accumulation, Muon in each, and one of each other factor."""
    plain = Mode(grid=grid, precision=precision)
    modes = [
        replace(plain, stage=stage, accumulation=accumulation)
        for stage in (0, 1, 2, 3)
        for accumulation in (1, 3)
    ]
    modes += [replace(plain, checkpointing=kind) for kind in ("attention", "block")]
    modes += [replace(plain, sharing=kind) for kind in ("none", "groups:2")]
    modes += [replace(plain, objective="none"), replace(plain, clipping=None)]
    if precision == "fp32":
        modes += [replace(plain, stage=stage, optimizer="Muon") for stage in (0, 1, 2, 3)]
    return [mode for mode in modes if not mode.is_refused]


def is_within(mode: Mode, off: Difference, alone: Difference | None) -> bool:
    """The promises of docs/exactness.md. `alone`: what one process gives in this precision."""
    if mode.precision == "fp32":
        # Newton-Schulz divides by singular values, and so enlarges fp32's rounding of small ones.
        bound = 2e-5 if mode.optimizer == "Muon" else 1e-5
        is_same_loss = off.loss < 1e-6 and off.norm < 1e-6
        # The worst gradient is of a tensor whose gradient nearly cancels.
        return is_same_loss and off.gradient < 1e-4 and off.parameter < bound
    if alone is not None:
        return off.overall <= 1.5 * alone.overall
    return off.overall <= HALF_BOUNDS[mode.precision]


def measure(modes: list[Mode]) -> list[dict]:
    several = modes[0].world_size > 1 and modes[0].precision != "fp32"
    others = [same_order(mode) for mode in modes] if several else []
    outcomes: dict[Mode, Outcome] = train_all(list(dict.fromkeys([*modes, *others])))
    references = References()
    rows = []
    for mode in modes:
        off = compare(outcomes[mode], references.of(mode, outcomes[mode]))
        alone = None
        one = same_order(mode)
        if several:
            alone = compare(outcomes[one], references.of(one, outcomes[one]))
        within = is_within(mode, off, alone)
        rows.append({"mode": asdict(mode), "off": asdict(off), "within": within})
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exactness.one", description=__doc__)
    add = parser.add_argument
    add("--grid", required=True, help="tensor x data parallel ranks, such as 2x1")
    add("--precision", choices=("fp32", "bf16", "fp16"), required=True)
    add("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    tensor, data = map(int, args.grid.split("x"))
    rows = measure(modes_of((tensor, data), args.precision))
    args.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
