"""A folder of a model is opened as what it is, with its own vocabulary, or refused in one line."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.commands.fill_mask import main as fill_mask
from albert_ds.settings import finetune
from albert_ds.settings.pretrain import read_config
from albert_ds.training.pretrain import write_run_files
from albert_ds.vocab.vocab import MODEL_NAME, TOKENIZER_NAME, read_vocab, train_vocab
from tests.conftest import train_command
from tests.finetuning import flags, write_checkpoint, write_cola
from tests.models import Bomb, folder_of, run_export, run_import


@pytest.fixture
def exported(vocab, tmp_path) -> Path:
    return run_export(write_checkpoint(tmp_path / "run", vocab), tmp_path / "hf")


def change_weights(change):
    def spoil(hf: Path) -> None:
        state = load_file(hf / "model.safetensors")
        change(state)
        save_file(state, hf / "model.safetensors")

    return spoil


def change_config(**changes):
    def spoil(hf: Path) -> None:
        path = hf / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def write_pickle(content):
    def spoil(hf: Path) -> None:
        (hf / "model.safetensors").unlink()
        torch.save(content, hf / "pytorch_model.bin")

    return spoil


def name_shards(name: str):
    def spoil(hf: Path) -> None:
        (hf / "model.safetensors").unlink()
        table = {"weight_map": {"predictions.bias": name}}
        (hf / "model.safetensors.index.json").write_text(json.dumps(table))

    return spoil


# What is wrong in any file of JSON: bad_input/json_cases.py.
WRONG = [
    (change_weights(lambda s: s.pop("predictions.bias")), "predictions.bias is missing"),
    (change_weights(lambda s: s.update(extra=torch.zeros(1))), "extra belongs to another model"),
    (change_config(vocab_size=301), r"is \(300, 16\): config.json makes it \(301, 16\)"),
    (
        change_weights(lambda s: s.update({"predictions.decoder.bias": torch.ones(300)})),
        "predictions.decoder.bias differs from predictions.bias",
    ),
    (
        change_weights(lambda s: s["predictions.bias"][-1:].fill_(float("nan"))),
        "predictions.bias is not finite",
    ),
    (change_config(embedding_size=32), r"is \(300, 16\): config.json makes it \(300, 32\)"),
    (change_config(hidden_act="gelu"), 'hidden_act "gelu": must be one of "gelu_new"'),
    (change_config(model_type="bert"), 'model_type "bert": must be "albert"'),
    (change_config(inner_group_num=2), "inner_group_num 2: must be 1"),
    (change_config(attention_probs_dropout_prob=0.2), "attention_probs_dropout_prob 0.2: must be"),
    (change_config(num_hidden_layers=4, num_hidden_groups=3), "3 does not divide"),
    (lambda hf: (hf / "model.safetensors").write_bytes(b"\x10" + bytes(20)), "not a file of tens"),
    (lambda hf: (hf / "model.safetensors").unlink(), "neither a run"),
    (
        lambda hf: [(hf / name).unlink() for name in (MODEL_NAME, TOKENIZER_NAME)],
        "spiece.model: no such file",
    ),
    (lambda hf: (hf / MODEL_NAME).rename(hf / "vocab.txt"), "its vocab.txt is of WordPiece"),
    (write_pickle({"step": 1}), "not a file of tensors: must be a state dict"),
    (write_pickle([torch.zeros(1)]), "not a file of tensors: must be a state dict"),
    *(
        (write_pickle({name: x}), "must be a state dict, of names and dense real tensors")
        for name, x in {
            5: torch.zeros(300),
            "predictions.bias": torch.zeros(300, dtype=torch.complex64),
            "sparse": torch.zeros(300).to_sparse(),
            "meta": torch.zeros(300, device="meta"),
        }.items()
    ),
    (write_pickle({"predictions.bias": Bomb(Path("executed"))}), "not a file of .* run code"),
    (
        lambda hf: (
            (hf / "model.safetensors")
            .rename(hf / "pytorch_model.bin")
            .write_bytes(pickle.dumps(Bomb(Path("executed")), protocol=2))
        ),
        "not a file of tensors: it would run code; use another$",
    ),
    (
        lambda hf: (
            (hf / "model.safetensors")
            .rename(hf / "pytorch_model.bin")
            .write_bytes(pickle.dumps({}, protocol=4))  # of which torch warns
        ),
        "not a file of tensors",
    ),
    *(
        (name_shards(name), "weight_map: .*: must be the name of a file")
        for name in ("", ".", "/", "a\0b")
    ),
]


def test_a_wrong_folder_is_refused_in_one_line_and_no_code_in_it_is_run(
    exported, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    whole = {path: path.read_bytes() for path in exported.iterdir()}
    for spoil, words in WRONG:
        spoil(exported)
        with pytest.raises(UserError, match=words) as caught:
            run_import(exported, tmp_path / "back")
        assert "\n" not in str(caught.value) and str(exported) in str(caught.value)
        assert not {"back", ".back.partial", "executed"} & {p.name for p in tmp_path.iterdir()}
        for name in ("pytorch_model.bin", "model.safetensors.index.json"):
            (exported / name).unlink(missing_ok=True)
        (exported / "vocab.txt").unlink(missing_ok=True)
        for path, content in whole.items():
            path.write_bytes(content)
    run_import(exported, tmp_path / "back")


def test_an_encoder_alone_is_imported_with_a_new_head(exported, tmp_path, caplog):
    """As AutoModel and sentence-transformers save it: without heads and their prefix."""
    state = load_file(exported / "model.safetensors")
    alone = {n.removeprefix("albert."): x for n, x in state.items() if n.startswith("albert.")}
    save_file(alone, exported / "model.safetensors")
    run_import(exported, tmp_path / "back")
    assert "no head for masked words (predictions): it starts from random weights" in caplog.text
    again = load_file(run_export(tmp_path / "back", tmp_path / "again") / "model.safetensors")
    assert {n: again[f"albert.{n}"].tolist() for n in alone} == {
        name: tensor.tolist() for name, tensor in alone.items()
    }
    assert again["predictions.dense.weight"].std() > 0


def test_tensors_in_any_order_of_memory_are_imported(exported, tmp_path):
    """torch's own files keep strides, and that two names have one storage."""
    state = load_file(exported / "model.safetensors")
    table = {}
    for name, tensor in state.items():
        table[name] = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
    same = [name for name, tensor in state.items() if tensor.shape == (32,)]
    table |= dict.fromkeys(same, torch.ones(1).expand(32))
    (exported / "model.safetensors").unlink()
    torch.save(table, exported / "pytorch_model.bin")
    run_import(exported, tmp_path / "back")
    back = ModelFolder(tmp_path / "back").build_model().state_dict()
    assert sum(x.numel() for x in back.values()) > 0
    word = "albert.embeddings.word_embeddings.weight"
    embedding = next(x for name, x in back.items() if x.shape == state[word].shape)
    assert torch.equal(embedding, state[word])


