"""The cases: which commands run, and what is hashed of what they leave."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.distributed import take_port
from tests.golden import material
from tests.golden.hashes import hash_files

# One thread, and no units of the processor that some virtual machines report and do not have.
THREADS = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
TIMEOUT = 300.0
SHARED_FLAGS = (
    "--model albert-tiny --num-layers 4 --hidden-size 32 --embedding-size 16 --num-heads 4 "
    "--max-position-embeddings 256 --steps 20 --batch-size 12 --log-every 1 --eval-every 10 "
    "--eval-samples 8 --save-every 10"
)


class Layout(NamedTuple):
    """One pretraining; a rank has `12 / ranks / micro-batch` accumulated micro-batches."""

    ranks: int
    stage: int
    precision: str
    flags: str


LAYOUTS = {
    "zero0": Layout(2, 0, "fp32", "--micro-batch-size 6"),
    "zero1": Layout(2, 1, "fp32", "--micro-batch-size 2"),
    "zero2": Layout(2, 2, "fp32", "--micro-batch-size 2 --sharing groups:2"),
    "zero3": Layout(2, 3, "fp32", "--micro-batch-size 6"),
    "zero1-bf16": Layout(2, 1, "bf16", "--micro-batch-size 6 --sharing none"),
    "zero2-bf16": Layout(2, 2, "bf16", "--micro-batch-size 2 --activation-checkpointing block"),
    "zero3-bf16": Layout(2, 3, "bf16", "--micro-batch-size 6 --sharing groups:2"),
    "tp2": Layout(2, 1, "fp32", "--micro-batch-size 12 --tensor-parallel 2"),
    "tp2-bf16": Layout(
        2, 1, "bf16", "--micro-batch-size 4 --tensor-parallel 2 --sharing groups:2 --dropout 0"
    ),
    "nsp": Layout(1, 1, "fp32", "--micro-batch-size 4 --objective nsp"),
    "mlm": Layout(1, 0, "fp32", "--micro-batch-size 4 --objective none --sharing none --dropout 0"),
    "lora": Layout(1, 1, "fp32", "--micro-batch-size 12 --sharing groups:2 --per-layer lora:2"),
    "depth": Layout(1, 0, "fp32", "--micro-batch-size 4 --depth-schedule 2@0,4@50%"),
    "resumed": Layout(2, 1, "bf16", "--micro-batch-size 2"),
}
LANGUAGES = ("en", "de", "zh", "th")
TASKS = {
    "mrpc": ("glue/mrpc", 1, material.write_mrpc),
    "squad2": ("squad2", 2, material.write_squad2),
    "race": ("race", 1, material.write_race),
}
PRETRAINED = "zero1"  # what is exported and fine-tuned
NAMES = [*LAYOUTS, *(f"shards-{code}" for code in LANGUAGES), "export", *TASKS]
Hashes = dict[str, dict[str, str]]


class Failure(Exception):
    """A command failed, or two of its results that must be equal are not."""


def find_difference(expected: dict[str, list[str]], hashes: Hashes) -> str | None:
    """What of `hashes` has other hashes than `expected`, first the file and the item; or None."""
    for name in sorted(expected.keys() | hashes.keys()):
        if name not in hashes or name not in expected:
            return f"{name} is {'gone' if name not in hashes else 'new'}"
        new = [item for item, digest in hashes[name].items() if digest not in expected[name]]
        if new:
            return f"{name}: {len(new)} of {len(hashes[name])} items, first {new[0]}"
        if gone := len(expected[name]) - len(hashes[name]):
            return f"{name}: {gone} items are gone, the others are equal"
    return None


class Cases:
    """Runs the cases of one tree of the code in one empty folder."""

    def __init__(self, code: Path, work: Path):
        self.code, self.work = code.resolve(), work.resolve()

    def build_english(self) -> None:
        """The shards that all trainings read."""
        self._build_shards("en", "data", processes=1)

    def run(self, name: str) -> Hashes:
        if name in LAYOUTS:
            return self._train(name)
        if name in TASKS:
            return self._finetune(name)
        return self._export() if name == "export" else self._compare_shards(name[-2:])

    def _train(self, name: str) -> Hashes:
        layout = LAYOUTS[name]
        run = self.work / name
        config = self.work / f"{name}.json"
        config.write_text(json.dumps(make_deepspeed_config(layout)))
        argv = ["train", "--data", self.work / "en" / "data", "--output", run]
        argv += ["--deepspeed_config", config, *SHARED_FLAGS.split(), *layout.flags.split()]
        self._command(argv, f"{name}.log", ranks=layout.ranks)
        whole = hash_run(run, 20)
        if name == "resumed":  # RUN as it is if the machine fails after step 10
            shutil.rmtree(run / "checkpoints" / "step-00000020")
            (run / "checkpoints" / "latest").write_text("step-00000010")
            self._command(argv, f"{name}.log", ranks=layout.ranks)
            check_equal("uninterrupted and resumed", whole, hash_run(run, 20))
        return whole

    def _build_shards(self, code: str, output: str, processes: int) -> Path:
        folder = self.work / code
        if not folder.exists():
            texts = material.write_text(folder / "text", code)
            argv = ["vocab", "--input", texts, "--language", code, "--output", folder / "vocab"]
            self._command([*argv, "--vocab-size", "300"], f"{code}/vocab.log")
        if not (folder / output).exists():
            argv = ["shards", "--input", folder / "text" / "*", "--language", code]
            argv += ["--vocab", folder / "vocab" / "spiece.model", "--output", folder / output]
            argv += "--sequence-length 64 --holdout 0.1 --samples-per-shard 200".split()
            self._command(argv, f"{code}/{output}.log", processes=processes)
        return folder / output

    def _compare_shards(self, code: str) -> Hashes:
        patterns = ("*.tar", "index.json", "tokenizer.json")
        one = hash_files(self._build_shards(code, "data", processes=1), *patterns)
        two = hash_files(self._build_shards(code, "data-of-two", processes=2), *patterns)
        check_equal("shards of one and of two processes", one, two)
        return one | hash_files(self.work / code, "vocab/spiece.vocab")

    def _export(self) -> Hashes:
        output = self.work / "export"
        argv = ["export", "--checkpoint", self.work / PRETRAINED, "--output", output]
        self._command(argv, "export.log")
        return hash_files(output, "model.safetensors", "tokenizer.json", "config.json")

    def _finetune(self, name: str) -> Hashes:
        task, ranks, write_task = TASKS[name]
        data = self.work / f"{name}-data"
        output = self.work / name
        write_task(data)
        argv = ["finetune", "--task", task, "--data", data, "--output", output]
        argv += ["--checkpoint", self.work / PRETRAINED, "--micro-batch-size", "4"]
        argv += "--steps 10 --batch-size 8 --dropout 0.1 --learning-rate 0.002".split()
        argv += "--sequence-length 192 --log-every 1 --eval-every 5 --save-every 5".split()
        self._command(argv, f"{name}.log", ranks=ranks)
        predictions = "*.tsv" if name == "mrpc" else "predictions.*.json"
        others = ("results.json", "outputs.*.safetensors")
        return hash_run(output, 10) | hash_files(output, predictions, *others)

    def _command(self, argv: list, log: str, *, ranks: int = 1, processes: int = 1) -> None:
        """Run `albert-ds ARGV` on that many ranks, or that many processes of MPI, to code 0."""
        command = [sys.executable, "-m", "albert_ds", *map(str, argv)]
        if processes > 1:
            mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.defpath}")
            if mpirun is None:
                raise Failure("mpirun is not installed")
            launcher = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(processes)]
            command = [*launcher, *command]
        shared = {
            **os.environ,
            **THREADS,
            "PYTHONPATH": f"{self.code}:{self.code / 'tools'}",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
        }
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(take_port()), "WORLD_SIZE": ranks}
        with (self.work / log).open("a") as file:
            running = []
            for rank in range(ranks):
                environment = {**place, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
                environment = shared | {key: str(value) for key, value in environment.items()}
                running.append(
                    subprocess.Popen(
                        command, cwd=self.code, env=environment, stdout=file, stderr=file
                    )
                )
            try:
                codes = [process.wait(TIMEOUT) for process in running]
            finally:
                for process in running:
                    process.kill()
        if any(codes):
            last = (self.work / log).read_text().strip().split("\n")[-1]
            raise Failure(f"{argv[0]} ended with {codes}: {last}")


def make_deepspeed_config(layout: Layout) -> dict:
    """LAMB with clipping, the rest from the command line, as in the JSONs of ds_configs/."""
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    lamb = {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.01}
    config = {
        **dict.fromkeys(batch, "auto"),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Lamb", "params": lamb},
        "zero_optimization": {"stage": layout.stage},
    }
    if layout.precision == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config


def hash_run(run: Path, step: int) -> Hashes:
    checkpoint = f"checkpoints/step-{step:08d}"
    return hash_files(run, f"{checkpoint}/*.safetensors", f"{checkpoint}/*.json", "metrics.jsonl")


def check_equal(what: str, one: Hashes, two: Hashes) -> None:
    difference = find_difference({name: list(items.values()) for name, items in one.items()}, two)
    if difference:
        raise Failure(f"{what} differ: {difference}")
