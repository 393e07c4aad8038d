"""What text takes of memory as it grows, and what a sample costs the vocabulary.

Prints two tables: of each command the peak memory of all its processes together, by megabytes of
text; and of vocabularies of the default sample and of the whole text, the tokens a word of the
other two hundredths of the text.

    python tools/lab/text_memory.py --input 'wiki/**' --work DIR --sizes 10 100
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
from albert_lab.tables import table

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.storage import find_files
from albert_ds.text.documents import TextConfig
from albert_ds.text.sources import cut_units, read_documents
from albert_ds.vocab.vocab import read_vocab

LOOK_SECONDS = 0.2
WHOLE = ("--sample-bytes", 1 << 40)
HELD_OUT = 50  # one document in as many
SMALL = ("--model", "albert-tiny", "--num-layers", 1, "--batch-size", 8, "--steps", 1)
SHORT = ("--sequence-length", 64)


def build_parser() -> cli.Parser:
    parser = cli.Parser(prog="tools/lab/text_memory.py", description=__doc__)
    add = parser.add
    add("--input", "text of at least the largest size", "GLOB", cli.path, nargs="+", required=True)
    add("--work", "folder for what is built", "DIR", Path, required=True)
    add("--sizes", "sizes of the text", "MB", cli.positive, nargs="+", default=[10, 100])
    add("--vocab-size", "largest number of pieces", "PIECES", cli.positive, default=30_000)
    return parser


def measure(*words) -> int:
    """The largest number of bytes that `albert-ds WORDS` and its children have held together."""
    command = [sys.executable, "-m", "albert_ds", *map(str, words)]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        held = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                held += one.memory_full_info().uss
            except psutil.Error:  # it has ended
                continue
        peak = max(peak, held)
        time.sleep(LOOK_SECONDS)
    if process.returncode:
        sys.exit(process.returncode)
    cli.log_line(f"{words[0]}: {peak / 1e6:,.0f} MB")  # it may be stopped before its tables
    return peak


def write_text(work: Path, inputs: list[str], size: int) -> dict[str, Path]:
    """Text of `size` bytes, a document a line of JSON; what is held out; a task; metrics."""
    paths = {name: work / name for name in ("text", "heldout")}
    task = work / "task"
    task.mkdir(parents=True)
    written = number = 0
    with paths["text"].open("w") as text, paths["heldout"].open("w") as heldout:
        train, dev = (task / f"{split}.jsonl" for split in ("train", "dev"))
        with train.open("w") as rows, dev.open("w") as few:
            for reading in (r for unit in cut_units(inputs) for r in read_documents(unit)):
                number += 1
                line = json.dumps({"text": "\n".join(reading.document.lines)}, ensure_ascii=False)
                (heldout if number % HELD_OUT == 0 else text).write(line + "\n")
                labelled = {**json.loads(line), "label": "ab"[number % 2]}
                (few if number % HELD_OUT == 1 else rows).write(json.dumps(labelled) + "\n")
                if (written := written + len(line.encode()) + 1) > size:
                    break
    if written <= size:
        raise UserError(f"--input: holds {written:,} bytes; must hold those of --sizes")
    with (work / "metrics.jsonl").open("w") as metrics:
        for step in range(1, size // 100):  # bytes a line
            metrics.write(json.dumps({"step": step, "loss": 9.0, "mlm_loss": 8.0, "lr": 0.001}))
            metrics.write(" " * 40 + "\n")
    return {**paths, "task": task, "metrics": work / "metrics.jsonl"}


def measure_all(work: Path, inputs: list[str], size: int, pieces: int) -> tuple[dict, dict]:
    """Peak bytes of each command, and tokens a word of each vocabulary."""
    paths = write_text(work, inputs, size)
    vocab, data, run = work / "vocab", work / "data", work / "run"
    text = ("--input", paths["text"], "--vocab-size", pieces)
    trained = ("--checkpoint", run)
    peaks = {"vocab": measure("vocab", *text, "--output", vocab)}
    peaks["vocab of the whole text"] = measure("vocab", *text, *WHOLE, "--output", work / "whole")
    words = ("--vocab", vocab / "spiece.model", "--output", data, *SHORT)
    peaks["shards"] = measure("shards", "--input", paths["text"], *words)
    json_file = Path(__file__).parents[2] / "ds_configs" / "zero1_fp32.json"
    words = ("--deepspeed_config", json_file, "--micro-batch-size", 8, *SHORT)
    peaks["train"] = measure("train", *SMALL, "--data", data, "--output", run, *words)
    peaks["probe"] = measure("probe", *trained, "--data", data, "--output", work / "probe.json")
    words = ("--task", "text", "--data", paths["task"], "--output", work / "tuned", *words)
    peaks["finetune"] = measure("finetune", *trained, *words, *SMALL[-4:])
    peaks["report"] = measure("report", paths["metrics"], "--output", work / "report.html")
    sentences = [
        sentence
        for unit in cut_units([str(paths["heldout"])])
        for reading in read_documents(unit)
        for sentence in TextConfig().split(reading.document.lines)
    ]
    number = sum(len(sentence.split()) for sentence in sentences)
    return peaks, {
        name: sum(map(len, read_vocab(folder / "spiece.model").encode(sentences))) / number
        for name, folder in (("sampled", vocab), ("whole", work / "whole"))
    }


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    inputs = find_files(args.input)
    peaks = {}
    tokens = {}
    for size in args.sizes:
        work = args.work / str(size)
        peaks[size], tokens[size] = measure_all(work, inputs, size * 10**6, args.vocab_size)
    rows = [
        [name, *(f"{peaks[s][name] / 1e6:,.0f}" for s in peaks)] for name in peaks[args.sizes[0]]
    ]
    print(table(["peak memory, MB", *(f"{size} MB" for size in args.sizes)], rows))
    rows = [
        [
            f"{size} MB",
            f"{t['sampled']:.4f}",
            f"{t['whole']:.4f}",
            f"{t['sampled'] / t['whole'] - 1:+.2%}",
        ]
        for size, t in tokens.items()
    ]
    print(table(["text", "tokens a word, sampled", "whole text", "difference"], rows))


if __name__ == "__main__":
    cli.run(main)
