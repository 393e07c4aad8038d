"""What a trainer has read and checked is handed on: no file is opened twice.

Python's own audit event tells of every `open`, and the map of a file of tensors is counted where it
is asked for, since safetensors opens it in Rust.
"""

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import safetensors

from albert_ds.settings.finetune import DS_CONFIG
from tests.command import kill_after
from tests.conftest import train_command
from tests.distributed import end_ranks, run_ranks
from tests.finetuning import flags
from tests.legs import tune
from tests.models import run_export


def count_opens(rank: int, program: str, argv: list[str], folders: list[Path]) -> Counter:
    """Run a trainer; how often it opens each file that is in `folders` when it starts, to read it.

    The keys are ("opened" or "mapped", the file).
    """
    from albert_ds import finetune, train

    known = {os.path.realpath(x) for folder in folders for x in folder.rglob("*") if x.is_file()}
    counts: Counter = Counter()

    def count(kind: str, path) -> None:
        name = os.path.realpath(os.fsdecode(path))
        if name in known:
            counts[kind, name] += 1

    def see(event: str, given: tuple) -> None:
        if event == "open" and not isinstance(given[0], int):
            path, _, flags = given
            if flags & os.O_ACCMODE == os.O_RDONLY:
                count("opened", path)

    def map_file(path, *given, **named):
        count("mapped", path)
        return safe_open(path, *given, **named)

    safe_open = safetensors.safe_open
    for module in list(sys.modules.values()):
        if getattr(module, "safe_open", None) is safe_open:
            vars(module)["safe_open"] = map_file
    sys.addaudithook(see)
    assert {"train": train, "finetune": finetune}[program].main(argv) == 0
    return counts


def check(counts: Counter, run: Path, *read: Path) -> None:
    """Each file once, and those in `read` at all; a file of tensors once more for its checksum.

    RUN/config.json is read again under the lock: another start may have written it since. And of
    Hugging Face's tokenizer_config.json each of two readers reads its part.
    """
    twice = [str(run / "config.json")]
    twice += [name for _, name in counts if name.endswith("hf/tokenizer_config.json")]
    again = {each: n for each, n in counts.items() if n > 1 + (each[1] in twice)}
    assert again == {} and {str(path) for path in read} <= {name for _, name in counts}


def test_a_training_opens_each_file_once(data, tmp_path):
    first, run = tmp_path / "first", tmp_path / "run"
    given = dict(average=0.9, save_at_tokens="2k", steps=4, save_every=2, eval_every=4)
    run_ranks(count_opens, 1, "train", train_command(data, first, **given)[2:], [])
    # From --init-from, and then from its own checkpoint.
    for steps, of in ((4, first), (6, run)):
        argv = train_command(data, run, **{**given, "steps": steps}, init_from=first)[2:]
        counts = run_ranks(count_opens, 1, "train", argv, [data, first, run])[0]
        # Shards are read again in every epoch.
        counts = Counter({each: n for each, n in counts.items() if not each[1].endswith(".tar")})
        weights = of / "checkpoints" / "step-00000004" / "weights.safetensors"
        check(counts, run, data / "index.json", data / "spiece.model", weights)
        assert counts["mapped", str(weights)] == 1


@pytest.mark.parametrize("start", ["--checkpoint", "--from-task", "Hugging Face"])
def test_a_fine_tuning_opens_each_file_once(cola, checkpoint, tmp_path, start):
    run = tmp_path / "run"
    given = dict(steps=6, eval_every=2, save_every=2)
    source = checkpoint
    if start == "Hugging Face":
        source = run_export(checkpoint, tmp_path / "hf")
    if start == "--from-task":
        source = given["from_task"] = tmp_path / "first"
        tune("glue/cola", cola, checkpoint, source)
    weights = next(x for x in source.rglob("*.safetensors") if x.stem in ("weights", "model"))
    folders = [checkpoint, source, run, Path(DS_CONFIG).parent]
    argv = flags("glue/cola", cola, source if start == "Hugging Face" else checkpoint, run, **given)
    check(run_ranks(count_opens, 1, "finetune", argv, folders)[0], run, weights)
    shutil.rmtree(run)
    end_ranks(kill_after, 1, ["finetune", *argv], 3)
    counts = run_ranks(count_opens, 1, "finetune", argv, folders)[0]
    check(counts, run, run / "checkpoints" / "step-00000002" / "exp_avg.safetensors")
