"""What is said to whom goes on with a model: its base, its languages, a tokenizer that differs."""

import json
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.checkpoint.origin import describe_start, find_base
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.vocab.vocab import read_vocab
from tests.command import run_command, run_python
from tests.finetuning import MODEL, write_cola
from tests.models import run_export, write_run

CONFIG = ("--deepspeed_config", "ds_configs/zero1_fp32.json")
RUN = ("--steps", 1, "--batch-size", 8, "--micro-batch-size", 8)


@pytest.fixture(scope="module")
def hf_folder(data, tmp_path_factory):
    """A folder of Hugging Face: French, and one piece of its tokenizer is its user's."""
    folder = tmp_path_factory.mktemp("theirs")
    vocab = read_vocab(data / "spiece.model")
    model = AlbertForPretraining(replace(MODEL, vocab_size=vocab.size))
    hf = run_export(write_run(folder / "run", model, vocab), folder / "albert-fr")
    (hf / "README.md").write_text("---\nlanguage:\n- fr\n- oc\nlicense: mit\n---\n# Theirs\n")
    tokenizer = AutoTokenizer.from_pretrained(hf)
    piece = next(p for p in vocab.pieces[5:] if p.isalpha() and len(p) > 2)
    tokenizer.add_special_tokens({"additional_special_tokens": [piece]})
    tokenizer.save_pretrained(hf)
    text = f"The {piece} of an object{piece}name."
    assert AutoTokenizer.from_pretrained(hf)(text).input_ids[1:-1] != vocab.encode([text])[0]
    return hf


def test_a_tokenizer_that_gives_other_ids_is_said_before_the_work(hf_folder, data, tmp_path):
    train = (
        "train",
        "--init-from",
        hf_folder,
        "--data",
        data,
        *RUN,
        *CONFIG,
        "--output",
        tmp_path / "run",
    )
    cola = ("--task", "glue/cola", "--data", write_cola(tmp_path / "CoLA"))
    tune = ("finetune", *cola, "--checkpoint", hf_folder, *RUN, "--output", tmp_path / "tuned")
    said = [
        *(run_python("-m", "albert_ds", *map(str, words)) for words in (train, tune)),
        run_command("import", "--input", hf_folder, "--output", tmp_path / "imported"),
    ]
    for line in (done.stderr if hasattr(done, "stderr") else done.err for done in said):
        assert line.count("its tokenizer finds 1 added tokens in a text") == 1, line
        assert line.partition("saved step")[0].count("gets other ids") == 1
    assert "albert-fr: a model of the language fr oc; the shards are of en" in said[0].stderr
    card = ModelCard.load(run_export(tmp_path / "run", tmp_path / "hf") / "README.md").data
    assert (card.language, card.to_dict()["base_model"]) == (["en"], "albert-fr")


def test_a_base_is_found_through_runs(hf_folder, data, tmp_path, vocab):
    model = AlbertForPretraining(MODEL)
    assert run_command("import", "--input", hf_folder, "--output", tmp_path / "imported").code == 0
    imported = ModelFolder(tmp_path / "imported")
    assert describe_start(imported, {"data": "de"})[0].endswith(
        "the language fr oc; the shards are of de"
    )
    runs = [tmp_path / f"run{n}" for n in range(3)]
    starts = (str(imported.path), f"{runs[0]}/checkpoints/step-00000001", str(runs[1]))
    for run, start in zip(runs, starts, strict=True):
        write_run(run, model, vocab, init_from=start, data=[str(data)])
        record = json.loads((run / "config.json").read_text())
        assert find_base(record) == "albert-fr"
        assert find_base({**record, "from_scratch": True}) is None
    assert describe_start(ModelFolder(runs[0]), {"data": "de"}) == [
        f"{runs[0]}: a model of the language en; the shards are of de"
    ]
    cached = tmp_path / "models--someone--albert-oc" / "snapshots" / "0123"
    cached.parent.mkdir(parents=True)
    hf_folder.rename(cached)
    assert find_base({"init_from": str(cached)}) == "someone/albert-oc"
    cached.rename(hf_folder)
    assert find_base({"init_from": "gone/albert-it"}) == "albert-it"
    assert find_base({"init_from": "gone/checkpoints/step-00000001"}) is None
    write_run(runs[0], model, vocab, init_from=str(runs[2]))  # round and round
    assert find_base({"init_from": str(runs[0])}) is None
    assert find_base({"init_from": None}) is None


def test_user_pieces_of_a_lone_model_are_said(hf_folder, tmp_path, data):
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    (hf_folder / "tokenizer.json").rename(tmp_path / "aside")
    proto = ModelProto.FromString((data / "spiece.model").read_bytes())
    proto.pieces[40].type = proto.pieces[40].USER_DEFINED
    (hf_folder / "spiece.model").write_bytes(proto.SerializeToString())
    (line,) = describe_start(ModelFolder(hf_folder), {})
    assert f"such as {proto.pieces[40].piece!r}" in line
    (tmp_path / "aside").rename(hf_folder / "tokenizer.json")
