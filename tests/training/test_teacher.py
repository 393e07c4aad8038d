"""--teacher: the goals of another model's scores, from the command line to the weights.

The update in every layout: tests/test_exactness.py.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from albert_ds.model import config as sizes
from albert_ds.model.albert import AlbertForPretraining, MlmHead
from albert_ds.model.task_heads import AlbertForTask, HeadConfig
from albert_ds.model.teacher import TOP, find_goals, sum_divergences
from albert_ds.vocab.vocab import read_vocab
from tests.batches import IGNORED
from tests.command import Done, run_command, run_on_rank
from tests.conftest import train_command
from tests.distributed import run_ranks
from tests.finetuning import MODEL, write_checkpoint
from tests.models import folder_of, run_export, shake, write_run
from tests.reference import mean_divergence
from tests.runs import SMALL

STREAM = {"sequence_length": 64}
TIMES = ("second", "wait")


def train(data: Path, run: Path, **flags) -> Done:
    words = ["train", *train_command(data, run, **{"dropout": 0.1, "steps": 4, **flags})[2:]]
    return run_ranks(run_on_rank, 1, words)[0]


def read_weights(run: Path, step: int) -> bytes:
    return (folder_of(run, step) / "weights.safetensors").read_bytes()


def read_metrics(run: Path) -> list[dict]:
    """The records without what depends on time."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: x for k, x in r.items() if not any(t in k for t in TIMES)} for r in records]


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory) -> Path:
    """A run whose scores are far from even."""
    vocab = read_vocab(data / "spiece.model")
    folder = tmp_path_factory.mktemp("teacher")
    config = replace(MODEL, vocab_size=vocab.size, sharing="none", max_position_embeddings=64)
    model = shake(AlbertForPretraining(config))
    with torch.no_grad():
        model.mlm_head.bias *= 15
    return write_run(folder / "run", model, vocab, stream=STREAM)


@pytest.mark.parametrize("classes", [TOP - 1, 3 * TOP])
def test_the_divergence_is_that_of_the_probabilities(classes, monkeypatch):
    """Also in parts of few rows, of a padded batch, and where all others have next to nothing."""
    draw = torch.Generator().manual_seed(0)
    config = replace(SMALL, vocab_size=classes)
    head = MlmHead(config)
    rows = 7
    hidden = torch.randn(rows, SMALL.hidden_size, generator=draw)
    word = torch.randn(classes, SMALL.embedding_size, generator=draw)
    teacher_logits = torch.randn(rows, classes, generator=draw) * 4
    teacher_logits[0, :5] += 100  # the mass of all others rounds to nothing beside that of the top
    labels = torch.randint(classes, (rows,), generator=draw)
    labels[3] = IGNORED
    goals = find_goals(teacher_logits)
    kept = labels != IGNORED
    top = min(TOP, classes - 1)
    assert goals.top.shape == (rows, top)
    expected = mean_divergence(
        head.logits(hidden, word)[kept].double(), teacher_logits[kept].double(), top
    )
    for limit in (1 << 30, 1):
        monkeypatch.setattr(sizes, "MAX_SCORE_BYTES", limit)
        head.zero_grad()
        divergence = head(hidden, labels, word, False, goals)[-1]
        divergence.backward()
        total = float(expected.detach()) * int(kept.sum())
        assert divergence.item() == pytest.approx(total, rel=1e-6)
        logits = head.logits(hidden, word).detach().double()[kept].requires_grad_()
        (mean_divergence(logits, teacher_logits[kept].double(), top) * int(kept.sum())).backward()
        torch.testing.assert_close(
            head.bias.grad.double(), logits.grad.sum(0), atol=1e-6, rtol=1e-4
        )


def test_a_model_is_at_its_own_goals():
    scores = torch.randn(5, 100) * 3
    assert sum_divergences(scores, torch.zeros(5, dtype=int), find_goals(scores)) == 0