def test_a_folder_without_a_model_says_what_is_needed(tmp_path):
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}").mkdir()
    with pytest.raises(UserError, match="neither a run .*; name one of seed-0, seed-1 in it"):
        ModelFolder(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match='config.json: no "model" in it'):
        run_export(tmp_path / "run", tmp_path / "hf")


def test_a_command_stands_in_the_folder_or_beside_it(vocab, tmp_path, monkeypatch):
    run = write_checkpoint(tmp_path / "run", vocab)
    step = run / "checkpoints" / "step-00000001"
    for place, path in ((tmp_path, "run"), (run, "."), (step.parent, step.name), (step, ".")):
        monkeypatch.chdir(place)
        folder = ModelFolder(path)
        assert folder.name == "run/step-00000001" and folder.vocab.sha256 == vocab.sha256


@pytest.fixture
def run(data, tmp_path) -> Path:
    """A run on the shards `data` that records its vocabulary."""
    vocab = read_vocab(data / MODEL_NAME)
    return write_checkpoint(tmp_path / "source", vocab, vocab_size=vocab.size)


def record_vocab(run: Path) -> None:
    sha256 = read_vocab(run / MODEL_NAME).sha256
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(record | {"vocab_sha256": sha256}))


def init_from(data: Path, run: Path):
    shape = {"num_heads": 2, "ffn_size": 64, "max_position_embeddings": 64}
    argv = train_command(data, run.parent / "new", **shape, init_from=run)[2:]
    return read_config(argv, world_size=2)[0]


