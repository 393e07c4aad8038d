"""tokenizer.json as transformers saves it, and files of other tokenizers.

Ids: test_languages.py. Wrong JSON: bad_input/json_cases.py.
"""

import json
from pathlib import Path

import pytest

from albert_ds.base.errors import UserError
from albert_ds.vocab.tokenizer_json import read_tokenizer_json
from albert_ds.vocab.vocab import Vocab
from tests.models import small_vocab


def write_folder(vocab: Vocab, folder: Path) -> Path:
    """A tokenizer as an export leaves it."""
    folder.mkdir()
    vocab.write(folder)
    vocab.build_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def vocab(text_file):
    return small_vocab(text_file)


def test_what_is_written_is_what_transformers_saves(vocab, tmp_path):
    from transformers import AutoTokenizer

    folder = write_folder(vocab, tmp_path / "ours")
    alone = tmp_path / "alone"
    alone.mkdir()
    vocab.write(alone)
    AutoTokenizer.from_pretrained(alone).save_pretrained(tmp_path / "theirs")
    tokenizer, hf_tokenizer = (
        json.loads((path / "tokenizer.json").read_text()) for path in (folder, tmp_path / "theirs")
    )
    assert tokenizer == hf_tokenizer


def test_a_file_of_transformers_4_is_read(vocab, tmp_path):
    """It joins blanks in the normalizer and spells the first blank of a text otherwise."""
    path = write_folder(vocab, tmp_path / "old") / "tokenizer.json"
    content = json.loads(path.read_text())
    blanks = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    content["normalizer"]["normalizers"].append(blanks)
    marks = content["pre_tokenizer"]["pretokenizers"][1]
    del marks["prepend_scheme"]
    marks["add_prefix_space"] = True
    path.write_text(json.dumps(content))
    texts = ["The object  of a class.", "caf\u00e9"]
    assert read_tokenizer_json(path).encode(texts) == vocab.encode(texts)


SPOILERS = {
    "another model": (lambda c: c["model"].update(type="BPE"), "its model is BPE"),
    "another unknown": (lambda c: c["model"].update(unk_id=0), "unk_id 0"),
    "nothing": (lambda c: c.clear(), "tokenizer.json: "),
    "no pieces": (lambda c: c["model"].update(vocab=[["x"]]), "vocab.0 ..x..: must be a list"),
    "other pieces": (lambda c: c["model"]["vocab"].reverse(), "is no piece of the model"),
    "no normalizer": (lambda c: c.update(normalizer=None), "normalizer null: must be an object"),
    "a step too few": (
        lambda c: c["normalizer"]["normalizers"].pop(0),
        "its normalizer .* is none of an ALBERT",
    ),
    "another split": (
        lambda c: c["pre_tokenizer"]["pretokenizers"].pop(0),
        "splits text by .*, an ALBERT by white space",
    ),
    "a token too many": (
        lambda c: c["added_tokens"].append({"id": 300, "content": "<new>"}),
        "added token '<new>', id 300, is no piece",
    ),
    "no added tokens, other pieces": (
        lambda c: [c.update(added_tokens=[]), c["model"]["vocab"].insert(0, ["<s>", 0.0])],
        "its first pieces are",
    ),
}


def test_a_file_of_another_tokenizer_is_refused_in_one_line(vocab, tmp_path):
    path = write_folder(vocab, tmp_path / "wrong") / "tokenizer.json"
    whole = path.read_text()
    for change, words in SPOILERS.values():
        change(content := json.loads(whole))
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=words) as caught:
            read_tokenizer_json(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.write_text(whole)
    (path.parent / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    with pytest.raises(UserError, match="do_lower_case is False, but tokenizer.json"):
        read_tokenizer_json(path)
