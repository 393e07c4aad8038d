"""Text from a segmenter: the ids are those of the plain text, and the words are the segmenter's."""

import json
import random
import re
import shutil
from itertools import pairwise

import numpy as np
import pytest

from albert_ds.data.shards import Shard, open_shards
from albert_ds.data.stream import MicroBatchReader
from albert_ds.data.stream_config import StreamConfig
from albert_ds.data.vocab import CLS, SEP, WORD_END, Normalisation, train_vocab
from albert_ds.data.words import build_word_starts, find_word_starts
from albert_ds.errors import UserError
from albert_ds.text.documents import TextConfig
from albert_ds.text.segmented import (
    encode_segmented,
    find_starts,
    remove_spaces,
    split_into_words,
)
from tests.command import run_command
from tests.data.corpus import build
from tests.data.test_languages import encode_elsewhere, load_in_hugging_face, read_language

# Segmented by hand.
TEXT = [
    "系统 管理员 可以 使用 命令 删除 文件 。 用户 不 能 打开 这个 数据库 。",
    "今天 的 天气 很 好 ， 我们 去 公园 散步 。 他 喜欢 看 书 。",
    "请 先 安装 Linux 内核 ２ ． ６ ， 然后 重新 启动 计算机 。",
    "“ 文件 ” 菜单 里 有 “ Open File ” 命令 。 数据 库 服务器 已经 关闭 。",
]
PLAIN = [
    "系统管理员可以使用命令删除文件。用户不能打开这个数据库。",
    "今天的天气很好，我们去公园散步。他喜欢看书。",
    "请先安装Linux内核２．６，然后重新启动计算机。",
    "“文件”菜单里有“Open File”命令。数据库服务器已经关闭。",
]
CHINESE = TextConfig(language="zh", segmented=True)
# A segmenter of one rule for real text: these particles are words, and so is what they separate.
PARTICLE = re.compile("([的在了和是有为不或与到从，。：、])")


@pytest.fixture(scope="module", params=[False, True], ids=["pieces", "bytes"])
def vocab(request):
    text = [s for line in TEXT for s in split_into_words(CHINESE.split([line]), [line])] * 20
    return train_vocab(
        text, Normalisation(), vocab_size=372 if request.param else 99, segmented=True,
        byte_fallback=request.param, character_coverage=0.98 if request.param else 1.0,
    )  # fmt: skip


def segment(line: str) -> str:
    return " ".join(PARTICLE.sub(r" \1 ", line).split())


def units_of(ids, starts, vocab):
    """The text of every unit that masking takes as one."""
    begins = [*np.flatnonzero(starts), len(ids)]
    return [
        vocab.decode(list(map(int, ids[i:j]))) for i, j in zip(begins, begins[1:], strict=False)
    ]


def test_the_spaces_of_a_segmenter_leave_the_plain_text():
    assert [remove_spaces(line) for line in TEXT] == PLAIN
    assert CHINESE.split(TEXT[:1]) == PLAIN[0].replace("。", "。\n").split()
    assert remove_spaces("ผู้ ใช้ เปิด ไฟล์ ที่ นี่") == "ผู้ใช้เปิดไฟล์ที่นี่"
    plain = TextConfig(language="zh")
    assert plain.plain(TEXT) == TEXT


def test_ids_are_those_of_the_plain_text_here_and_in_hugging_face(vocab, tmp_path):
    sentences = CHINESE.split(TEXT)
    marked, joined = encode_segmented(sentences, find_starts(TEXT), vocab)
    ids = [[token % vocab.size for token in sentence] for sentence in marked]
    assert ids == vocab.encode(sentences)
    assert ids == encode_elsewhere(load_in_hugging_face(vocab, tmp_path), sentences)
    assert not joined


def test_the_words_are_those_of_the_segmenter(vocab):
    for line in TEXT:
        sentences = CHINESE.split([line])
        marked, _ = encode_segmented(sentences, find_starts([line]), vocab)
        units = []
        for sentence in marked:
            ids = np.array(sentence)
            units += units_of(ids % vocab.size, ids >= vocab.size, vocab)
        assert [unit.strip() for unit in units] == vocab.normalise(line).split()


def test_no_piece_is_trained_across_two_words(vocab):
    words = {word for line in TEXT for word in vocab.normalise(line).split()}
    pieces = [p.strip("\u2581") for p in vocab.pieces[13:] if not p.startswith("<0x")]
    allowed = [*words, "<>x0123456789ABCDEFabcdef"]
    assert all(any(piece in word for word in allowed) for piece in pieces)
    assert not any(WORD_END in piece for piece in vocab.pieces)


