"""Words of the text, as index.json counts them and as the samples of training do."""

import json

import pytest

from albert_ds.data.samples import SampleReader
from albert_ds.data.shards import open_shards
from albert_ds.data.stream_config import StreamConfig
from albert_ds.text.documents import TextConfig
from albert_ds.vocab.vocab import WORD_MARK
from tests.command import run_command


def test_the_index_counts_what_stands_between_spaces_in_the_sentences(text_file, data):
    counts = json.loads((data / "index.json").read_text())["counts"]
    documents = text_file.read_text(encoding="utf-8").split("\n\n")
    sentences = [s for text in documents for s in TextConfig().split(text.split("\n"))]
    assert counts["words"] == sum(len(sentence.split()) for sentence in sentences)
    # Sentences may end within what spaces separate, as `a."b`.
    assert counts["words"] == pytest.approx(sum(len(x.split()) for x in documents), rel=0.01)


def test_the_words_of_a_segmenter_are_counted(tmp_path):
    documents = ["我们 在 学校 里 学习 中文 。", "他 喜欢 看 书 ， 也 喜欢 写字 。"]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(60 * documents))
    flags = ("--input", text, "--language", "zh", "--segmented", "--lines", "sentence", "--output")
    done = run_command("vocab", *flags, tmp_path / "vocab", "--vocab-size", 60)
    assert done.code == 0, done.err
    vocab = ("--vocab", tmp_path / "vocab" / "spiece.model")
    done = run_command("shards", *flags, tmp_path / "data", *vocab, "--holdout", 0)
    assert done.code == 0, done.err
    counts = json.loads((tmp_path / "data" / "index.json").read_text())["counts"]
    assert counts["words"] == len(text.read_text().split()) - counts["joined_words"]


@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
@pytest.mark.parametrize("length", [24, 64])
def test_a_sample_has_the_words_that_begin_in_it(data, objective, length):
    """Also cut ones, and both documents of a pair; decoded, without its masks."""
    source = open_shards(data, "train")
    config = StreamConfig(objective=objective, sequence_length=length)
    reader = SampleReader([source], None, config)
    pieces = source.vocab.pieces
    compared = 0
    for position in range(200):
        sample = reader.draw(position)
        ids = sample.ids.copy()
        ids[sample.positions] = sample.labels
        parts = [ids[1 : sample.first - 1].tolist(), ids[sample.first : -1].tolist()]
        # A sentence longer than a sample goes on in the next one, perhaps within a word.
        if all(pieces[part[0]].startswith(WORD_MARK) for part in parts if part):
            text = ["".join(pieces[i] for i in part).replace(WORD_MARK, " ") for part in parts]
            cut = sum(each.endswith(" ") for each in text)  # of the last word no letter is left
            assert sample.words == sum(len(each.split()) for each in text) + cut
            compared += 1
    assert compared > 80
