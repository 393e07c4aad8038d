"""Fine-tuning on wrong input: one line, the right code, nothing half done."""

import json
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.settings.finetune import read_config
from albert_ds.settings.shared import as_json, write_config
from albert_ds.tasks.recipes import RECIPES, Lengths
from albert_ds.training.finetune import read_start
from albert_ds.vocab.vocab import Normalisation, train_vocab
from tests.command import ROOT, run_python
from tests.distributed import run_ranks
from tests.finetuning import (
    flags,
    tune_ranks,
    write_checkpoint,
    write_mnli,
    write_race,
    write_rte,
    write_squad,
)
from tests.models import run_export


def read(folder, name):
    return json.loads((folder / name).read_text())


REFUSED = {
    "another task": ({"task": "glue/ax"}, "argument --task: invalid choice"),
    "no data": ({"data": "none"}, "--data none: no such folder"),
    "no checkpoint": ({"checkpoint": "none"}, "none: no such folder"),
    "too long": ({"sequence_length": 65}, "--sequence-length 65: the model takes at most 64"),
    "too short": ({"sequence_length": 9}, "--sequence-length 9: the model takes at most 64"),
    "uneven": ({"micro_batch_size": 3}, "--batch-size 8 is no multiple of --micro-batch-size 3"),
    "no task model": ({"from_task": "mnli"}, "--from-task mnli: no such folder"),
    "two starts": ({"from_task": "x", "from_scratch": True}, "one of them, not with another"),
    "a place above": ({"output": ROOT, "from_task": ROOT / "docs"}, "holds the input"),
    "a file": ({"output": __file__}, "exists and is not a folder"),
    "heads": ({"tensor_parallel": 4}, "--tensor-parallel 4 does not divide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_with_the_command_is_one_line(checkpoint, cola, tmp_path, case):
    changes, words = REFUSED[case]
    known = {"task": "glue/cola", "data": cola, "checkpoint": checkpoint, "output": tmp_path / "o"}
    known |= {name: changes[name] for name in known if name in changes}
    rest = {name: value for name, value in changes.items() if name not in known}
    with pytest.raises(UserError) as caught:
        read_config(flags(*known.values(), **rest), world_size=1)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("task", "sequence_length", "expected"),
    [
        ("squad2", 64, Lengths(sequence=64, question=42, stride=42)),
        ("squad2", 192, Lengths(sequence=192, question=64, stride=128)),
        ("squad2", 384, RECIPES["squad2"].lengths),
        ("race", 192, Lengths(sequence=192, question=128, stride=128)),
        ("race", 512, RECIPES["race"].lengths),
    ],
)
def test_short_sequences_leave_a_third_for_the_passage(
    vocab, tmp_path, task, sequence_length, expected
):
    start = write_checkpoint(tmp_path / "pretrained", vocab, max_position_embeddings=512)
    data = (
        write_race(tmp_path / "task") if task == "race" else write_squad(tmp_path / "task", "v2.0")
    )
    argv = flags(task, data, start, tmp_path / "out", sequence_length=sequence_length)
    assert read_config(argv, world_size=1)[0].lengths == expected


def test_a_setting_inside_a_field_is_named_by_its_flag(checkpoint, cola, tmp_path):
    def resolve(**given):
        argv = flags("glue/cola", cola, checkpoint, tmp_path / "out", **given)
        return read_config(argv, world_size=1)[0]

    (tmp_path / "out").mkdir()
    record = as_json(resolve())
    (tmp_path / "out" / "config.json").write_text(json.dumps(record))
    resolve(max_hours=1, micro_batch_size=4, seeds=2, log_every=7)
    for name, value, before in (
        ("dropout", 0.3, 0.0),
        ("sequence_length", 32, 64),
        ("learning_rate", 0.5, 0.002),
        ("patience", 3, None),
        ("eval_every", 2, 1),
    ):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(UserError) as caught:
            resolve(**{name: value})
        words = f"{flag} is {value}, but {tmp_path / 'out'} was started with {before};"
        assert str(caught.value).startswith(words)


def test_a_runs_config_json_and_epochs(checkpoint, cola, tmp_path):
    """The same settings in another folder; --epochs are over the examples, rounded down."""
    config = read_config(flags("glue/cola", cola, checkpoint, tmp_path / "out"), world_size=1)[0]
    write_config(config)
    argv = ["--config", str(tmp_path / "out/config.json"), "--output", str(tmp_path / "next")]
    loaded = read_config(argv, world_size=1)[0]
    assert replace(loaded, output=config.output, command=config.command) == config
    examples = len((cola / "train.tsv").read_text().splitlines())
    longer = read_config([*argv, "--epochs", "3.5"], world_size=1)[0]
    assert longer.steps == int(3.5 * examples / config.batch_size) != config.steps


def test_a_set_that_changed_is_named(checkpoint, tmp_path):
    """Which one it is, and not the checksums of all."""
    data = write_rte(tmp_path / "RTE")
    argv = flags("glue/rte", data, checkpoint, tmp_path / "out")
    config = read_config(argv, world_size=1)[0]
    write_config(config)
    lines = (data / "dev.tsv").read_text().splitlines(keepends=True)
    (data / "dev.tsv").write_text("".join(lines[:-1]))
    with pytest.raises(UserError) as caught:
        read_config(argv, world_size=1)
    assert re.fullmatch(
        r"the dev set of --data \(sha256\) is \w{12}, but \S+/out was started with "
        f"{config.features['dev'][:12]}; use that, or another --output",
        str(caught.value),
    )


def test_a_task_model_of_another_kind_is_refused(checkpoint, cola, text_file, tmp_path):
    lines = text_file.read_text(encoding="utf-8").splitlines()[3000:6000]
    other = train_vocab(lines, Normalisation(), vocab_size=300)
    models = {
        "has another vocabulary than": write_checkpoint(tmp_path / "other", other),
        "its num_layers is 4, that of": write_checkpoint(tmp_path / "deep", other, num_layers=4),
    }
    for words, folder in models.items():
        argv = flags("glue/cola", cola, checkpoint, tmp_path / "out", from_task=folder)
        config, opened = read_config(argv, world_size=1)
        with pytest.raises(UserError, match=f"--from-task {folder}: {words} --checkpoint"):
            read_start(config, opened, SimpleNamespace(rank=0))


def test_a_task_model_may_be_what_transformers_saved(checkpoint, cola, tmp_path):
    """Of it there is only tokenizer.json, which is the same vocabulary in another file."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    hf = run_export(checkpoint, tmp_path / "hf")
    tuned = tmp_path / "tuned"
    AutoModelForSequenceClassification.from_pretrained(hf).save_pretrained(tuned)
    AutoTokenizer.from_pretrained(hf).save_pretrained(tuned)
    assert not (tuned / "spiece.model").exists()
    argv = flags("glue/cola", cola, checkpoint, tmp_path / "out", from_task=tuned)
    weights = read_start(*read_config(argv, world_size=1), SimpleNamespace(rank=0))
    torch.testing.assert_close(weights, ModelFolder(hf).read_encoder()[1], rtol=0, atol=0)


def tune_apart(argv: list[str]) -> subprocess.CompletedProcess:
    """finetune.py in a process of its own, with what it said."""
    return run_python("-W", "ignore", "albert_ds/finetune.py", *argv)


def test_data_that_is_wrong_is_refused_with_its_line(checkpoint, tmp_path):
    data = write_rte(tmp_path / "RTE")
    (data / "dev.tsv").write_text((data / "dev.tsv").read_text() + "12\ta\tb\n")
    argv = flags("glue/rte", data, checkpoint, tmp_path / "out")
    done = tune_apart(argv)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 3 and "dev.tsv, line 14: 3 fields, must be 4" in last, done.stderr
    assert "Traceback" not in done.stderr
    assert read(tmp_path / "out", "exit.json")["code"] == 3
    (data / "dev.tsv").unlink()
    assert run_ranks(tune_ranks, 1, argv) == [2]


@pytest.mark.parametrize("task", ["glue/rte", "squad1"])
def test_a_set_without_examples_is_refused(checkpoint, tmp_path, task):
    if task == "squad1":
        data = write_squad(tmp_path / "data", "v1.1")
        (data / "dev-v1.1.json").write_text('{"data": []}')
    else:
        data = write_rte(tmp_path / "data")
        (data / "dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n")
    done = tune_apart(flags(task, data, checkpoint, tmp_path / "out", sequence_length=32))
    words = f"albert-ds: --data {data}: the dev set holds no examples"
    assert done.returncode == 3 and done.stderr.splitlines()[-1] == words


def test_a_test_set_is_predicted_and_one_that_is_not_there_is_said(checkpoint, tmp_path):
    data = write_mnli(tmp_path / "MNLI")
    (data / "diagnostic.tsv").write_text("index\tsentence1\tsentence2\n0\tthe class\ta list\n")
    out = tmp_path / "out"
    said = tune_apart(flags("glue/mnli", data, checkpoint, out)).stderr
    header, row = (out / "AX.tsv").read_text().splitlines()
    labels = ("contradiction", "entailment", "neutral")
    assert header == "index\tprediction" and row in [f"0\t{label}" for label in labels]
    assert f"glue/mnli test_matched: not in {data}, so nothing is predicted for it" in said
    assert "test_diagnostic: not in" not in said
    assert "test_diagnostic: 1 examples (published: 1,104)" in said


def test_another_setting_does_not_continue_a_run(checkpoint, cola, tmp_path):
    argv = flags("glue/cola", cola, checkpoint, tmp_path / "out")
    assert run_ranks(tune_ranks, 1, argv) == [0]
    before = (tmp_path / "out" / "config.json").read_bytes()
    tokenised = {*(tmp_path / "out" / "features").iterdir()}
    assert run_ranks(tune_ranks, 1, [*argv, "--sequence-length", "32"]) == [2]
    assert {*(tmp_path / "out" / "features").iterdir()} == tokenised
    argv[argv.index("--learning-rate") + 1] = "0.5"
    assert run_ranks(tune_ranks, 1, argv) == [2]
    reason = read(tmp_path / "out", "exit.json")["reason"]
    assert "0.5" in reason and "was started with" in reason
    assert (tmp_path / "out" / "config.json").read_bytes() == before
