"""Every language: no text is unknown or destroyed, and Hugging Face gives the same ids."""

import hashlib
import tarfile
import unicodedata
from itertools import product

import pytest

from albert_ds.base.errors import UserError
from albert_ds.vocab.tokenizer_json import NORMALISATIONS, read_tokenizer_json
from albert_ds.vocab.vocab import RELEASED, UNK, Normalisation, Vocab, read_vocab, train_vocab
from tests.data.corpus import SHARED, read_all

# Short sentences of our own: what must not become another word.
SENTENCES = {
    "ar": "\u0623\u0643\u0644 \u0627\u0644\u0648\u0644\u062f \u062a\u0641\u0651\u0627\u062d\u0629.",
    "bn": "\u09ac\u09be\u0982\u09b2\u09be \u09ad\u09be\u09b7\u09be",
    "de": "Das ist schon sch\u00f6n, \u00fcber Gr\u00f6\u00dfe.",
    "hi": "\u0939\u093f\u0928\u094d\u0926\u0940 \u092d\u093e\u0937\u093e",
    "ja": "\u30d1\u30b9\u3068\u30d0\u30b9\u3068\u30cf\u30b9\u3001\u304c\u304e\u3050",
    "km": "\u1797\u17b6\u179f\u17b6\u1781\u17d2\u1798\u17c2\u179a",
    "ko": "\ud55c\uad6d\uc5b4\ub294 \uc544\ub984\ub2f5\ub2e4.",
    "ru": "\u043c\u043e\u0439 \u0434\u043e\u043c, \u0451\u043b\u043a\u0430",
    "th": "\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48\u0e21\u0e35\u0e19\u0e49\u0e33",
    "vi": "Ti\u1ebfng Vi\u1ec7t c\u00f3 s\u00e1u thanh \u0111i\u1ec7u.",
    "fa": "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
}
CASED = Normalisation(lower_case=False)
VOCAB_SIZES = {"th": 2000, "vi": 1500}  # others: 2500


def read_language(code: str) -> list[str]:
    """The lines of the real text in a language; a test without it is skipped."""
    if code == "en":
        files = sorted((SHARED / "wiki_sample").glob("*/*"))[:1]
        lines = [line for document in read_all(files) for line in document.lines]
    else:
        path = SHARED / "languages.tar.xz"
        if not path.is_file():
            pytest.skip(f"no real text: {path} is absent")
        with tarfile.open(path, "r:xz") as tar:
            content = tar.extractfile(f"languages/{code}.txt")
            assert content is not None
            lines = list(filter(None, content.read().decode().split("\n")))
    if not lines:
        pytest.skip(f"no real text in {SHARED}")
    return lines