def test_the_student_comes_nearer_and_the_run_tells_of_its_teacher(data, teacher, tmp_path):
    run = tmp_path / "run"
    flags = dict(teacher_weight=2, steps=40, learning_rate=0.05, objective="none", eval_every=20)
    done = train(data, run, teacher=teacher, **flags)
    assert done.code == 0, done.err
    assert "  teacher     run/step-00000001, " in done.out and "parameters, weight 2\n" in done.out
    record = json.loads((run / "config.json").read_text())
    state = json.loads((folder_of(teacher, 1) / "state.json").read_text())
    assert record["teacher"] == str(teacher) and record["teacher_weight"] == 2
    assert record["teacher_crc32"] == state["crc32"]["weights.safetensors"]
    records = read_metrics(run)
    steps = [r for r in records if "loss" in r]
    for r in steps:
        assert r["loss"] == pytest.approx(r["mlm_loss"] + r["teacher_loss"])
    distances = [r["teacher_loss"] for r in steps]
    assert sum(distances[-5:]) < 0.5 * sum(distances[:5])
    # Evaluation goes without it, and so does what has no teacher.
    held = [r for r in records if "heldout_loss" in r]
    assert held and all(r["heldout_loss"] == r["heldout_mlm_loss"] for r in held)
    assert not any("teacher" in key for r in held for key in r)


