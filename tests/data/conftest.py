"""The made-up corpus, its vocabulary and shards; and the real text beside the project."""

from pathlib import Path

import pytest

from albert_ds.data.shards import ShardSet, open_shards
from albert_ds.vocab.vocab import RELEASED, Vocab, train_vocab
from tests.data.corpus import SHARED, build, make_documents, write_wiki


@pytest.fixture(scope="session")
def documents() -> list[list[str]]:
    return make_documents(120)


@pytest.fixture(scope="session")
def sentences(documents) -> list[str]:
    odd = "(it's 1,000, or 0.0003 in 1999) \u2013 caf\u00e9 \u4e2d\u6587 \u03a3\u03b1\u03c2"
    return [sentence for document in documents for sentence in document] + [odd] * 50


@pytest.fixture(scope="session")
def vocab(sentences) -> Vocab:
    return train_vocab(sentences, RELEASED, vocab_size=240)


@pytest.fixture(scope="session")
def corpus(documents, tmp_path_factory) -> Path:
    return write_wiki(tmp_path_factory.mktemp("corpus") / "wiki_00", documents)


@pytest.fixture(scope="session")
def built(vocab, corpus, tmp_path_factory) -> Path:
    """A built folder of several rounds of shards, the last shard smaller than the others."""
    folder = tmp_path_factory.mktemp("data") / "built"
    build(folder, vocab, [corpus])
    return folder


@pytest.fixture(scope="session")
def train(built) -> ShardSet:
    return open_shards(built, "train")


@pytest.fixture(scope="session")
def wiki_files() -> list[Path]:
    files = sorted((SHARED / "wiki_sample").glob("*/*"))
    if not files:
        pytest.skip(f"no real text: {SHARED / 'wiki_sample'} is absent")
    return files
