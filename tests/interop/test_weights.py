"""Every folder with weights: out to Hugging Face and back, and each way for one to be wrong."""

import json
import logging
import pickle
import socket
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from albert_ds.checkpoint.folder import FILES, TrainState, write_checkpoint
from albert_ds.data.vocab import Normalisation, train_vocab
from albert_ds.errors import DamagedData, UserError
from albert_ds.interop.export import export_hf, import_hf
from albert_ds.interop.weights import read_initial_weights, read_weights
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=300,
    embedding_size=16,
    hidden_size=32,
    num_layers=4,
    num_heads=2,
    ffn_size=48,
    max_position_embeddings=64,
    dropout=0.1,
)
SENTENCES = [
    'The "value" of an object (its state) may change.',
    "Caf\u00e9 prices: \u00a33.50 \u2013 or \u20ac4, in 2,024.",
    "It is [MASK] of the [MASK].",
    "",
]


@pytest.fixture(scope="module")
def vocab(text_file):
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    return train_vocab(lines, Normalisation(), vocab_size=CONFIG.vocab_size)


@pytest.fixture
def make_run(tmp_path, vocab):
    """A function config -> (a run as training leaves it, its model)."""

    def make(config):
        run, model = tmp_path / "run", AlbertForPretraining(config, seed=3).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        run.mkdir()
        weights = model.state_dict()
        zeros = {name: torch.zeros_like(x) for name, x in weights.items()}
        state = TrainState(step=40, samples=40, updates=40, loss_scale=None)
        tensors = dict(zip(FILES, (weights, zeros, zeros), strict=True))
        assert write_checkpoint(run, tensors, state, keep_last=1, keep_every=None) is None
        (run / "config.json").write_text(json.dumps({"steps": 40, "model": asdict(config)}))
        vocab.write(run)
        return run, model

    return make


@pytest.fixture
def exported(make_run, tmp_path):
    """A run exported; what the tests of wrong folders spoil."""
    run, _ = make_run(CONFIG)
    export_hf(run, tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def encode_ours(model, vocab, sentence):
    """Our states [N, H] and pooled [1, H] of [CLS] sentence [SEP], with the sentence as given."""
    parts = vocab.encode(sentence.split("[MASK]"))
    ids = [2] + [piece for part in parts for piece in (*part, 4)][:-1] + [3]
    end = torch.tensor([0, len(ids)], dtype=torch.int32)
    ids = torch.tensor(ids)
    return ids, model.albert(ids, ids * 0, torch.arange(len(ids)), end, len(ids))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sharing": "none"},
        {"sharing": "groups:2"},
        {"sharing": "attention"},
        {"sharing": "ffn"},
        {"embedding_size": 32, "sharing": "none"},
        {"pair_head": False},
    ],
    ids=str,
)
def test_hugging_face_computes_the_same_and_gives_it_back(
    make_run, vocab, tmp_path, offline, changes
):
    from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

    close = {"rtol": 1e-5, "atol": 1e-5}
    config = replace(CONFIG, **changes)
    run, model = make_run(config)
    hf, checkpoint = tmp_path / "hf", tmp_path / "checkpoint"
    export_hf(run, hf)

    tokenizer = AutoTokenizer.from_pretrained(hf)
    masked = AutoModelForMaskedLM.from_pretrained(hf).eval()
    pretraining = AutoModelForPreTraining.from_pretrained(hf).eval()
    for sentence in SENTENCES:
        ids, ours = encode_ours(model, vocab, sentence)
        inputs = tokenizer(sentence, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == ids.tolist()
        word = model.albert.embeddings.word.weight
        logits = model.mlm_head.logits(ours["last_hidden_state"], word)
        for theirs in (masked(**inputs).logits, pretraining(**inputs).prediction_logits):
            torch.testing.assert_close(theirs[0], logits, **close)
        if config.pair_head:
            pairs, pooled = model.pair_head(ours["pooled"]), AutoModel.from_pretrained(hf)(**inputs)
            torch.testing.assert_close(pretraining(**inputs).sop_logits, pairs, **close)
            torch.testing.assert_close(pooled.pooler_output, ours["pooled"], **close)

    import_hf(hf, checkpoint)
    assert (checkpoint / "spiece.model").read_bytes() == (run / "spiece.model").read_bytes()
    found, state = read_weights(checkpoint)
    assert found == config
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)


