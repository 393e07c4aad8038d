"""Clean and deduplicate text with datatrove, then build shards of it by datatrove's executor.

python tools/examples/datatrove_shards.py --input raw --work work --tasks 7 \
    --vocab vocab/spiece.model --output data

raw holds JSON lines with "text". Short documents and exact copies go; your filters belong there. On
a cluster --slurm PARTITION makes stages job arrays. The same command does failed tasks again.
"""

import argparse
import sys
from functools import partial

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline import dedup, filters, readers, writers
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig


class Shards(PipelineStep):
    """A part of `albert-ds shards` in each task; in a task that is alone the join."""

    def __init__(self, *flags: str):
        super().__init__()
        self.command = [sys.executable, "-m", "albert_ds", "shards", *flags]

    def run(self, data, rank: int = 0, world_size: int = 1):
        import subprocess  # on Slurm the class is unpickled without its module

        part = ["--piece", f"{rank + 1}/{world_size}"] if world_size > 1 else ["--join"]
        subprocess.run([*self.command, *part], check=True)
        yield from data or ()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--input", "--work", "--vocab", "--output"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--tasks", type=int, default=4, help="2 or more; half of them at a time")
    parser.add_argument("--slurm")
    args = parser.parse_args()
    clean, signed, copies, text = (f"{args.work}/{x}" for x in ("clean", "sign", "find", "text"))
    is_long = filters.LambdaFilter(lambda d: len(d.text) >= 200)
    read = readers.JsonlReader(clean)
    write_clean, write_text = writers.JsonlWriter(clean), writers.JsonlWriter(text)
    config = ExactDedupConfig(lambda document: document.text.encode())
    shards = Shards("--input", f"{text}/*.gz", "--vocab", args.vocab, "--output", args.output)
    run = partial(LocalPipelineExecutor, workers=args.tasks // 2)
    stage = None
    if args.slurm:
        run = partial(SlurmPipelineExecutor, partition=args.slurm, time="24:00:00")
    for name, tasks, pipeline in (
        ("clean", args.tasks, [readers.JsonlReader(args.input), is_long, write_clean]),
        ("sign", args.tasks, [read, dedup.ExactDedupSignature(signed, config)]),
        ("find", 1, [dedup.ExactFindDedups(signed, copies, config)]),
        ("drop", args.tasks, [read, dedup.ExactDedupFilter(copies, config), write_text]),
        ("encode", args.tasks, [shards]),
        ("join", 1, [shards]),
    ):
        stage = run(pipeline, tasks=tasks, depends=stage, logging_dir=f"{args.work}/logs/{name}")
    stage.run()
