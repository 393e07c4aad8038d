"""Measure the data part on one core: building shards, reading samples, resuming.

With --input, texts of the given sizes (cut at document boundaries) are built, and the shards of
the last one are read; with --data, existing shards are read. Reading is compared with Hugging
Face's whole-word collator on the same sequences. What is compared takes turns (A B A B), so a
drift of the machine's speed cancels.
"""

import cProfile
import itertools
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from albert_lab.tables import table, three

from albert_ds import cli
from albert_ds.cli import Parser, natural, positive
from albert_ds.data.storage import find_files
from albert_ds.errors import UserError
from albert_ds.text.sources import cut_units, read_documents

BUILD = Path(__file__).parents[1] / "build_shards.py"
KINDS: dict[str, dict[str, Any]] = {
    "sop, 15 % masked": {},
    "sop, at most 20 masked": {"max_predictions": 20},
    "nsp, 15 % masked": {"objective": "nsp"},
    "none, 15 % masked": {"objective": "none"},
}
BATCH = 32


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/data_bench.py", description=__doc__)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--input", nargs="+", type=cli.path, metavar="GLOB", help="text, as for build_shards.py"
    )
    what.add_argument(
        "--data", type=cli.path, metavar="DATA", help="folder of build_shards.py: only read it"
    )
    add(
        "--vocab",
        type=cli.path,
        metavar="FILE",
        help="spiece.model of build_vocab.py; needed with --input",
    )
    text = "MB of text to build, one or several (default: 20 100)"
    add("--megabytes", nargs="+", type=positive, default=[20, 100], help=text)
    add("--samples", type=positive, default=4096, help="samples of each reading")
    add("--repeats", type=positive, default=5, help="rounds of each comparison")
    add(
        "--core",
        type=natural,
        default=0,
        metavar="NUMBER",
        help="number of the one core that everything runs on",
    )
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.input and not args.vocab:
        raise UserError("--vocab: missing; needed with --input")
    os.sched_setaffinity(0, {args.core})
    import torch

    torch.set_num_threads(1)
    print(f"{read_cpu_name()}, one core, Python {platform.python_version()}\n")
    with tempfile.TemporaryDirectory() as scratch:
        data = args.data or str(measure_building(args, Path(scratch)))
        compare_rates(data, args.samples, args.repeats)
        print_profile(data, args.samples)
        measure_resume(data, args.repeats)


def measure_building(args, folder: Path) -> Path:
    """Print a row for each text; returns the shards of the last one."""
    from albert_ds.data.shards import read_index

    rows, built = [], folder
    for megabytes in sorted(args.megabytes):
        text = write_text(args.input, megabytes, folder / f"{megabytes}.txt")
        built = text.with_suffix("")
        command = [sys.executable, BUILD, "--input", text, "--vocab", args.vocab, "--output", built]
        seconds, memory = run_tool(command)
        size = text.stat().st_size / 1e6
        disk = sum(path.stat().st_size for path in built.iterdir()) / 1e6
        sequences = read_index(built)["splits"]["train"]["samples"]
        speed = f"{size / seconds:.1f}"
        rows.append([f"{size:.0f}", f"{sequences:,}", speed, f"{memory:.0f}", f"{disk:.0f}"])
    print(table(("text MB", "sequences", "MB/s", "peak memory MB", "disk MB"), rows), "\n")
    return built


def write_text(patterns: list[str], megabytes: int, target: Path) -> Path:
    """Write documents of the input to `target` until it has that many megabytes."""
    with target.open("wb") as file:
        for unit in cut_units(find_files(patterns)):
            for reading in read_documents(unit):
                file.write(("\n".join(reading.document.lines) + "\n\n").encode())
                if file.tell() >= megabytes * 1e6:
                    return target
        held = file.tell() / 1e6
    raise UserError(f"--megabytes {megabytes}: --input has only {held:.0f}")


def run_tool(command: list) -> tuple[float, float]:
    """Seconds and peak memory in MB of a process."""
    began = time.perf_counter()
    child = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise UserError(f"{Path(command[1]).name} ended with exit code {child.returncode}")
    return seconds, usage.ru_maxrss * 1024 / 1e6  # Linux counts it in KiB


