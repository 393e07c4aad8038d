"""The ids are those of Hugging Face, for any text and every way to normalise."""

import json
import random
import subprocess
import sys
import unicodedata

import pytest
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from albert_ds.base.errors import MachineFailed, UserError
from albert_ds.vocab.vocab import (
    RELEASED,
    Normalisation,
    Vocab,
    make_portable,
    read_vocab,
    train_vocab,
)
from tests.data.corpus import ROOT, SHARED
from tests.data.test_languages import check_in_hugging_face

TEXTS = [
    "The quick (brown) fox: 1,234 times, in 1999, at 0.0003 % ... x-y - a\u2013b \u00a35 \u20ac7",
    "  double  spaces\tand\ttabs \n lines \r\n and\x0bmore\x0c ",
    "``quoted'' text, it's 'fine' \"so\" ''",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m \u0130stanbul \u1e9e \ufb01n \u017fo",
    "\u03a3\u039f\u03a6\u039f\u03a3 \u03c3\u03bf\u03c6\u03cc\u03c2",
    "\u4e2d\u6587\u5b57 \u65e5\u672c\u8a9e\u3067 \u30ab\u3099 \uff76\uff9e \ud55c\uad6d\uc5b4",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u05e9\u05c1",
    "control\x00\x01\x1f\x7f\x85chars\u200b\u200d\u00ad\u2028\u3000\ufeff\ufffd\u2581_",
    "\u1ebf e\u0302\u0301 e\u0323\u0302\u0301\u0308\u0330 a\u0336\u0336\u0336",
    "aaaa 0000000 111101 ==== .... -- ((())) a.b.c 1,2,3, 10,",
    "\U0001f600\U0001f468\u200d\U0001f469 \U00010330 \ue000",
    "[mask] <doc>",
    "",
    " ",
]


def test_layout_is_albert_s(vocab):
    first = '<pad> <unk> [CLS] [SEP] [MASK] ( ) " - . \u2013 \u00a3 \u20ac'
    assert vocab.pieces[:13] == first.split()
    assert len(vocab.pieces) == vocab.size == 240


@pytest.mark.parametrize(
    "form, keep_accents", [("nfkc", True), ("albert", True), ("albert", False)]
)
@pytest.mark.parametrize("lower_case", [True, False])
def test_same_ids_as_hugging_face(sentences, tmp_path, lower_case, form, keep_accents):
    flags = Normalisation(lower_case=lower_case, keep_accents=keep_accents, form=form)
    vocab = train_vocab(sentences, flags, vocab_size=240)
    check_in_hugging_face(vocab, [*TEXTS, *random_texts()], tmp_path)


def random_texts():
    """Short strings over small alphabets: ties between segmentations, odd Unicode."""
    draw = random.Random(1)
    everything = [chr(c) for c in range(0x20000) if not 0xD800 <= c < 0xE000]
    marks = [c for c in everything if unicodedata.category(c)[0] == "M"]
    spaces = [c for c in everything if unicodedata.category(c)[0] in "ZC"][:200]
    for alphabet in ("01", "0,.", "ab ", "a'`\"", everything, marks + ["a", "e"], spaces + ["a"]):
        for _ in range(120):
            yield "".join(draw.choices(alphabet, k=draw.randint(1, 12)))


def test_same_ids_with_a_vocabulary_from_elsewhere(tmp_path):
    path = SHARED / "spm" / "albert-layout-de.model"
    if not path.is_file():
        pytest.skip(f"no real vocabulary: {path} is absent")
    german = (
        "Gr\u00f6\u00dfe (\u00fcber 1,5 m), 3,50 \u20ac \u2013 \u201eja\u201c \u00dcbung-s-frage."
    )
    check_in_hugging_face(read_vocab(path), [*TEXTS, german], tmp_path)


def test_a_comma_is_taken_off_a_number(vocab, tmp_path):
    """As ALBERT's tokeniser does, which is left with dead pieces like "1," in its vocabulary."""
    proto = ModelProto.FromString(vocab.model)
    for piece, score in (("1,", -0.5), ("\u25811,", -0.5), ("00,", -0.5)):
        proto.pieces.add(piece=piece, score=score)
    extended = Vocab(make_portable(proto.SerializeToString(), ""), RELEASED)
    texts = ["11, 1,000, 100,000,000, and 1,"]
    ids = extended.encode(texts)
    assert max(ids[0]) < vocab.size  # none of the pieces added above
    assert ids == vocab.encode(texts)
    check_in_hugging_face(extended, texts, tmp_path)
    assert make_portable(extended.model, "") == extended.model


