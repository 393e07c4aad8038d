"""Schedules in training: exact through stops and in every layout, and in all that a run writes."""

import json
import shutil
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path

import pytest

from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.data.shards import open_shards
from albert_ds.data.stream import heldout_batches, training_batches
from albert_ds.data.stream_config import DataPlan, StreamConfig
from albert_ds.settings.pretrain import read_config
from tests.batches import random_samples
from tests.command import run_command
from tests.conftest import finish, start_ranks, train_command
from tests.distributed import run_ranks
from tests.legs import Case, files_of, pretrain, records, rewind, run_case
from tests.reference import reference_training, update_error
from tests.runs import SMALL, small_config, train_ranks

STEPS = 12
SCHEDULES = {
    "batch_size": "8@0,16@25%,4@8",
    "sequence_length": "16@0..64@6,32@9",
    "masked_fraction": "0.3..0.15@100%",
    "depth_schedule": "1@0,2@7",
}
TO_COME = {  # the same for seven steps, and for twice as many steps in all
    "batch_size": "8@0,16@3,4@8,8@20",
    "masked_fraction": "0.3..0.15@12",
    "depth_schedule": "1@0,2@9",
}
FIRST = dict(zip(SCHEDULES, (8, 16, 0.3, 2), strict=True))
BATCHES = [8] * 3 + [16] * 5 + [4] * 4
LENGTHS = [16, 24, 32, 40, 48, 56, 64, 64, 64, 32, 32, 32]
FLAGS = dict(**SCHEDULES, steps=STEPS, save_every=1, keep_last=STEPS, num_workers=1, dropout=0.1)
# Trains the tensors that it reads; of single rows, products round as these lie in memory.
FLAGS |= dict(deepspeed_config="ds_configs/zero0_fp32.json", micro_batch_size=1)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    pretrain(data, run, **FLAGS)
    return run


def resume(whole: Path, run: Path, step: int) -> None:
    """Make `run` from `whole` as it was after `step`."""
    rewind(shutil.copytree(whole, run), step)


@pytest.mark.parametrize("step", [1, 3, 7, 8])
def test_a_resume_inside_every_change_equals_the_uninterrupted_run(data, whole, step):
    run_case(Case(config=FLAGS, cuts=(step,), fault=rewind), data, folder=whole.parent)


def test_the_metrics_follow(data, whole):
    steps = [record for record in records(whole) if "samples" in record]
    assert [record["samples"] for record in steps] == [sum(BATCHES[:n]) for n in range(1, 13)]
    assert [record["batch_size"] for record in steps] == BATCHES
    assert [record["sequence_length"] for record in steps] == LENGTHS
    shares = [0.3 - 0.15 * step / STEPS for step in range(STEPS)]
    assert [record["masked_fraction"] for record in steps] == pytest.approx(shares)
    assert [record["num_layers"] for record in steps] == [1] * 7 + [2] * 5
    # Held-out samples are drawn as at the end of the run, every time.
    stream = StreamConfig(sequence_length=32, masked_fraction=0.15)
    held = heldout_batches(
        open_shards(data, "heldout"), stream, limit=8, micro_batch_size=8, dp_rank=0, dp_size=1
    )
    masked = [record["heldout_masked"] for record in records(whole) if "heldout_masked" in record]
    assert masked == [next(held).masked] * 2


def test_an_export_knows_the_longest_sequence_of_its_steps(whole, tmp_path):
    assert ModelFolder(whole).trained_length == 64
    done = run_command(
        *("export", "--checkpoint", whole, "--output", tmp_path / "hf"),
        "--revision-per-checkpoint",
    )
    assert done.code == 0, done.err
    lengths = [ModelFolder(path).trained_length for path in sorted((tmp_path / "hf").iterdir())]
    assert lengths == list(accumulate(LENGTHS, max))
    run = tmp_path / "run"  # a checkpoint may be kept under a name of the user's
    resume(whole, run, 1)
    (run / "checkpoints" / "step-00000001").rename(run / "checkpoints" / "small")
    assert ModelFolder(run / "checkpoints" / "small").trained_length == 16
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"schedules": 5}))
    with pytest.raises(UserError, match="config.json: schedules: 5: must be an object"):
        ModelFolder(run / "checkpoints" / "small").trained_length  # noqa: B018