def test_weight_0_is_no_teacher_bit_for_bit(data, teacher, tmp_path):
    """And its folder is not opened: there is none."""
    runs = {name: tmp_path / name for name in ("without", "zero", "one")}
    gone = {"teacher": tmp_path / "gone", "teacher_weight": 0}
    given = {"zero": gone, "one": {"teacher": teacher}}
    for name, run in runs.items():
        done = train(data, run, **given.get(name, {}))
        assert done.code == 0, done.err
        assert ("  teacher     none, as --teacher-weight is 0\n" in done.out) == (name == "zero")
    assert read_weights(runs["zero"], 4) == read_weights(runs["without"], 4)
    assert read_metrics(runs["zero"]) == read_metrics(runs["without"])
    assert read_weights(runs["one"], 4) != read_weights(runs["without"], 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stopped_run_goes_on_bit_for_bit_with_the_same_teacher_alone(
    precision, data, teacher, tmp_path
):
    """It may have moved, and be Hugging Face's form of the same weights in a new run."""
    own = tmp_path / "own"
    file = f"ds_configs/zero1_{precision}.json"
    shutil.copytree(teacher, own)
    whole, parts, of_theirs = (tmp_path / name for name in ("whole", "parts", "theirs"))
    given = dict(deepspeed_config=file, save_every=2, teacher_weight=0.5)
    assert train(data, whole, teacher=teacher, **given).code == 0
    assert train(data, parts, teacher=own, max_hours=9, **given).code == 0
    shutil.rmtree(folder_of(parts, 4))
    (parts / "checkpoints" / "latest").write_text("step-00000002\n")
    own.rename(tmp_path / "moved")
    gone = train(data, parts, teacher=own, **given)
    assert (gone.code, gone.err) == (2, f"albert-ds: {own}: no such folder\n")
    before = read_weights(parts, 2)
    vocab = read_vocab(data / "spiece.model")
    other = replace(MODEL, vocab_size=vocab.size, max_position_embeddings=64)
    write_run(own, AlbertForPretraining(other, seed=5), vocab)
    changed = train(data, parts, teacher=own, **given)
    assert changed.code == 2 and changed.err.count("\n") == 1
    assert "--teacher (CRC-32 of its weights) is " in changed.err
    assert read_weights(parts, 2) == before and not folder_of(parts, 4).exists()
    assert train(data, parts, teacher=tmp_path / "moved", **given).code == 0
    assert read_weights(parts, 4) == read_weights(whole, 4)
    hf = run_export(teacher, tmp_path / "hf")
    assert train(data, of_theirs, teacher=hf, **given).code == 0
    assert read_weights(of_theirs, 4) == read_weights(whole, 4)


def run_without_memory(rank: int, words: list) -> Done:
    psutil.virtual_memory = lambda: SimpleNamespace(available=0)
    return run_on_rank(rank, words)


def test_the_start_counts_the_teacher_into_the_memory(data, teacher, tmp_path):
    words = ["train", *train_command(data, tmp_path / "run", teacher=teacher)[2:]]
    for more, counted in (((), True), (("--teacher-weight", 0), False)):
        done = run_ranks(run_without_memory, 1, [*words, *more])[0]
        weights = load_file(folder_of(teacher, 1) / "weights.safetensors").values()
        phrase = f" parameters and the {sum(map(torch.numel, weights)):,} of --teacher need "
        assert done.code == 2 and "GB of this machine's memory, 0 are free" in done.err, done.err
        assert (phrase in done.err) == counted, done.err


def test_of_a_run_with_an_average_the_weights_teach(data, tmp_path):
    """Those of its last step; an export of the average teaches something else."""
    kept = tmp_path / "kept"
    assert train(data, kept, average=0.9, learning_rate=0.05).code == 0
    teachers = {
        "run": kept,
        "weights": run_export(kept, tmp_path / "weights"),
        "average": run_export(kept, tmp_path / "average", "--average"),
    }
    weights = {}
    for name, folder in teachers.items():
        run = tmp_path / f"by-{name}"
        assert train(data, run, teacher=folder, sequence_length=32).code == 0
        weights[name] = read_weights(run, 4)
    assert weights["run"] == weights["weights"] != weights["average"]


def strip_heads(hf: Path) -> None:
    """What AutoModel saves: the encoder alone."""
    from transformers import AlbertModel

    AlbertModel.from_pretrained(hf).save_pretrained(hf)


def swap_special_pieces(hf: Path) -> None:
    """[CLS] and [SEP] have each other's ids."""
    (hf / "spiece.model").unlink(missing_ok=True)
    path = hf / "tokenizer.json"
    record = json.loads(path.read_text())
    pieces = record["model"]["vocab"]
    pieces[2], pieces[3] = pieces[3], pieces[2]
    for token in record["added_tokens"]:
        token["id"] = {2: 3, 3: 2}.get(token["id"], token["id"])
    path.write_text(json.dumps(record))


def test_a_teacher_that_cannot_be_one_is_refused_in_one_line(data, teacher, vocab, tmp_path):
    own = read_vocab(data / "spiece.model")
    known = {"vocab_size": own.size, "max_position_embeddings": 64}
    names = ("small", "short", "bare", "tuned", "headless", "special")
    folders = {name: tmp_path / name for name in names}
    head = HeadConfig(kind="classification", num_labels=2, dropout=0.0)
    write_run(folders["tuned"], AlbertForTask(replace(MODEL, **known), head), own, head=head)
    write_checkpoint(folders["small"], vocab, stream=STREAM)
    write_checkpoint(folders["short"], own, **known, stream={"sequence_length": 32})
    write_checkpoint(folders["bare"], own, **known, stream=STREAM)
    for file in ("spiece.model", "tokenizer.json"):
        (folders["bare"] / file).unlink(missing_ok=True)
    for name, spoil in (("headless", strip_heads), ("special", swap_special_pieces)):
        spoil(run_export(teacher, folders[name]))
    said = {
        "small": "its model has 300 pieces, the data's vocabulary 800; they must be the same",
        "short": "has seen sequences of at most 32 tokens, those of this run have up to 64",
        "bare": "no vocabulary beside its weights",
        "tuned": "a fine-tuned model (classification); must be a pretrained one",
        "headless": "no head for masked words (predictions); must have one",
        "special": "its first pieces are ('<pad>', '<unk>', '[SEP]', '[CLS]', '[MASK]')",
        "nowhere": "no such folder",
    }
    for name, words in said.items():
        done = run_command(*as_words(data, tmp_path / "run", tmp_path / name))
        lines = done.err.splitlines()
        assert done.code == 2 and len(lines) == 1, (name, done.err)
        assert words in lines[0] and str(tmp_path / name) in lines[0], lines
    done = run_command(*as_words(data, tmp_path / "run", None), "--teacher-weight", 1)
    assert (done.code, done.err) == (2, "albert-ds: --teacher-weight: only with --teacher\n")
    done = run_command(*as_words(data, folders["short"] / "run", folders["short"]))
    assert done.code == 2
    assert not (tmp_path / "run").exists()


def as_words(data: Path, run: Path, teacher: Path | None) -> list:
    flags = {} if teacher is None else {"teacher": teacher}
    return ["train", *train_command(data, run, **flags)[2:]]