def load_in_hugging_face(vocab: Vocab, folder):
    transformers = pytest.importorskip("transformers")
    vocab.write(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def encode_elsewhere(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("code", SENTENCES)
def test_the_default_keeps_every_letter_and_mark(code):
    text = SENTENCES[code]
    normalise = Normalisation().build(b"")
    assert normalise(text) == unicodedata.normalize("NFC", text).lower()
    assert normalise(unicodedata.normalize("NFD", text)) == normalise(text)


@pytest.mark.parametrize(
    "text, normalised",
    [
        ("a\u00adb\u200bc\u2060d\ufeffe", "abcde"),  # soft hyphen, zero widths, byte order mark
        ("\u200eab\u200f \u202acd\u202c \u2066ef\u2069\u061c", "ab cd ef"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),  # a joiner is spelling
        ("\u0dc1\u0dca\u200d\u0dbb", "\u0dc1\u0dca\u200d\u0dbb"),
        ("a\u00a0b\u3000c\u2028d\u0085e\tf\u2581g", "a b c d e f g"),
        ("a\x00b\x1fc\x7f", "abc"),
        ("\uff21\uff11\uff76\uff9e", "a1\u30ac"),  # full and half width
        ("\u0e19\u0e49\u0e33 \u0e99\u0ecd\u0eb2", "\u0e19\u0e49\u0e33 \u0e99\u0eb3"),
    ],
)
def test_invisible_characters_widths_and_spaces(text, normalised):
    assert Normalisation().build(b"")(text) == normalised


def check_in_hugging_face(vocab: Vocab, texts: list[str], folder):
    """Ids and text are those of its tokenizer, also after it has saved itself, and back here."""
    expected = vocab.encode(texts)
    for name in ("ours", "theirs"):
        (folder / name).mkdir(parents=True)
    tokenizer = load_in_hugging_face(vocab, folder / "ours")
    assert encode_elsewhere(tokenizer, texts) == expected
    assert read_vocab(folder / "ours" / "spiece.model").encode(texts) == expected
    tokenizer.save_pretrained(folder / "theirs")
    assert not (folder / "theirs" / "spiece.model").exists()
    again = type(tokenizer).from_pretrained(folder / "theirs")
    assert encode_elsewhere(again, texts) == expected
    copy = read_tokenizer_json(folder / "theirs" / "tokenizer.json")
    assert copy.normalisation == vocab.normalisation
    assert copy.encode(texts) == expected and copy.byte_fallback == vocab.byte_fallback
    assert [copy.decode(ids) for ids in expected[:50]] == [vocab.decode(i) for i in expected[:50]]
    return tokenizer


@pytest.mark.parametrize(
    ("code", "trained"),
    [
        *product(("ar", "de", "en", "ja", "ko", "th", "vi", "zh"), (Normalisation(), RELEASED)),
        *product(("de", "en", "ja", "ko", "vi"), (CASED,)),
    ],
    ids=str,
)
def test_known_and_equal_in_hugging_face(code, trained, tmp_path):
    """Unknown tokens are at most 0.1 % of the text of training, of Hangul that NFKD takes apart as
    of all others; ids and text are those of Hugging Face under every normalisation."""
    lines = read_language(code)[:2500]
    vocab = train_vocab(lines, trained, vocab_size=VOCAB_SIZES.get(code, 2500))
    ids = vocab.encode(lines)
    tokens = sum(map(len, ids))
    unknown = sum(line.count(UNK) for line in ids)
    assert unknown <= 0.001 * tokens
    texts = lines[:: max(1, len(lines) // 500)]
    texts += [unicodedata.normalize("NFD", text) for text in texts[:200]]
    expected = vocab.encode(texts)
    assert expected[-200:] == expected[:200]  # composed or not is the same text
    for number, normalisation in enumerate(NORMALISATIONS):
        # A model of the default steps records them; as released any of its form may follow.
        if normalisation == trained or normalisation.form == "albert" == trained.form:
            variant = Vocab(vocab.model, normalisation)
            tokenizer = check_in_hugging_face(variant, texts, tmp_path / str(number))
            if normalisation == Normalisation():
                for text, line in zip(texts, expected, strict=True):  # what went in comes out
                    plain = " ".join(vocab.normalise(text).split())
                    assert UNK in line or tokenizer.decode(line) == plain


def test_rare_characters_are_unknown_and_byte_fallback_knows_them(tmp_path):
    """The exception: at a lower coverage, and in text that was not trained on, rare characters
    have no piece. With byte fallback each is written as its bytes, in Hugging Face as here."""
    common = [SENTENCES["ja"] + str(number) for number in range(200)]
    rare = "\u9f98\u9750 \U0002a6d6 \U0001f600 <0xE9> <0x41>\u9f98"
    plain = train_vocab(common, Normalisation(), vocab_size=40)
    assert UNK in plain.encode([rare])[0]
    vocab = train_vocab(common, Normalisation(), vocab_size=315, byte_fallback=True)
    assert vocab.pieces[13:269] == [f"<0x{byte:02X}>" for byte in range(256)]
    texts = [rare, *common[:20], rare * 3, "\u9f98", "a \u9f98b"]
    ids = vocab.encode(texts)
    assert not any(UNK in line for line in ids)
    assert vocab.decode(ids[0]) == vocab.normalise(rare)
    check_in_hugging_face(vocab, texts, tmp_path / "default")
    for name, normalisation in (("cased", CASED), ("released", RELEASED)):
        other = train_vocab(common, normalisation, vocab_size=312, byte_fallback=True)
        check_in_hugging_face(other, texts, tmp_path / name)
    assert plain.count_bytes()[UNK] == 1
    sizes = vocab.count_bytes()
    for text, line in zip(texts, ids, strict=True):  # a text begins with a word mark
        assert sum(sizes[i] for i in line) == len(f" {vocab.normalise(text)}".encode())


@pytest.mark.parametrize("keep_accents", [False, True])
def test_older_folders_are_read_as_they_were_written(vocab, tmp_path, keep_accents):
    """Without "normalization" the steps are AlbertTokenizer's, whatever the accents."""
    (tmp_path / "spiece.model").write_bytes(vocab.model)
    config = f'{{"do_lower_case": true, "keep_accents": {str(keep_accents).lower()}}}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    again = read_vocab(tmp_path / "spiece.model")
    assert again.normalisation == Normalisation(
        lower_case=True, keep_accents=keep_accents, form="albert"
    )
    assert again.normalise("Caf\u00e9 \uff21") == ("caf\u00e9 a" if keep_accents else "cafe a")


def test_the_released_setting_trains_the_vocabulary_that_it_always_did(vocab):
    """The bytes that the first version of this project trained on the same text."""
    assert vocab.sha256 == "39b9282cac6be6a87eecdb4cf3b9867e6d12a0d7dcf8516029320811a954158a"
    ids = vocab.encode(["(it's 1,000, or 0.0003 in 1999) \u2013 caf\u00e9 Bafado."])
    digest = hashlib.sha256(str(ids).encode()).hexdigest()
    assert digest[:16] == "0b04c199eb6d5a7a"


def test_the_two_files_of_a_vocabulary_belong_together(tmp_path):
    text = [f"{word} {number}" for word in ("caf\u00e9", "na\u00efve") for number in range(99)]
    train_vocab(text, Normalisation(), vocab_size=40).write(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for other in (
        "{}",
        config.read_text().replace('"do_lower_case": true', '"do_lower_case": false'),
    ):
        config.write_text(other)
        with pytest.raises(UserError, match="was trained under nfkc-lower: keep both files"):
            read_vocab(tmp_path / "spiece.model")