def test_inspect_shows_what_a_step_reads(whole):
    for step, first, number, longest in ((1, 0, 8, 16), (5, 40, 16, 48), (12, 116, 4, 32)):
        done = run_command("inspect", "--run", whole, "--step", step)
        assert done.code == 0, done.err
        lines = done.out.splitlines()
        shown = [int(line.split()[1][:-1]) for line in lines if line.startswith("sample ")]
        assert shown == list(range(first, first + number))
        sizes = [int(line.split()[0]) for line in lines if " tokens, " in line]
        assert len(sizes) == number and max(sizes) == longest


def test_two_ranks_train_as_one(data, whole, tmp_path):
    flags = {**FLAGS, "dropout": 0, "save_every": 100, "num_workers": 0, "eval_samples": 7}
    for ranks in (1, 2):
        pretrain(data, tmp_path / str(ranks), ranks=ranks, **flags)
    one, two = (records(tmp_path / name) for name in "12")
    for key in ("step", "samples", "batch_size", "sequence_length", "heldout_masked"):
        assert [r[key] for r in one if key in r] == [r[key] for r in two if key in r]
    for key in ("loss", "grad_norm", "heldout_loss"):
        expected = [record[key] for record in one if key in record]
        assert [r[key] for r in two if key in r] == pytest.approx(expected, rel=1e-4)


def test_a_changing_batch_accumulates_right_at_every_stage():
    """Against float64 over whole batches: DeepSpeed would count micro-batches across steps."""
    sizes = [4, 4, 12, 8, 12, 4]
    batches = [
        random_samples(size, vocab_size=SMALL.vocab_size, max_length=24, seed=seed)
        for seed, size in enumerate(sizes)
    ]
    text = ",".join(f"{size}@{step}" for step, size in enumerate(sizes))
    configs = [
        replace(
            small_config(
                world_size=2, batch_size=sizes[0], ds_file=f"zero1_{precision}.json", stage=stage
            ),
            schedules={"batch_size": text},
        )
        for stage, precision in ((0, "fp32"), *product((1, 2, 3), ("fp32", "bf16")))
    ]
    rates = [configs[0].rate_at(step) for step in range(len(batches))]
    runs = run_ranks(train_ranks, 2, configs, batches)[0]
    expected = reference_training(SMALL, runs[0].initial, batches, rates=rates)
    for config, run in zip(configs, runs, strict=True):
        limit = 1e-5 if "fp32" in config.deepspeed_config else 0.05
        assert run.losses == pytest.approx(expected.losses, rel=limit)
        assert update_error(run.weights, expected.weights, run.initial) <= limit


