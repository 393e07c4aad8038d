"""Train every row of a file, some at a time, without Slurm. A row that fails stops no other.

    python tools/lab/sweep.py --rows rows.txt --output runs/sweep --seeds 1 2 --at-once 2 \\
        -- --model albert-tiny --data DATA --steps 2000 ...

A line of the file is a name and the flags of `albert-ds train` that make the row:

    base:
    wide: --hidden-size 512
    loop: --sharing loop:1,2x2,1 --depth-schedule 4-8@0

What follows -- are flags of all rows. A run is DIR/NAME/seed-S, as tools/lab/sharing_table.py and
`albert-ds report` take it, beside its log. The same command again goes on with what is not
finished. DIR/rows.csv has the last held-out values of all; the code is 1 if a row failed.
"""

import csv
import io
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from albert_lab.tables import table

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.files import may_replace, write_file
from albert_ds.base.json_files import read_json, read_lines


class Cell(NamedTuple):
    """A row with one seed."""

    row: str
    seed: int
    run: Path
    words: list[str]  # after `albert-ds`


def build_parser() -> cli.Parser:
    parser = cli.Parser(prog="tools/lab/sweep.py", description=__doc__)
    add = parser.add
    add("--rows", "file of rows", "FILE", Path, required=True)
    add("--output", "folder of the runs", "DIR", Path, required=True)
    add("--seeds", "seeds of each row", "N", cli.non_negative, nargs="+", default=[0])
    add("--at-once", "rows that train at the same time", "ROWS", cli.positive, default=1)
    add("flags", "flags of the trainer, of all rows", "-- FLAG", nargs="*")
    return parser


def read_rows(file: Path) -> dict[str, list[str]]:
    """Name -> flags. Raises UserError with the line for what is none."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--rows {file}: cannot be read: {error}") from None
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, flags = line.partition(":")
        if not colon or not re.fullmatch(r"[\w.+-]+", name) or name in rows:
            raise UserError(f"--rows {file}, line {number}: must be `NAME: --FLAG VALUE ...`, once")
        try:
            rows[name] = shlex.split(flags)
        except ValueError as error:
            raise UserError(f"--rows {file}, line {number}: {error}") from None
    if not rows:
        raise UserError(f"--rows {file}: has no row")
    return rows


def is_done(cell: Cell) -> bool:
    """Whether this very command has ended with 0."""
    config, ending = cell.run / "config.json", cell.run / "exit.json"
    if not (config.is_file() and ending.is_file()):
        return False
    typed = shlex.split(str(read_json(config).get("command")))
    return read_json(ending).get("code") == 0 and typed[1:] == cell.words


def train(cell: Cell) -> int:
    """The exit code of a row's training, which writes into its log."""
    if is_done(cell):
        return 0
    cli.log_line(f"{cell.row}, seed {cell.seed}: begins")
    cell.run.parent.mkdir(parents=True, exist_ok=True)
    with cell.run.with_suffix(".log").open("a") as log:
        command = [sys.executable, "-m", "albert_ds", *cell.words]
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    cli.log_line(f"{cell.row}, seed {cell.seed}: {'done' if code == 0 else f'code {code}'}")
    return code


def last_values(cell: Cell) -> dict[str, float]:
    """Of each held-out number the last, and the step it was taken at."""
    file = cell.run / "metrics.jsonl"
    values = {}
    for record in read_lines(file) if file.is_file() else ():
        held = {key: v for key, v in record.items() if key.startswith("heldout_")}
        values |= {"step": record["step"], **held} if held else {}
    return values


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    rows = read_rows(args.rows)
    output = args.output / "rows.csv"
    if not may_replace(output) and not output.read_bytes().startswith(b"row,seed,code"):
        raise UserError(f"--output {args.output}: {output.name} in it is none of a sweep")
    cells = [
        Cell(
            row,
            seed,
            run,
            ["train", *args.flags, *flags, "--seed", str(seed), "--output", str(run)],
        )
        for row, flags in rows.items()
        for seed in args.seeds
        for run in [args.output / row / f"seed-{seed}"]
    ]
    with ThreadPoolExecutor(args.at_once) as pool:
        codes = list(pool.map(train, cells))
    values = [last_values(cell) for cell in cells]
    header = list(dict.fromkeys(["row", "seed", "code", *(k for last in values for k in last)]))
    lines = [
        {"row": cell.row, "seed": cell.seed, "code": code, **last}
        for cell, code, last in zip(cells, codes, values, strict=True)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_file(output, text.getvalue())
    print(table(header, [[line.get(key, "") for key in header] for line in lines]))
    for cell, code in zip(cells, codes, strict=True):
        if code:
            cli.log_line(f"{cell.row}, seed {cell.seed}: code {code}, {cell.run}.log says why")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    cli.run(main)
