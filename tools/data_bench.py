"""Measure the data part: building beside the released pipeline's algorithm, memory, and what
load_bench.py measures of reading. Everything runs on one core; prints Markdown tables.

Takes real text and cuts it to the given sizes at document boundaries. What is compared takes turns
(A B A B), so that a drift of the machine's speed cancels.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from albert_ds.data.inputs import cut_units, read_documents
from albert_ds.data.storage import find_files
from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser

TOOLS = Path(__file__).parent
PASSES = 40  # over the text, as released


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="GLOB", help="text, as for build_shards.py")
    add("--vocab", required=True, metavar="FILE", help="spiece.model of build_vocab.py")
    add(
        "--megabytes",
        nargs="+",
        type=int,
        default=[20, 100],
        help="of text to build alone, for memory; shards of the last are read (20 100)",
    )
    add("--beside", type=int, default=5, help="MB of text to build beside the released (5)")
    add("--repeats", type=int, default=5, help="turns of whatever is compared (5)")
    add("--core", type=int, default=0, help="the one core that everything runs on (0)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    os.sched_setaffinity(0, {args.core})
    print(f"{read_cpu_name()}, one core, Python {platform.python_version()}\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = {
            megabytes: write_text(args.input, megabytes, folder / f"{megabytes}.txt")
            for megabytes in sorted({*args.megabytes, args.beside})
        }
        compare_one_pass(texts[args.beside], args, folder)
        compare_passes(texts[args.beside], args, folder)
        built = measure_memory([texts[m] for m in sorted(args.megabytes)], args, folder)
        command = [sys.executable, TOOLS / "load_bench.py", "--data", built]
        subprocess.run([*command, "--repeats", str(args.repeats)], check=True)


def compare_one_pass(text: Path, args: argparse.Namespace, folder: Path) -> None:
    """Both tokenise once; ours leaves sequences, the released leaves masked samples."""
    seconds: dict[str, list[float]] = {"ours": [], "released": []}
    memory = {}
    for turn in range(args.repeats):
        for name, command in (
            ("ours", shards_command(text, args.vocab, folder / f"one-{turn}")),
            ("released", released_command(text, args.vocab, folder / f"one-{turn}.rec", 1)),
        ):
            taken, memory[name] = run_tool(command)
            seconds[name].append(taken)
    megabytes = text.stat().st_size / 1e6
    print_row("one pass", "MB of text/s: min", "median", "max", "peak memory MB")
    print_row("---", *["---:"] * 4)
    for name, values in seconds.items():
        rates = [megabytes / value for value in values]
        print_row(name, *spread(rates, ".2f"), f"{memory[name]:.0f}")
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["released"], strict=True)]
    print_row("ratio, turn by turn", *spread(ratios, ".1f"), "")
    print()


def compare_passes(text: Path, args: argparse.Namespace, folder: Path) -> None:
    """What 40 passes of training data cost: the released draws and stores each of them; ours are
    built once and drawn when they are read, which is counted here."""
    built, released = folder / "forty", folder / "forty.rec"
    build_seconds, memory = run_tool(shards_command(text, args.vocab, built))
    read_seconds = read_epochs(built)
    their_seconds, their_memory = run_tool(released_command(text, args.vocab, released, PASSES))
    size, their_size = (
        sum(path.stat().st_size for path in built.iterdir()) / 1e6,
        released.stat().st_size / 1e6,
    )
    print_row(f"{PASSES} passes over {text.stat().st_size / 1e6:.0f} MB", "s", "disk MB", "peak MB")
    print_row("---", *["---:"] * 3)
    ours = build_seconds + read_seconds
    print_row("ours, built", f"{build_seconds:.1f}", f"{size:.1f}", f"{memory:.0f}")
    print_row("ours, built and read", f"{ours:.1f}", f"{size:.1f}", "")
    print_row("released", f"{their_seconds:.1f}", f"{their_size:.1f}", f"{their_memory:.0f}")
    print_row("ratio", f"{their_seconds / ours:.1f}", f"{their_size / size:.1f}", "")
    print()


def read_epochs(folder: Path) -> float:
    """Seconds to draw and mask every sequence 40 times."""
    import torch

    from albert_ds.data.samples import StreamConfig
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import training_batches

    torch.set_num_threads(1)
    began = time.perf_counter()
    batches = training_batches(
        [open_shards(folder, "train")],
        None,
        StreamConfig(max_predictions=20),  # as the released draws them
        start=0,
        batch_size=32,
        micro_batch_size=32,
        dp_rank=0,
        dp_size=1,
    )
    read, wanted = 0, PASSES * count_sequences(folder)
    while read < wanted:
        read += next(batches).samples
    return time.perf_counter() - began


def count_sequences(folder: Path) -> int:
    from albert_ds.data.shards import read_index

    return read_index(folder)["splits"]["train"]["samples"]


def measure_memory(texts: list[Path], args: argparse.Namespace, folder: Path) -> Path:
    """Prints a row a text; returns the shards of the last one."""
    print_row("text MB", "sequences", "MB/s", "peak memory MB", "disk MB")
    print_row(*["---:"] * 5)
    built = folder
    for text in texts:
        built = text.with_suffix("")
        seconds, memory = run_tool(shards_command(text, args.vocab, built))
        megabytes = text.stat().st_size / 1e6
        disk = sum(path.stat().st_size for path in built.iterdir()) / 1e6
        sequences = f"{count_sequences(built):,}"
        speed = f"{megabytes / seconds:.1f}"
        print_row(f"{megabytes:.0f}", sequences, speed, f"{memory:.0f}", f"{disk:.0f}")
    print()
    return built


def shards_command(text: Path, vocab: str, output: Path) -> list:
    command = [sys.executable, TOOLS / "build_shards.py", "--input", text, "--vocab", vocab]
    return [*command, "--output", output]


def released_command(text: Path, vocab: str, output: Path, passes: int) -> list:
    command = [sys.executable, TOOLS / "released_pipeline.py", "--input", text, "--vocab", vocab]
    return [*command, "--output", output, "--passes", passes]


def run_tool(command: list) -> tuple[float, float]:
    """Seconds and peak memory in MB of a process of its own."""
    began = time.perf_counter()
    child = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise UserError(f"{Path(command[1]).name} ended with exit code {child.returncode}")
    return seconds, usage.ru_maxrss * 1024 / 1e6  # Linux counts it in KiB


def write_text(patterns: list[str], megabytes: int, target: Path) -> Path:
    """Write documents of the input to `target` until there are so many bytes."""
    with target.open("wb") as file:
        for unit in cut_units(find_files(patterns)):
            for reading in read_documents(unit):
                file.write(("\n".join(reading.document.lines) + "\n\n").encode())
                if file.tell() >= megabytes * 1e6:
                    return target
        held = file.tell() / 1e6
    raise UserError(f"--megabytes {megabytes}: --input holds only {held:.0f}")


def spread(values: list[float], form: str) -> list[str]:
    return [format(of(values), form) for of in (min, statistics.median, max)]


def print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def read_cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


if __name__ == "__main__":
    try:
        main()
    except ENDINGS as ending:
        print(f"data_bench: {ending}", file=sys.stderr)
        sys.exit(ending.code)
