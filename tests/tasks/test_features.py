"""Pairs are cut as BERT cuts them, batches are sequences end to end, the cache goes by content."""

import os
from itertools import product

import numpy as np
import pytest
import torch

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.data.segments import cut_pair
from albert_ds.tasks.features import FeatureBuilder, cached, collate, fingerprint, read_features


def test_the_longer_text_loses_its_end_token_by_token():
    for first, second, room in product(range(12), range(12), range(1, 24)):
        a, b = first, second
        while a + b > room:
            if a > b:
                a -= 1
            else:
                b -= 1
        assert cut_pair(first, second, room) == (a, b)


@pytest.fixture
def features():
    builder = FeatureBuilder("span_starts", "span_ends", "impossible")
    texts = [builder.add_text(list(range(low, high))) for low, high in ((10, 13), (20, 29))]
    spans = dict(span_starts=6, span_ends=7, impossible=0)
    builder.add_row(0, (texts[0], 0, 3), (texts[1], 2, 6), **spans)
    builder.add_row(0, (texts[0], 0, 3), (texts[1], 8, 9), span_starts=0, span_ends=0, impossible=1)
    builder.add_row(1, (texts[0], 1, 2), span_starts=0, span_ends=0, impossible=1)
    begin = np.array([-1] * 3 + list(range(9)), np.int32)
    return builder.build(token_begin=begin, token_end=begin + 1)


def test_a_micro_batch_is_its_sequences_end_to_end(features):
    batch = collate(features, [2, 0], with_targets=True)
    first = [2, 11, 3]
    second = [2, 10, 11, 12, 3, 22, 23, 24, 25, 3]
    assert batch["input_ids"].tolist() == first + second
    assert batch["token_type_ids"].tolist() == [0] * 3 + [0] * 5 + [1] * 5
    assert batch["position_ids"].tolist() == [*range(3), *range(10)]
    assert batch["cu_seqlens"].tolist() == [0, 3, 13] and batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == 10
    # An answer may lie in the window, not in the question, not on a [SEP]; [CLS] means none.
    assert batch["allowed"].int().tolist() == [1, 0, 0] + [1, 0, 0, 0, 0] + [1, 1, 1, 1, 0]
    assert batch["span_starts"].tolist() == [0, 6] and batch["impossible"].tolist() == [1, 0]
    assert features.lengths.tolist() == [10, 7, 3]
    assert not {"span_starts", "labels"} & collate(features, [0], with_targets=False).keys()


@pytest.mark.parametrize("where", [0, 8, 0.5, 0.99])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_cache_that_is_not_whole_is_made_again(tmp_path, features, capsys, damage, where):
    built = []
    for _ in range(3):
        entry = cached(tmp_path, "key", lambda: built.append(1) or features)
        for name, array in features.arrays.items():
            np.testing.assert_array_equal(entry.arrays[name], array)
        if len(built) == 1:
            path = tmp_path / "key.safetensors"
            content = bytearray(path.read_bytes())
            at = where if isinstance(where, int) else int(where * len(content))
            content[at] ^= 4
            path.write_bytes(content[:at] if damage == "cut" else content)
            with pytest.raises(DamagedData, match="key.safetensors"):
                read_features(path)
    assert len(built) == 2
    assert capsys.readouterr().err.count("it is made again") == 1


def test_a_pipe_is_no_cache(tmp_path):
    os.mkfifo(tmp_path / "key.safetensors")  # to open it would take for ever
    with pytest.raises(DamagedData, match="key.safetensors: not a file"):
        read_features(tmp_path / "key.safetensors")


def test_the_cache_goes_by_content(tmp_path, features):
    (tmp_path / "train.tsv").write_text("a")
    built = []

    def build():
        built.append(1)
        return features

    for lengths in ([8], [8], [9]):
        key = fingerprint(tmp_path, [tmp_path / "train.tsv"], lengths=lengths)
        entry = cached(tmp_path / "cache", key, build)
        assert entry.counts == features.counts and entry.key == key
        for name, array in features.arrays.items():
            np.testing.assert_array_equal(entry.arrays[name], array)
    assert len(built) == 2
    (tmp_path / "train.tsv").write_text("b")
    cached(tmp_path / "cache", fingerprint(tmp_path, [tmp_path / "train.tsv"], lengths=[8]), build)
    assert len(built) == 3
    with pytest.raises(UserError, match="none.tsv"):
        fingerprint(tmp_path, [tmp_path / "none.tsv"])