def uses(data: Path, run: Path, cola: Path) -> dict:
    """Commands that need the vocabulary of a run."""
    tuned = flags("glue/cola", cola, run, run.parent / "tuned")
    return {
        "--init-from": lambda: init_from(data, run),
        "export": lambda: run_export(run, run.parent / "hf"),
        "fill-mask": lambda: fill_mask(["--checkpoint", str(run), "a [MASK] b"]),
        "finetune": lambda: finetune.read_config(tuned, world_size=1)[0],
    }


def test_sizes_and_what_was_trained_are_those_of_init_from(data, run, tmp_path):
    """Without --model; the positions that the older weights have seen count as trained."""
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(record | {"stream": {"sequence_length": 56}}))
    words = ("--data", data, "--output", tmp_path / "new", "--steps", 2, "--batch-size", 4)
    words += ("--micro-batch-size", 2, "--deepspeed_config", "ds_configs/zero1_fp32.json")
    words += ("--sequence-length", 48)
    config, opened = read_config([*map(str, words), "--init-from", str(run)], world_size=2)
    assert config.model == ModelFolder(run).config
    write_run_files(config, opened)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["trained_length"] == 56
    with pytest.raises(UserError, match="--model: must be one of .*, if there is no --init-from"):
        read_config([*map(str, words)], world_size=2)
    above = [*map(str, words), "--init-from", str(run), "--output", str(run.parent)]
    with pytest.raises(UserError, match="holds the input"):
        read_config(above, world_size=2)
    # Once the new run has a checkpoint it goes on without the old one.
    run.rename(run.with_name("gone"))
    with pytest.raises(UserError, match=f"--init-from {run}: no such folder"):
        read_config([*map(str, words), "--init-from", str(run)], world_size=2)
    folder_of(tmp_path / "new", 1).mkdir(parents=True)
    again, opened = read_config([*map(str, words), "--init-from", str(run)], world_size=2)
    assert again == config
    write_run_files(again, opened)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["trained_length"] == 56


def test_weights_are_used_with_their_own_vocabulary_only(data, run, tmp_path, text_file):
    """With another one of the same size every id would stand for another piece."""
    record_vocab(run)
    cola = write_cola(tmp_path / "cola")
    for use in uses(data, run, cola).values():
        use()
    lines = text_file.read_text(encoding="utf-8").splitlines()[:2500]
    own = read_vocab(data / MODEL_NAME)
    other = train_vocab(lines, own.normalisation, vocab_size=own.size)
    assert other.size == own.size and other.pieces != own.pieces
    other.write(run)
    for name, use in uses(data, run, cola).items():
        with pytest.raises(UserError, match="belong to another vocabulary"):
            print(name, use())
    # Weights that record none: the pieces are compared with those of the data.
    record = json.loads((run / "config.json").read_text())
    del record["vocab_sha256"]
    (run / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"has the piece .* as id \d+, that of the data"):
        init_from(data, run)
    for name in (MODEL_NAME, TOKENIZER_NAME):
        (run / name).unlink(missing_ok=True)
    init_from(data, run)  # the weights alone do not say


def test_a_vocabulary_of_another_size_is_refused(data, vocab, tmp_path):
    run = write_checkpoint(tmp_path / "run", vocab)
    with pytest.raises(UserError, match="its model has 300 pieces, the data's vocabulary 800"):
        ModelFolder(run).check_vocab(read_vocab(data / MODEL_NAME), "run")
    write_checkpoint(tmp_path / "other", vocab, vocab_size=290)
    with pytest.raises(UserError, match="has 300 pieces, the model's vocab_size is 290"):
        run_export(tmp_path / "other", tmp_path / "hf")