def compare_rates(data: str, samples: int, repeats: int) -> None:
    readers: dict[str, Callable[[], int]] = {}
    for name, settings in KINDS.items():
        batches = open_stream(data, **settings)
        readers[name] = lambda batches=batches: next(batches).samples
    readers["Hugging Face's collator"] = collator_of_hugging_face(data)
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(repeats + 1):
        for name, read in readers.items():
            began, done = time.perf_counter(), 0
            while done < samples:
                done += read()
            if turn:  # the first round warms up
                rates[name].append(done / (time.perf_counter() - began))
    first = statistics.median(next(iter(rates.values())))
    rows = [
        [name, *three(values, ",.0f"), f"{statistics.median(values) / first:.2f}"]
        for name, values in rates.items()
    ]
    print(table(("samples/s", "min", "median", "max", "median / the first's"), rows), "\n")


def open_stream(data: str, start: int = 0, **settings: Any) -> Iterator:
    from albert_ds.data.samples import StreamConfig
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import training_batches

    source = open_shards(data, "train")
    return training_batches(
        [source],
        None,
        StreamConfig(sequence_length=source.sequence_length, **settings),
        start=start,
        batch_size=BATCH,
        micro_batch_size=BATCH,
        dp_rank=0,
        dp_size=1,
    )


def collator_of_hugging_face(data: str) -> Callable[[], int]:
    """A function that masks the next batch of the same sequences, which are lists in memory."""
    from transformers import AlbertTokenizer, DataCollatorForLanguageModeling

    from albert_ds.data.shards import open_shards
    from albert_ds.data.vocab import CLS, PAD, SEP
    from albert_ds.data.words import build_word_starts

    source = open_shards(data, "train")
    tokenizer = AlbertTokenizer.from_pretrained(data, local_files_only=True)
    # Without replacement by random tokens: it cannot do that with whole words.
    collate = DataCollatorForLanguageModeling(
        tokenizer, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    starts = build_word_starts(source.vocab.pieces, "scripts")
    examples: list[dict[str, Any]] = []
    for batch in open_stream(data, objective="none", masked_fraction=1e-6):
        for begin, end in itertools.pairwise(batch.tensors["cu_seqlens"].tolist()):
            ids = batch.tensors["input_ids"][begin:end].tolist()
            special = [int(token in (CLS, SEP)) for token in ids]
            # It recognises words by gaps between the character offsets of their tokens.
            at, offsets = 0, []
            for token, is_special in zip(ids, special, strict=True):
                at += bool(starts[token] or is_special)
                offsets.append((at, at + 1))
                at += 1
            examples.append(
                {"input_ids": ids, "special_tokens_mask": special, "offset_mapping": offsets}
            )
        if len(examples) >= 1024:
            break
    batches = [examples[i : i + BATCH] for i in range(0, len(examples), BATCH)]
    for batch in batches:  # it pads ids but not offsets; padding here is not timed
        longest = max(len(example["input_ids"]) for example in batch)
        fills = {"input_ids": PAD, "special_tokens_mask": 1, "offset_mapping": (0, 0)}
        for example in batch:
            for name, fill in fills.items():
                example[name] += [fill] * (longest - len(example[name]))
    turns = itertools.cycle(batches)

    def read() -> int:
        batch = next(turns)
        collate([dict(example) for example in batch])
        return len(batch)

    return read


def print_profile(data: str, samples: int) -> None:
    """Own time of each function, as a share of the time of reading that many samples."""
    batches = open_stream(data)
    next(batches)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(max(1, samples // BATCH)):
        next(batches)
    profile.disable()
    stats = pstats.Stats(profile).stats  # ty: ignore[missing-attribute]
    total = sum(own for _, _, own, _, _ in stats.values())
    ranked = sorted(stats.items(), key=lambda item: -item[1][2])
    rows = []
    for (file, _, name), (_, calls, own, _, _) in ranked[:12]:
        place = f"{Path(file).name}: {name}" if file != "~" else name.strip("<>")
        rows.append([place.replace("|", "/"), f"{own / total:.0%}", f"{calls / samples:.1f}"])
    print(table(("function", "own share of the time", "calls per sample"), rows), "\n")


def measure_resume(data: str, repeats: int) -> None:
    """Time from opening the stream to its first batch: at the start, in the middle, far on."""
    from albert_ds.data.shards import open_shards

    source = open_shards(data, "train")
    middle = int(source.sizes.sum()) // 2 // BATCH * BATCH
    rows = []
    for name, start in (("from 0", 0), ("from the middle", middle), ("from 10^9", 10**9)):
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            next(open_stream(data, start))
            taken.append(1e3 * (time.perf_counter() - began))
        rows.append([name, *three(taken, ".0f")])
    title = f"first {BATCH} samples of {len(source.shards)} shards"
    print(table((title, "ms: min", "median", "max"), rows))


def read_cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cli.run(main)