def test_a_piece_across_two_words_joins_them():
    vocab = train_vocab(
        ["数据库打开", "数据库关闭", "数据库文件", "打开数据库", "关闭数据库", "文件打开"] * 50,
        Normalisation(),
        vocab_size=26,
    )
    assert "数据库" in vocab.pieces
    marked, joined = encode_segmented(["数据库数据"], find_starts(["数据 库 数据"]), vocab)
    ids = np.array(marked[0])
    units = units_of(ids % vocab.size, ids >= vocab.size, vocab)
    assert (units, joined) == (["数据库", "数据"], 1)


def test_a_word_that_normalisation_joins_to_the_one_before():
    vocab = train_vocab(["か が き ぎ"] * 50, Normalisation(), vocab_size=19)
    sentences = ["か\u3099き"]  # the mark of voicing stands in a word of its own
    marked, _ = encode_segmented(sentences, find_starts(["か \u3099 き"]), vocab)
    assert [token % vocab.size for token in marked[0]] == vocab.encode(sentences)[0]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """(vocabulary, plain shards, segmented shards, words) of real Chinese text."""
    lines = read_language("zh")[:3000]
    segmented = [segment(line) for line in lines]
    plain = [remove_spaces(line) for line in segmented]
    folder = tmp_path_factory.mktemp("segmented")
    text = [s for line in segmented for s in split_into_words(CHINESE.split([line]), [line])]
    vocab = train_vocab(text, Normalisation(), vocab_size=3000, segmented=True)
    for name, content, flag in (("plain", plain, False), ("segmented", segmented, True)):
        paragraphs = ["\n".join(content[i : i + 30]) for i in range(0, len(content), 30)]
        path = folder / f"{name}.txt"
        path.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
        build(
            folder / name,
            vocab,
            [path],
            language="zh",
            segmented=flag,
            samples_per_shard=100,
            sequence_length=256,
        )
    words = {word for line in segmented for word in vocab.normalise(line).split()}
    return (
        vocab,
        open_shards(folder / "plain", "train"),
        open_shards(folder / "segmented", "train"),
        words,
    )


def read_sequences(source):
    shards = [Shard(source, number) for number in range(len(source.shards))]
    return [shard[i] for shard in shards for i in range(len(shard))]


def test_segmented_shards_are_the_plain_ones_with_marks(real):
    vocab, plain, segmented, _ = real
    assert segmented.segmented and not plain.segmented
    pairs = list(zip(read_sequences(plain), read_sequences(segmented), strict=True))
    assert len(pairs) > 200
    for one, other in pairs:
        assert one.document == other.document
        np.testing.assert_array_equal(one.ends, other.ends)
        np.testing.assert_array_equal(one.ids, other.ids % vocab.size)
        assert (other.ids[[0, *other.ends[:-1]]] >= vocab.size).all()


@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
def test_masks_of_segmented_shards_cover_whole_words(real, objective):
    vocab, _, segmented, words = real
    reader = MicroBatchReader(
        [segmented], None, StreamConfig(sequence_length=128, short_fraction=0, objective=objective)
    )
    units = runs = 0
    for position in range(300):
        sample = reader.draw(position)
        assert sample.ids.max() < vocab.size
        ids = sample.ids.copy()
        ids[sample.positions] = sample.labels
        starts = sample.starts | np.isin(ids, (CLS, SEP))
        starts[np.flatnonzero(np.isin(ids, (CLS, SEP)))[:-1] + 1] = True
        masked = np.zeros(len(ids) + 1, bool)
        masked[sample.positions] = True
        bounds = [*np.flatnonzero(starts), len(ids)]
        for begin, end in zip(bounds, bounds[1:], strict=False):
            assert masked[begin:end].all() or not masked[begin:end].any()
            if masked[begin]:
                units += 1
                unit = vocab.decode(ids[begin:end].tolist()).strip()
                runs += unit in words
    assert units > 1000
    assert runs > 0.95 * units  # the others are joined words, or hold an unknown character