def test_a_bracket_does_not_start_a_word(vocab):
    """SentencePiece's segmentation, as released: no word mark after a user symbol."""
    pieces = [vocab.pieces[i] for i in vocab.encode(["ba (ba)-ba."])[0]]
    assert "".join(pieces) == "\u2581ba\u2581(ba)-ba."
    assert not {"\u2581(", "(b", "a)"} & set(pieces)


def test_text_cannot_spell_special_ids(vocab):
    assert not set(vocab.encode(["[CLS] a [SEP] [MASK] <pad>"])[0]) & {0, 2, 3, 4}


def test_training_is_deterministic(documents):
    """Also in another process, where hash tables have another order, and for text in any order."""
    text = [sentence for document in documents for sentence in document]
    again = [train_vocab(t, Normalisation(), vocab_size=200).model for t in (text, text[::-1])]
    assert again[0] == again[1]
    # More text than the sample holds, so that the sample is drawn, too.
    train = (
        "train_vocab(text, Normalisation(), vocab_size=150, sample_bytes=20_000, seed={}).sha256"
    )
    script = (
        "from tests.data.corpus import make_documents\n"
        "from albert_ds.vocab.vocab import Normalisation, train_vocab\n"
        "text = [sentence for document in make_documents(120) for sentence in document]\n"
        f"print({train.format(1)}, {train.format(2)})"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    here = [
        train_vocab(text, Normalisation(), vocab_size=150, sample_bytes=20_000, seed=seed).sha256
        for seed in (1, 2)
    ]
    assert done.stdout.split() == here and here[0] != here[1]


def test_long_text_is_not_left_out(documents):
    """A sentence beyond SentencePiece's own limit of 4192 bytes still counts."""
    vocab = train_vocab(
        [" ".join(["zizizi wowowo"] * 1000)] + documents[0] * 5, Normalisation(), vocab_size=60
    )
    assert {"z", "w"} & {piece[-1:] for piece in vocab.pieces} or "\u2581zizizi" in vocab.pieces


def test_text_with_sentencepiece_s_own_sign_is_not_left_out(documents):
    text = [sentence for document in documents for sentence in document]
    marked = [sentence.replace(" ", " \N{LOWER FIVE EIGHTHS BLOCK} ") for sentence in text]
    models = [train_vocab(t, Normalisation(), vocab_size=200).model for t in (text, marked)]
    assert models[0] == models[1]


def test_the_number_of_pieces_follows_the_text():
    text = ["just a few words here, and others there"] * 9
    vocab = train_vocab(text, Normalisation(), vocab_size=5000)
    assert 30 < vocab.size < 60
    asked = train_vocab(text, Normalisation(), vocab_size=vocab.size)
    assert asked.model == vocab.model  # as if that many had been asked for
    with pytest.raises(UserError, match=r"--vocab-size 20: this text has \d+ characters"):
        train_vocab(["abcdefghijklmnopqrstuvwxyz"] * 9, Normalisation(), vocab_size=20)
    with pytest.raises(UserError, match="--vocab-size 13: must be over the 13 fixed pieces"):
        train_vocab(["a"], Normalisation(), vocab_size=13)
    with pytest.raises(UserError, match="hold no text"):
        train_vocab([], Normalisation(), vocab_size=100)


def test_a_full_disk_ends_the_training_as_itself():
    def broken():
        yield "some text"
        raise MachineFailed("no copy in /tmp")

    with pytest.raises(MachineFailed, match="^no copy in /tmp$"):
        train_vocab(broken(), Normalisation(), vocab_size=100)


def test_not_a_vocabulary(vocab, tmp_path):
    twice = vocab.model.replace(b"\x01b", b"\x01d", 1)  # a piece that is there already
    (tmp_path / "spiece.model").write_bytes(twice)
    with pytest.raises(UserError, match="already defined"):
        read_vocab(tmp_path / "spiece.model")
    proto = ModelProto.FromString(vocab.model)
    proto.normalizer_spec.precompiled_charsmap = b"\0\4\0\0" + 2000 * b"\0"
    nfkc = {"normalization": "nfkc", "keep_accents": True, "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(nfkc))  # reads no map of the model
    proto.normalizer_spec.name = "nfkc-lower"
    (tmp_path / "spiece.model").write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match="precompiled_charsmap is invalid"):
        read_vocab(tmp_path / "spiece.model")


def test_a_folder_is_no_vocabulary(tmp_path):
    with pytest.raises(UserError, match="no such file; a vocabulary is a spiece.model that"):
        read_vocab(tmp_path)
