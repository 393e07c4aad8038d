"""`make exactness`: run the matrix and put it into docs/exactness.md."""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.exactness import modes as modes_  # noqa: E402
from tests.exactness import report  # noqa: E402
from tests.exactness.document import replace_section  # noqa: E402
from tests.exactness.run import train_all  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exactness", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/exactness.md"))
    args = parser.parse_args(argv)
    crossed, pairwise = modes_.crossed_modes(), modes_.pairwise_modes()
    chosen = [*crossed, *pairwise, *modes_.half_precision_modes()]
    chosen += [modes_.yardstick(mode) for mode in chosen if mode.precision == "bf16"]
    outcomes = train_all(list(dict.fromkeys(chosen)))
    rows = report.measure_rows(outcomes)
    by_mode = {row.mode: row for row in rows}
    replace_section(args.output, "worst", report.worst_table(rows))
    replace_section(args.output, "bf16", report.half_precision_table(outcomes, rows))
    pairwise_lines = report.as_table([by_mode[mode] for mode in pairwise])
    replace_section(args.output, "pairwise", [*pairwise_lines, *report.refused_lines()])
    replace_section(args.output, "crossed", report.as_table([by_mode[mode] for mode in crossed]))
    print("\n".join(report.worst_table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