def test_more_steps_prolong_a_plateau(data, tmp_path):
    """A run of 8 steps that is prolonged before its cool-down is one of 12 steps, bit for bit."""
    flags = dict(learning_rate_schedule="wsd", cooldown=0.25, warmup_steps=2, save_every=7)
    flags |= dict(keep_last=1, final_rate=0.1)
    short, long, longer = (tmp_path / name for name in ("short", "long", "longer"))
    for run, steps in ((short, 8), (long, STEPS)):
        pretrain(data, run, steps=steps, **flags)
    before = files_of(short / "checkpoints" / "step-00000008")
    assert [path.name for path in sorted((short / "checkpoints").glob("step-*"))] == [
        "step-00000006",  # the last one before the cool-down
        "step-00000008",
    ]
    rates = [record["lr"] for record in records(short) if "lr" in record]
    assert rates == pytest.approx([0, 0.00088, *[0.00176] * 5, 0.00176 * 0.55])
    (longer / "checkpoints").mkdir(parents=True)  # as docs/optimizers.md says it
    kept = Path("checkpoints", "step-00000006")
    shutil.copytree(short / kept, longer / kept)
    for path in short.glob("*.json*"):
        shutil.copy(path, longer)
    pretrain(data, longer, steps=STEPS, **flags)
    last = Path("checkpoints", f"step-{STEPS:08d}")
    assert files_of(longer / last) == files_of(long / last)
    lines = [[r for r in records(run) if "lr" in r] for run in (longer, long)]
    assert lines[0] == lines[1]
    assert files_of(short / "checkpoints" / "step-00000008") == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": "8@0,16@25%,8@5"}, "--batch-size: 8 in step 6, which"),
        ({"batch_size": "8"}, "--batch-size: 8 in step 4, which"),
        ({"batch_size": "4"}, "--batch-size is 4, but"),
        ({"sequence_length": "16@0..64@6,16@7"}, None),
        ({"sequence_length": "16@0..64@7"}, "--sequence-length: 23 in step 2, which"),
        ({"masked_fraction": "0.3..0.15@11"}, "--masked-fraction: 0.286363636"),
        ({"steps": 24}, "--batch-size: 8 in step 4"),
        ({"steps": 6, **FIRST}, "--steps 6: "),
        ({**TO_COME, "steps": 24}, None),
        ({"depth_schedule": "1@0,2@6"}, "--depth-schedule: 2 in step 7, which"),
    ],
)
def test_only_the_steps_to_come_may_have_other_values(data, whole, tmp_path, changes, words):
    run = tmp_path / "run"
    resume(whole, run, 7)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    argv = train_command(data, run, **{**FLAGS, **changes})[2:]
    if words is None:
        assert read_config(argv, world_size=1)[0].run == run
    else:
        with pytest.raises(UserError) as caught:
            read_config(argv, world_size=1)
        assert str(caught.value).startswith(words) and "\n" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_checkpoints_at_tokens_and_words(data, tmp_path):
    """Each after the step that reaches a number, none is deleted, also through a resume."""
    source = open_shards(data, "train")
    plan = DataPlan(batch_size=8, stream=StreamConfig(sequence_length=64))
    batches = training_batches(
        [source], None, plan, step=0, micro_batch_size=8, dp_rank=0, dp_size=1
    )
    drawn = [next(batches) for _ in range(STEPS)]
    totals, words = (list(accumulate(getattr(b, n) for b in drawn)) for n in ("tokens", "words"))
    wanted = [1, totals[3] - 1, totals[3], 10**9]
    of_words = [words[6] + 1, words[6] + 2, 10**9, words[3]]
    flags = dict(save_at_tokens=",".join(map(str, wanted)), keep_last=1, save_every=5)
    flags |= dict(save_at_words=",".join(map(str, of_words[:3])), log_every=3, sequence_length=64)
    again = ["--save-at-words", str(of_words[3])]  # typed again, the lists add up
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert finish(start_ranks([*train_command(data, whole, **flags), *again], 2)) == [0, 0]

    def saved(run: Path) -> list[int]:
        return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))

    assert saved(whole) == [1, 4, 5, 8, 10, STEPS]
    logged = {r["step"]: (r["tokens"], r["words"]) for r in records(whole) if "tokens" in r}
    counted = [*zip(totals, words, strict=True)]
    assert logged == {step: counted[step - 1] for step in (1, 3, 4, 6, 8, 9, 12)}
    resume(whole, run, 5)  # step 5 has no line in metrics.jsonl
    assert finish(start_ranks([*train_command(data, run, **flags), *again], 1)) == [0]
    assert saved(run) == saved(whole)
    assert logged == {r["step"]: (r["tokens"], r["words"]) for r in records(run) if "tokens" in r}

    # Revisions by words: the step that reached a number has its name, two if it reached two.
    command = ("export", "--checkpoint", run, "--output", tmp_path / "hf")
    done = run_command(*command, "--revision-per-checkpoint")
    assert done.code == 0 and "chck_1000M: not reached; it is left out" in done.err, done.err
    step_of = {chck(number): step for number, step in zip(of_words, (8, 8, None, 4), strict=True)}
    del step_of[chck(10**9)]
    step_of |= {f"step-{step:08d}": step for step in (1, 5, 10, STEPS)}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == step_of.keys()
    for name, step in step_of.items():
        folder = run / "checkpoints" / f"step-{step:08d}"
        alone = ("--checkpoint", folder, "--output", tmp_path / "alone" / name)
        assert run_command("export", *alone).code == 0
        assert read_weights(tmp_path / "hf" / name) == read_weights(tmp_path / "alone" / name)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "hf").rglob("*")}
    done = run_command(*command, "--revision-per-checkpoint")
    assert done.code == 2 and "name another folder" in done.err.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "hf").rglob("*")} == before


def chck(number: int) -> str:
    return f"chck_{number / 10**6}M"


def read_weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_older_shards_have_no_words_to_save_at(data, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(data, older)
    index = json.loads((older / "index.json").read_text())
    del index["counts"]["words"]
    (older / "index.json").write_text(json.dumps(index))
    argv = train_command(older, tmp_path / "run", save_at_words="1M")[2:]
    with pytest.raises(UserError, match="--save-at-words: --data .*older was built before words"):
        read_config(argv, world_size=1)
    read_config(train_command(older, tmp_path / "run", save_at_tokens="1M")[2:], world_size=1)
    assert not (tmp_path / "run").exists()
