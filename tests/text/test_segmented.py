"""Text from a segmenter: the ids are those of the plain text, and the words are the segmenter's."""

import json
import random
import shutil
from itertools import pairwise

import numpy as np
import pytest

from albert_ds.base.errors import UserError
from albert_ds.data.shards import open_shards
from albert_ds.data.stream import MicroBatchReader
from albert_ds.data.stream_config import StreamConfig
from albert_ds.text.documents import TextConfig
from albert_ds.text.segmented import (
    encode_segmented,
    find_starts,
    remove_spaces,
    split_into_words,
)
from albert_ds.vocab.vocab import CLS, SEP, WORD_END, Normalisation, train_vocab
from albert_ds.vocab.words import build_word_starts, find_word_starts
from tests.command import run_command
from tests.data.drawing import stored_sequences
from tests.data.test_languages import encode_elsewhere, load_in_hugging_face

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


@pytest.fixture(scope="module", params=[False, True], ids=["pieces", "bytes"])
def vocab(request):
    text = [s for line in TEXT for s in split_into_words(CHINESE.split([line]), [line])] * 20
    return train_vocab(
        text, Normalisation(), vocab_size=372 if request.param else 99, segmented=True,
        byte_fallback=request.param, character_coverage=0.98 if request.param else 1.0,
    )  # fmt: skip


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


def test_ids_are_those_of_the_plain_text_and_words_are_the_segmenters(vocab, tmp_path):
    """The ids are those of Hugging Face, too."""
    hugging_face = load_in_hugging_face(vocab, tmp_path)
    for line in TEXT:
        sentences = CHINESE.split([line])
        marked, joined = encode_segmented(sentences, find_starts([line]), vocab)
        ids = [[token % vocab.size for token in sentence] for sentence in marked]
        assert ids == vocab.encode(sentences) == encode_elsewhere(hugging_face, sentences)
        units = []
        for sentence in map(np.array, marked):
            units += units_of(sentence % vocab.size, sentence >= vocab.size, vocab)
        assert [unit.strip() for unit in units] == vocab.normalise(line).split()
        assert not joined


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


# Words of each language, with marks of its script, what ends them, and what ends a sentence.
WRITTEN = {
    "km": ("ភាសា ខ្មែរ កម្ពុជា ជា និង មាន", "\u200b", "។"),
    "my": ("မြန်မာ စာ ဘာသာ သည် ကို", "\u200b", "။"),
    "zh": ("系统 管理员 可以 使用 命令 删除 文件 用户 打开", " ", " 。"),
}


def write_words(language: str) -> tuple[str, set[str], set[str]]:
    """Documents whose words are marked; the words; and sentences without any mark.

    Phrases end at spaces where words do not, and there the last sentence of each document has no
    mark and is long.
    """
    draw = random.Random(0)
    words, mark, stop = WRITTEN[language]
    words = words.split()
    documents = []
    unmarked = set()
    for _ in range(60):
        phrases = [mark.join(draw.choices(words, k=draw.randint(2, 6))) for _ in range(9)]
        document = "".join(f"{a} {b}{stop}" for a, b in pairwise(phrases))
        if mark != " ":
            last = "".join(draw.choices(words, k=20)) + stop
            unmarked.add(last)
            document += last
        documents.append(document)
    ends = {stop.strip(), *(word + stop for word in words)}
    return "\n\n".join(documents) + "\n", {*words, *ends}, unmarked


@pytest.mark.parametrize("language", WRITTEN)
def test_marked_words_are_words(language, tmp_path):
    """The shards are those of the text without marks, but for where its words begin."""
    text, words, without = write_words(language)
    mark = WRITTEN[language][1]
    (tmp_path / "written").write_text(text)
    (tmp_path / "plain").write_text(text.replace(mark, ""))
    flags = ("--language", language)
    vocab = ("--output", tmp_path / "vocab", "--vocab-size", 33)
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
    assert index["segmented"] and index["word_mark"] == mark
    where = ("--input", tmp_path / "written", "--output", tmp_path / "of-none")
    said = run_command("shards", *where, *flags).err
    assert ("zero-width spaces mark the words" in said) == (mark != " ")
    sources = [open_shards(tmp_path / f"of-{name}", "train") for name in ("written", "plain")]
    vocab = sources[0].vocab
    kinds = build_word_starts(vocab.pieces, "scripts")
    marked = unmarked = 0
    for one, other in zip(*map(stored_sequences, sources), strict=True):
        assert one.document == other.document
        np.testing.assert_array_equal(one.ids % vocab.size, other.ids)
        for begin, end in pairwise([0, *one.ends]):
            ids = other.ids[begin:end]
            starts = one.ids[begin:end] >= vocab.size
            if vocab.decode(ids.tolist()).strip() not in without:
                assert words.issuperset(unit.strip() for unit in units_of(ids, starts, vocab))
                marked += 1
            else:  # no mark in a long sentence: its pieces are words
                np.testing.assert_array_equal(starts, find_word_starts(kinds[ids]))
                unmarked += 1
    assert marked > 300 and (unmarked > 40 or not without)
    if not without:
        check_masks(sources[0], words)


def check_masks(source, words: set[str]) -> None:
    """Of every objective: words are masked whole, and never with an id that is a mark."""
    vocab = source.vocab
    for objective in ("sop", "nsp", "none"):
        settings = {"sequence_length": 128, "short_fraction": 0, "objective": objective}
        reader = MicroBatchReader([source], None, StreamConfig(**settings))
        whole = []
        for sample in map(reader.draw, range(100)):
            assert sample.ids.max() < vocab.size
            ids = sample.ids.copy()
            ids[sample.positions] = sample.labels
            is_marker = np.isin(ids, (CLS, SEP))
            starts = sample.starts | is_marker
            starts[np.flatnonzero(is_marker)[:-1] + 1] = True
            masked = np.isin(np.arange(len(ids)), sample.positions)
            for begin, end in pairwise([*np.flatnonzero(starts), len(ids)]):
                assert masked[begin:end].all() or not masked[begin:end].any()
                if masked[begin]:
                    whole.append(vocab.decode(ids[begin:end].tolist()).strip() in words)
        assert len(whole) > 100 and np.mean(whole) > 0.95  # others are cut where a window ends
