"""Text from a segmenter: the ids are those of the plain text, and the words are the segmenter's."""

import re

import numpy as np
import pytest

from albert_ds.data.shards import Shard, open_shards
from albert_ds.data.stream import MicroBatchReader
from albert_ds.data.stream_config import StreamConfig
from albert_ds.data.vocab import CLS, SEP, WORD_END, Normalisation, train_vocab
from albert_ds.errors import UserError
from albert_ds.text.documents import TextConfig
from albert_ds.text.segmented import (
    encode_segmented,
    find_starts,
    remove_spaces,
    split_into_words,
)
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


def test_a_language_with_spaces_or_sentences_that_end_at_spaces_is_refused():
    for language in ("en", "ko", "ar", "vi"):
        with pytest.raises(UserError, match=f"--segmented with --language {language}: its own sp"):
            TextConfig(language=language, segmented=True)
    with pytest.raises(UserError, match="pass --lines sentence"):
        TextConfig(language="th", segmented=True)
    TextConfig(language="th", segmented=True, lines="sentence")
    TextConfig(language="my", segmented=True)
