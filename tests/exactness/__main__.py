"""`make exactness`: measure, and write the tables of docs/exactness.md and its raw page."""

import argparse
import itertools
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.exactness import modes as modes_  # noqa: E402
from tests.exactness import report  # noqa: E402
from tests.exactness.document import replace_section  # noqa: E402
from tests.exactness.run import train_all  # noqa: E402

# Sections of the raw page, each of modes in every layout.
LAYOUTS = {"muon": modes_.muon_modes, "teacher": modes_.teacher_modes}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exactness", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, default=Path("docs/exactness.md"), help="the page (%(default)s)")
    add("--raw", type=Path, default=Path("docs/raw/exactness.md"), help="long tables (%(default)s)")
    add("--short", action="store_true", help="leave out the full cross product of the layouts")
    add("--only", choices=("fp8", *LAYOUTS), help="measure these modes alone")
    args = parser.parse_args(argv)
    machine = report.describe_machine()
    for name, list_modes in LAYOUTS.items():
        if args.only in (None, name):
            rows = report.measure_rows(train_all(list_modes()))
            replace_section(args.raw, name, [*machine, report.grid_table(rows)])
    if args.only in (None, "fp8"):
        modes = modes_.eight_bit_modes()  # as one process takes them too
        outcomes = train_all(list(dict.fromkeys([*modes, *map(modes_.same_order, modes)])))
        lines = [*machine, report.half_precision_table(outcomes, "fp8")]
        replace_section(args.raw, "fp8", lines)
    if args.only is not None:
        return 0
    replace_section(args.output, "sizes", [report.size_table()])
    tables = {
        "pairwise": modes_.pairwise_modes(),
        "sharing": modes_.sharing_modes(),
        **({} if args.short else {"crossed": modes_.crossed_modes()}),
    }
    changing = modes_.depth_modes()
    chosen = [*itertools.chain(*tables.values()), *changing, *modes_.half_precision_modes()]
    half = [mode for mode in chosen if mode.precision == "bf16"]
    chosen += [modes_.same_order(mode) for mode in half]
    outcomes = train_all(list(dict.fromkeys(chosen)))
    rows = report.measure_rows(outcomes)
    by_mode = {row.mode: row for row in rows}
    worst = report.worst_table(rows)
    replace_section(args.output, "worst", [*machine, worst])
    replace_section(args.output, "bf16", [report.half_precision_table(outcomes)])
    replace_section(args.raw, "tensors", [report.tensor_table(outcomes)])
    for name, modes in tables.items():
        layout_rows = [by_mode[mode] for mode in modes]
        lines = report.layout_table(layout_rows, has_refused=name == "pairwise")
        replace_section(args.raw, name, [*machine, lines])
    lines = report.depth_table([by_mode[mode] for mode in changing])
    replace_section(args.raw, "depths", [*machine, lines])
    print(worst)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
