"""A folder with a valid input of every command, and the words of each command on it."""

import json
import shutil
import sys
from pathlib import Path

from albert_ds.base.files import write_report
from tests.command import run_command
from tests.conftest import ROOT
from tests.distributed import run_ranks
from tests.finetuning import flags, tune_ranks, write_checkpoint, write_cola
from tests.models import run_export

# Command: its words but for --output, the inputs in them, and the name of an output.
TEXT = ("--input", "text.txt")
RUN_WORDS = ("--batch-size", 8, "--steps", 1)
DS_CONFIG = ("--deepspeed_config", "ds.json")
SMALL = ("--model", "albert-tiny", "--num-layers", 1, "--hidden-size", 32, "--embedding-size", 16)
MEASURED = ("--sequence-length", 8, *DS_CONFIG)
WRITES = {
    "vocab": ((*TEXT, "--vocab-size", 300), ["text.txt"], "folder"),
    "shards": (
        (*TEXT, "--vocab", "vocab/spiece.model", "--sequence-length", 64),
        ["text.txt", "vocab"],
        "folder",
    ),
    "train": (
        (*SMALL, "--data", "data", *RUN_WORDS, "--micro-batch-size", 8, *DS_CONFIG),
        ["data"],
        "folder",
    ),
    "finetune": (
        ("--task", "glue/cola", "--data", "cola", "--checkpoint", "run", *RUN_WORDS),
        ["cola", "run"],
        "folder",
    ),
    "learn": (("--text", "text.txt", "--hours", 0.001), ["text.txt"], "folder"),
    "plan": (("text.txt", "--hours", 0.001), ["text.txt"], "folder"),
    "scaling plan": (("text.txt", "--hours", 0.001), ["text.txt"], "folder"),
    "recipes": ((), [], "folder"),
    "probe": (
        ("--checkpoint", "run", "--minimal-pairs", "pairs"),
        ["run", "pairs", "run/config.json", "pairs/order.jsonl"],
        "file.json",
    ),
    "ensemble": (("--members", "tuned"), ["tuned"], "folder"),
    "export": (("--checkpoint", "run"), ["run"], "folder"),
    "import": (("--input", "hf"), ["hf"], "folder"),
    "report": (
        ("run",),
        ["run", "run/metrics.jsonl", "run/config.json", "run/spiece.model"],
        "file.html",
    ),
    "bench": (("--models", "albert-tiny", "--ranks", 1, *MEASURED), ["ds.json"], "file.json"),
    "traffic": (("--models", "albert-tiny", "--ranks", 1, *MEASURED), ["ds.json"], "file.json"),
    "gpu-check": (("--data", "data", "--quick", "--piece", "machine"), ["data"], "folder"),
    "plots curves": (("--runs", "run"), ["run", "run/metrics.jsonl"], "file.svg"),
    "plots traffic": (("--input", "bench.json"), ["bench.json"], "file.png"),
    "plots split": (("--input", "bench.json"), ["bench.json"], "file.png"),
    "plots layers": (("--input", "layers.json"), ["layers.json"], "file.png"),
    "plots depths": (("--input", "depths.json"), ["depths.json"], "file.png"),
    "plots scores": (("--input", "scores.json"), ["scores.json"], "file.svg"),
    "plots steps": (("--input", "check.jsonl", "--labels", "one"), ["check.jsonl"], "file.png"),
}
# Commands that write nothing, or an answer on the screen.
READS = {
    "inspect": ("--data", "data"),
    "fill-mask": ("--checkpoint", "run", "The [MASK] is a name."),
    "plan": ("--model", "albert-base", "--steps", 100, "--gpus", 8, "--link", 100),
}


def build_room(folder: Path, data: Path, text_file: Path, checkpoint: Path, cola: Path) -> None:
    """`folder` is empty; the others are built data, its text, a run and a task's tables."""
    for source, name in ((data, "data"), (data.parent / "vocab", "vocab"), (cola, "cola")):
        shutil.copytree(source, folder / name)
    shutil.copytree(checkpoint, folder / "run")
    (folder / "run/metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "loss": 8}\n')
    (folder / "text.txt").write_text(text_file.read_text(encoding="utf-8")[:40_000])
    shutil.copy(ROOT / "ds_configs/zero1_fp32.json", folder / "ds.json")
    run_export(folder / "run", folder / "hf")
    argv = flags("glue/cola", cola, checkpoint, folder / "tuned", steps=1)
    assert run_ranks(tune_ranks, 1, argv) == [0]
    pair = {"sentence_good": "The class is a name.", "sentence_bad": "The is class a name."}
    (folder / "pairs").mkdir()
    (folder / "pairs/order.jsonl").write_text(json.dumps(pair) + "\n")
    measured = json.loads((ROOT / "docs/raw/bench_base_2.json").read_text())
    values = {"sharing": "all", "l2": [3.0, 2.0], "degrees": [40.0, 20.0], "tokens": 9}
    write_report(folder / "bench.json", measured)
    write_report(folder / "layers.json", {"models": {"albert": values}})
    means = {"mlm_loss": 5.0, "mlm_accuracy": 0.2, "l2": 3.0, "degrees": 40.0}
    depth = {"num_layers": 2, **means, **{f"{key}_interval": 0.1 for key in means}}
    write_report(folder / "depths.json", {"depths": [depth]})
    score = {"name": "one", "score": 50, "minutes": 5}
    write_report(folder / "scores.json", {"models": [score]})
    cell = {"kind": "speed", "size": "albert-base", "micro": 8, "checkpointing": "none"}
    cell["found"] = dict.fromkeys(("step_seconds", "fastest", "slowest"), 0.1)
    (folder / "check.jsonl").write_text(json.dumps(cell) + "\n")


def build_inputs(folder: Path) -> Path:
    """A room from nothing."""
    from pydoc_data.topics import topics

    from albert_ds.vocab.vocab import Normalisation, train_vocab

    text = folder / "topics.txt"
    documents = ("\n".join(filter(str.strip, text.splitlines())) for text in topics.values())
    text.write_text("\n\n".join(documents)[:200_000], encoding="utf-8")
    vocab = ("--output", folder / "vocab", "--vocab-size", 800)
    shards = ("--vocab", folder / "vocab" / "spiece.model", "--output", folder / "shards")
    for command, words in (("vocab", vocab), ("shards", (*shards, "--sequence-length", 64))):
        done = run_command(command, "--input", text, *words)
        assert done.code == 0, done.err
    small = train_vocab(text.read_text().splitlines(), Normalisation(), vocab_size=300)
    (folder / "inputs").mkdir()
    checkpoint = write_checkpoint(folder / "pretrained", small)
    cola = write_cola(folder / "CoLA")
    build_room(folder / "inputs", folder / "shards", text, checkpoint, cola)
    return folder / "inputs"


def content_of(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


if __name__ == "__main__":
    build_inputs(Path(sys.argv[1]))
