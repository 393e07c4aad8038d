"""Lengths, cuts and edge pieces alone must not tell the label of a pair, on real text.

Without them a model could score well on the sentence task and learn nothing about sentences.
`python -m pytest -s -o addopts= tests/data/test_leaks.py` prints the accuracies.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from albert_ds.data.segments import NO_LABEL
from albert_ds.data.shards import Shard, ShardSet, open_shards, pack_sequence, write_shard
from albert_ds.data.stream import MicroBatchReader
from albert_ds.data.stream_config import StreamConfig
from albert_ds.text.documents import TextConfig
from albert_ds.vocab.vocab import SEP, SPECIAL_PIECES, Normalisation, train_vocab
from tests.data.corpus import build, read_all
from tests.data.drawing import restore, samples_of

SAMPLES = (4000, 4000)  # drawn of the training and of the held-out documents, in many epochs
# Accuracy of the same features on pairs of SOP as released, by length: sentences fill each window
# and the overhang is cut off (--packing full, built for that length). Released NSP gives 0.587.
RELEASED_SOP = {512: 0.533, 128: 0.548, 64: 0.639, 32: 0.801}
SENTENCE_ENDS = tuple('.!?)"')


@pytest.fixture(scope="module")
def folders(wiki_files, tmp_path_factory):
    """Wikipedia at 512 tokens, packed in both ways; the classifier is tested on held-out text."""
    documents = read_all(wiki_files)
    text = [s for document in documents for s in TextConfig().split(document.lines)]
    vocab = train_vocab(text, Normalisation(), vocab_size=4000)
    folder = tmp_path_factory.mktemp("leaks")
    options = {"sequence_length": 512, "samples_per_shard": 2048, "holdout": 0.4}
    for packing in ("whole", "full"):
        build(folder / packing, vocab, wiki_files, packing=packing, **options)
    return folder


class Numbered:
    """A split whose token ids are the tokens' numbers in it, so that each is known when drawn."""

    def __init__(self, source: ShardSet, folder):
        shards = [Shard(source, n) for n in range(len(source.shards))]
        pieces = [*SPECIAL_PIECES]
        starts = [0] * 5
        ends = [0] * 5
        infos = []
        for shard, info in zip(shards, source.shards, strict=True):
            records = []
            for sequence in (shard[i] for i in range(len(shard))):
                count = len(sequence.ids)
                numbers = list(range(len(pieces), len(pieces) + count))
                pieces += [source.vocab.pieces[token] for token in sequence.ids]
                is_end = np.zeros(count, int)
                is_end[sequence.ends.astype(int) - 1] = 1
                ends += is_end.tolist()
                starts += [1, *is_end[:-1].tolist()]
                ends_of = sequence.ends.tolist()
                records.append(pack_sequence(sequence.document, ends_of, numbers, np.dtype("<u4")))
            infos.append(write_shard(folder, info.name, records, info.tokens))
        self.source = ShardSet(
            folder=str(folder),
            split=source.split,
            shards=tuple(infos),
            vocab=SimpleNamespace(pieces=pieces, size=len(pieces), sha256=""),
            documents=source.documents,
            sequence_length=source.sequence_length,
            token_dtype=np.dtype("<u4"),
        )
        self._starts, self._ends = np.array(starts), np.array(ends)
        self._begins_word = np.array([piece[0] == "\u2581" for piece in pieces] + [True])
        self._closes = np.array([piece.endswith(SENTENCE_ENDS) for piece in pieces])

    def draw(self, config: StreamConfig, samples: int):
        """Features of lengths and cuts, those and the edge pieces, and labels."""
        reader = MicroBatchReader([self.source], None, config)
        plain, edges, labels = [], [], []
        ranges = (range(begin, begin + 16) for begin in range(0, samples, 16))
        for sample in samples_of(map(reader.read, ranges)).values():
            if sample[5] == NO_LABEL:
                continue
            ids = restore(sample)
            middle = ids.index(SEP)
            segments = [ids[1:middle], ids[middle + 1 : -1]]
            lengths = [len(segment) for segment in segments]
            plain.append([*lengths, sum(lengths), lengths[0] - lengths[1]])
            edges.append([])
            for first, last in ((segment[0], segment[-1]) for segment in segments):
                plain[-1] += [self._starts[first], self._ends[last]]
                edges[-1] += [self._begins_word[first], self._closes[first]]
                edges[-1] += [self._begins_word[last + 1], self._closes[last]]
            labels.append(sample[5])
        return np.array(plain), np.hstack([plain, edges]).astype(int), np.array(labels)


@pytest.fixture(scope="module")
def splits(folders, tmp_path_factory):
    return {
        packing: [
            Numbered(open_shards(folders / packing, split), tmp_path_factory.mktemp(split))
            for split in ("train", "heldout")
        ]
        for packing in ("whole", "full")
    }


@pytest.mark.parametrize(
    ("length", "packing"),
    [
        *((512, "whole"), (32, "whole")),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((128, "whole"), (128, "full"), (64, "whole"))
        ),
    ],
)
@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_form_does_not_tell_the_label(splits, objective, length, packing):
    config = StreamConfig(objective=objective, sequence_length=length, seed=1)
    train, held = (
        split.draw(config, samples) for split, samples in zip(splits[packing], SAMPLES, strict=True)
    )
    scores = []
    for features in (0, 1):
        model = HistGradientBoostingClassifier(max_iter=60, max_leaf_nodes=8, random_state=0)
        model.fit(train[features], train[2])
        scores.append(float((model.predict(held[features]) == held[2]).mean()))
    print(
        f"\n{objective} {length} {packing}: lengths and cuts {scores[0]:.3f}, with edges "
        f"{scores[1]:.3f}, of {len(held[2])} held-out pairs"
    )
    # Nothing is left of NSP. SOP is drawn as released: where a window is cut to its length, the
    # later segment holds the overhang of the last sentence and is cut a little more often.
    limit = 0.54 if objective == "nsp" else RELEASED_SOP[length] + 0.02  # 2.5 standard errors
    assert max(scores) < limit