def test_a_language_with_spaces_or_sentences_that_end_at_spaces_is_refused(tmp_path):
    for language in ("en", "ko", "ar", "vi"):
        with pytest.raises(UserError, match=f"--segmented with --language {language}: its own sp"):
            TextConfig(language=language, segmented=True)
    TextConfig(language="my", segmented=True)
    words = ("--language", "th", "--segmented", "--vocab-size", 22, "--output", tmp_path / "vocab")
    (tmp_path / "text").write_text("ผู้ ใช้ ที่\n" * 50)
    done = run_command("vocab", "--input", tmp_path / "text", *words)
    assert done.code == 2 and "pass --lines sentence" in done.err
    done = run_command("vocab", "--input", tmp_path / "text", *words, "--lines", "sentence")
    assert done.code == 0 and "words: marked by spaces, which are taken out" in done.out
    text = (tmp_path / "text").read_text().replace(" ", "\u200b")
    (tmp_path / "text").write_text(text)
    shutil.rmtree(tmp_path / "vocab")
    done = run_command("vocab", "--input", tmp_path / "text", *words)
    assert done.code == 0 and "words: marked by zero-width spaces, which" in done.out


# Words of Khmer and Burmese, each with marks of its script.
WRITTEN = {
    "km": "ភាសា ខ្មែរ កម្ពុជា ជា និង មាន",
    "my": "မြန်မာ စာ ဘာသာ သည် ကို",
}
FULL_STOP = {"km": "។", "my": "။"}


def write_words(language: str) -> tuple[str, set[str]]:
    """Documents whose words end at zero-width spaces and whose phrases end at spaces; the words.

    The last sentence of each has no mark and is long.
    """
    draw = random.Random(0)
    words = WRITTEN[language].split()
    lines = []
    for _ in range(60):
        phrases = ["\u200b".join(draw.choices(words, k=draw.randint(2, 6))) for _ in range(9)]
        ends = (f"{a} {b}{FULL_STOP[language]}" for a, b in pairwise(phrases))
        lines.append("".join(ends) + "".join(draw.choices(words, k=20)) + FULL_STOP[language])
    return "\n\n".join(lines) + "\n", {*words, *(word + FULL_STOP[language] for word in words)}


@pytest.mark.parametrize("language", WRITTEN)
def test_words_that_writers_mark_with_zero_width_spaces_are_words(language, tmp_path):
    """The shards are those of the text without them, with marks at the words."""
    text, words = write_words(language)
    (tmp_path / "written").write_text(text)
    (tmp_path / "plain").write_text(text.replace("\u200b", ""))
    flags = ("--language", language)
    vocab = ("--output", tmp_path / "vocab", "--vocab-size", 30)
    done = run_command(
        "vocab", "--input", tmp_path / "written", "--segmented", *flags, *vocab, "--max-unknown", 1
    )
    assert done.code == 0, done.err
    assert "normalisation: 0.00% of the characters changed" in done.out
    flags += ("--vocab", tmp_path / "vocab" / "spiece.model", "--max-unknown", 1)
    flags += ("--sequence-length", 512)
    for name, more in (("written", ["--segmented"]), ("plain", [])):
        where = ("--input", tmp_path / name, "--output", tmp_path / f"of-{name}")
        done = run_command("shards", *where, *more, *flags)
        assert done.code == 0, done.err
        assert "zero-width spaces mark" not in done.err
    index = json.loads((tmp_path / "of-written" / "index.json").read_text())
    assert index["segmented"] and index["word_mark"] == "\u200b"
    where = ("--input", tmp_path / "written", "--output", tmp_path / "of-none")
    assert "zero-width spaces mark the words" in run_command("shards", *where, *flags).err
    sources = [open_shards(tmp_path / f"of-{name}", "train") for name in ("written", "plain")]
    vocab = sources[0].vocab
    kinds = build_word_starts(vocab.pieces, "scripts")
    marked = unmarked = 0
    for one, other in zip(*map(read_sequences, sources), strict=True):
        assert one.document == other.document
        np.testing.assert_array_equal(one.ids % vocab.size, other.ids)
        for begin, end in pairwise([0, *one.ends]):
            ids, starts = other.ids[begin:end], one.ids[begin:end] >= vocab.size
            if " " in vocab.decode(ids.tolist()).strip():
                assert words.issuperset(unit.strip() for unit in units_of(ids, starts, vocab))
                marked += 1
            else:  # no mark in a long sentence: its pieces are words
                np.testing.assert_array_equal(starts, find_word_starts(kinds[ids]))
                unmarked += 1
    assert marked > 300 and unmarked > 40
