"""Measure the data part: samples a second of the loader on one core, memory and speed of building.

Takes real text, cuts it to the given sizes at document boundaries, builds shards of each in a
process of its own, and reads the largest of them. Prints Markdown tables.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from albert_ds.data.readers import find_inputs, read_documents
from albert_ds.errors import ENDINGS, UserError

TOOLS = Path(__file__).parent
KINDS = {
    "sop, 15 % masked": {},
    "sop, at most 20 masked": {"max_predictions": 20},
    "nsp, 15 % masked": {"objective": "nsp"},
    "none, 15 % masked": {"objective": "none"},
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="GLOB", help="text, as for build_shards.py")
    add("--vocab", required=True, type=Path, metavar="FILE", help="spiece.model of build_vocab.py")
    add("--megabytes", nargs="+", type=int, default=[20, 100], help="of text to build (20 100)")
    add("--samples", type=int, default=4096, help="samples of each reading (4096)")
    add("--repeats", type=int, default=7, help="readings of each kind (7)")
    add("--core", type=int, default=0, help="the one core that everything runs on (0)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    paths = find_inputs(args.input)
    os.sched_setaffinity(0, {args.core})
    with tempfile.TemporaryDirectory() as scratch:
        print(f"{read_cpu_name()}, one core, Python {platform.python_version()}\n")
        print_row("text MB", "documents", "sequences", "MB/s", "MB per CPU s", "peak memory MB")
        print_row(*["---:"] * 6)
        for megabytes in sorted(args.megabytes):
            built = Path(scratch, str(megabytes))
            print_row(*measure_build(paths, args.vocab, megabytes, built))
        print()
        print_row("samples/s", "min", "median", "max", "median per CPU s")
        print_row("---", *["---:"] * 4)
        for name, settings in KINDS.items():
            rates = list(measure_loader(built, settings, args.samples, args.repeats))
            wall, cpu = zip(*rates, strict=True)
            columns = min(wall), statistics.median(wall), max(wall), statistics.median(cpu)
            print_row(name, *(f"{rate:,.0f}" for rate in columns))


def measure_build(paths: list[Path], vocab: Path, megabytes: int, output: Path) -> list[str]:
    """A row of the first table; the shards are in `output` afterwards."""
    text = output.with_suffix(".txt")
    documents = write_text(paths, megabytes, text)
    command = [sys.executable, TOOLS / "build_shards.py", "--input", text, "--vocab", vocab]
    began = time.perf_counter()
    child = subprocess.Popen([*command, "--output", output], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise UserError(f"build_shards.py ended with exit code {child.returncode}")
    from albert_ds.data.shards import read_index

    sequences = read_index(output)["counts"]["sequences"]
    size = text.stat().st_size / 1e6
    text.unlink()
    speeds = [size / seconds, size / (usage.ru_utime + usage.ru_stime)]
    peak = usage.ru_maxrss * 1024 / 1e6  # Linux counts it in KiB
    return [
        f"{size:.0f}",
        f"{documents:,}",
        f"{sequences:,}",
        *(f"{speed:.1f}" for speed in speeds),
        f"{peak:.0f}",
    ]


def write_text(paths: list[Path], megabytes: int, target: Path) -> int:
    """Write documents of the input until there are so many bytes; returns their number."""
    number = 0
    with target.open("wb") as file:
        for number, (lines, _) in enumerate(read_documents(paths), 1):
            file.write(("\n".join(lines) + "\n\n").encode())
            if file.tell() >= megabytes * 1e6:
                return number
    raise UserError(
        f"--megabytes {megabytes}: --input holds only {target.stat().st_size / 1e6:.0f}"
    )


def measure_loader(
    folder: Path, settings: dict, samples: int, repeats: int
) -> Iterator[tuple[float, float]]:
    """Samples a second, and a second of CPU time, of `repeats` readings after one to warm up."""
    import torch

    from albert_ds.data.samples import StreamConfig
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import training_batches

    torch.set_num_threads(1)
    batches = training_batches(
        [open_shards(folder, "train")],
        None,
        StreamConfig(**settings),
        start=0,
        batch_size=32,
        micro_batch_size=32,
        dp_rank=0,
        dp_size=1,
    )
    for repeat in range(repeats + 1):
        wall, cpu, read = time.perf_counter(), time.process_time(), 0
        while read < samples:
            read += next(batches).samples
        if repeat:
            yield read / (time.perf_counter() - wall), read / (time.process_time() - cpu)


def read_cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ENDINGS as ending:
        print(f"data_bench: {ending}", file=sys.stderr)
        sys.exit(ending.code)