def test_the_exported_tokenizer_tells_segments_apart(exported):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    pair = tokenizer("one", "two")
    second = pair["input_ids"].index(3) + 1
    assert pair["token_type_ids"] == [int(i >= second) for i in range(len(pair["input_ids"]))]
    assert tokenizer.model_max_length == CONFIG.max_position_embeddings


def test_the_card_says_what_was_written_differently(make_run, tmp_path):
    run, model = make_run(replace(CONFIG, sharing="attention", embedding_size=32, pair_head=False))
    export_hf(run, tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"{sum(p.numel() for p in model.parameters()):,}" in card
    for words in ("run/step-00000040", "repeated", "identity", "random", "AutoModelForMaskedLM"):
        assert words in card


def test_a_run_is_read_at_its_newest_checkpoint_or_at_any(make_run):
    run, model = make_run(CONFIG)
    older = run / "checkpoints" / "step-00000020"
    older.mkdir()
    save_file({n: 2 * x for n, x in model.state_dict().items()}, older / "weights.safetensors")
    for folder, factor in ((run, 1), (older, 2)):
        config, state = read_weights(folder)
        assert config == CONFIG
        torch.testing.assert_close(state, {n: factor * x for n, x in model.state_dict().items()})


def test_older_files_of_hugging_face_are_read(exported):
    """Half precision, a pickled state dict, buffers and tied copies in it."""
    expected = load_file(exported / "model.safetensors")
    state = {name: tensor.bfloat16() for name, tensor in expected.items()}
    state["albert.embeddings.position_ids"] = torch.arange(64)[None]
    state["predictions.decoder.weight"] = state["albert.embeddings.word_embeddings.weight"]
    state["predictions.decoder.bias"] = state["predictions.bias"]
    (exported / "model.safetensors").unlink()
    torch.save(state, exported / "pytorch_model.bin")
    config, found = read_weights(exported)
    assert config == CONFIG
    word = expected["albert.embeddings.word_embeddings.weight"].bfloat16().float()
    assert torch.equal(found["albert.embeddings.word.weight"], word)


def test_a_released_file_gets_a_sentence_head_of_zeros_and_says_so(exported, caplog):
    spoil(exported, lambda state: [state.pop(name) for name in list(state) if "sop" in name])
    with caplog.at_level(logging.WARNING):
        config, state = read_weights(exported)
    assert config.pair_head and not state["pair_head.weight"].any()
    assert "no sentence head" in caplog.text


def spoil(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def spoil_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SPOILERS = {
    "a tensor too few": (
        lambda hf: spoil(hf, lambda s: s.pop("predictions.bias")),
        "predictions.bias is missing",
    ),
    "a tensor too many": (
        lambda hf: spoil(hf, lambda s: s.update(extra=torch.zeros(1))),
        "extra belongs to another model",
    ),
    "another shape": (
        lambda hf: spoil_config(hf, vocab_size=301),
        r"word_embeddings.weight is \(300, 16\): config.json makes it \(301, 16\)",
    ),
    "an untied decoder": (
        lambda hf: spoil(hf, lambda s: s.update({"predictions.decoder.bias": torch.ones(300)})),
        "predictions.decoder.bias differs from predictions.bias",
    ),
    "a map where there is none": (
        lambda hf: spoil_config(hf, embedding_size=32),
        "embedding_hidden_mapping_in must be an identity",
    ),
    "erf": (lambda hf: spoil_config(hf, hidden_act="gelu"), "hidden_act 'gelu': must be gelu_new"),
    "BERT": (lambda hf: spoil_config(hf, model_type="bert"), "model_type 'bert': must be albert"),
    "inner groups": (
        lambda hf: spoil_config(hf, inner_group_num=2),
        "inner_group_num 2: must be 1",
    ),
    "two dropouts": (
        lambda hf: spoil_config(hf, attention_probs_dropout_prob=0.2),
        "attention_probs_dropout_prob 0.2: must be 0.1",
    ),
    "uneven groups": (lambda hf: spoil_config(hf, num_hidden_groups=3), "3 does not divide"),
    "no number": (lambda hf: spoil_config(hf, hidden_size="32"), "hidden_size '32': must be a num"),
    "no JSON": (lambda hf: (hf / "config.json").write_text("{"), "config.json: not JSON"),
    "a list": (lambda hf: (hf / "config.json").write_text("[]"), "must be a JSON object"),
    "cut off": (
        lambda hf: (hf / "model.safetensors").write_bytes(b"\x10" + bytes(20)),
        "not a file of tensors",
    ),
    "no weights": (lambda hf: (hf / "model.safetensors").unlink(), "neither a run"),
    "no vocabulary": (
        lambda hf: [(hf / name).unlink() for name in ("spiece.model", "tokenizer.json")],
        "spiece.model: no such file",
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_wrong_folder_is_refused_in_one_line(exported, tmp_path, spoiler):
    break_it, words = SPOILERS[spoiler]
    break_it(exported)
    output = tmp_path / "checkpoint"
    with pytest.raises(UserError, match=words) as caught:
        import_hf(exported, output)
    assert "\n" not in str(caught.value) and str(exported) in str(caught.value)
    assert list(tmp_path.glob("*checkpoint*")) == []


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()


@pytest.mark.parametrize("content", [{"step": 1}, [torch.zeros(1)]], ids=str)
def test_a_pickle_of_anything_but_tensors_is_refused(exported, content):
    (exported / "model.safetensors").unlink()
    torch.save(content, exported / "pytorch_model.bin")
    with pytest.raises(UserError, match="not a file of tensors: must be a state dict"):
        read_weights(exported)


def test_a_pickle_is_never_run(exported, tmp_path):
    (exported / "model.safetensors").unlink()
    payload = {"predictions.bias": Payload(tmp_path / "executed")}
    torch.save(payload, exported / "pytorch_model.bin")
    with pytest.raises(UserError, match="not a file of tensors"):
        read_weights(exported)
    (exported / "pytorch_model.bin").write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(UserError, match="not a file of tensors"):
        read_weights(exported)
    assert not (tmp_path / "executed").exists()


def test_a_damaged_checkpoint_is_not_read(make_run):
    run, _ = make_run(CONFIG)
    path = run / "checkpoints" / "step-00000040" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedData, match="weights.safetensors is damaged"):
        read_weights(run)


def test_an_export_never_lands_on_a_run(make_run, tmp_path):
    run, _ = make_run(CONFIG)
    before = (run / "config.json").read_bytes()
    with pytest.raises(UserError, match="is the input"):
        export_hf(run, run)
    assert (run / "config.json").read_bytes() == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: exists and is not a folder"):
        export_hf(run, tmp_path / "file")


def test_a_vocabulary_of_another_size_is_refused(make_run, tmp_path):
    run, _ = make_run(replace(CONFIG, vocab_size=290))
    with pytest.raises(UserError, match="vocabulary has 300 pieces, the model's vocab_size is 290"):
        export_hf(run, tmp_path / "hf")


def test_a_new_run_starts_from_weights_of_its_own_shape(make_run):
    run, model = make_run(CONFIG)
    expected = model.state_dict()
    same = replace(CONFIG, dropout=0.0, sharing="groups:1")
    torch.testing.assert_close(read_initial_weights(run, same), dict(expected))
    headless = read_initial_weights(run, replace(CONFIG, pair_head=False))
    heads = {n for n in expected if n.startswith(("albert.pooler", "pair_head"))}
    assert headless.keys() == expected.keys() - heads
    for changes, words in (
        ({"num_heads": 4}, "its num_heads is 2, this run's is 4"),
        ({"embedding_size": 4}, "this run's is 4"),
    ):
        with pytest.raises(UserError, match=words):
            read_initial_weights(run, replace(CONFIG, **changes))


def test_a_headless_checkpoint_starts_no_run_with_pairs(make_run):
    run, _ = make_run(replace(CONFIG, pair_head=False))
    with pytest.raises(UserError, match="has no sentence head: --objective must be none"):
        read_initial_weights(run, CONFIG)
